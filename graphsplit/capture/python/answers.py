"""Values that code asks of tensors where it is not kept whole: asked beforehand, and known.

There are no values while a step is recorded. So a step whose code asks for them is recorded
piecewise::

    h = self.first(x)          recorded: a graph that ends in h.sum(), which is run, and its
    if h.sum() > 0:            value told to all workers
        h = self.mid(h)        recorded: the step, for the answer True

The answers are Python values that the code reads, as attributes are: a recording holds for those
that it was made with, and numbers are lifted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now
from graphsplit.guards.places import Place, entry
from graphsplit.torch_ext.attributes import module_now
from graphsplit.torch_ext.function_modes import TorchCalls
from graphsplit.torch_ext.private import FakeTensor

MOST = 64  # values that one microbatch asks for
_KNOWN = "last"
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "item": lambda number: number,
    "__bool__": bool,
    "is_nonzero": bool,
    "__int__": int,
    "__float__": float,
    "__index__": operator.index,
}
_COMPARISONS: dict[str, Callable[..., torch.Tensor]] = {
    "equal": torch.eq,
    "allclose": torch.isclose,
}


class Answers:
    """The answers to what the microbatch under way asked for, in order; the same on all workers.

    Attributes:
        asking: The modules whose code is answered: those that cannot be kept whole.
    """

    def __init__(self) -> None:
        self.asking: WeakSet[nn.Module] = WeakSet()
        self._told: dict[Any, Any] = {}
        self.forget()

    def __len__(self) -> int:
        return len(self._told) - 1

    def forget(self) -> None:
        """Begin another microbatch."""
        self._told.clear()
        self._told[_KNOWN] = "nothing yet"  # a text: no number that might be lifted

    def add(self, value: Any) -> None:
        """Note the answer to the next question."""
        self._told[len(self)] = value
        self._told[_KNOWN] = f"value {len(self)}"

    def place(self, number: int, line: str) -> Place:
        """Where an answer is."""
        return entry(self._told, number, f"value {number + 1} that forward asks a tensor for", line)

    def count(self) -> Place:
        """Where it stands how many answers there are."""
        return entry(self._told, _KNOWN, "what forward has been told of its tensors")

    def holds(self, place: Place) -> bool:
        """Whether a place is one of these."""
        return place.holder is self._told


class NotAnsweredError(BaseException):
    """The code that is recorded asks for a value that is not known yet.

    No ``Exception``: the code might catch it.
    """


class Asking(TorchCalls):
    """Answers questions of code that is recorded; ends the recording at one without an answer.

    Args:
        answers: The answers.
        note: ``note(place, is_read)``: called before an answer is read.
        is_paused: Whether what runs now is no part of the graph.
        ends_in: The class of the error that the code is known to end in.

    Attributes:
        unanswered: What is asked for, once there is no answer.
    """

    def __init__(
        self,
        answers: Answers,
        note: Callable[[Place, bool], None],
        is_paused: Callable[[], bool],
        ends_in: type[Exception] | None = None,
    ) -> None:
        super().__init__()
        self._answers, self._note, self._is_paused = answers, note, is_paused
        self._ends_in = ends_in
        self._num_asked, self._is_off = 0, True
        self.unanswered: torch.Tensor | None = None

    def run(self, function: Callable[[], Any]) -> Any:
        """Run the code; what it returns, or the value that it asks for first.

        Where the code ends in the error that is known, that stands in for a question.
        """
        self._is_off = False
        try:
            found = function()
        except BaseException as error:  # of code that caught the question, too
            if self.unanswered is None and type(error) is self._ends_in:
                self.unanswered = torch.zeros(())
            if self.unanswered is None or isinstance(error, KeyboardInterrupt):
                raise
        finally:
            self._is_off = True
        return found if self.unanswered is None else [self.unanswered]

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function of torch, or give the answer that it would."""
        name = getattr(function, "__name__", "")
        if name in _COMPARISONS and _are_alike(*args[:2]) and self._is_asking(args):
            return bool(self._answer(_COMPARISONS[name](*args, **kwargs).all()))
        if name in _CONVERSIONS and self._is_asking(args) and args[0].numel() == 1:
            return _CONVERSIONS[name](self._answer(args[0]))
        return function(*args, **kwargs)

    def _is_asking(self, args: Sequence[Any]) -> bool:
        is_fake = bool(args) and isinstance(args[0], FakeTensor)
        if not is_fake or self._is_off or self._is_paused():
            return False
        slot = get_proxy_slot(args[0], get_proxy_mode().tracer, None)  # type: ignore[union-attr]
        is_known = slot is None or slot.constant is not None
        return not is_known and module_now() in self._answers.asking

    def _answer(self, tensor: torch.Tensor) -> Any:
        line, number = users_line_now(), self._num_asked
        self._num_asked += 1
        if number >= MOST:
            raise CaptureError(
                f"forward asks tensors for more than {MOST} values\n  {line}\n"
                f"  Fix: compute with the tensors; or put the lines around this one into a module "
                f"with nothing placed inside, which is kept whole."
            )
        if number < len(self._answers):
            return self._read(self._answers.place(number, line))
        self._read(self._answers.count())
        self.unanswered = tensor.detach().clone()
        raise NotAnsweredError(line)

    def _read(self, place: Place) -> Any:
        self._note(place, True)
        return place.read()


def _are_alike(one: Any, other: Any = None) -> bool:
    """Whether two different tensors can be compared element by element."""
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return are_tensors and one is not other and _form(one) == _form(other)


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
