"""The Python values around a captured step: what it read, what it left, which were lifted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

import torch
from torch import nn

from graphsplit.capture.checkpoints import checkpoints_watched
from graphsplit.capture.numbers.functions import CONVERSIONS, computed_with
from graphsplit.capture.numbers.lifted import Lifted, computed, lifted_in_place
from graphsplit.capture.python import identities
from graphsplit.capture.python.answers import Answers, Asking
from graphsplit.capture.python.iterators import KeptIterators
from graphsplit.capture.python.trained_marks import TrainedMarks
from graphsplit.capture.reach.at_calls import FoundByCalls
from graphsplit.capture.reach.state import Reached
from graphsplit.capture.state.assigned_buffers import AssignedBuffers
from graphsplit.capture.state.handed import Handed
from graphsplit.capture.state.kept_tensors import KeepsTensorsError, KeptTensors
from graphsplit.capture.state.moved_parameters import ModulesStay
from graphsplit.capture.state.older_values import NOTHING_RENEWED, Renewed
from graphsplit.capture.state.owned_tensors import Key
from graphsplit.capture.state.steering import NotFollowedError, buffers_followed, numbers_apart
from graphsplit.errors import CaptureError, OwnershipError
from graphsplit.frames import users_line_now
from graphsplit.guards.changes import Change, changes_of, from_before, put_all_back
from graphsplit.guards.check import Guards, Watched
from graphsplit.guards.code_facts import library_places, names_used_by, torch_places
from graphsplit.guards.places import Place, PlaceKind, entry
from graphsplit.guards.recorder import ReadRecorder
from graphsplit.guards.tensor_attributes import (
    check_classes,
    tensor_attributes_seen,
    tensors_of,
    users_classes,
)
from graphsplit.guards.values import (
    CONTAINERS,
    MISSING,
    Frozen,
    any_leaf,
    differences,
    freeze,
    reference_of,
)
from graphsplit.guards.visitor import Noted
from graphsplit.marks.ignored import is_ignored
from graphsplit.torch_ext.attributes import (
    BACKWARD_HOOKS,
    CALL,
    FORWARD_HOOKS,
    TABLES,
    storage_of,
)
from graphsplit.torch_ext.eager_mode import compiled_branches
from graphsplit.torch_ext.fake_caches import forget_fake_tensors
from graphsplit.torch_ext.private import FakeTensor
from graphsplit.torch_ext.replaced import outside
from graphsplit.torch_ext.stand_ins import StandIn
from graphsplit.torch_ext.steering import let_steer, may_steer, steers


@dataclass(frozen=True, eq=False)
class PythonState:
    """The Python state that a captured step depends on, and that it leaves.

    Attributes:
        guards: All that it read.
        changes: All that it changed.
        lifted: The numbers that are operands of the graph.
        handed: What the script is handed beside the outputs, in their order.
        renewed: The kept tensors to which it assigns.
        calls: What code kept whole finds, where that is not what the step leaves.
    """

    guards: Guards
    changes: tuple[Change, ...] = ()
    lifted: Lifted = field(default_factory=Lifted)
    handed: tuple[Handed, ...] = ()
    renewed: Renewed = NOTHING_RENEWED
    calls: FoundByCalls = field(default_factory=FoundByCalls)


NO_STATE = PythonState(Guards(()))


class StateWatch:
    """Watches the Python code of a step each time that it is recorded.

    Args:
        lift: Places whose numbers are to be lifted.
        answers: What tensors were found to hold, for code that asks them.
        hands_out: Whether the script is handed the tensors that the code leaves in Python.

    Attributes:
        may_ask: Whether there are any answers.
        asking: Answers the code that is recorded.
        asked: The buffers that steer Python code and of which something was asked.
        replaced: Attributes of modules with a tensor in whose place another one is left.
        ends_in: The class of the error that the code is known to end in; None: it goes to its end.
    """

    def __init__(
        self,
        lift: Sequence[Place] = (),
        answers: Answers | None = None,
        *,
        hands_out: bool = False,
    ) -> None:
        self._lift = tuple(lift)
        self._hands_out = hands_out
        self.ends_in: type[Exception] | None = None
        self.may_ask = answers is not None
        self.answers = Answers() if answers is None else answers
        self._follows_all = False
        self._unfollowed: frozenset[tuple[int, str]] = frozenset()
        self._tried: frozenset[tuple[int, str]] | None = None
        self.asked: set[tuple[int, str]] = set()
        self._recorder: ReadRecorder | None = None
        self._changes: tuple[Change, ...] = ()
        self.replaced: list[Key] = []
        self._lifted = Lifted()
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}

    def follow_all(self) -> bool:
        """Follow all buffers that may steer Python code, to see which do; whether there is a need.

        Those that turned out to be something else are left out the next time.
        """
        if self._tried == self._unfollowed:
            return False
        self._follows_all, self._tried = True, self._unfollowed
        self.asked.clear()
        return bool(self._followed())

    def let_steer(self) -> bool:
        """Let the buffers of which something was asked steer Python code; whether there are any."""
        self._follows_all = False
        tensors = [self._tensors[key] for key in self.asked - self._unfollowed]
        let_steer(tensors)
        return bool(tensors)

    @property
    def has_unfollowed(self) -> bool:
        """Whether a buffer that steers was found, and cannot be followed."""
        return bool(self._unfollowed)

    @property
    def has_changes(self) -> bool:
        """Whether the code that was watched last left something in Python."""
        return bool(self._changes)

    def _followed(self) -> frozenset[tuple[int, str]]:
        is_one = may_steer if self._follows_all else steers
        found = {key: tensor for key, tensor in self._tensors.items() if is_one(tensor)}
        if self._follows_all:
            found = {key: tensor for key, tensor in found.items() if key not in self._unfollowed}
        if not found:
            return frozenset()
        dense = (t for t in self._tensors.values() if t.layout is torch.strided)
        users = Counter(storage_of(tensor) for tensor in dense)
        return frozenset(
            key
            for key, tensor in found.items()
            if not isinstance(tensor, (StandIn, nn.Parameter)) and users[storage_of(tensor)] == 1
        )

    def begin(self, root: nn.Module, is_paused: Callable[[], bool]) -> None:
        """Note what all modules hold: while the step is recorded, other things stand there.

        Args:
            root: The module that holds the network and the loss.
            is_paused: Whether what runs now is no part of the graph.
        """
        self._root, self._calls, thread = root, FoundByCalls(), threading.get_ident()
        # Other threads (one that sends a snapshot, say) read attributes, and are no part of it.
        self._is_paused = is_paused = _in_thread(thread, is_paused)
        self._kept = KeptTensors(root)
        self._recorder = ReadRecorder(root, label_of_path, is_paused, self._kept.real_of)
        self._kept.has_made = self._recorder.has_made
        self._before = [(module, dict(vars(module))) for module in root.modules()]
        self._tensors = tensors_of(root.modules())
        check_classes(
            (f"{label_of_path(path)}.{name}", tensor)
            for path, module in root.named_modules()
            for (_, name), tensor in tensors_of([module]).items()
        )
        self.asking = Asking(self.answers, self._recorder.note_tensors, is_paused, self.ends_in)

    @contextmanager
    def watching(self, assigned: AssignedBuffers | None = None) -> Iterator[None]:
        """Watch what runs inside; ends with everything as it was.

        Args:
            assigned: Copies what code keeps in Python into buffers; None: it is not copied.
        """
        recorder = self._begun()
        marks = TrainedMarks(self._root, label_of_path, self._is_paused)
        stay = ModulesStay(self._root, label_of_path)
        modules, keys = {id(m): m for m in self._root.modules()}, self._followed()
        apart, has_ended = numbers_apart(modules, self._tensors, keys), False
        with apart, lifted_in_place(self._lift) as lifted, computed_with(lifted):
            try:
                identities.stand_for(tensors_of(self._root.modules()), self._tensors)
                conversions = CONVERSIONS if lifted.places else {}
                recorder.by_name.others = {**identities.FUNCTIONS, **conversions}
                with identities.as_keys():
                    self._kept.bring_in()
                self._kept.leave_out(tensor for tensor, _ in lifted.tensors.values())
                recorder.note_lifted(lifted.places)
                run_again, iterators = RunAgain(recorder), KeptIterators(recorder.unseen)
                recorder.on_first = iterators.note
                with (
                    iterators,
                    identities.classes_asked() as recorder.by_name.ask_classes,
                    recorder.recording(),
                    compiled_branches(recorder.suspended),
                    marks.seen(),
                    identities.as_keys(),
                    self._attributes_seen(recorder),
                    checkpoints_watched(run_again.checkpoint),
                    self._steering_seen(recorder, modules, keys),
                    stay.seen(),
                ):
                    self._meet(recorder, modules.values())
                    yield
                run_again.check()
                if assigned is not None:
                    self._kept.settle(recorder.noted, assigned, hands_out=self._hands_out)
                has_ended = True
            except OwnershipError:  # it may be of something that is kept, in an unknown place
                unknown = self._kept.unknown(recorder.noted) if assigned is not None else []
                if unknown:
                    put_all_back(recorder.noted.values())
                    raise KeepsTensorsError({}, unknown) from None
                self._kept.refuse_others(recorder.noted)
                raise
            finally:
                try:
                    recorder.note_unseen()
                    self.replaced = _replaced(recorder.noted.values(), lifted)
                    left, reforms = self._left_by(recorder), self._kept.changes(label_of_path)
                    self._changes = (*left, *marks.changes(), *stay.changes(), *reforms)
                except CaptureError:
                    if has_ended:  # else the code has raised an error itself
                        raise
                finally:
                    self._kept.put_back()
        self._lifted = lifted

    def note_call(self, reached: Reached, line: str) -> None:
        """Note what a call that is kept whole finds in Python."""
        self._calls.note(reached, line, self._begun(), self._kept.real_of)

    def _left_by(self, recorder: ReadRecorder) -> tuple[Change, ...]:
        known = recorder.noted, computed, recorder.has_made
        self._calls.find(*known, leaves=self.asking.unanswered is None)
        return changes_of(*known)

    def _begun(self) -> ReadRecorder:
        assert self._recorder is not None
        return self._recorder

    def _meet(self, recorder: ReadRecorder, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            recorder.touch(module)
        for kind in {type(t) for t in self._tensors.values() if users_classes(t)}:
            recorder.by_name.ask_classes()  # type(w).scale, w.__class__.scale
            recorder.meet_class(kind)

    def _attributes_seen(self, recorder: ReadRecorder) -> AbstractContextManager[None]:
        labels = {id(m): label_of_path(path) for path, m in self._root.named_modules()}
        standing = tensors_of(self._root.modules())
        return tensor_attributes_seen(
            standing, self._tensors, labels.__getitem__, recorder.note_tensors
        )

    @contextmanager
    def _steering_seen(
        self,
        recorder: ReadRecorder,
        modules: Mapping[int, nn.Module],
        keys: frozenset[tuple[int, str]],
    ) -> Iterator[None]:
        if not keys:
            yield
            return
        paths = {id(m): (label_of_path(path), path) for path, m in self._root.named_modules()}
        note, standing = recorder.note_tensors, tensors_of(self._root.modules())
        try:
            with buffers_followed(
                modules, self._tensors, keys, paths.__getitem__, note, standing
            ) as asked:
                try:
                    yield
                finally:
                    self.asked |= asked
        except NotFollowedError as error:
            self._unfollowed |= error.keys
            raise

    def put_back(self) -> None:
        """Put back what torch has replaced by copies: the containers in attributes of modules."""
        if self._recorder is not None:
            self._recorder.put_values_back()
        for module, before in self._before:
            held = vars(module)
            for name, value in before.items():
                if isinstance(value, CONTAINERS) and held.get(name) is not value:
                    held[name] = value

    def with_handed(self, outputs: Any) -> Any:
        """Outputs, with what the code has left for the script, if anything; a question is alone."""
        handed = [one.value for one in self._kept.handed]
        return (outputs, handed) if handed and self.asking.unanswered is None else outputs

    def noted(self) -> tuple[Noted, ...]:
        """All places that were read or written, once the recording is over."""
        return tuple(self._recorder.noted.values()) if self._recorder is not None else ()

    def state(self, of_calls: Iterable[nn.Module] = ()) -> PythonState:
        """The findings, once the recording is over.

        Args:
            of_calls: Modules that calls kept whole use: their code runs at each step, but on the
                parameters that were found when it was captured.
        """
        recorder = self._begun()
        free = {place.identity for place in self._lifted.places}
        watched = [
            _watched(noted, has_symbols=bool(free))
            for identity, noted in from_before(recorder.noted).items()
            if noted.is_read and identity not in free and not is_ignored(noted.place)
        ]
        for module in of_calls:
            recorder.touch(module)
        modules = [one for one in recorder.touched.values() if isinstance(one, nn.Module)]
        for module in modules:
            _, path, label = recorder.tables[id(vars(module))]
            watched += _structure(module, label, path)
        watched += _methods({type(module): None for module in modules})
        names = recorder.names | names_used_by(map(type, modules))
        of_code = (library_places(code, held) for code, held in recorder.executed.values())
        watched += [
            Watched(place, outside(place.holder, place.key, place.read()))
            for place in chain(torch_places(names), *of_code)
        ]
        forget_fake_tensors()
        watched += [
            Watched(place, value, is_structure=True)
            for place, value in (*recorder.results_kept(), *recorder.of_names.values())
        ]
        guards = Guards(
            watched,
            tensors=tuple(recorder.tensors.values()),
            types={n: v for n, v in recorder.touched.items() if n not in recorder.weakly_met},
            lifted=self._lifted.places,
            with_switches=True,
        )
        recorder.let_go()
        handed = tuple(replace(one, value=None) for one in self._kept.handed)
        own = self._changes, self._lifted, handed, self._kept.renewed, self._calls
        return PythonState(guards, *own)


def _replaced(noted: Iterable[Noted], lifted: Lifted) -> list[Key]:
    """Attributes of modules that hold a tensor without values where a tensor was."""
    return [
        (one.place.module, one.place.key)
        for one in noted
        if one.place.module is not None
        and isinstance(one.first, torch.Tensor)
        and isinstance(now := one.place.read(), FakeTensor)
        and id(now) not in lifted.tensors
    ]


def label_of_path(path: str) -> str:
    """A module's name for people, from its path in what is captured."""
    top, _, rest = path.partition(".")
    first = {"network": "net"}.get(top, top)
    return f"{first}.{rest}" if rest else first


