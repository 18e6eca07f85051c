"""The loops of a script's own in a job that recovers, and where they stand.

Nothing of a script's calls is remembered: after a loss all workers start their scripts anew, and
every call before the loop really runs. The place of a snapshot is a way through the loops, from the
outside in: which loop it was, counted from the beginning of the one around it, and which batch::

    for epoch in gs.loop(range(3)):        (loop 0, round 1)
        for batch in gs.loop(loader):      (loop 0, batch 20)

Loops before the place yield nothing; those on the way begin at their round; the last one puts
everything back, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit.checkpoint.generators import all_generators
from graphsplit.checkpoint.position import FROM_THE_START, LoaderWatch
from graphsplit.distribute.workers.loop import Loop
from graphsplit.encoding.values import encode
from graphsplit.errors import CheckpointError, ConfigurationError, StateError, StoppedInOrder
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall, Script
from graphsplit.recovery.loops.anew import Successor
from graphsplit.recovery.loops.body import Body, BroughtBack
from graphsplit.recovery.loops.kept import KeptObjects, optimizers_in
from graphsplit.recovery.loops.networks import LoopNetworks, LoopOptimizers
from graphsplit.recovery.loops.rounds import LoopPlace, LoopRounds, reopened
from graphsplit.recovery.loops.snapshots import LoopSnapshots
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.shard import GENERATORS, SnapshotShard
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass
from graphsplit.train.cluster_engine import ClusterEngine

BOTH = (
    "a job that recovers has a gs.Model, and a network of gs.distribute: they are "
    "brought back in different ways\n"
    "  Fix: use one of the two, or start the job with fail_fast."
)


class LoopScript(Script):
    """Runs the script of one worker whose own loops survive the loss of workers.

    Args:
        job: The job.
        successor: The process that comes after this one, if workers are lost.
        settings: How often snapshots are taken, and where they go.
    """

    def __init__(self, job: Job, successor: Successor, settings: SnapshotSettings) -> None:
        super().__init__()
        self._job, self._every = job, settings.every
        self._loop = Loop.of(job)
        self._snapshots = LoopSnapshots(job, successor, settings)
        self._running: list[LoopRounds] = []
        self._num_outer = 0  # loops that stand in no other one, so far
        self._since = 0  # batches since the last snapshot
        self._has_joined = False
        self._kept: _Everything | None = None
        self._part: SnapshotShard | None = None  # to be put back
        self._places: tuple[LoopPlace, ...] = ()
        self._num_calls = 0  # outside of loops, since the last one ended
        self._around: dict[tuple[str, int], dict[str, Any]] = {}
        self._seen: set[tuple[str, int]] = set()

    # What others ask.

    def add_engine(self, task: Any, engine: Any, states: Any) -> None:
        """A Model was built: refuse it."""
        if isinstance(engine, ClusterEngine):
            raise ConfigurationError(BOTH)

    def around(self, engine: Any, calls: Any, *, changes_nothing: bool = False) -> Any:
        """The calls of a Model, as they are."""
        return calls

    def collective(self, call: ModelCall) -> Any:
        """Run a call that all workers make."""
        with self._job.reporting():
            if not self._running:
                self._num_calls += 1
                if self._has_joined and self._part is not None:
                    raise StateError(_PAST)
                if call.name == "backward":
                    raise ConfigurationError(_OUTSIDE.format("backward()"))
            return call()

    def check_own_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to step what would not be brought back."""
        if self._kept is None or not self._running:
            raise ConfigurationError(_OUTSIDE.format("optimizer.step()"))
        if optimizer not in self._kept.optimizers:
            name = type(optimizer).__name__
            raise ConfigurationError(
                f"the loop steps an optimizer, {name}, that it does not keep; a worker that comes "
                f"back would not have its state\n"
                f"  Fix: gs.loop(..., keep=[..., optimizer]), or its scheduler."
            )

    @property
    def stops_own_loop(self) -> bool:
        """Whether a loop runs: it ends at the head of a batch, with a snapshot."""
        return bool(self._running)

    def leave_generation(self) -> None:
        """Start the script anew, as all do. Never returns."""
        self._snapshots.start_anew()

    def finished(self) -> None:
        """The script is over: it must have come to the loop in which it stood before.

        Raises:
            StateError: It has not.
        """
        if self._part is not None:
            raise StateError(_PAST)
        self._snapshots.finished()

    def close(self) -> None:
        """End all threads."""
        self._snapshots.close()

    # Loops.

    def rounds(
        self, source: Any, keep: Sequence[Any], body: Body, *, numbered: bool
    ) -> Iterator[Any]:
        """Go through a loader, or anything that can be gone through again."""
        with self._job.reporting():
            self._join()
            current = self._begin(source, keep, body)
        if current is None:  # it was done before the snapshot
            self._num_calls = 0
            return
        try:
            while True:
                with self._job.reporting():
                    body.look(self._outside(source))
                    before = self._before() if self._is_due(current) else None
                    if before is not None and self._job.is_stopping:
                        self._take(before, is_last=True)
                if before is not None and self._job.is_stopping:
                    raise StoppedInOrder
                try:
                    item = next(current.iterator)
                except StopIteration:
                    break
                if self._part is not None and not self._places:
                    with self._job.reporting():
                        self._restore(self._part)
                if before is not None:
                    with self._job.reporting():
                        self._take(before)
                current.begin_round()
                self._since += 1
                yield (current.index - 1, item) if numbered else item
        finally:
            self._end(current)

    def _join(self) -> None:
        """At the first loop: find out with all others where to go on."""
        if self._has_joined:
            return
        self._has_joined = True
        if self._snapshots.may_go_on:
            self._part = self._snapshots.agree()
        if self._part is not None:
            self._places = tuple(LoopPlace(*map(int, pair)) for pair in self._part.values["place"])

    def _begin(self, source: Any, keep: Sequence[Any], body: Body) -> LoopRounds | None:
        if getattr(source, "__next__", None) is not None:
            raise ConfigurationError(
                f"{body.where}: gs.loop was given a {type(source).__name__}, which can be gone "
                f"through only once; a worker that comes back goes through it again\n"
                f"  Fix: pass a DataLoader, a list or a range."
            )
        depth = len(self._running)
        number = self._running[-1].num_inner if depth else self._num_outer
        if depth:
            self._running[-1].num_inner += 1
            self._check_inner(keep, body)
        else:
            self._num_outer += 1
            self._kept = _Everything(self._loop, [*keep, *body.loaders()])
        outside = self._outside(source)
        self._check_around(body, outside)
        body.begin(outside)
        if not self._places:
            watch = LoaderWatch()
            current = LoopRounds(number, source, watch, body)
            watch.begin_epoch(source, FROM_THE_START)
            current.iterator = iter(source)
        else:
            found = self._on_the_way(number, depth, source, body)
            if found is None:
                return None
            current = found
        self._running.append(current)
        return current

    def _on_the_way(self, number: int, depth: int, source: Any, body: Body) -> LoopRounds | None:
        """A loop that is begun before the place of the snapshot is reached; None if it is done."""
        assert self._part is not None and self._kept is not None
        place = self._places[depth] if depth < len(self._places) else LoopPlace(-1, 0)
        if number < place.number:
            self._kept.optimizers.note_stepped()
            return None
        if number > place.number:
            raise StateError(
                f"{body.where}: the script goes through other loops than before the restart\n"
                f"  Fix: let it go through the same ones each time it is started."
            )
        part = self._part
        node = part.values["loaders"][depth]
        iterator, watch = reopened(source, part.decoded(node), place.index)
        current = LoopRounds(number, source, watch, body, iterator, place.index)
        if depth + 1 == len(self._places):
            for rounds, its_node in zip(
                (*self._running, current), part.values["loaders"], strict=True
            ):
                rounds.go_on(part.decoded(its_node))
            part.put_generators()
            self._places = ()
        return current

    def _restore(self, part: SnapshotShard) -> None:
        """The batch of the snapshot is here: from here on everything is as it was.

        Not before: what a loader changes when it is asked for that batch has been copied.
        """
        assert self._kept is not None
        with DisableTorchFunctionSubclass():
            self._kept.put_back(part, [rounds.source for rounds in self._running])
        self._part, self._since = None, 0
        self._snapshots.wait_offered()

    def _end(self, current: LoopRounds) -> None:
        if current in self._running:
            del self._running[self._running.index(current) :]
        if not self._running:
            self._num_calls = 0

    def _outside(self, source: Any) -> BroughtBack:
        assert self._kept is not None
        return BroughtBack(self._kept.has, self._kept.is_distributed, source)

    def _check_inner(self, keep: Sequence[Any], body: Body) -> None:
        assert self._kept is not None
        for one in keep:
            if not self._kept.has(one):
                raise ConfigurationError(
                    f"{body.where}: an inner gs.loop keeps a {type(one).__name__} that the "
                    f"outermost one does not\n"
                    f"  Fix: give keep=[...] to the outermost loop."
                )

    def _check_around(self, body: Body, outside: BroughtBack) -> None:
        """Plain loops around it: they are gone through anew after a loss."""
        own = {rounds.body.place for rounds in self._running}
        plain = [one for one in body.text.around if (body.file, one.line) not in own]
        is_again = body.place in self._seen and not self._running
        if self._seen and not self._running and not is_again:
            raise ConfigurationError(
                f"{body.where}: a second gs.loop after another one; a worker that comes back "
                f"leaves the first one out, and runs the lines in between without it\n"
                f"  Fix: for phase in gs.loop(range(2), keep=[...]): around both."
            )
        if not self._running:
            self._seen.add(body.place)
        if is_again and (self._num_calls or not plain):
            what = "calls of the network between its rounds" if plain else "the function it is in"
            raise ConfigurationError(
                f"{body.where}: a plain loop around gs.loop repeats {what}; a worker that comes "
                f"back would do so with other parameters\n"
                f"  Fix: for epoch in gs.loop(range(epochs), keep=[...]): as the loop around it."
            )
        for one in plain:
            key = (body.file, one.line)
            self._around[key] = body.look_around(one, outside, self._around.get(key))

    # Snapshots.

    def _is_due(self, current: LoopRounds) -> bool:
        is_due = self._since >= self._every or self._job.is_stopping
        return not self._places and is_due and current.can_go_on_here

    def _before(self) -> dict[str, Any]:
        """The state before the next batch is fetched."""
        generators = all_generators()
        loaders = [rounds.state(generators[1]) for rounds in self._running]
        return {GENERATORS: generators, "loaders": loaders}

    def _take(self, before: dict[str, Any], *, is_last: bool = False) -> None:
        """Take a snapshot at the head of a batch; the last one is safe when this returns."""
        assert self._kept is not None
        *outer, inner = self._running
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {
            "place": [[r.number, r.index - 1] for r in outer] + [[inner.number, inner.index]],
            GENERATORS: encode(before[GENERATORS], tensors, path=GENERATORS),
            "loaders": [
                encode(one, tensors, path=f"loader{index}")
                for index, one in enumerate(before["loaders"])
            ],
        }
        with torch.no_grad(), DisableTorchFunctionSubclass():
            values |= self._kept.collect(tensors)
            self._snapshots.take(values, tensors, rounds=self._since, is_last=is_last)
        self._since = 0


