"""Each example, on threads as workers, ends in the bits of the loop that anybody would write."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphsplit as gs
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
EXAMPLES = Path(__file__).parents[2] / "examples"
Plain = Callable[[ModuleType], Any]


@pytest.fixture
def example(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    path = EXAMPLES / f"{request.param}.py"
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delenv("DATA_PATH", raising=False)
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("data", None)


def step(optimizer: torch.optim.Optimizer, *losses: torch.Tensor) -> list[torch.Tensor]:
    optimizer.zero_grad()
    for loss in losses:
        loss.backward()
    optimizer.step()
    return [loss.detach() for loss in losses]


def ddp_toy(example: ModuleType) -> Any:
    net, losses = example.ToyModel(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for _ in range(5):
        x, y = torch.randn(20, 10), torch.randn(20, 5)
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        of_parts = [mse_loss(net(rows), target) * 0.25 for rows, target in parts]
        losses.append(sum(step(optimizer, *of_parts), torch.tensor(0.0)))
    return losses, net.state_dict()


def two_stage_pipeline(example: ModuleType) -> Any:
    net, losses = example.network(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        x, y = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        losses.append(sum(step_parts(optimizer, net, parts), torch.tensor(0.0)))
    return losses, net.state_dict()


def step_parts(optimizer: torch.optim.Optimizer, net: nn.Module, parts: Any) -> list[torch.Tensor]:
    optimizer.zero_grad()
    losses = []
    for x, y in parts:
        losses.append(cross_entropy(net(x), y) * 0.25)
        losses[-1].backward()
    optimizer.step()
    return [loss.detach() for loss in losses]


def clip_towers(example: ModuleType) -> Any:
    net, losses = example.Clip(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(5):
        images, texts = torch.randn(8, 3, 16, 16), torch.randint(50, (8, 8))
        losses += step(optimizer, net(images, texts))
    return losses, net.state_dict()


def gan(example: ModuleType) -> Any:
    maker, judge = example.networks()
    judging, making = (
        torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in (judge, maker)
    )
    ones, losses = torch.ones(16, 1), []
    for _ in range(5):
        real, noise = torch.randn(16, 2) + 3, torch.randn(16, 8)
        made = maker(noise).detach()
        right = binary_cross_entropy_with_logits(judge(real), ones)
        losses += step(judging, right + binary_cross_entropy_with_logits(judge(made), 0 * ones))
        losses += step(making, binary_cross_entropy_with_logits(judge(maker(noise)), ones))
    state = {f"generator.{name}": value for name, value in maker.state_dict().items()}
    state |= {f"discriminator.{name}": value for name, value in judge.state_dict().items()}
    return losses, OrderedDict(state)


def encoder_decoder(example: ModuleType) -> Any:
    net, losses = example.Translate(), []
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(5):
        source, target, following = example.sentences()
        losses += step(optimizer, example.loss_of(net(source, target), following))
    return losses, net.state_dict()


def linear(example: ModuleType) -> Any:
    net = nn.Sequential(nn.Flatten(), nn.Linear(32 * 32, 10))
    train_set, test_set = example.make_datasets(None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in example.batches(train_set, batch_size=64, shuffle=True):
            step(optimizer, cross_entropy(net(x), y))
    with torch.no_grad():
        right = [
            (net(x).argmax(1) == y).sum().item()
            for x, y in example.batches(test_set, batch_size=64)
        ]
    return sum(right) / len(test_set), net.state_dict()


def loop_that_survives(example: ModuleType) -> Any:
    net, counts = example.Classifier(), {"losses": [], "right": []}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 45)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader = example.batches()
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(net)
            counts["losses"].append(loss.item())
        ema.eval()
        with torch.no_grad():
            right = sum((ema(x).argmax(1) == y).sum().item() for x, y in loader)
        counts["right"].append(right / 240)
    return counts, net.state_dict(), ema.module.state_dict()


LOOPS: dict[str, tuple[Plain, Any]] = {
    "loop_that_survives": (loop_that_survives, 2),
    "ddp_toy": (ddp_toy, 5),
    "two_stage_pipeline": (two_stage_pipeline, 5),
    "clip_towers": (clip_towers, 5),
    "gan": (gan, 5),
    "encoder_decoder": (encoder_decoder, 5),
    "lenet_mnist/linear": (linear, 2),
}


@pytest.mark.parametrize(
    ("example", "plain", "length"), [(name, *loop) for name, loop in LOOPS.items()],
    indirect=["example"], ids=list(LOOPS),
)  # fmt: skip
def test_an_example_ends_in_the_bits_of_the_plain_loop(
    example: ModuleType, plain: Plain, length: int
) -> None:
    torch.manual_seed(0)
    expected = plain(example)
    for number in (3, 5) if example.__name__ == "example_clip_towers" else (2, 3, 5):
        for found in on_workers(lambda: example.train(length), number):
            assert difference(expected, found) is None


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("example", ["ddp_toy"], indirect=True)
def test_the_toy_has_the_bits_of_the_loop_on_any_number_of_replicas(
    example: ModuleType, workers: int
) -> None:
    torch.manual_seed(0)
    expected = ddp_toy(example)
    train = functools.partial(example.train, workers=workers)
    for found in ThreadCluster(lambda rank: train(), workers, is_recoverable=False).run():
        assert difference(expected, found) is None


@pytest.mark.parametrize("example", ["loop_that_survives"], indirect=True)
def test_the_loop_that_survives_ends_in_the_same_bits_after_a_loss(example: ModuleType) -> None:
    torch.manual_seed(0)
    expected = loop_that_survives(example)
    kills: dict[int, list[int]] = {}
    for number in range(2):
        cluster = ThreadCluster(lambda rank: example.train(2), 2, SnapshotSettings(every=10), kills)
        for found in cluster.run():
            assert difference(expected, found) is None
        assert cluster.num_killed == cluster.num_anew == number
        kills = {1: [int(0.7 * cluster.lengths[1])]}


def on_workers(train: Callable[[], Any], number: int = 3) -> list[Any]:
    return ThreadCluster(lambda rank: train(), number, is_recoverable=False).run()


@pytest.mark.parametrize("example", ["gpt_like"], indirect=True)
def test_the_gpt_accumulates_and_goes_on_where_it_was(example: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, losses = example.Gpt(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for first in range(0, 20, 4):
        optimizer.zero_grad()
        for number in range(first, first + 4):
            tokens, following = example.batch(number)
            loss = example.loss_of(net(tokens), following)
            (loss * 0.25).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if first == 8:
            half = copy.deepcopy(losses), copy.deepcopy(net.state_dict())
    for found in on_workers(lambda: example.train(tmp_path, steps=3)):
        assert difference(half, found) is None
    for found in on_workers(lambda: example.train(tmp_path, steps=2, resume=True)):
        assert difference((losses[12:], net.state_dict()), found) is None


def data_parallel(net: nn.Module, loss_fn: Any, data: Any) -> Any:
    """The loop that adds 4 parts of each batch in pairs, and two batches before each step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    losses, parameters = [], list(net.parameters())
    for number, (x, y) in enumerate(2 * data):
        if number % 2 == 0:
            before: list[Any] = [None] * len(parameters)
        total, parts = 0, []
        for m, (xm, ym) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            torch.set_rng_state(gs.microbatch_rng_state(0, number, m))
            optimizer.zero_grad()
            loss = loss_fn(net(xm), ym)
            (loss * 0.25 / 2).backward()
            parts.append([p.grad for p in parameters])
            total = total + loss.detach() * 0.25
        for index, (p, (a, b, c, d)) in enumerate(
            zip(parameters, zip(*parts, strict=True), strict=True)
        ):
            gradient = (a + b) + (c + d)
            p.grad = gradient if before[index] is None else before[index] + gradient
        before = [p.grad for p in parameters]
        losses.append(total)
        if number % 2:
            optimizer.step()
            warm_up.step()
    net.eval()
    with torch.no_grad():
        seen = [(float(loss_fn(net(x), y)) * len(y), len(y)) for x, y in data]
    mean = sum(loss for loss, _ in seen) / sum(rows for _, rows in seen)
    return losses, {"Loss": mean}, net.state_dict()


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("example", ["replicas"], indirect=True)
def test_data_parallelism_has_the_bits_of_the_loop_whatever_the_workers(
    example: ModuleType, workers: int
) -> None:
    torch.manual_seed(1)
    seen, read = example.pictures(4), example.tokens(4)
    expected = []
    for make, loss_fn, data in (
        (example.ResNet, cross_entropy, seen),
        (example.Gpt, example.loss_of, read),
    ):
        torch.manual_seed(0)
        expected.append(data_parallel(make(), loss_fn, data))
    cluster = ThreadCluster(lambda _: example.train_both(workers), workers, is_recoverable=False)
    for found in cluster.run():
        assert difference(tuple(expected), found) is None


def test_every_example_is_tried() -> None:
    files = {str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.py")}
    of_lenet = {f"lenet_mnist/{name}" for name in ("data", "lenet", "train")}
    of_trainers = {
        f"trainers/{name}" for name in ("accelerate_loop", "lightning_module", "run_clm")
    }
    assert files - of_lenet - of_trainers == {*LOOPS, "gpt_like", "replicas"}