def _watched(noted: Noted, *, has_symbols: bool) -> Watched:
    """A place that was read, with what was there first."""
    first = freeze(noted.place.read()) if has_symbols else noted.first
    if noted.is_whole or not isinstance(noted.first, Frozen):
        return Watched(noted.place, first)
    return Watched(noted.place, reference_of(noted.first), contents=first)


def _structure(module: nn.Module, label: str, path: str | None) -> Iterator[Watched]:
    """A module's tables and hooks: its identity besides its attributes."""
    held = vars(module)

    def own(name: str) -> Place:
        return entry(held, name, f"{label}.{name}", module=path)

    for table in (*TABLES, *FORWARD_HOOKS, *BACKWARD_HOOKS):
        if isinstance(held.get(table), dict):  # a scripted module keeps its own elsewhere
            yield Watched(own(table), freeze(held[table]), is_structure=True)
    if "training" in held:
        yield Watched(own("training"), module.training)
    yield Watched(own("forward"), held.get("forward", MISSING))


def _methods(kinds: Iterable[type[nn.Module]]) -> Iterable[Watched]:
    """The methods that run where a module is called: in its class, or where that has them from."""
    found: dict[Any, Watched] = {}
    for kind, name in product(kinds, ("forward", "__call__", CALL)):
        for owner in kind.__mro__:
            place = Place(PlaceKind.CLASS, owner, name, f"{owner.__qualname__}.{name}")
            found[place.identity] = Watched(place, place.read())
            if name in vars(owner):
                break
    return found.values()