_OUTSIDE = (
    "{} outside of gs.loop, in a job that recovers (GS_RECOVERY): a loop of the script's own "
    "cannot go on from a snapshot by itself\n"
    "  Fix: for batch in gs.loop(loader, keep=[optimizer, scheduler, ...]): as the loop, or "
    "train with gs.Model, or start the job with fail_fast."
)


_PAST = (
    "the script has not come to the round of gs.loop in which it stood before the restart\n"
    "  Fix: let it go through the same loops each time it is started; let what gs.loop changes "
    "decide nothing outside of it."
)


@dataclass
class _Everything:
    """All that the outermost loop keeps."""

    loop: Loop
    keep: Sequence[Any]
    networks: LoopNetworks = field(init=False)
    objects: KeptObjects = field(init=False)
    optimizers: LoopOptimizers = field(init=False)

    def __post_init__(self) -> None:
        self.networks = LoopNetworks(self.loop)
        self._distributed = self.networks.modules()
        self.objects = KeptObjects(self.keep, self._distributed)
        named = {**self.networks.tensors(), **self.objects.tensors()}
        self.optimizers = LoopOptimizers(optimizers_in(self.keep), self.loop, named)

    def has(self, one: Any) -> bool:
        """Whether an object is kept."""
        return one in self.objects or (
            isinstance(one, torch.optim.Optimizer) and one in self.optimizers
        )

    def is_distributed(self, module: torch.nn.Module) -> bool:
        """Whether a module is part of a distributed network."""
        return id(module) in self._distributed

    def collect(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """All of it, as it is now."""
        return {
            "networks": self.networks.collect(tensors),
            "optimizers": self.optimizers.collect(tensors),
            "kept": self.objects.collect(tensors),
        }

    def put_back(self, part: SnapshotShard, running: Sequence[Any]) -> None:
        """All of it, as it was."""
        try:
            self.networks.put_back(part)
            self.optimizers.put_back(part)
            self.objects.put_back(part, running)
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"a snapshot cannot be put back: {error}") from error
