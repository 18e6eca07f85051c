"""Several workers save and load together, on one disk or on several, and fail together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_helpers import (
    SmallDisk,
    ThreadHolder,
    all_well,
    alone,
    groups_of,
    task_of,
    together,
)
from simulated.compare import difference
from torch import nn

from graphsplit.checkpoint.disk import files
from graphsplit.checkpoint.states import States
from graphsplit.deferred.construction import deferred_init, is_deferred, materialize
from graphsplit.errors import CheckpointError, StateError
from graphsplit.job.control import ControlChannels
from graphsplit.job.group import WorkerGroup
from graphsplit.planning.task import named_state

MIB = 1024 * 1024


class Net(nn.Module):
    """A tied weight, a buffer, and a dtype that the file format does not know."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, width), nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("scratch", torch.randn(2), persistent=False)


Pair = tuple[nn.Module, torch.optim.Optimizer]


def pair(seed: int, width: int = 6) -> Pair:
    torch.manual_seed(seed)
    network = Net(width)
    return network, torch.optim.Adam(network.parameters(), lr=0.01 * (seed + 1), amsgrad=True)


def trained(seed: int = 0) -> Pair:
    network, optimizer = pair(seed)
    for _ in range(2):
        for parameter in network.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    return network, optimizer


def owners_of(network: nn.Module, num_workers: int, stride: int = 1) -> dict[str, int]:
    """Some owner for every name; tied names have one."""
    found: dict[int, int] = {}
    return {
        name: found.setdefault(id(tensor), len(found) * stride % num_workers)
        for name, tensor in named_state(network, None).items()
    }


def save(
    saved: Pair, groups: list[ControlChannels], folder: Callable[[int], Path], **options: Any
) -> list[Any]:
    owners = owners_of(saved[0], len(groups))

    def run(group: WorkerGroup) -> None:
        states = States(task_of(*saved), ThreadHolder(group, owners, loader_rank=1))
        states.save(folder(group.rank), extra={}, **options)

    return together(groups, run)


def load(
    pairs: list[Pair],
    groups: list[ControlChannels],
    folder: Callable[[int], Path],
    owners: Mapping[str, int],
) -> list[Any]:
    def run(group: WorkerGroup) -> None:
        holder = ThreadHolder(group, owners)
        States(task_of(*pairs[group.rank]), holder).load(folder(group.rank), extra={})

    return together(groups, run)


def assert_owned_parts_are(saved: Pair, pairs: list[Pair], owners: Mapping[str, int]) -> None:
    for name, tensor in named_state(saved[0], None).items():
        network, optimizer = pairs[owners[name]]
        mine = named_state(network, None)[name]
        assert difference(tensor.detach(), mine.detach()) is None, name
        entry = dict(saved[1].state.get(tensor) or {})
        assert difference(entry, dict(optimizer.state.get(mine) or {})) is None, name
        others = {rank for rank in range(len(pairs)) if rank != owners[name]}
        for rank in others:
            theirs = named_state(pairs[rank][0], None)[name]
            assert theirs not in pairs[rank][1].state, f"worker {rank} keeps state of {name}"
    for _, optimizer in pairs:
        assert optimizer.param_groups[0]["lr"] == saved[1].param_groups[0]["lr"]


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_saved_on_three_workers_and_loaded_on_any_number(
    tmp_path: Path, gather: bool, num_workers: int
) -> None:
    saved = trained()
    all_well(save(saved, groups_of(3), lambda rank: tmp_path, gather=gather))
    num_files = 2 if gather else 6
    assert len(os.listdir(tmp_path)) == num_files + 1
    pairs = [pair(5) for _ in range(num_workers)]
    owners = owners_of(saved[0], num_workers, stride=2)
    all_well(load(pairs, groups_of(num_workers), lambda rank: tmp_path, owners))
    assert_owned_parts_are(saved, pairs, owners)


