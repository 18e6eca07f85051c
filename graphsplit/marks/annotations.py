"""Where users say which worker runs what: ``Module.place``, ``gs.place`` and ``gs.op``.

Annotations are only written down here. ``placement.resolve`` decides, from them and from the
captured graph, which worker runs each operation.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import astuple, dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch.compiler
import torch.fx.traceback
from torch import nn

from graphsplit.errors import PlacementError
from graphsplit.marks.unused import note_placed, note_replaced, note_used
from graphsplit.marks.workers import UnknownWorkerError, numbered
from graphsplit.text import called, described, need

WORKER_ROLE = "MS_WORKER"
_MODULE_ATTRIBUTE = "_graphsplit_placement"
# A slice of a ModuleList is a new list around the same modules: what is written on it would be
# lost with it. So its children are told, and by which container: that of a container which is
# itself part of the network counts as the placement of a module around them, and no more.
_CONTAINER_ATTRIBUTE = "_graphsplit_container"
_SLICES_ATTRIBUTE = "_graphsplit_slices"
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Under this key a ``with gs.place(...)`` block travels in ``node.meta["custom"]``.
NODE_KEY = "graphsplit_placement"

# By these words capture knows the error again that torch's compiler wraps.
INSIDE_BRANCH = "gs.place and gs.op(...).place have no part of a branch or loop to place"

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

# For each module, the networks that it has been planned with, as long as they exist.
_planned_with: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = (
    weakref.WeakKeyDictionary()
)


def _write(module: nn.Module, annotation: Annotation) -> None:
    """Write a placement on a module, in the place of what is there."""
    before = module.__dict__.get(_MODULE_ATTRIBUTE)
    if before is not None:
        note_replaced(before.source)
    module.__dict__[_MODULE_ATTRIBUTE] = annotation
    note_placed(annotation.source, type(module).__name__)


@dataclass(frozen=True)
class Annotation:
    """One placement as the user wrote it.

    Attributes:
        rank: The worker.
        source: ``file:line`` of the user's call, or of the rule in a file.
        by_rule: Whether ``gs.apply_placement`` has written it.
        replicas: The workers that share its microbatches, of which ``rank`` is one; empty where one
            worker runs all.
        rows: How the microbatches are divided among these, in proportion; empty: evenly.
    """

    rank: int
    source: str
    by_rule: bool = False
    replicas: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def blocks(self, num_parts: int, *, to_last: bool = False) -> tuple[int, ...]:
        """How many of some microbatches each replica runs.

        Args:
            num_parts: How many there are.
            to_last: Whether what is over goes to the last replicas, and not to the first ones.
        """
        shares = self.rows or (1,) * len(self.replicas)
        sizes = [num_parts * share // sum(shares) for share in shares]
        over = [num_parts * share % sum(shares) for share in shares]
        line = range(len(shares) - 1, -1, -1) if to_last else range(len(shares))
        by_rest = sorted(line, key=lambda index: -over[index])
        for index in by_rest[: num_parts - sum(sizes)]:
            sizes[index] += 1
        return tuple(sizes)

    def block_of(self, part: int, num_parts: int) -> int:
        """The replica, by its index, that runs a microbatch: replicas run contiguous blocks.

        Args:
            part: Its number; below 0, from -1 for the last one, where the last replicas get more.
            num_parts: How many there are.
        """
        ends = itertools.accumulate(self.blocks(num_parts, to_last=part < 0))
        return next(index for index, end in enumerate(ends) if part % num_parts < end)

    def in_lane(self, part: int, num_parts: int) -> Annotation:
        """The placement of one microbatch."""
        if not self.replicas:
            return self
        return replace(self, rank=self.replicas[self.block_of(part, num_parts)])

    def among(self, seats: Sequence[int]) -> Annotation | None:
        """The placement on the workers that are left; None if it names none of them.

        Args:
            seats: The ranks that the script knows, of the workers that are there: what it names by
                these is worker 0, 1, ... of the present generation.
        """
        if not self.replicas:
            return replace(self, rank=seats.index(self.rank)) if self.rank in seats else None
        rows = self.rows or (1,) * len(self.replicas)
        left = [(seats.index(r), n) for r, n in zip(self.replicas, rows, strict=True) if r in seats]
        if not left:
            return None
        ranks, shares = zip(*left, strict=True)
        return annotation_of(
            ranks, shares if self.rows else None, self.source, by_rule=self.by_rule
        )

    def is_like(self, other: Annotation) -> bool:
        """Whether it places as another one does."""
        return (self.where, self.rows) == (other.where, other.rows)

    @property
    def where(self) -> int | list[int]:
        """The worker, or the workers."""
        return list(self.replicas) or self.rank

    @property
    def highest(self) -> int:
        """The highest rank that it names."""
        return max(self.replicas, default=self.rank)


def callers_line(depth: int) -> str:
    """``file:line`` of a frame: 1 is the caller of the function that asks."""
    frame = sys._getframe(depth)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def problem_with(role: object, rank: object) -> tuple[str, str] | None:
    """The fault in a role and a rank, and how to mend it; None if there is none."""
    if not isinstance(role, str) or role != WORKER_ROLE:
        is_short = role is None or isinstance(role, (str, int, float))
        shown = repr(role) if is_short else described(role)
        return (
            f"role {shown} is not known; expected {WORKER_ROLE!r}",
            f"only workers run operations: place({WORKER_ROLE!r}, rank)",
        )
    if isinstance(rank, bool) or not isinstance(rank, int):
        return (
            f"rank {rank!r} is a {type(rank).__name__}; expected an int",
            "pass the worker's number, for example 3",
        )
    if rank < 0:
        return (
            f"rank {rank} is negative; ranks begin at 0",
            "choose a rank from 0 to MS_WORKER_NUM - 1",
        )
    return None


def problem_with_ranks(role: object, ranks: Any, rows: Any = None) -> tuple[str, str] | None:
    """As ``problem_with``, for what may be one rank, or several that share the microbatches."""
    if not isinstance(ranks, (list, tuple)):
        many = "rows= divides microbatches among several workers", "pass a list of ranks"
        return problem_with(role, ranks) if rows is None else many
    for rank in ranks:
        found = problem_with(role, rank)
        if found is not None:
            return found
    if not ranks or len(set(ranks)) < len(ranks):
        return (
            f"{ranks!r} names {'a worker twice' if ranks else 'no worker'}",
            "name each worker that runs some of the microbatches once",
        )
    is_list = isinstance(rows, (list, tuple)) and len(rows) == len(ranks)
    if rows is not None and not (is_list and all(type(r) is int and r > 0 for r in rows)):
        return (
            f"rows={rows!r} does not divide microbatches among {len(ranks)} workers",
            "pass as many positive ints as ranks, for example rows=(2, 1) for place([0, 1])",
        )
    return None


def annotation_of(ranks: Any, rows: Any, source: str, *, by_rule: bool = False) -> Annotation:
    """A placement without a fault, on one worker or on several."""
    if not isinstance(ranks, (list, tuple)):
        return Annotation(ranks, source, by_rule)
    if len(ranks) == 1:
        return Annotation(ranks[0], source, by_rule)
    return Annotation(ranks[0], source, by_rule, tuple(ranks), tuple(rows or ()))


def _check_ranks(what: str, role: object, ranks: Any, rows: Any, source: str) -> Annotation:
    """A placement on one worker, or on several that share the microbatches."""
    try:
        ranks = ranks if problem_with(role, 0) else numbered(ranks)  # `place(1, "MS_WORKER")`
    except UnknownWorkerError as error:
        raise PlacementError(f"{what}: {error.problem}\n  {source}\n  Fix: {error.fix}.") from None
    found = problem_with_ranks(role, ranks, rows)
    if found is not None:
        raise PlacementError(f"{what}: {found[0]}\n  {source}\n  Fix: {found[1]}.")
    return annotation_of(ranks, rows, source)


def place_module(module: nn.Module, role: Any, rank: Any, rows: Any = None) -> nn.Module:
    """Let a module, and everything inside it that has no placement of its own, run on one worker.

    Or on several, which share a step's microbatches: ``module.place("MS_WORKER", [1, 2])``.

    Installed as ``torch.nn.Module.place``. Placing a module again replaces its placement. A slice
    may be placed too: ``net.layers[0:4].place(...)`` places those of the four that have no
    placement of their own.

    Args:
        module: The module; usable as ``module.place(role, rank)``.
        role: ``"MS_WORKER"``; may be left out: ``module.place(1)``, ``module.place(rank=1)``.
        rank: The worker, from 0 to the number of workers less one. The upper bound is checked
            when the cluster's size is known. Or the name of its host, or a label of its:
            ``"b"``, ``"b:1"`` for the second of several, ``"b:*"`` for all. A list of workers:
            each runs a contiguous block of the microbatches, see
            ``docs/how-to/replicate-modules.md``.
        rows: With a list of workers: how the microbatches are divided among them, in proportion,
            as in ``rows=(2, 1, 1)``.

    Returns:
        The module itself, so that calls can be chained.

    Raises:
        PlacementError: Unknown role, a rank that is negative or no int, a name of no worker or
            of several, a module that a ``Model``
            has already planned, or one that a rule of ``gs.apply_placement`` puts elsewhere.
    """
    source = callers_line(4)  # past the installed method
    is_module = isinstance(module, nn.Module)
    need("place", "self", module, is_module, "a module, as in net.layer.place(0)")
    name = type(module).__name__
    annotation = _check_ranks(f"{name}.place", role, rank, rows, source)
    children = list(module.children()) if isinstance(module, _CONTAINERS) else []
    if any(_has_been_planned(placed) for placed in (module, *children)):
        raise PlacementError(
            f"{name}.place({role!r}, {rank}): this module is already planned; its parameters live "
            f"on their workers\n  {source}\n  Fix: place modules before the first train, eval, "
            f"predict or explain of a Model."
        )
    found = module_annotation(module)
    if found is not None and found.by_rule and not found.is_like(annotation):
        raise PlacementError(
            f"{name}.place({role!r}, {rank}): a rule puts this module on {role} {found.where}\n"
            f"  {source}\n  {found.source}\n  Fix: leave out one of the two."
        )
    _write(module, annotation)
    if children:
        container = module.__dict__.setdefault(_CONTAINER_ATTRIBUTE, uuid.uuid4().hex)
        for child in children:
            slices = dict(child.__dict__.get(_SLICES_ATTRIBUTE, {}))
            slices.pop(container, None)
            child.__dict__[_SLICES_ATTRIBUTE] = {**slices, container: annotation}
    return module


def module_annotation(module: nn.Module) -> Annotation | None:
    """The placement written on this very module, if any."""
    found = module.__dict__.get(_MODULE_ATTRIBUTE)
    return found if isinstance(found, Annotation) else None


def annotations_of(network: nn.Module) -> dict[str, Annotation]:
    """The placement of every placed module of a network, by path; shared ones under each path.

    A module's own placement comes before that of the latest slice that it was placed with.

    Raises:
        PlacementError: Rules and slices put modules on different workers; all of them are listed.
    """
    modules = list(network.named_modules(remove_duplicate=False))
    containers = {module.__dict__.get(_CONTAINER_ATTRIBUTE) for _, module in modules}
    found, conflicts = {}, []
    for path, module in modules:
        annotation = module_annotation(module)
        slices = module.__dict__.get(_SLICES_ATTRIBUTE, {})
        outside = [a for container, a in slices.items() if container not in containers]
        if annotation is None and outside:
            annotation = outside[-1]
        if annotation is None:
            continue
        if annotation.by_rule and outside and not outside[-1].is_like(annotation):
            conflicts.append(
                f"module {path!r} is placed on {WORKER_ROLE} {annotation.where} by a rule, and on "
                f"{outside[-1].where} as part of a slice\n"
                f"    {annotation.source}\n    {outside[-1].source}"
            )
        found[path] = annotation
    if conflicts:
        raise faults_found(conflicts, fix="leave out one of the two.")
    return found


def faults_found(faults: Sequence[str], *, fix: str) -> PlacementError:
    """One error for all faults of a placement."""
    head = "a placement" if len(faults) == 1 else f"{len(faults)} placements"
    lines = "\n  ".join([f"{head} cannot be honoured:", *faults])
    return PlacementError(f"{lines}\n  Fix: {fix}")


def write_rule(module: nn.Module, annotation: Annotation | None) -> None:
    """Write a rule's placement on a module that has none, or take a rule's placement away."""
    found = module_annotation(module)
    if annotation is not None and found is None:
        _write(module, annotation)
    elif annotation is None and found is not None and found.by_rule:
        note_replaced(found.source)
        del module.__dict__[_MODULE_ATTRIBUTE]


def is_planned(network: nn.Module) -> bool:
    """Whether a ``Model`` has planned a network, or some module of it."""
    return any(_has_been_planned(module) for module in network.modules())


def _has_been_planned(module: nn.Module) -> bool:
    """Whether a network that still exists was planned with it.

    Networks may share a module without parameters, such as one activation for all; one that is no
    longer there decides nothing.
    """
    if not _planned_with.get(module):
        return False
    gc.collect()  # networks often lie in cycles
    return bool(_planned_with.get(module))


def mark_planned(network: nn.Module) -> None:
    """Refuse further placements of a network's modules from now on."""
    for module in network.modules():
        for one in (
            module_annotation(module),
            *module.__dict__.get(_SLICES_ATTRIBUTE, {}).values(),
        ):
            if one is not None:
                note_used(one.source)
        _planned_with.setdefault(module, weakref.WeakSet()).add(network)


