"""The function to call, on its way from the caller to its workers, and all that it expects there.

It is a pickle, by ``cloudpickle``: functions of a notebook's cell or of ``__main__`` are not to be
found by name elsewhere. It lies in memory that only the caller's own children have inherited; what
comes back does so by the safe codec (see ``outcome``).
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from graphsplit.errors import ConfigurationError
from graphsplit.job.process_generators import ProcessStates


@dataclass(frozen=True)
class LaunchedCall:
    """A call to make on every worker.

    Attributes:
        fn: The function.
        args: Its arguments.
        kwargs: Those that it gets by name.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def parts(self) -> Iterator[tuple[str, Any]]:
        """All that it brings along, by name."""
        yield from ((f"argument {i}", value) for i, value in enumerate(self.args))
        yield from ((f"argument {name!r}", value) for name, value in self.kwargs.items())
        if inspect.isfunction(self.fn):
            used = inspect.getclosurevars(self.fn)
            for name, value in {**used.globals, **used.nonlocals}.items():
                yield f"the variable {name!r} that it uses", value


def name_of(fn: Callable[..., Any]) -> str:
    """A function's name, for people."""
    return getattr(fn, "__qualname__", "") or repr(fn)


def pickled(call: LaunchedCall) -> bytes:
    """A call, and what it finds in this process: paths, sources of cells, random generators.

    Raises:
        ConfigurationError: Something in it cannot be pickled; names it.
    """
    try:
        body = cloudpickle.dumps((call.fn, tuple(call.args), dict(call.kwargs)))
    except Exception as error:  # an object's own way of being pickled may raise anything
        raise ConfigurationError(
            f"{name_of(call.fn)} cannot be sent to the workers: {_culprit(call)}"
            f"{type(error).__name__}: {error}\n"
            f"  Fix: make in the function what it cannot be given from outside."
        ) from error
    found: bytes = cloudpickle.dumps(
        (sys.path, sys.argv, _sources(), torch.get_rng_state(), tuple(ProcessStates.now()), body)
    )
    return found


def received(octets: torch.Tensor) -> LaunchedCall:
    """Read ``pickled`` in a child of its process; paths and generators are set as there."""
    paths, argv, sources, generator, states, body = cloudpickle.loads(octets.numpy())
    sys.path[:], sys.argv[:] = paths, argv
    linecache.cache.update(sources)
    call = LaunchedCall(*cloudpickle.loads(body))
    torch.set_rng_state(generator)
    ProcessStates(*states).put()
    return call


def _sources() -> dict[str, Any]:
    """The sources that are in no file: a notebook's cells, for tracebacks that show lines."""
    return {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    }


def _culprit(call: LaunchedCall) -> str:
    for name, value in call.parts():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{name} ({type(value).__module__}.{type(value).__qualname__}) is at fault: "
    return ""
