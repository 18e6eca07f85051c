"""A script whose calls can be taken back, and given again to a process that starts anew.

Every call of a Model has a number, the same on all workers. Now and then a *snapshot* is taken: of
what every worker owns, and of the place in the script, inside ``train`` or at the end of a call::

    calls        train ───────────────►  eval ─►  train_step ─► train_step ─► ...
    snapshots    1    2    3    4    5                   6

After a loss everybody goes on from the newest snapshot of which all parts are there:

- *Survivors* put back what they own. They are past the snapshot, perhaps in a later call; calls
  since then are run again from the log, and their results dropped, up to the one under way.
- The process that took the lost one's place runs the script from its first line. Calls that ended
  before the snapshot return what they returned then, without running; the one with the snapshot in
  it goes on in its middle.

So all workers make the same exchanges again, from the same state: the bits are those of a run in
which nothing happened.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch

from graphsplit.checkpoint.generators import all_generators, is_same, set_all_generators
from graphsplit.errors import (
    CheckpointError,
    ConfigurationError,
    MembershipChangedError,
    StateError,
)
from graphsplit.guards.values import put_back
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall, Script
from graphsplit.recovery.kinds import kind_of, loads_state
from graphsplit.recovery.log import Entry, left_to_the_script, refuse_what_ends
from graphsplit.recovery.loops.anew import Successor
from graphsplit.recovery.loops.script import BOTH, LoopScript
from graphsplit.recovery.results import Memory, Results, pack, unpack
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.share import ModelSnapshot
from graphsplit.recovery.snapshots import ScriptPoint, Snapshots
from graphsplit.train.cluster_engine import ClusterEngine

T = TypeVar("T")
_KEPT = "the tensors that code keeps"
_STEPPING = ("train", "train_step", "forward_backward")


class RecoveringScript(Script):
    """Runs the calls of a script on one worker of a job that recovers.

    Args:
        job: The job.
        settings: How often snapshots are taken.
    """

    gives_again = True

    def __init__(self, job: Job, settings: SnapshotSettings) -> None:
        self._job = job
        self.settings = settings
        self._shares: list[ModelSnapshot] = []
        self._by_engine: dict[int, ModelSnapshot] = {}
        self._results = Results()
        self._snapshots = Snapshots(job, settings, self._shares, self._results)
        self._entries: dict[int, Entry] = {}
        self._ordinal = -1  # of the call that was made last
        self._running: Entry | None = None
        self._depth = 0
        self._steps = 0  # since the last snapshot
        self._generators: tuple[Any, ...] | None = None  # after the last call
        self._has_joined = False
        self._memory: Memory | None = None  # what an earlier process returned
        self._place: ScriptPoint | None = None  # where the script goes on for real
        job.after_recovery = self._recover_at_the_end
        self._successor = Successor()

    def begin_own_loop(self) -> None:
        """A network is distributed: from here on ``LoopScript`` runs the script.

        Raises:
            ConfigurationError: It has a Model as well; or the job goes on without lost workers.
        """
        if self._shares:
            raise ConfigurationError(BOTH)
        if self._job.goes_on:
            raise ConfigurationError(
                "distribute was called in a job with GS_RECOVERY=go_on: a network in a loop of the "
                "script's own has no replicas, so nobody could go on without a worker\n"
                "  Fix: GS_RECOVERY=wait_rejoin and gs.loop, or train with Model.train."
            )
        self.close()
        self._job.after_recovery = None
        self._job.script = LoopScript(self._job, self._successor, self.settings)

    def add_engine(self, task: Any, engine: Any, states: Any) -> None:
        """A Model was built, of a task, an engine and states."""
        if not isinstance(engine, ClusterEngine):
            return
        share = ModelSnapshot(len(self._shares), task, engine, states)
        engine.planner.recordings.keep_graphs()
        engine.planner.expected_owners = dict(self._snapshots.owners_of(share.index))
        self._shares.append(share)
        self._by_engine[id(engine)] = share

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor is of a Model: a worker that comes back is given its values again."""
        held = {id(tensor) for share in self._shares for tensor in share.tensors()}
        return any(id(tensor) in held for tensor in tensors)

    def number_of(self, engine: Any) -> int | None:
        """Its place among the Models: snapshots go by that."""
        return self._by_engine[id(engine)].index

    def around(self, engine: Any, calls: T, *, changes_nothing: bool = False) -> T:
        """The calls of a Model, each of which may be taken back, and given again."""
        run = self.local if changes_nothing else self.collective
        return cast(T, _Recorded(engine, calls, run))

    # Calls.

    def collective(self, call: ModelCall) -> Any:
        """Run a call that all workers make; or return what it returned before."""
        if self._depth:  # made by a callback: part of another call
            self._job.member.position.calls.check(call.name)
            with self._nested():
                return call()
        self._ordinal += 1
        with self._job.reporting():
            for share in self._shares:
                share.engine.planner.python_values.hide()
                share.states.begin()  # also where its first call is given again
                share.check_given()
        self._join()
        if self._place is not None and self._ordinal < self._place.first_needed:
            return self._give_again(self._ordinal, call)
        self._check(call)
        entry = self._enter(self._ordinal, call)
        if self._place is not None and self._place.ordinal == entry.ordinal:
            self._restore()  # the snapshot is inside this call
        return self._carry_out(entry)

    def local(self, call: ModelCall) -> Any:
        """Run a call that changes nothing; or return what it returned before."""
        if self._depth:
            return call()
        self._join()
        model = self._index(call)
        if self._memory is not None:
            found = self._memory.look(call.name, model)
            if found is not None:
                return kind_of(call.name).unpack(call, self._share(call), found.result)
        result = call()
        kind = kind_of(call.name)
        self._results.add({"name": call.name, "model": model, "result": kind.pack(call, result)})
        return result

    def step_done(self) -> None:
        """A step of ``train`` is over: perhaps take a snapshot."""
        if self._depth == 1 and self._running is not None:
            self._look_who_comes()
            self._check_shares()
            self._steps += 1
            if self._steps >= self.settings.every:
                self._take(self._running, inside=True)

    def stop(self) -> None:
        """Take a last snapshot, and see it safe."""
        entry = self._running or self._entries.get(self._ordinal)
        if entry is None:
            return
        self._take(entry, inside=self._running is not None, is_last=True)
        with self._job.reporting():
            self._snapshots.wait_safe()

    def finished(self) -> None:
        """Nothing will have to be recovered."""
        self._snapshots.finished()

    def close(self) -> None:
        """End all threads."""
        self._snapshots.close()

    @contextmanager
    def _nested(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _share(self, call: ModelCall) -> ModelSnapshot | None:
        return self._by_engine.get(id(call.engine))

    def _index(self, call: ModelCall) -> int:
        share = self._share(call)
        return -1 if share is None else share.index

    def _check(self, call: ModelCall) -> None:
        """Refuse, before it begins, what could not be brought back."""
        with self._job.reporting():
            refuse_what_ends(call, _refuse)
            if call.name in _STEPPING and self._results.lost:
                raise ConfigurationError(
                    f"a worker that comes back could not be given again what a call before "
                    f"{call.name} returned\n  {self._results.lost[0]}\n  Fix: let "
                    f"state_dict(to=path) write a file, predict after training, or start the job "
                    f"with fail_fast."
                )

    def _enter(self, ordinal: int, call: ModelCall) -> Entry:
        entry = Entry.of(ordinal, call, self._shares)
        with self._job.reporting():
            for share in self._shares:
                share.keep_start(must_be_whole=self._job.goes_on)
        self._note_draws(entry)
        self._entries[ordinal] = entry
        return entry

    def _note_draws(self, entry: Entry) -> None:
        """The script drew random numbers since the last call: a later process must as well."""
        if self._generators is not None and not is_same(self._generators, entry.generators):
            packed = pack(self._generators, what="generators")
            self._results.add({"call": entry.ordinal - 1, "generators": packed})

    def _carry_out(self, entry: Entry) -> Any:
        while True:
            with suppress(MembershipChangedError):
                return self._attempt(entry)
            theirs = left_to_the_script(entry, self._entries.values())
            self._until_done(lambda: self._run_again(self._go_back(), entry), is_over=True)
            for one in theirs:
                put_back(one)

    def _attempt(self, entry: Entry) -> Any:
        """Run a call, note what it returned, and perhaps take a snapshot."""
        call, share = entry.call, self._share(entry.call)
        self._look_who_comes()
        self._running = entry
        try:
            with self._nested():
                result = call()
        except (CheckpointError, StateError) as error:  # all workers raise it, and may go on
            self._finish(entry)
            self._results.add_error(entry.ordinal, call.name, self._index(call), error)
            raise
        finally:
            self._running = None
        kind = kind_of(call.name)
        self._results.add_call(
            entry.ordinal,
            call.name,
            self._index(call),
            lambda: kind.pack(call, result),
            after=kind.after(call, share, entry),
            kept=None if share is None else _kept_tensors(share),
        )
        self._finish(entry)
        self._after(entry)
        return result

    def _finish(self, entry: Entry) -> None:
        share = self._share(entry.call)
        if share is not None and loads_state(entry.call.name):
            share.was_loaded = True
        for one in self._shares:
            one.note_versions()
        self._generators = all_generators()

    def _after(self, entry: Entry) -> None:
        if entry.call.name == "train":
            self._take(entry, inside=False)
            with self._job.reporting():
                self._snapshots.wait_offered()
        elif entry.call.name in ("train_step", "step"):
            self._check_shares()
            self._steps += 1
            if self._steps >= self.settings.every:
                self._take(entry, inside=False)

    def _check_shares(self) -> None:
        with self._job.reporting():
            for share in self._shares:
                share.check_once()

    def _take(self, entry: Entry, *, inside: bool, is_last: bool = False) -> None:
        with self._job.reporting():
            index = self._index(entry.call)
            self._snapshots.take(
                entry.ordinal, inside=inside, model=index, steps=self._steps, is_last=is_last
            )
        self._steps = 0
        first = self._snapshots.first_needed
        for ordinal in [n for n in self._entries if n < first]:
            del self._entries[ordinal]

    # A process that takes the place of another.

    def _join(self) -> None:
        """At the first call: find out whether an earlier process had come further."""
        if self._has_joined:
            return
        self._has_joined = True
        if self._job.joined_generation == 1 and self.settings.folder is None:
            return

        def join() -> None:
            with self._job.reporting():
                place, lines = self._snapshots.agree(can_start=True)
                self._expect_owners()
                if place is not None:
                    self._place, self._memory = place, Memory(lines)

        self._until_done(join)

    def _until_done(self, action: Callable[[], None], *, is_over: bool = False) -> None:
        """Do something in this generation of the job, or in the first one in which it can be done.

        Args:
            action: What to do.
            is_over: Whether this generation is over.
        """
        while True:
            with suppress(MembershipChangedError):
                if is_over:
                    self._forget_plans()
                    self._job.recover()
                    self._start_over()
                return action()
            # Behind the error, not while it is handled: its traceback holds the old generation.
            is_over = True

    def _expect_owners(self) -> None:
        if self._job.goes_on:
            return  # they are fixed anew
        for share in self._shares:
            share.engine.planner.expected_owners = dict(self._snapshots.owners_of(share.index))

    def _give_again(self, ordinal: int, call: ModelCall) -> Any:
        assert self._memory is not None
        with self._job.reporting():
            found = self._memory.call(ordinal, call.name, self._index(call))
            kind, share = kind_of(call.name), self._share(call)
            if share is not None and loads_state(call.name):
                share.was_loaded = True
            kind.give_again(call, share, found.after)
            if found.generators is not None:
                set_all_generators(unpack(found.generators, what="generators"))
        self._job.member.position.progress += 1  # others wait for this worker
        place = self._place
        if place is not None and ordinal == place.ordinal and not place.inside:
            self._restore()
        found.raise_error()
        result = kind.unpack(call, share, found.result)
        if self._place is not None and share is not None and found.kept is not None:
            share.engine.planner.python_values.show(unpack(found.kept, what=_KEPT))
        return result

    def _restore(self) -> None:
        """The place is reached: from here on calls run."""
        is_agreed = True

        def restore() -> None:
            nonlocal is_agreed
            with self._job.reporting():
                if not is_agreed:
                    self._snapshots.agree(can_start=False)
                is_agreed = False
                self._snapshots.restore(is_rollback=False)

        self._until_done(restore)
        self._place = None
        self._steps = 0
        self._generators = all_generators()

    # A process that goes back.

    def _recover_at_the_end(self) -> None:
        if self._has_joined:  # and is in the next generation already
            self._start_over()
            self._until_done(lambda: self._run_again(self._go_back(), None))

    def _forget_plans(self) -> None:
        """Nothing of a generation that is over may be kept, however many there are.

        Code, tensors and mapped memory lie in cycles, which Python looks for ever more rarely.
        """
        self._job.member.position.hold()
        for share in self._shares:
            share.left.leave(share.engine.planner, self._job.rank)
            share.engine.planner.start_over()
        gc.collect()

    def _start_over(self) -> None:
        self._job.num_barriers = 0
        for share in self._shares:
            share.engine.start_over()

    def _go_back(self) -> ScriptPoint | None:
        """Go back to where all can."""
        with self._job.reporting():
            place, _ = self._snapshots.agree(can_start=0 in self._entries)
            self._expect_owners()
            self._snapshots.restore(is_rollback=True)
        self._steps = 0
        self._generators = all_generators() if place is not None else None
        return place

    def _run_again(self, place: ScriptPoint | None, entry: Entry | None) -> None:
        """Come again to where a call is about to run; None: to the end of the script."""
        first = 0 if place is None else place.ordinal + (not place.inside)
        for ordinal in sorted(self._entries):
            earlier = self._entries[ordinal]
            if ordinal < first:
                continue
            if place is None or not place.inside or ordinal != place.ordinal:
                self._check_written(earlier)
                earlier.put_back()
                self._note_draws(earlier)
            if earlier is entry:
                return
            try:
                self._attempt(earlier)
            except (CheckpointError, StateError):
                continue  # the script has seen it

    def _look_who_comes(self) -> None:
        """A worker that is alone waits for nobody, and would not hear of those who come."""
        if self._job.goes_on and self._job.abort.cause is not None:
            with self._job.reporting():
                self._job.abort.raise_if_set()

    def _check_written(self, entry: Entry) -> None:
        if self._job.goes_on and any(before.needs_owners for before in entry.models):
            with self._job.reporting():
                _refuse(
                    f"the script wrote to parameters, buffers or an optimizer's state before "
                    f"{entry.call.name}(), and a worker was lost before that was in a snapshot: "
                    f"what the lost one wrote is lost\n"
                    f"  Fix: write in a callback of train(), or set GS_RECOVERY=wait_rejoin."
                )


class _Recorded:
    """Has the methods of some calls; each goes to the script as a ``ModelCall`` of its name."""

    def __init__(self, engine: Any, calls: Any, run: Callable[[ModelCall], Any]) -> None:
        self._engine = engine
        self._calls = calls
        self._run = run

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._calls, name)
        return lambda *arguments: self._run(ModelCall(name, method, arguments, self._engine))


def _kept_tensors(share: ModelSnapshot) -> str | None:
    found = share.engine.planner.python_values.kept_tensors()
    return pack(found, what=_KEPT) if found else None


def _refuse(message: str) -> None:
    raise ConfigurationError(message)