def _in_thread(thread: int, is_paused: Callable[[], bool]) -> Callable[[], bool]:
    """A test that holds in all threads but one, too."""
    return lambda: threading.get_ident() != thread or is_paused()


# Python values inside ``torch.utils.checkpoint``, whose code eager runs again in backward.
#
# A captured step runs that code once. So a value that it changes would be changed once instead of
# twice, and one that is changed after it would be read as it was, instead of as it is by then.


class RunAgain:
    """Refuses what a checkpoint would do otherwise when it runs again.

    Args:
        recorder: Notes the places that code reads and writes.
    """

    def __init__(self, recorder: ReadRecorder) -> None:
        self._recorder = recorder
        self._used: list[tuple[Noted, Any, str]] = []  # a place, its value then, the user's line

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Run what a checkpoint runs.

        Raises:
            CaptureError: It has changed a Python value, and there will be a backward.
        """
        if not torch.is_grad_enabled():
            yield
            return
        noted = self._recorder.noted
        with self._recorder.unseen():
            before = {key: freeze(one.place.read()) for key, one in noted.items()}
        begun = self._recorder.begin_part(with_code=True)
        yield
        line = users_line_now()
        with self._recorder.unseen():
            for key, one in noted.items():
                if self._recorder.by_name.has_put(one.place.holder, one.place.key):
                    continue  # code that runs there asks by names for the first time
                if _differs(before.get(key, one.first), one):
                    raise _refusal(one, "is changed inside", line)
                if any(part >= begun for part in one.uses):
                    self._used.append((one, freeze(one.place.read()), line))

    def check(self) -> None:
        """Check, at the end of the step, that backward would read what forward read.

        Raises:
            CaptureError: What a checkpoint has read was changed after it.
        """
        for one, value, line in self._used:
            if _differs(value, one):
                raise _refusal(one, "is read inside, and changed after,", line)


def _differs(before: Any, one: Noted) -> bool:
    """Whether a place holds something else; tensors that code made and keeps do not count."""
    now = freeze(one.place.read())
    is_kept_tensor = any_leaf(now, lambda leaf: isinstance(leaf, (FakeTensor, torch.fx.Proxy)))
    return not is_kept_tensor and any(True for _ in differences(before, one.place.read()))


def _refusal(one: Noted, how: str, line: str) -> CaptureError:
    return CaptureError(
        f"{one.place.label} {how} a torch.utils.checkpoint, whose code runs again in backward: "
        f"the captured graph would run it once\n  {line}\n"
        f"  Fix: change the value in forward before the checkpoint, outside of what it runs; or "
        f"leave the checkpoint out and pass recompute to gs.Model."
    )
