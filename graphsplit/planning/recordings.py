"""The graphs that were recorded for a Model, each with the Python values that it holds for.

A step is recorded for each mode, for each signature, and for each state of the Python values that
its code reads. A state that was seen before finds its recording again. Where only numbers have
taken other values, they are lifted, if that gives the same graphs (``capture.numbers.lifted``)::

    beta 0.5      recorded: mul(h, 0.5)
    beta 0.25     recorded: mul(h, 0.25), and with beta lifted: mul(h, beta). Both graphs are those
                  of the lifted one with a number in place of beta, so that is kept
    beta 0.125    the lifted one holds
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from graphsplit.batches.signature import Signature, leaves
from graphsplit.capture.canonical import TensorsOfNumbers, canonical_lines
from graphsplit.capture.graph import CapturedGraph, Mode, NodeKind
from graphsplit.capture.numbers.replaced import is_number, numbers_before
from graphsplit.capture.operations.opaque_call import opaque_call
from graphsplit.capture.state import older_values as older
from graphsplit.errors import CaptureError, StaleGraphError
from graphsplit.guards.check import Failure, named_failure, switches_of_all
from graphsplit.guards.places import Place, PlaceKind
from graphsplit.guards.values import MISSING, number_of
from graphsplit.optimizers.optimizer import are_same
from graphsplit.planning.compared.announced import Swaps
from graphsplit.planning.progress import warn_of_captures
from graphsplit.planning.task import Task
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

_MAX_RECORDINGS = 64
_MAX_LIFTS = 2
# What a graph depends on of a parameter besides its value; the script changes dtypes by ``.data``.
MARKS = ("requires_grad", "dtype")
Mark = tuple[bool, torch.dtype]
_marks = attrgetter(*MARKS)


@dataclass(eq=False)
class Recording:
    """A recorded step.

    Attributes:
        number: Its number, equal on all workers.
        mode: Train, eval or predict.
        signature: Of the batch, or of each microbatch.
        graph: The graph.
        parameters: Those of network and loss.
        marks: Of every parameter, whether it is trained, and its dtype.
        loss_fn: The loss.
        tensors: The state that it works on.
        plans: The number of the recording whose plans it shares: its own, or that of an earlier one
            with the same graph.
        num_checked: How many steps it was used for, where steps are recorded again now and then.
    """

    number: int
    mode: Mode
    signature: Signature
    graph: CapturedGraph
    parameters: tuple[nn.Parameter, ...]
    marks: tuple[Mark, ...]
    loss_fn: Any
    tensors: tuple[torch.Tensor, ...]
    plans: int = -1
    num_checked: int = 0
    _leaves: dict[str, list[Any] | None] = field(default_factory=dict)
    _numbers: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)

    def lifted(self) -> tuple[Any, ...]:
        """The present values of the lifted numbers."""
        guards = self.graph.state.guards
        return guards.lifted_values() if guards.lifted else ()

    def is_for(self, signature: Signature) -> bool:
        """Whether the graph holds for a batch, as far as Python values do not matter."""
        return self.signature == signature or self.numbers(signature, self.lifted()) is not None

    def numbers(self, signature: Signature, lifted: Sequence[Any]) -> Mapping[str, Any] | None:
        """The numbers of the graph, for a batch; None if the graph does not hold for it."""
        sizes = self.graph.sizes
        if sizes is None:
            return {} if self.signature is signature or self.signature == signature else None
        if not lifted and signature.digest in self._numbers:
            return self._numbers[signature.digest]
        if signature.digest not in self._leaves:
            is_alike = signature.structure() == self.signature.structure()
            self._leaves[signature.digest] = leaves(signature.example("meta")) if is_alike else None
        known = self._leaves[signature.digest]
        symbols = None if known is None else sizes.bind(known, lifted)
        found = None if symbols is None else sizes.compute(symbols)
        if not lifted:
            self._numbers[signature.digest] = found
        return found


class Match(NamedTuple):
    """A recording that holds now.

    Attributes:
        recording: The recording.
        lifted: The present values of its lifted numbers.
        numbers: The numbers that its graph computes with.
    """

    recording: Recording
    lifted: tuple[Any, ...]
    numbers: Mapping[str, Any]

    def describe(self) -> str:
        """The graph, and the numbers that its text does not tell."""
        places = self.recording.graph.state.guards.lifted
        values = zip(places, self.lifted, strict=True)
        lines = [f"{place.label} is {value!r}" for place, value in values]
        return "\n".join([switches_of_all(), *lines, self.recording.graph.describe()])


def marks_of(parameters: Sequence[torch.Tensor]) -> tuple[Mark, ...]:
    """Of every parameter its mark."""
    with DisableTorchFunctionSubclass():  # stand-ins would answer slowly
        return tuple(map(_marks, parameters))


@dataclass(eq=False)
class Recordings:
    """Makes recordings, and finds those that hold.

    Args:
        record: Records a step with some places lifted.
        task: Has the loss.
        trainable: Gives the parameters of network and loss, since the last recording that was used.
        tensors: Gives all parameters and buffers by name.
        swaps: The loss and the optimizer that the Model was given since the last step.
        is_answer: Whether a place has the answer to what code asks of a tensor.
    """

    _record: Callable[[Mode, Signature, tuple[Place, ...]], CapturedGraph]
    _task: Task
    _trainable: Callable[[], tuple[nn.Parameter, ...]]
    _tensors: Callable[[], Mapping[str, torch.Tensor]]
    _swaps: Swaps
    _is_answer: Callable[[Place], bool]

    def __post_init__(self) -> None:
        self._latest: list[Recording] = []  # the one that was used last comes first
        self._num_made = 0
        self._num_lifts: Counter[str] = Counter()
        self._num_changes: Counter[tuple[Mode, str, str]] = Counter()
        self._counts_before = self._num_lifts, self._num_changes  # the recording made last
        self._stock: list[Recording] | None = None

    def __iter__(self) -> Iterator[Recording]:
        return iter(self._latest)

    def keep_graphs(self) -> None:
        """Keep captured graphs when recordings are forgotten."""
        self._stock = self._stock or []

    def start_over(self) -> None:
        """Forget all recordings; all workers do so at the same point."""
        if self._stock is not None:
            self._stock = [*self._latest, *self._stock][:_MAX_RECORDINGS]
        self._latest.clear()
        older.forget_older(self._task.network)
        self._num_made = 0
        self._num_lifts.clear()  # a worker that is new has none either
        self._num_changes.clear()

    def latest_if_it_holds(self) -> Recording | None:
        """The recording that was used last, if it is one of Python's values as they are now."""
        latest = next(iter(self._latest), None)
        return latest if latest is not None and latest.graph.state.guards.hold() else None

    def find(self, mode: Mode, signature: Signature) -> Match | None:
        """The recording that holds now, if there is one.

        Args:
            mode: Train, eval or predict.
            signature: Of the batch, or of each microbatch.
        """
        if not older.kept_places:
            return self._holding(mode, signature)
        older.note_held(self._task.network)
        found = self._holding(mode, signature)
        older.count_references(self._task.network)
        return found

    def _holding(self, mode: Mode, signature: Signature) -> Match | None:
        for index, recording in enumerate(self._latest):
            is_other = recording.signature is not signature and recording.signature != signature
            if recording.mode is not mode or (is_other and recording.graph.sizes is None):
                continue
            if not self._fits(recording) or not recording.graph.state.guards.hold():
                continue
            lifted = recording.lifted()
            numbers = recording.numbers(signature, lifted)
            if numbers is not None:
                if index:
                    self._latest.insert(0, self._latest.pop(index))
                return Match(recording, lifted, numbers)
        return None

    def changed(self, mode: Mode, signature: Signature, number: int | None = None) -> list[Failure]:
        """The change since the recording of such a step that was used last, or a numbered one.

        With what the Model was given since the last step.
        """
        numbered = (r for r in self._latest if r.number == number)
        before = next(chain(numbered, self._of_step(mode, signature)), None)
        swapped = self._swaps.changed()
        if before is None:
            return swapped
        was = self._named_marks(before.marks)
        now = self._named_marks(marks_of(self._trainable()))
        marks = (named_failure(name, was[name], now[name]) for name in now if name in was)
        marks = (mark for mark in marks if mark.old != mark.new)
        return [*swapped, *before.graph.state.guards.failures(), *marks]

    def value_at(self, mode: Mode, signature: Signature, label: str) -> Any:
        """The value at a place with a name, as it was for that recording; else ``MISSING``."""
        given = self._swaps.given(label)
        if given is not None:
            return given
        before = next(iter(self._of_step(mode, signature)), None)
        if before is None:
            return MISSING
        marks = self._named_marks(before.marks)
        return marks[label] if label in marks else before.graph.state.guards.value_at(label)

    def _of_step(self, mode: Mode, signature: Signature) -> list[Recording]:
        """The recordings of such a step: those for what is trained now, then the others."""
        found = [r for r in self._latest if r.mode is mode and r.is_for(signature)]
        return sorted(found, key=lambda recording: not self._fits(recording))

    def _named_marks(self, marks: Sequence[Mark]) -> dict[str, Any]:
        """The marks of the parameters, by a name for people."""
        names = {id(t): n for n, t in self._tensors().items() if isinstance(t, nn.Parameter)}
        pairs = zip(names.values(), marks, strict=False)  # another loss may have others
        return {f"{m} of {n}": v for n, own in pairs for m, v in zip(MARKS, own, strict=True)}

    def why_again(self, mode: Mode, signature: Signature) -> str:
        """Why a step that was recorded is to be recorded once more; empty if it never was."""
        former = [recording for recording in self._latest if recording.mode is mode]
        if not former:
            return ""
        if not self._of_step(mode, signature):
            return signature.difference(former[0].signature)
        changed = self.changed(mode, signature)
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        return f"{changed[0]}{more}" if changed else "what is trained, or the loss, is another"

    def make(self, mode: Mode, signature: Signature) -> Match:
        """Record the step as it is now. All workers do so at the same point.

        Raises:
            CaptureError: The step cannot be captured.
        """
        began = time.monotonic()
        self._counts_before = self._num_lifts.copy(), self._num_changes.copy()
        graph = self._kept(mode, signature) or self._record(mode, signature, ())
        before = self._before(mode, signature, graph)
        changed = tuple(before.graph.state.guards.failures()) if before is not None else ()
        chosen = self._lifted(before, graph, changed, mode, signature) if before else None
        if chosen is None:
            sizes = signature.structure() if self._task.dynamic_dims else signature.digest
            self._count(changed, (mode, sizes), time.monotonic() - began)
        parameters = self._trainable()
        recording = Recording(
            self._num_made,
            mode,
            signature,
            chosen or graph,
            parameters,
            marks_of(parameters),
            self._task.loss_fn,
            tuple(self._tensors().values()),
        )
        self._num_made += 1
        recording.plans = self._twin_of(recording)
        self._latest.insert(0, recording)
        del self._latest[_MAX_RECORDINGS:]
        lifted = recording.lifted()
        numbers = recording.numbers(signature, lifted)
        if numbers is None:
            raise CaptureError("a recorded step does not hold for the batch that it was made for")
        return Match(recording, lifted, numbers)

    def drop(self, found: Match) -> None:
        """Forget the recording that was made last, and all counts with it: it is made again."""
        self._latest.remove(found.recording)
        self._num_made -= 1
        self._num_lifts, self._num_changes = self._counts_before

    def forget_sizes(self) -> None:
        """Forget recordings of buffers that have another size by now. All workers do so."""
        tensors = self._tensors()
        self._latest = [
            recording
            for recording in self._latest
            if all(
                node.meta is None or tensors[node.target].shape == node.meta.shape
                for node in recording.graph.nodes
                if node.kind is NodeKind.BUFFER and node.target in tensors
            )
        ]

    def check_again(self, found: Match, every: int) -> None:
        """Every so many steps of a recording, record the step once more.

        Counted apart: where training and evaluation take turns, each has its turn.

        Raises:
            StaleGraphError: That gives another graph, which must not be.
        """
        recording = found.recording
        recording.num_checked += 1
        if recording.num_checked % every:
            return
        again = self._record(recording.mode, recording.signature, ())
        batch = leaves(recording.signature.example("meta")) if found.lifted else ()
        old = canonical_lines(recording.graph, found.lifted, batch)
        new = canonical_lines(again, (), batch)
        if old == new:
            return
        pairs = list(zip_longest(old, new, fillvalue=("nothing", "nothing")))
        told = next(
            (f"{now} was {was}" for (_, was), (_, now) in pairs if now != was),
            next(f"{now!r} was {was!r}" for (was, _), (now, _) in pairs if now != was),
        )
        raise StaleGraphError(
            f"GS_RECAPTURE_EVERY={every}: the {recording.mode.step} gives another graph than "
            f"the one that runs, though nothing that its code was seen to read has changed\n"
            f"  {told}\n"
            f"  Fix: keep what this line reads in an attribute, or in a buffer; or keep the code "
            f"that reads it whole with gs.opaque."
        )

    # Making.

    def _kept(self, mode: Mode, signature: Signature) -> CapturedGraph | None:
        """A graph that was captured before recordings were forgotten, if it holds."""
        for old in self._stock or ():
            if (
                old.mode is mode
                and old.signature == signature
                and not old.graph.state.guards.lifted
                and self._fits(old)
                and old.graph.state.guards.hold()
            ):
                return old.graph
        return None

    def _fits(self, recording: Recording) -> bool:
        """Whether what it was made for is trained, and with the loss that the Model has.

        That the network has other parameters now, its guards see.
        """
        return (
            recording.loss_fn is self._task.loss_fn
            and marks_of(recording.parameters) == recording.marks
        )

    def _before(self, mode: Mode, signature: Signature, graph: CapturedGraph) -> Recording | None:
        """The recording of such a step that was used last; one that is like a graph, if any is."""
        steps = filter(self._fits, self._of_step(mode, signature))
        found = [r for r in steps if r.graph.num_answered == graph.num_answered]
        alike = (recording for recording in found if _are_alike(recording.graph, graph))
        return next(alike, found[0] if found else None)

    def _lifted(
        self,
        before: Recording,
        graph: CapturedGraph,
        changed: Sequence[Failure],
        mode: Mode,
        signature: Signature,
    ) -> CapturedGraph | None:
        """The step with the numbers lifted that have changed, if that gives the same graphs."""
        old_places = before.graph.state.guards.lifted
        if not changed or not all(map(is_number, changed)):
            return None
        if not _are_alike(before.graph, graph):
            return None
        labels = sorted(failure.place.label for failure in changed)
        if max(self._num_lifts[label] for label in labels) >= _MAX_LIFTS:
            return None
        places = (*old_places, *(failure.place for failure in changed))
        try:
            lifted = self._record(mode, signature, places)
        except (CaptureError, OverflowError):  # or a size that a number decides has no bound
            lifted = None
        now = tuple(number_of(place.read()) for place in places)
        was = [(*before.lifted(), *numbers) for numbers in numbers_before(changed)]
        if lifted is not None and not (
            any(_gives(lifted, then, before.graph, before.lifted(), signature) for then in was)
            and _gives(lifted, now, graph, (), signature)
        ):
            lifted = None
        if lifted is None:
            self._num_lifts.update(labels)
        return lifted

    def _count(self, changed: Sequence[Failure], step: tuple[Mode, str], seconds: float) -> None:
        """Warn of a place for which graphs are made again and again: the third time, and on."""
        for failure in changed:
            key = (*step, failure.place.label)
            self._num_changes[key] += 1
            count = self._num_changes[key]
            if count > 1 and count & (count - 1) == 0:
                warn_of_captures(
                    failure, count + 1, seconds, is_answer=self._is_answer(failure.place)
                )

    def _twin_of(self, recording: Recording) -> int:
        """Whose plans it can use: those of an earlier recording with the same graph."""
        has_calls = any(opaque_call(node) is not None for node in recording.graph.fx_nodes.values())
        for other in self._latest if not has_calls else ():
            if (
                other.mode is recording.mode
                and other.signature == recording.signature
                and other.loss_fn is recording.loss_fn
                and other.marks == recording.marks
                and are_same(other.tensors, recording.tensors)
                and recording.graph.runs_as(other.graph)
            ):
                return other.plans
        return recording.number

    # Snapshots.

    def places(self) -> Iterator[tuple[Place, Any, Any, bool]]:
        """Every watched place, the value that it had when it was read, and the loss of then.

        And whether all of the value counts, or only items of it that are places of their own.
        """
        for recording in reversed(self._latest):
            state, loss_fn = recording.graph.state, recording.loss_fn
            for watched in state.guards.watched:
                if not watched.is_structure and not self._is_answer(watched.place):
                    is_whole = watched.contents is MISSING
                    first = watched.value if is_whole else watched.contents
                    yield watched.place, first, loss_fn, is_whole
            for place in state.guards.lifted:
                if not self._is_answer(place):
                    yield place, place.read(), loss_fn, True
            for change in state.changes:
                # Snapshots keep the marks of all parameters, and the forms of all buffers.
                if change.place.kind not in (PlaceKind.MARK, PlaceKind.BUFFER):
                    yield change.place, change.old, loss_fn, True


def _are_alike(one: CapturedGraph, other: CapturedGraph) -> bool:
    """Whether two graphs may differ in numbers alone."""
    return _form(one) == _form(other)


def _form(graph: CapturedGraph) -> list[Any]:
    return [*TensorsOfNumbers.of(graph).forms(), *(c.place.label for c in graph.changes)]


def _gives(
    lifted: CapturedGraph,
    values: Sequence[Any],
    graph: CapturedGraph,
    its_values: Sequence[Any],
    signature: Signature,
) -> bool:
    """Whether a lifted graph is another one, for some values of the lifted numbers."""
    sizes, batch = lifted.sizes, leaves(signature.example("meta"))
    if sizes is None or sizes.bind(batch, values) is None:
        return False
    one = canonical_lines(lifted, values, batch)
    other = canonical_lines(graph, its_values, batch)
    return [line for line, _ in one] == [line for line, _ in other]
