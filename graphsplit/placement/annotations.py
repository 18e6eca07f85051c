"""Where users say which worker runs what: ``Module.place``, ``gs.place`` and ``gs.op``.

Annotations are only written down here. ``placement.resolve`` decides, from them and from the
captured graph, which worker runs each operation.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch.fx.traceback
from torch import nn

from graphsplit.errors import PlacementError

WORKER_ROLE = "MS_WORKER"
_MODULE_ATTRIBUTE = "_graphsplit_placement"
# Under this key a ``with gs.place(...)`` block travels in ``node.meta["custom"]``.
NODE_KEY = "graphsplit_placement"

P = ParamSpec("P")
R = TypeVar("R")

_planned_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True)
class Annotation:
    """One placement as the user wrote it.

    Attributes:
        rank: The worker.
        source: ``file:line`` of the user's call.
    """

    rank: int
    source: str


def _callers_line(depth: int) -> str:
    frame = sys._getframe(depth)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _check(what: str, role: object, rank: object, source: str) -> Annotation:
    problem = fix = ""
    if role != WORKER_ROLE:
        problem = f"role {role!r} is not known; expected {WORKER_ROLE!r}"
        fix = f"only workers run operations: place({WORKER_ROLE!r}, rank)"
    elif isinstance(rank, bool) or not isinstance(rank, int):
        problem = f"rank {rank!r} is a {type(rank).__name__}; expected an int"
        fix = "pass the worker's number, for example 3"
    elif rank < 0:
        problem = f"rank {rank} is negative; ranks begin at 0"
        fix = "choose a rank from 0 to MS_WORKER_NUM - 1"
    else:
        return Annotation(rank, source)
    raise PlacementError(f"{what}: {problem}\n  {source}\n  Fix: {fix}.")


def place_module(module: nn.Module, role: str, rank: int) -> nn.Module:
    """Let a module, and everything inside it that has no placement of its own, run on one worker.

    Installed as ``torch.nn.Module.place``. Placing a module again replaces its placement.

    Args:
        module: The module; usable as ``module.place(role, rank)``.
        role: ``"MS_WORKER"``.
        rank: The worker, from 0 to the number of workers less one. The upper bound is checked
            when the cluster's size is known.

    Returns:
        The module itself, so that calls can be chained.

    Raises:
        PlacementError: Unknown role, a rank that is negative or no int, or a module that a
            ``Model`` has already planned.
    """
    source = _callers_line(3)  # past the installed method
    name = type(module).__name__
    annotation = _check(f"{name}.place", role, rank, source)
    if module in _planned_modules:
        raise PlacementError(
            f"{name}.place({role!r}, {rank}): this module is already planned; its parameters live "
            f"on their workers\n  {source}\n  Fix: place modules before the first train, eval, "
            f"predict or explain of a Model."
        )
    module.__dict__[_MODULE_ATTRIBUTE] = annotation
    return module


def module_annotation(module: nn.Module) -> Annotation | None:
    """The placement written on this very module, if any."""
    found = module.__dict__.get(_MODULE_ATTRIBUTE)
    return found if isinstance(found, Annotation) else None


def mark_planned(network: nn.Module) -> None:
    """Refuse further placements of a network's modules from now on."""
    for module in network.modules():
        _planned_modules.add(module)


@contextmanager
def place(role: str, rank: int) -> Iterator[None]:
    """Let the operations inside a ``with`` block run on one worker.

    Used inside ``forward``. The innermost block wins, and any block wins over the placement of
    modules around it. In one process it does nothing.

    Args:
        role: ``"MS_WORKER"``.
        rank: The worker.

    Raises:
        PlacementError: Unknown role, or a rank that is negative or no int.
    """
    annotation = _check("gs.place", role, rank, _callers_line(3))
    with torch.fx.traceback.annotate({NODE_KEY: (annotation.rank, annotation.source)}):
        yield


class PlaceableOperation(Generic[P, R]):
    """A function that can be placed like a module; made by ``gs.op``."""

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._annotation: Annotation | None = None

    def place(self, role: str, rank: int) -> PlaceableOperation[P, R]:
        """Return this operation bound to one worker.

        Raises:
            PlacementError: Unknown role, or a rank that is negative or no int.
        """
        placed = PlaceableOperation(self._function)
        placed._annotation = _check("gs.op(...).place", role, rank, _callers_line(2))
        return placed

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, on its worker when it is captured."""
        if self._annotation is None:
            return self._function(*args, **kwargs)
        noted = {NODE_KEY: (self._annotation.rank, self._annotation.source)}
        with torch.fx.traceback.annotate(noted):
            return self._function(*args, **kwargs)


def op(function: Callable[P, R]) -> PlaceableOperation[P, R]:
    """Make a function placeable: ``gs.op(torch.add).place("MS_WORKER", 1)(a, b)``."""
    return PlaceableOperation(function)


def install() -> None:
    """Give every ``torch.nn.Module`` the method ``place``."""

    def place(self: Any, role: str, rank: int) -> Any:
        return place_module(self, role, rank)

    place.__doc__ = place_module.__doc__
    nn.Module.place = place  # type: ignore[attr-defined]
