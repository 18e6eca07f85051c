"""``forward_backward``, ``zero_grad``, ``step``: a training step that the script puts together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError, JobFailedError, LoaderMismatchError
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]
NUM_WORKERS = 3
MAX_NORM = 0.05
SCALES = (0.25, 1.0, -0.5)  # of the batches of one step


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 3))


def batches() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in SCALES]
        for _ in range(3)
    ]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


def plain(*, microbatches: int = 1, extras: bool = False) -> Any:
    """The loop that anybody would write; nothing of a ``Model``."""
    net = network()
    optimizer, loss_fn = optimizer_of(net), nn.CrossEntropyLoss()
    scaling = scaler() if extras else None
    seed, losses, num = torch.initial_seed(), [], 0
    for step in batches():
        optimizer.zero_grad()
        for (inputs, target), scale in zip(step, SCALES, strict=True):
            before, parts = torch.get_rng_state(), []
            pieces = zip(inputs.chunk(microbatches), target.chunk(microbatches), strict=True)
            for index, (x, y) in enumerate(pieces):
                if microbatches > 1:
                    torch.set_rng_state(gs.microbatch_rng_state(seed, num, index))
                loss = loss_fn(net(x), y)
                parts.append(loss if microbatches == 1 else loss * (1 / microbatches))
                scaled = parts[-1] * scale
                (scaled if scaling is None else scaling.scale(scaled)).backward()
            if microbatches > 1:
                torch.set_rng_state(before)
            losses.append(sum(part.detach() for part in parts))
            num += 1
        if scaling is None:
            optimizer.step()
        else:
            scaling.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
            scaling.step(optimizer)
            scaling.update()
    return losses, net.state_dict(), torch.get_rng_state()


def made(*, place: bool = True, extras: bool = False, **options: Any) -> gs.Model:
    net = network()
    if place:
        for index, rank in ((0, 0), (2, 1), (3, 2)):
            net[index].place("MS_WORKER", rank)
    if extras:
        options |= {"clip": gs.clip.GlobalNorm(MAX_NORM), "scaler": scaler()}
    return gs.Model(net, nn.CrossEntropyLoss(), optimizer_of(net), **options)


def parts(**options: Any) -> Any:
    model, losses = made(**options), []
    for step in batches():
        model.zero_grad()
        for batch, scale in zip(step, SCALES, strict=True):
            losses.append(model.forward_backward(*batch, scale=scale))
        model.step()
    return losses, model.state_dict(), torch.get_rng_state()


CASES: list[dict[str, Any]] = [
    {},
    {"extras": True},
    {"microbatches": 3},
    {"microbatches": 2, "schedule": "zero_bubble", "extras": True},
    *(
        {"microbatches": 3, "schedule": one}
        for one in ("gpipe", "1f1b", "interleaved_1f1b", "auto")
    ),
]


@pytest.mark.parametrize("options", CASES)
def test_parts_of_a_step_give_the_bits_of_the_plain_loop(options: dict[str, Any]) -> None:
    with_extras = {k: v for k, v in options.items() if k != "schedule"}
    expected = plain(**with_extras)
    assert difference(expected, parts(place=False, **options)) is None
    for found in ThreadCluster(lambda _: parts(**options), NUM_WORKERS).run():
        assert difference(expected, found) is None


def test_gradients_that_are_added_in_pairs_are_those_of_one_process() -> None:
    """Its own bits are compared with a plain loop in ``equivalence/test_gradient_order.py``."""
    options: dict[str, Any] = {"microbatches": 6, "gradient_order": "pairs", "extras": True}
    expected = parts(place=False, **options)
    assert difference(expected, parts(place=False, **{**options, "gradient_order": "left"}))
    for found in ThreadCluster(lambda _: parts(**options), NUM_WORKERS).run():
        assert difference(expected, found) is None


@pytest.mark.parametrize("extras", [False, True])
def test_the_three_parts_are_a_training_step(extras: bool) -> None:
    def script(train: Callable[[gs.Model, Any], torch.Tensor]) -> Any:
        model = made(extras=extras)
        losses = [train(model, batch) for step in batches() for batch in step]
        return losses, model.state_dict(), model.optimizer_state_dict(), model.position

    def by_parts(model: gs.Model, batch: Any) -> torch.Tensor:
        model.zero_grad()
        loss = model.forward_backward(*batch)
        model.step()
        return loss

    def both(_: int) -> Any:
        return script(lambda model, batch: model.train_step(*batch)), script(by_parts)

    for whole, found in ThreadCluster(both, NUM_WORKERS).run():
        assert difference(whole, found) is None


def test_gradients_that_wait_for_a_step_are_saved(tmp_path: Any) -> None:
    first, *_ = batches()

    def script(_: int) -> Any:
        model, again = made(), made()
        again.zero_grad()
        again.forward_backward(*first[0], scale=3.0)  # what is loaded takes the place of this
        model.forward_backward(*first[0])
        model.save(tmp_path / "half")
        again.load(tmp_path / "half")
        for one in (model, again):
            torch.manual_seed(7)  # dropout draws the same
            one.forward_backward(*first[1])
            one.step()
        return model.state_dict(), again.state_dict()

    for one, other in ThreadCluster(script, NUM_WORKERS).run():
        assert difference(one, other) is None


@pytest.mark.parametrize("kills", [{0: [25]}, {1: [40]}, {2: [70, 30]}])
def test_a_worker_that_is_lost_between_the_parts_changes_nothing(kills: Any) -> None:
    options: dict[str, Any] = {"microbatches": 2, "extras": True}
    num_kills = sum(map(len, kills.values()))
    cluster = ThreadCluster(
        lambda _: parts(**options), NUM_WORKERS, SnapshotSettings(every=2), kills
    )
    expected = plain(**options)
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == num_kills


def test_gradients_stay_after_a_step() -> None:
    (batch, *_), *_ = batches()

    def script(_: int) -> Any:
        model = made(extras=True)
        model.forward_backward(*batch)
        model.step()
        model.step()
        return model.state_dict(), model.last_gradient_norm

    net = network()
    optimizer, scaling = optimizer_of(net), scaler()
    scaling.scale(nn.functional.cross_entropy(net(batch[0]), batch[1])).backward()
    for _ in range(2):
        scaling.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        scaling.step(optimizer)
        scaling.update()
    for found in (script(0), *ThreadCluster(script, NUM_WORKERS).run()):
        assert difference((net.state_dict(), norm), found) is None


def test_what_is_no_scale_or_does_not_go_together_is_refused() -> None:
    batch = batches()[0][0]
    model = made()
    for scale in (float("nan"), float("inf"), True, "1", torch.tensor(2.0)):
        with pytest.raises(ConfigurationError, match=r"scale is .*; expected a number"):
            model.forward_backward(*batch, scale=scale)
    with pytest.raises(ConfigurationError, match=r"accumulate=4(.|\n)*Fix(.|\n)*scale=1 / 4"):
        made(accumulate=4).forward_backward(*batch)
    without = gs.Model(network(), nn.CrossEntropyLoss())
    without.forward_backward(*batch)
    with pytest.raises(ConfigurationError, match="step needs an optimizer"):
        without.step()


@pytest.mark.parametrize("before", ["nothing", "train_step", "zero_grad"])
def test_a_step_without_gradients_is_refused(before: str) -> None:
    batch = batches()[0][0]

    def script(_: int) -> None:
        model = made()
        if before == "train_step":
            model.train_step(*batch)
        if before == "zero_grad":
            model.forward_backward(*batch)
            model.zero_grad()
        model.step()

    with pytest.raises(ConfigurationError, match="no gradients that forward_backward has added"):
        script(0)
    with pytest.raises((ConfigurationError, JobFailedError), match="no gradients that forward_ba"):
        ThreadCluster(script, NUM_WORKERS).run()


def test_workers_that_pass_different_scales_are_told() -> None:
    batch = batches()[0][0]

    def script(rank: int) -> None:
        made().forward_backward(*batch, scale=1.0 + rank)

    with pytest.raises((LoaderMismatchError, JobFailedError), match=r"\(and scale\)"):
        ThreadCluster(script, NUM_WORKERS).run()
