"""Find out that the user's code has caught an error that only capture raises.

There are no values while a network is recorded, so what asks for one gets an error::

    try:
        k = float(h.sum())
    except Exception:
        k = 5.0               what is recorded, for ever

In eager mode no error comes. So every such error is noted where it is raised. Its traceback ends
in the frame that has caught it: where that is the user's, another branch was recorded than eager
mode takes. What torch's functions raise at the sight of shapes comes in eager mode too; a function
whose error the user's code has caught is tried once on zeros, for fakes may be asked for more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphsplit.capture.failures import comes_of_capture
from graphsplit.capture.opaque.record import OpaqueRecorder
from graphsplit.capture.own_errors import error_of_zeros
from graphsplit.errors import CaptureError
from graphsplit.frames import is_users
from graphsplit.torch_ext.attributes import module_now
from graphsplit.torch_ext.function_modes import TorchCalls
from graphsplit.torch_ext.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from graphsplit.torch_ext.replaced import replaced

# Raised outside of torch's functions, too: by a number that stands for a value.
_KINDS: tuple[Any, ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    CaptureError,  # no other error of ours: torch's compiler looks into them, in branches
)


Again = Callable[[], Exception | None]


@dataclass(frozen=True)
class Swallowed:
    """An error that the user's code may have caught.

    Attributes:
        error: The error.
        module: The innermost module that ran.
        again: What the same call raises in eager mode; None: nothing, it comes of capture.
    """

    error: Exception
    module: nn.Module | None
    again: Again | None = None

    def only_in_capture(self) -> bool:
        """Whether the user's code has caught it, and would have nothing to catch in eager mode."""
        return _was_caught(self.error) and not (
            self.again is not None and type(self.again()) is type(self.error)
        )


class Signals(TorchCalls):
    """Notes the errors that a recording raises in the user's code.

    Args:
        recorder: Knows what is recorded, and what is run as it is.
    """

    def __init__(self, recorder: OpaqueRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._noted: list[Swallowed] = []
        self._stack = ExitStack()

    def __enter__(self) -> Signals:
        for kind in _KINDS:
            self._stack.enter_context(replaced(kind, "__init__", self._noting(kind.__init__)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()
        self._noted.clear()  # tracebacks hold all that was recorded

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function, and note what it raises for want of values."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            again = partial(error_of_zeros, function, args, kwargs)
            self._note(error, None if comes_of_capture(error) else again)
            raise

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(error: Exception, *args: Any, **kwargs: Any) -> None:
            original(error, *args, **kwargs)
            self._note(error)

        return init

    def _note(self, error: Exception, again: Again | None = None) -> None:
        if self._recorder.is_recording:
            self._noted.append(Swallowed(error, module_now(), again))

    def swallowed(self) -> Swallowed | None:
        """The first error that the user's code has caught, and only capture raises, if any."""
        return next((noted for noted in self._noted if noted.only_in_capture()), None)


def _was_caught(error: Exception) -> bool:
    trace = error.__traceback__
    return trace is not None and is_users(trace.tb_frame.f_code.co_filename)
