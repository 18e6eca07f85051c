"""The snapshots of one worker: taken, brought away, agreed on, and put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphsplit.checkpoint.by_worker import check_alike, states_of
from graphsplit.checkpoint.generators import all_generators, set_all_generators
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.encoding.values import encode
from graphsplit.errors import CheckpointError
from graphsplit.job.job import Job
from graphsplit.recovery.agreement import START, Offer, Target
from graphsplit.recovery.exchange import (
    exchange_parts,
    gather_parts,
    give_lines,
    pieces_of,
    share_script,
)
from graphsplit.recovery.results import Results, pack, unpack
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.disk import (
    KEEP,
    ModelsOnDisk,
    model_folder,
)
from graphsplit.recovery.snapshot.parts import Parts
from graphsplit.recovery.snapshot.replicator import HeldCopies, Replicator
from graphsplit.recovery.snapshot.shard import GENERATORS, SnapshotShard
from graphsplit.recovery.snapshot.share import ModelSnapshot


@dataclass(frozen=True)
class ScriptPoint:
    """Where in the script a snapshot was taken.

    Attributes:
        number: Number of the snapshot.
        ordinal: Number of the call.
        inside: Whether it was inside the call, rather than at its end.
        model: The Model whose call it was.
        num_lines: How many lines of results there were.
        models: The Models that it holds.
    """

    number: int
    ordinal: int
    inside: bool
    model: int
    num_lines: int
    models: tuple[int, ...]

    @property
    def first_needed(self) -> int:
        """The first call that must be run, or gone on with, from there."""
        return self.ordinal if self.inside else self.ordinal + 1


class Snapshots(Parts):
    """Takes snapshots on one worker, and goes back to them.

    Args:
        job: The job.
        settings: How often they go to disk, and where.
        shares: What this worker holds of every Model; grows as Models are built.
        results: What calls have returned.
    """

    writer = ModelsOnDisk

    def __init__(
        self, job: Job, settings: SnapshotSettings, shares: list[ModelSnapshot], results: Results
    ) -> None:
        super().__init__(job, settings)
        self._shares = shares
        self._results = results
        self._places: dict[int, ScriptPoint] = {}
        self._num_sent = 0  # lines of results that have been sent in this generation
        self._on_disk: tuple[int, ...] = ()  # that may be there, or are on their way
        self._target: Target | None = None
        self._part: SnapshotShard | None = None  # of the target, where it is in memory
        self._owners: Mapping[str, Mapping[str, int]] = {}
        self._script_on_disk: Mapping[str, Any] = {}
        self._is_established = False
        self._seats: tuple[int, ...] = ()  # of those among whom parts were taken last
        self._whole: list[SnapshotShard] = []  # the parts of all, since others have come or gone

    def owners_of(self, index: int) -> Mapping[str, int]:
        """The owners that other workers have fixed for a Model; empty if none."""
        return self._owners.get(str(index), {})

    @property
    def first_needed(self) -> int:
        """The first call that may have to be run again; earlier ones can be forgotten."""
        committed = self._replicator.committed if self._replicator is not None else START
        place = self._places.get(committed)
        return 0 if place is None else place.first_needed

    # Taking.

    def take(
        self, ordinal: int, *, inside: bool, model: int, steps: int, is_last: bool = False
    ) -> None:
        """Take a snapshot. All workers take the same ones.

        Args:
            ordinal: Number of the call.
            inside: Whether the call is still running.
            model: The Model that was called.
            steps: Training steps since the snapshot before.
            is_last: The script ends here: it goes to disk, where there is a folder.

        Raises:
            MembershipChangedError, JobFailedError: The generation is over.
            CheckpointError: An earlier one could not be written.
            StateError: At the first within a call: callbacks keep what others could not take.
        """
        self._is_established, self._seats = True, self._job.seats
        replicator = self._replicator or self._begin_replicating(HeldCopies())
        replicator.wait_committed(replicator.offered)  # [Note: at most two]
        self._forget_old(replicator.committed)
        before = self._places.get(self._number)  # all know it, those who came last too
        if inside and self._job.goes_on and (before is None or before.ordinal != ordinal):
            states = states_of(self._shares[model].states.run.callbacks)
            check_alike(self._job.control, states)
        self._number += 1
        models = tuple(share.index for share in self._shares if share.matters)
        num_lines = len(self._results.lines)
        place = ScriptPoint(self._number, ordinal, inside, model, num_lines, models)
        self._places[self._number] = place
        for share in self._shares:
            share.given_at[self._number] = share.given()
        part = self._copy(place)
        goes_to_disk = self._goes_to_disk(replicator, steps, is_due=is_last or not inside)
        if goes_to_disk:
            # Complete ones are kept, and the next one replaces the oldest when it is complete.
            self._on_disk = (*self._on_disk, self._number)[-KEEP - 1 :]
        self._offer(part, self._script(place) if goes_to_disk else None)

    def _offer(self, part: SnapshotShard, script: Mapping[str, Any] | None = None) -> None:
        assert self._replicator is not None
        lines = self._results.lines
        self._replicator.offer(part, pieces_of(lines[self._num_sent :]), script=script)
        self._num_sent = len(lines)

    def _copy(self, place: ScriptPoint) -> SnapshotShard:
        tensors: dict[str, torch.Tensor] = {}
        generators = all_generators()
        nodes = [share.collect(tensors, generators[1]) for share in self._shares if share.matters]
        encoded = encode(generators, tensors, path=GENERATORS)
        values = {"place": records.to_node(place), "models": nodes, GENERATORS: encoded}
        return self._copied(values, tensors)

    def _script(self, place: ScriptPoint) -> dict[str, Any]:
        """The place in the script, as it goes to disk."""
        source = self._shares[place.model].engine.loader_rank
        mine = self._job.rank == source
        return {
            "place": records.to_node(place),
            "source": source,
            GENERATORS: pack(all_generators(), what=GENERATORS) if mine else None,
            "lines": list(self._results.lines) if mine else [],
        }

    def _forget_old(self, committed: int) -> None:
        place = self._places.get(committed)
        if place is None:
            return
        if self._whole and self._whole[0].number < committed:
            self._whole = []
        for number, earlier in list(self._places.items()):
            is_kept = number >= committed or number in self._on_disk
            if earlier.first_needed < place.first_needed or not is_kept:
                del self._places[number]
                for share in self._shares:
                    share.given_at.pop(number, None)
        for share in self._shares:
            if share.index in place.models:
                share.start = None

    def _begin_replicating(self, held: HeldCopies) -> Replicator:
        self._num_sent = 0
        return self._replicate(held)

    # Going back.

    def agree(self, *, can_start: bool) -> tuple[ScriptPoint | None, list[str]]:
        """Find out with all others where to go on. Collective.

        Args:
            can_start: Whether this worker could go back to the beginning of the script.

        Returns:
            The place, or None for the beginning of the script; and what calls returned before it.

        Raises:
            ClusterError: There is no place that all can go back to; the same on all workers.
        """
        old = self._replicator
        if old is not None:
            old.close()
        held = old.held if old is not None else HeldCopies()
        own = dict(old.own) if old is not None else {}
        group = self._job.control
        seats = self._job.seats if self._job.goes_on else None
        target = self._choose(self._make_offer(own, held, can_start), seats)
        self._target, self._part, self._owners = target, None, target.owners
        number = target.number
        if number == START:
            self._results.cut(0)
            self._places.clear()
            self._begin_again(number, HeldCopies(), own, None)
            return None, []
        if target.from_disk:
            self._script_on_disk = share_script(group, self._folder, number)
            place = _read_place(self._script_on_disk.get("place"))
            self._results.replace(_lines_of(self._script_on_disk))
            self._begin_again(number, HeldCopies(), own, place)
            return place, list(self._results.lines)
        if self._job.goes_on:
            return self._agree_whole(target, held, own)
        kept = held.only(number)
        self._part, lines = exchange_parts(group, target, own, kept)
        if lines is not None:
            self._results.replace(lines)
            self._places[number] = _read_place(self._part.values.get("place"))
        else:
            self._results.cut(self._places[number].num_lines)
        place = self._places[number]
        self._begin_again(number, kept, own, place)
        self._offer(self._part)
        return place, list(self._results.lines)

    def _agree_whole(
        self, target: Target, held: HeldCopies, own: Mapping[int, SnapshotShard]
    ) -> tuple[ScriptPoint, list[str]]:
        """Others are there than took the snapshot: let all have all of it, until the next one."""
        number, rank = target.number, self._job.rank
        mine: list[SnapshotShard] = []
        if rank in target.givers:
            has_all = bool(self._whole) and self._whole[0].number == number
            mine = self._whole if has_all else [own[number]]
            if target.givers.count(rank) > 1:
                mine.append(SnapshotShard.read(held.parts[number], what="the part held here"))
        self._whole = gather_parts(self._job.control, target, mine)
        place = _read_place(self._whole[0].values.get("place"))
        if rank not in target.fresh:
            self._results.cut(place.num_lines)
        self._results.replace(give_lines(self._job.control, target, self._results.lines))
        self._used.pop(number, None)  # its memory is part of what is whole
        others = {n: part for n, part in own.items() if n != number}
        self._begin_again(number, HeldCopies(), others, place)
        self._seats = self._job.seats
        return place, list(self._results.lines)

    def _make_offer(
        self, own: Mapping[int, SnapshotShard], held: HeldCopies, can_start: bool
    ) -> Offer:
        owners = {
            str(share.index): dict(share.engine.owners())
            for share in self._shares
            if share.is_settled
        }
        return Offer(
            is_fresh=not self._is_established,
            own=tuple(n for n in own if n in self._places),
            held=tuple(held.parts),
            disk=tuple(self._folder.numbers()) if self._folder is not None else (),
            reaches=tuple(self._places),
            can_start=can_start and all(share.can_start for share in self._shares),
            begins_anew=all(share.can_begin_anew for share in self._shares),
            owners=owners,
            seats=self._seats,
            whole=tuple({part.number for part in self._whole}),
        )

    def _begin_again(
        self,
        number: int,
        held: HeldCopies,
        own: Mapping[int, SnapshotShard],
        place: ScriptPoint | None,
    ) -> None:
        """A new generation begins at a snapshot: forget what came after it."""
        self._is_established = True
        for later in [n for n in self._places if n > number]:
            del self._places[later]
        earlier = [n for n in self._on_disk if n < number]
        self._on_disk = (*earlier, number)[-KEEP - 1 :]
        for part in own.values():
            if part.number != number:
                self._release(part)
        if place is not None:
            self._places[number] = place
        self._begin_replicating(held)

    def restore(self, *, is_rollback: bool) -> None:
        """Put everything back to what was agreed on. Collective if it comes from disk.

        Args:
            is_rollback: Whether this process has been beyond it.

        Raises:
            CheckpointError: A snapshot on disk is damaged; the same on all workers.
        """
        assert self._target is not None
        place = self._places.get(self._target.number)
        # A worker that begins anew knows nothing of owners, nor of what was written.
        begins_anew = place is None and all(share.can_begin_anew for share in self._shares)
        if begins_anew:
            self._job.forget_owners()
        if self._job.goes_on or begins_anew:
            for share in self._shares:
                share.let_go()
        self._put_back_starts(() if place is None else place.models)
        if place is not None:
            self._put_back_all(place, is_rollback=is_rollback)
        for share in self._shares:  # no more was written so far than where one has just started
            writes = share.engine.planner.writes
            writes.forget() if begins_anew else writes.start_over()

    def _put_back_all(self, place: ScriptPoint, *, is_rollback: bool) -> None:
        assert self._target is not None
        self._put_models_back(place)
        resumption = self._shares[place.model].states.resumption if place.inside else None
        if resumption is not None:
            resumption.is_rollback = is_rollback
            resumption.put_back = partial(self._put_models_back, place, is_again=True)
        if self._target.from_disk:
            packed = self._script_on_disk.get(GENERATORS)
            set_all_generators(unpack(packed, what=GENERATORS))
        else:
            part = self._whole[0] if self._job.goes_on else self._part
            assert part is not None
            part.put_generators()
        self.wait_offered()

    def _put_models_back(self, place: ScriptPoint, *, is_again: bool = False) -> None:
        assert self._target is not None
        for share in (self._shares[index] for index in place.models):
            if place.number in share.given_at:
                share.go_on_with(share.given_at[place.number])
            if self._target.from_disk:
                self._load(share, place)
            elif self._job.goes_on:
                share.load_parts(self._whole, inside=self._is_inside(share, place))
            else:
                self._put_back(share, place)
            # One that comes back has it from others, and may have to go back to it once more.
            share.given_at.setdefault(place.number, share.given())
            if is_again:
                share.engine.planner.writes.start_over()

    def _put_back_starts(self, but: Collection[int]) -> None:
        """Models that a snapshot does not hold: as they were before their first step.

        Where Models share modules, the one that began first knows the earliest state.
        """
        others = [s for s in self._shares if s.index not in but and s.start is not None]
        for share in sorted(others, key=lambda share: -share.began):
            share.put_back_start()

    def _put_back(self, share: ModelSnapshot, place: ScriptPoint) -> None:
        assert self._part is not None
        if not share.is_settled and (owners := self.owners_of(share.index)):
            share.adopt(owners)
        share.put_back(self._part, inside=self._is_inside(share, place))

    def _is_inside(self, share: ModelSnapshot, place: ScriptPoint) -> bool:
        return place.inside and share.index == place.model

    def _load(self, share: ModelSnapshot, place: ScriptPoint) -> None:
        assert self._folder is not None
        folder = model_folder(self._folder.path(place.number), share.index)
        share.load(folder, inside=self._is_inside(share, place))


def _read_place(node: Any) -> ScriptPoint:
    """Read what a part, or a file, says of the place in the script.

    Raises:
        CheckpointError: It is none.
    """
    try:
        return records.from_node(ScriptPoint, node, what="the place in the script")
    except MessageError as error:
        raise CheckpointError(f"a snapshot stands nowhere: {error}") from None


def _lines_of(script: Mapping[str, Any]) -> list[str]:
    lines = script.get("lines")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise CheckpointError("a snapshot on disk lacks what calls have returned")
    return lines