class PlacedBlock(ContextDecorator):
    """A ``with`` block of ``gs.place``, or a decorator of a function."""

    def __init__(self, annotation: Annotation) -> None:
        self._annotation = annotation
        self._is_used = False
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._is_used = True
        noted = {NODE_KEY: astuple(self._annotation)}
        self._entered.append(torch.fx.traceback.annotate(noted))
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def __call__(self, function: F) -> F:
        """Let a function run on the worker."""
        self._is_used = True
        return super().__call__(function)

    def _recreate_cm(self) -> PlacedBlock:
        return PlacedBlock(self._annotation)

    def __del__(self) -> None:
        if not self.__dict__.get("_is_used", True):
            _never_entered[self._annotation.source] = self._annotation.where


# Blocks of gs.place that were thrown away without a ``with``: their rank, by the user's line.
_never_entered: dict[str, int | list[int]] = {}


def check_blocks() -> None:
    """Raise ``PlacementError`` if a block of ``gs.place`` was made, and never entered."""
    lines = [
        f"gs.place({WORKER_ROLE!r}, {rank}) places nothing: it is not entered\n    {source}"
        for source, rank in _never_entered.items()
    ]
    _never_entered.clear()
    if lines:
        raise faults_found(lines, fix="write `with gs.place(...):` before the operations.")


