"""Loops of a script's own through ``gs.loop``, with workers killed at any instruction."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from recovery_features.left_in_python import Holding
from recovery_features.networks import OtherForms
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphsplit as gs
from graphsplit import opaque
from graphsplit.distribute.calls import NetworkCalls
from graphsplit.errors import CheckpointError, GraphsplitError, JobFailedError, StoppedInOrder
from graphsplit.job import joined
from graphsplit.recovery.loops import snapshots
from graphsplit.recovery.loops.disk import read_part
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.disk import SnapshotFolder, text_of

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:network or loss reads"),
]


class Plain:
    """What graphsplit gives, without it."""

    @staticmethod
    def distribute(net: Any) -> Any:
        return net

    @staticmethod
    def loop(source: Any, keep: Any = (), *, numbered: bool = False) -> Iterator[Any]:
        return enumerate(source) if numbered else iter(source)


def network(ranks: list[int]) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip
    for index, rank in zip((0, 1, 3, 5), ranks, strict=False):
        net[index].place("MS_WORKER", rank)
    return net


def loader(seed: int | None = 1) -> Any:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(20, 4, generator=generator), torch.arange(20) % 3)
    own = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data, batch_size=4, shuffle=True, generator=own)


def average(one: torch.Tensor, two: torch.Tensor, count: Any) -> torch.Tensor:
    return 0.9 * one + 0.1 * two


def everything(gs: Any, ranks: list[int]) -> Any:
    """Two epochs: an average, a scheduler, counters, an evaluation, draws of all generators."""
    net = network(ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], 0.5)
    net = gs.distribute(net)
    ema = torch.optim.swa_utils.AveragedModel(net, avg_fn=average)
    counts: dict[str, Any] = {"losses": [], "right": 0}
    data, criterion = loader(), nn.CrossEntropyLoss()
    random.seed(1)
    np.random.seed(2)
    for epoch in gs.loop(range(3), keep=[scheduler, ema, counts]):
        for x, y in gs.loop(data):
            noise = random.random() + float(np.random.rand())
            optimizer.zero_grad()
            out = net(x + 0.1 * torch.rand(x.shape) + 0.01 * noise)
            loss = criterion(out, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(net)
            counts["losses"].append(loss.item())
        net.eval()
        with torch.no_grad():
            counts["right"] += int((net(torch.ones(2, 4) * epoch).argmax(1) == 0).sum().item())
        net.train()
    return results(net, optimizer, counts, ema.module, scheduler)


def results(net: Any, optimizer: Any, counts: Any, *others: Any) -> Any:
    found = [copy.deepcopy(counts), net.state_dict(), optimizer.state_dict()]
    found += [dict(one.state_dict()) for one in others]
    return [*found, torch.get_rng_state(), random.getstate(), float(np.random.rand())]


def plain_epochs(gs: Any, ranks: list[int]) -> Any:
    """The loop around it is Python's own, a scheduler steps there; features; metrics."""
    net = network(ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    net = gs.distribute(net)
    losses: list[float] = []
    right = torchmetrics.Accuracy("multiclass", num_classes=3)
    scores = torchmetrics.AUROC("multiclass", num_classes=3)  # keeps all of them, in lists
    features: dict[str, Any] = {}
    net[3].register_forward_hook(lambda module, given, output: features.update(middle=output))
    data = loader(None)
    random.seed(1)
    np.random.seed(2)
    for _ in range(3):
        for i, (x, y) in gs.loop(data, keep=[scheduler, losses, right, scores], numbered=True):
            out = net(x)
            right.update(out.detach(), y)
            scores.update(out.detach(), y)
            loss = nn.functional.cross_entropy(out, y)
            loss = loss + 0.1 * features["middle"].square().mean()
            (loss / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            features.clear()
        scheduler.step()
    seen = right.compute().item(), right.update_count, scores.compute().item(), scores.update_count
    return results(net, optimizer, [losses, *seen], scheduler)


class Meter:
    """Counts, and says so in its state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Trainer:
    """Two networks, one of which thaws, a target that follows, a scaler, and a method as loop."""

    def __init__(self, gs: Any, ranks: list[int]) -> None:
        self.gs, self.meter, self.losses = gs, Meter(), []
        first, second = network(ranks), nn.Linear(3, 2)
        second.place("MS_WORKER", ranks[1] if ranks else 0)
        first[0].requires_grad_(False)
        self.first, self.second = gs.distribute(first), gs.distribute(second)
        self.target = copy.deepcopy(self.second)
        trained = [p for p in self.first.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)
        self.other = torch.optim.SGD(self.second.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.order = torch.Generator().manual_seed(7)

    def fit(self) -> None:
        keep = [self.optimizer, self.other, self.scaler, self.meter, self.losses, self.order]
        for epoch in self.gs.loop(range(3), keep=keep):
            if epoch == 1:
                self.first[0].requires_grad_(True)
                self.optimizer.add_param_group({"params": self.first[0].parameters(), "lr": 0.02})
            for i, (x, _) in self.gs.loop(loader(None), numbered=True):
                self.step(x + torch.rand(1, generator=self.order), i)
            with torch.no_grad():
                for one, two in zip(
                    self.target.parameters(), self.second.parameters(), strict=True
                ):
                    one.lerp_(two, 0.5)

    def step(self, x: torch.Tensor, number: int) -> None:
        hidden = self.first(x)
        loss = (self.second(hidden) - self.target(hidden.detach())).square().mean()
        loss = loss + hidden.square().mean() * number
        self.scaler.scale(loss).backward()
        if number % 2 == 0:
            for optimizer in (self.optimizer, self.other):
                self.scaler.step(optimizer)
                optimizer.zero_grad()
            self.scaler.update()
        self.meter.count += 1
        self.losses.append(loss.item())


def trainer(gs: Any, ranks: list[int]) -> Any:
    """A loop in a method of a class of the user's."""
    random.seed(1)
    np.random.seed(2)
    one = Trainer(gs, ranks)
    one.fit()
    found = results(one.first, one.optimizer, one.losses, one.second, one.target, one.other)
    return [*found, one.meter.count, one.scaler.get_scale(), one.order.get_state()]


class WarmingUp(nn.Module):
    """A loss that counts, and says so in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return nn.functional.cross_entropy(out, target) / self.count


def other_forms(gs: Any, ranks: list[int]) -> Any:
    """A buffer is registered in forward, another one grows; the loss has an extra state."""
    torch.manual_seed(0)
    net: Any = OtherForms()
    for part, rank in zip((net.first, net.second, net.third), ranks, strict=False):
        part.place("MS_WORKER", rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, losses, data, criterion = gs.distribute(net), [], loader(None), WarmingUp()
    random.seed(1)
    np.random.seed(2)
    for x, y in gs.loop(data, keep=[optimizer, losses, criterion]):
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return results(net, optimizer, losses)


def held_by_code(gs: Any, ranks: list[int]) -> Any:
    """A marked module, and one kept whole unasked, hold state of their own."""
    torch.manual_seed(0)
    marked = opaque(Holding(), outputs=lambda x: torch.empty_like(x))
    net: Any = nn.Sequential(nn.Linear(4, 8), marked, Holding(), nn.Linear(8, 3))
    for part, rank in zip(net, ranks, strict=False):
        part.place("MS_WORKER", rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, losses = gs.distribute(net), []
    random.seed(1)
    np.random.seed(2)
    for x, y in gs.loop(loader(None), keep=[optimizer, losses]):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return results(net, optimizer, losses)


SCRIPTS = {
    "everything": everything,
    "plain_epochs": plain_epochs,
    "trainer": trainer,
    "other_forms": other_forms,
    "held_by_code": held_by_code,
}
_expected: dict[str, Any] = {}


def expected(name: str) -> Any:
    if name not in _expected:
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        _expected[name] = SCRIPTS[name](Plain, [])
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
    return _expected[name]


def run(
    name: str,
    num_workers: int,
    kills: dict[int, list[int]],
    every: int = 3,
    folder: Path | None = None,
    **options: Any,
) -> ThreadCluster:
    want = expected(name)
    ranks = [0, 1, num_workers - 1, 0]
    settings = SnapshotSettings(every, every, folder)
    cluster = ThreadCluster(
        lambda rank: SCRIPTS[name](gs, ranks), num_workers, settings, kills, **options
    )
    for found in cluster.run():
        assert difference(want, found) is None
    return cluster


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_snapshots_change_nothing(name: str, num_workers: int) -> None:
    assert run(name, num_workers, {}).num_anew == 0


_lengths: dict[Any, dict[int, int]] = {}


def length(name: str, num_workers: int, rank: int) -> int:
    """After how many instructions a worker is done, in a run without a loss."""
    if (name, num_workers) not in _lengths:
        _lengths[name, num_workers] = run(name, num_workers, {}).lengths
    return _lengths[name, num_workers][rank]


@pytest.mark.parametrize("part", [0.02, 0.25, 0.45, 0.6, 0.8, 0.97])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SCRIPTS)
def test_all_begin_anew_and_the_bits_are_the_same(name: str, rank: int, part: float) -> None:
    cluster = run(name, 2, {rank: [int(part * length(name, 2, rank))]})
    assert cluster.num_killed == cluster.num_anew == 1


def lost_job(name: str, folder: Path, num_workers: int, part: float) -> None:
    """Run a job that ends when worker 1 is lost, with snapshots on disk."""
    at = int(part * length(name, num_workers, 1))
    settings = SnapshotSettings(every=2, disk_every=2, folder=folder)
    ranks = [0, 1, num_workers - 1, 0]
    lost = ThreadCluster(lambda rank: SCRIPTS[name](gs, ranks), num_workers, settings, {1: [at]})
    lost.comes_back, lost.dies_when = False, lambda: bool(SnapshotFolder(folder).numbers())
    with pytest.raises(JobFailedError):
        lost.run()
    assert SnapshotFolder(folder).numbers()


@pytest.fixture
def parts_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the snapshots that workers have read from disk."""
    found: list[int] = []

    def read(group: Any, folder: Any, number: int) -> Any:
        found.append(number)
        return read_part(group, folder, number)

    monkeypatch.setattr(snapshots, "read_part", read)
    return found


@pytest.mark.parametrize(
    ("name", "num_workers", "part"),
    [
        ("everything", 3, 0.45),
        ("everything", 2, 0.95),
        ("plain_epochs", 2, 0.6),
        ("trainer", 2, 0.7),
    ],
)
def test_a_job_started_again_goes_on_from_disk(
    name: str, num_workers: int, part: float, tmp_path: Path, parts_read: list[int]
) -> None:
    lost_job(name, tmp_path, num_workers, part)
    assert not parts_read
    run(name, num_workers, {}, every=2, folder=tmp_path)
    assert len(parts_read) == num_workers and parts_read[0] > 0
    assert SnapshotFolder(tmp_path).numbers() == [] and list(tmp_path.iterdir()) == []


def test_neighbours_that_are_lost_together_go_on_from_disk(
    tmp_path: Path, parts_read: list[int]
) -> None:
    at = int(0.6 * length("everything", 2, 1))
    lost = run(
        "everything", 2, {1: [at]}, every=2, folder=tmp_path, together=(0, 1),
        dies_when=lambda: bool(SnapshotFolder(tmp_path).numbers()),
    )  # fmt: skip
    assert lost.num_killed == 2 and len(parts_read) == 2


def part_of_worker_1(folder: Path) -> Path:
    return SnapshotFolder(folder).path(SnapshotFolder(folder).numbers()[-1]) / "part-1"


def spoil(folder: Path) -> None:
    path = part_of_worker_1(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(folder: Path) -> None:
    path = part_of_worker_1(folder)
    path.write_bytes(path.read_bytes()[:-1])


def lose(folder: Path) -> None:
    part_of_worker_1(folder).unlink()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (spoil, r"part-1 is damaged: its checksum differs\n  Fix: remove its folder"),
        (cut, r"part-1 is damaged"),
        (lose, r"part-1 cannot be read: No such file"),
    ],
)
def test_what_on_disk_does_not_fit_is_refused(
    change: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    lost_job("plain_epochs", tmp_path, 2, 0.6)
    change(tmp_path)
    with pytest.raises(GraphsplitError, match=text):
        run("plain_epochs", 2, {}, folder=tmp_path)
    assert SnapshotFolder(tmp_path).numbers()  # nothing is thrown away


def test_a_snapshot_of_a_model_is_none_of_an_own_loop(tmp_path: Path) -> None:
    folder = tmp_path / "00000004"
    folder.mkdir()
    (folder / "snapshot.json").write_text(text_of(4, {"place": {}}))
    with pytest.raises(CheckpointError, match=r"that of a gs\.Model.*\n  Fix: give each script"):
        run("plain_epochs", 2, {}, folder=tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """In which call of their networks all workers hear that they are to end."""
    forward, asked = NetworkCalls.forward, {"in call": 8}

    def watched(calls: Any, arguments: Any) -> Any:
        job: Any = joined.current()
        job.num_forward = getattr(job, "num_forward", 0) + 1
        job.member.state.stops_soon |= job.num_forward == asked["in call"]
        return forward(calls, arguments)

    monkeypatch.setattr(NetworkCalls, "forward", watched)
    return asked


def stopped(script: Callable[[], Any]) -> str:
    with pytest.raises(StoppedInOrder):
        script()
    return "stopped"


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_job_that_is_asked_to_end_stops_at_a_batch_and_goes_on_another_time(
    num_workers: int, tmp_path: Path, asked: dict[str, int]
) -> None:
    ranks, settings = [0, 1, num_workers - 1, 0], SnapshotSettings(100, 100, tmp_path)
    cluster = ThreadCluster(
        lambda rank: stopped(lambda: everything(gs, ranks)), num_workers, settings
    )
    assert cluster.run() == ["stopped"] * num_workers
    assert SnapshotFolder(tmp_path).numbers() == [1]
    asked["in call"] = 0
    run("everything", num_workers, {}, folder=tmp_path)


def test_an_own_loop_without_snapshots_ends_at_the_next_call(asked: dict[str, int]) -> None:
    def count(rank: int) -> int:
        net, num_calls = gs.distribute(network([0, 1, 1, 0])), 0
        with pytest.raises(StoppedInOrder):
            for _ in range(30):
                net(torch.ones(3, 4)).sum().backward()
                num_calls += 1
        return num_calls

    assert ThreadCluster(count, 3, is_recoverable=False).run() == [8, 8, 8]