def test_saved_on_workers_and_loaded_in_one_process_and_in_plain_pytorch(tmp_path: Path) -> None:
    saved = trained()
    all_well(save(saved, groups_of(4), lambda rank: tmp_path, gather=False))
    mine, plain = pair(5), Net()
    alone(task_of(*mine)).load(tmp_path, extra={})
    assert difference(dict(saved[0].state_dict()), dict(mine[0].state_dict())) is None
    assert difference(saved[1].state_dict(), mine[1].state_dict()) is None
    found: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("weights-*.safetensors"):
        found.update(safetensors.torch.load_file(path))
    missing, unexpected = plain.load_state_dict(found | {"phase": saved[0].phase}, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert difference(dict(saved[0].state_dict()), dict(plain.state_dict())) is None


def test_a_save_of_other_worker_numbers_is_replaced_whole(tmp_path: Path) -> None:
    for num_workers, gather in ((5, False), (2, False), (3, True)):
        saved, mine = trained(num_workers), pair(9)
        all_well(save(saved, groups_of(num_workers), lambda rank: tmp_path, gather=gather))
        alone(task_of(*mine)).load(tmp_path, extra={})
        assert difference(saved[1].state_dict(), mine[1].state_dict()) is None
        assert len(os.listdir(tmp_path)) == (1 if gather else num_workers) * 2 + 1


def test_what_one_worker_has_on_its_disk_is_streamed_to_the_others(tmp_path: Path) -> None:
    saved = trained()
    all_well(save(saved, groups_of(3), lambda rank: tmp_path / "disk0", gather=True))
    for seer in (0, 2):
        os.rename(tmp_path / "disk0", tmp_path / f"save{seer}")
        pairs = [pair(5) for _ in range(3)]
        owners = owners_of(saved[0], 3)
        all_well(
            load(
                pairs,
                groups_of(3),
                lambda rank, seer=seer: tmp_path / (f"save{seer}" if rank == seer else "none"),
                owners,
            )
        )
        assert_owned_parts_are(saved, pairs, owners)
        os.rename(tmp_path / f"save{seer}", tmp_path / "disk0")


def test_each_on_its_own_disk_saves_and_loads_its_shards(tmp_path: Path) -> None:
    saved = trained()
    own_disk = lambda rank: tmp_path / f"disk{rank}"  # noqa: E731
    all_well(save(saved, groups_of(3), own_disk, gather=False))
    assert [len(os.listdir(own_disk(rank))) for rank in range(3)] == [3, 2, 2]
    pairs, owners = [pair(5) for _ in range(3)], owners_of(saved[0], 3, stride=2)
    all_well(load(pairs, groups_of(3), own_disk, owners))
    assert_owned_parts_are(saved, pairs, owners)


def test_shards_that_nobody_sees_are_named_with_the_way_out(tmp_path: Path) -> None:
    saved = trained()
    all_well(save(saved, groups_of(3), lambda rank: tmp_path / f"disk{rank}", gather=False))
    with pytest.raises(
        CheckpointError, match=r"(?s)weights-00001-of-00003.*seen by no worker.*gather=True"
    ):
        alone(task_of(*pair(5))).load(tmp_path / "disk0", extra={})


def test_workers_that_share_a_disk_by_twos(tmp_path: Path) -> None:
    saved = trained()
    disk = lambda rank: tmp_path / f"disk{rank // 2}"  # noqa: E731
    all_well(save(saved, groups_of(4), disk, gather=False))
    pairs, owners = [pair(5) for _ in range(4)], owners_of(saved[0], 4, stride=3)
    all_well(load(pairs, groups_of(4), disk, owners))
    assert_owned_parts_are(saved, pairs, owners)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("room", [0, 3000, 12000])
def test_a_full_disk_is_one_error_on_all_workers_and_they_stay_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gather: bool, room: int
) -> None:
    old, new, groups = trained(1), trained(2), groups_of(3)
    all_well(save(old, groups, lambda rank: tmp_path, gather=gather))
    monkeypatch.setattr(files, "open_instead", SmallDisk(room).open)
    results = save(new, groups, lambda rank: tmp_path, gather=gather)
    monkeypatch.undo()
    assert all(isinstance(result, CheckpointError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert "No space left on device" in str(results[0])
    assert "worker" in str(results[0])
    mine = pair(9)
    alone(task_of(*mine)).load(tmp_path, extra={})
    assert difference(old[1].state_dict(), mine[1].state_dict()) is None
    all_well(save(new, groups, lambda rank: tmp_path, gather=gather))  # the job goes on
    alone(task_of(*mine)).load(tmp_path, extra={})
    assert difference(new[1].state_dict(), mine[1].state_dict()) is None


def test_a_state_that_one_worker_cannot_write_is_one_error_on_all(tmp_path: Path) -> None:
    saved, groups = trained(), groups_of(3)
    saved[1].state[saved[0].middle.weight]["note"] = object()
    results = save(saved, groups, lambda rank: tmp_path, gather=False)
    assert len({str(result) for result in results}) == 1
    assert "note is a builtins.object and cannot be saved" in str(results[0])
    assert os.listdir(tmp_path) == []


def test_what_does_not_fit_is_the_same_error_on_all(tmp_path: Path) -> None:
    saved = trained()
    all_well(save(saved, groups_of(2), lambda rank: tmp_path, gather=False))
    pairs = [pair(5, width=7) for _ in range(3)]
    results = load(pairs, groups_of(3), lambda rank: tmp_path, owners_of(pairs[0][0], 3))
    assert all(isinstance(result, StateError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert "embed.weight is float32[9, 6]; expected float32[9, 7]" in str(results[0])


def test_damage_that_one_worker_sees_is_one_error_on_all(tmp_path: Path) -> None:
    saved = trained()
    all_well(save(saved, groups_of(3), lambda rank: tmp_path, gather=False))
    path = tmp_path / "training-00002-of-00003.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    pairs = [pair(5) for _ in range(2)]
    results = load(pairs, groups_of(2), lambda rank: tmp_path, owners_of(saved[0], 2))
    assert all(isinstance(result, CheckpointError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert "is damaged" in str(results[0])


def settle(states: list[States], holders: list[ThreadHolder], owners: Mapping[str, int]) -> None:
    """What a first plan does: owners are fixed, and what waited for them happens."""
    for holder in holders:
        holder.fixed = dict(owners)
        waiting, holder.waiting = holder.waiting, {}
        for action in waiting.values():
            action()


def test_a_deferred_network_loads_what_it_owns_once_owners_are_known(tmp_path: Path) -> None:
    saved = trained()
    all_well(save(saved, groups_of(2), lambda rank: tmp_path, gather=False))
    groups, pairs = groups_of(2), []
    for _ in range(2):
        torch.manual_seed(5)
        with deferred_init():
            network = Net()
        pairs.append((network, torch.optim.Adam(network.parameters(), lr=0.5, amsgrad=True)))
    holders = [ThreadHolder(group, {}) for group in groups]
    states = [States(task_of(*pairs[r]), holders[r]) for r in range(2)]
    all_well(together(groups, lambda group: states[group.rank].load(tmp_path, extra={})))
    assert all(is_deferred(network) for network, _ in pairs), "loading has taken memory"
    assert all(o.param_groups[0]["lr"] == 0.01 for _, o in pairs), "settings come at once"
    owners = owners_of(saved[0], 2)
    for rank, (network, _) in enumerate(pairs):
        materialize(network, [name for name, owner in owners.items() if owner == rank])
    settle(states, holders, owners)
    assert_owned_parts_are(saved, pairs, owners)


def test_before_owners_are_known_every_worker_loads_the_whole_network(tmp_path: Path) -> None:
    saved = trained()
    all_well(save(saved, groups_of(3), lambda rank: tmp_path, gather=False))
    groups, pairs = groups_of(2), [pair(5), pair(6)]
    holders = [ThreadHolder(group, {}) for group in groups]
    states = [States(task_of(*pairs[r]), holders[r]) for r in range(2)]
    all_well(together(groups, lambda group: states[group.rank].load(tmp_path, extra={})))
    for network, optimizer in pairs:
        assert difference(dict(saved[0].state_dict()), dict(network.state_dict())) is None
        assert not optimizer.state, "optimizer state waits, so that none is held twice"
    owners = owners_of(saved[0], 2)
    settle(states, holders, owners)
    assert_owned_parts_are(saved, pairs, owners)


class Counting(ControlChannels):
    """Counts the bytes that were received and not yet let go."""

    held = 0
    peak = 0

    def receive(
        self, size_bytes: int, *, source: int, is_exact: bool = True
    ) -> Iterator[torch.Tensor]:
        for piece in super().receive(size_bytes, source=source, is_exact=is_exact):
            self.held += piece.numel()
            self.peak = max(self.peak, self.held)
            yield piece
            self.held -= piece.numel()


def test_the_writer_never_holds_more_than_a_piece_of_what_others_own(tmp_path: Path) -> None:
    network = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(4)])  # 4 MiB each
    groups = groups_of(3)
    writer = Counting(groups[0]._transport, 0, 3)
    writer.abort = groups[0].abort
    groups[0] = writer
    owners = {f"{i}.weight": i % 3 for i in range(4)}

    def run(group: WorkerGroup) -> None:
        states = States(task_of(network), ThreadHolder(group, owners))
        states.save_weights(tmp_path / "w.safetensors")

    all_well(together(groups, run))
    assert writer.peak <= MIB
    found = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert (
        difference(dict(network.state_dict()), {k: found[k] for k in network.state_dict()}) is None
    )


def test_one_file_streamed_by_all_is_loaded_by_all(tmp_path: Path) -> None:
    saved, groups = trained(), groups_of(3)
    owners = owners_of(saved[0], 3)
    both = (tmp_path / "w.safetensors", tmp_path / "o.safetensors")

    def write(group: WorkerGroup) -> None:
        states = States(task_of(*saved), ThreadHolder(group, owners))
        states.save_weights(both[0])
        states.save_optimizers(both[1])

    all_well(together(groups, write))
    pairs, again = [pair(5) for _ in range(2)], owners_of(saved[0], 2)

    def read(group: WorkerGroup) -> None:
        states = States(task_of(*pairs[group.rank]), ThreadHolder(group, again))
        states.load_weights(both[0] if group.rank == 1 else tmp_path / "none" / both[0].name)
        states.load_optimizers(both[1])

    all_well(together(groups_of(2), read))
    for name in again:
        if name != "scratch":  # no part of a state dictionary
            assert difference(
                named_state(saved[0], None)[name].detach(),
                named_state(pairs[again[name]][0], None)[name].detach(),
            ) is None  # fmt: skip
    plain = safetensors.torch.load_file(both[0])
    assert torch.equal(plain["middle.weight"], saved[0].middle.weight)
    assert "head.weight" not in plain