@called("gs.place")
def place(
    role: str | int | Sequence[int | str] = WORKER_ROLE,
    rank: int | str | Sequence[int | str] | None = None,
    *,
    rows: Sequence[int] | None = None,
) -> PlacedBlock:
    """Let the operations inside a ``with`` block run on one worker, or share the microbatches.

    Used inside ``forward``. The innermost block wins, and any block wins over the placement of
    modules around it. In one process it does nothing.

    Args:
        role: ``"MS_WORKER"``; may be left out: ``gs.place(1)``.
        rank: The worker, or a list of workers that share a step's microbatches.
        rows: As for ``Module.place``.

    Raises:
        PlacementError: Unknown role, or a rank that is negative or no int.
    """
    _refuse_inside_branches()
    return PlacedBlock(_check_ranks("gs.place", *_named(role, rank), rows, callers_line(3)))


def _named(role: Any, rank: Any) -> tuple[Any, Any]:
    """The role and the rank where the role may be left out."""
    is_name = isinstance(role, str) and not role.startswith("MS_")
    is_short = rank is None and (is_name or isinstance(role, (int, list, tuple, range)))
    return (WORKER_ROLE, role) if is_short else (role, rank)


def _refuse_inside_branches() -> None:
    """Branches and loops are recorded by torch's own compiler, and run whole on one worker."""
    if torch.compiler.is_dynamo_compiling():
        raise PlacementError(INSIDE_BRANCH)


class PlaceableOperation(Generic[P, R]):
    """A function that can be placed like a module; made by ``gs.op``."""

    def __init__(self, function: Callable[P, R]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._annotation: Annotation | None = None

    @called("gs.op(...).place")
    def place(
        self,
        role: str | int | Sequence[int | str] = WORKER_ROLE,
        rank: int | str | Sequence[int | str] | None = None,
        *,
        rows: Sequence[int] | None = None,
    ) -> PlaceableOperation[P, R]:
        """Return this operation bound to a worker; ``place(1)`` is ``place("MS_WORKER", 1)``.

        A list of workers shares a step's microbatches, by ``rows`` as for ``Module.place``.

        Raises:
            PlacementError: Unknown role, or a rank that is negative or no int.
        """
        placed = PlaceableOperation(self._function)
        named = _named(role, rank)
        placed._annotation = _check_ranks("gs.op(...).place", *named, rows, callers_line(3))
        return placed

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, on its worker when it is captured."""
        if self._annotation is None:
            return self._function(*args, **kwargs)
        _refuse_inside_branches()
        noted = {NODE_KEY: astuple(self._annotation)}
        with torch.fx.traceback.annotate(noted):
            return self._function(*args, **kwargs)


@called("gs.op")
def op(function: Callable[P, R]) -> PlaceableOperation[P, R]:
    """Make a function placeable: ``gs.op(torch.add).place("MS_WORKER", 1)(a, b)``."""
    need("gs.op", "function", function, callable(function), "a function, as torch.add")
    return PlaceableOperation(function)


def install() -> None:
    """Give every ``torch.nn.Module`` the method ``place``."""

    @called("net.place")
    def place(
        self: Any,
        role: str | int | Sequence[int | str] = WORKER_ROLE,
        rank: int | str | Sequence[int | str] | None = None,
        *,
        rows: Sequence[int] | None = None,
    ) -> Any:
        return place_module(self, *_named(role, rank), rows)

    place.__doc__, place.__qualname__ = place_module.__doc__, "Module.place"
    nn.Module.place = place  # type: ignore[attr-defined]
