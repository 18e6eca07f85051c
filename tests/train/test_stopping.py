"""Training ends early on all workers after the same step, with the bits of a plain loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_features.parts import Last, adam, all_of, batches, plain_net
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphsplit as gs
from graphsplit.errors import ConfigurationError

assert threads_as_workers
NUM_WORKERS = 3
on_threads = pytest.mark.usefixtures("threads_as_workers")
pytestmark = pytest.mark.timeout(200)


class Stops(gs.callbacks.Callback):
    """Ends training at a step, or at an epoch's end, on one worker alone or on all."""

    def __init__(self, epoch: int, step: int | None, rank: int | None) -> None:
        self.epoch, self.step, self.rank = epoch, step, rank
        self.heard: list[str] = []

    def _is_here(self, context: gs.callbacks.RunContext) -> bool:
        return context.epoch == self.epoch and self.rank in (None, context.rank)

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.heard.append(f"step {context.epoch} {context.step}")
        if self._is_here(context) and self.step == context.step:
            context.stop()

    def on_epoch_end(self, context: gs.callbacks.RunContext) -> None:
        self.heard.append(f"epoch {context.epoch}")
        if self._is_here(context) and self.step is None:
            context.stop()

    def on_stop(self, context: gs.callbacks.RunContext) -> None:
        self.heard.append(f"stop {context.epoch} {context.step}")

    def on_train_end(self, context: gs.callbacks.RunContext) -> None:
        self.heard.append("end")


def run_twice(epoch: int, step: int | None, rank: int | None) -> Any:
    """Stop; then train on over the same loader."""
    net = plain_net(place=True)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    loader, stops, last = batches(), Stops(epoch, step, rank), Last()
    model.train(4, loader, [last, stops])
    model.train(1, loader, [last])
    return stops.heard, last.losses, all_of(model)


def plain_losses(epoch: int, step: int | None) -> list[torch.Tensor]:
    """The loop that does not know graphsplit."""
    net = plain_net(place=False)
    optimizer, loss_fn, loader, losses = adam(net), nn.CrossEntropyLoss(), batches(), []

    def run_epoch(last_step: int | None) -> None:
        net.train()
        for number, (inputs, target) in enumerate(loader, 1):
            optimizer.zero_grad()
            loss = loss_fn(net(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if number == last_step:
                break

    for number in range(1, epoch + 1):
        run_epoch(step if number == epoch else None)
    run_epoch(None)
    return losses


@on_threads
@pytest.mark.parametrize("rank", [None, 0, 1, 2])
@pytest.mark.parametrize(("epoch", "step"), [(1, 1), (2, 2), (2, 3), (2, None)])
def test_one_worker_stops_all_after_the_same_step(epoch: int, step: int | None, rank: int | None):
    losses = plain_losses(epoch, step)
    heard, found, left = run_twice(epoch, step, None)
    assert difference(losses, found) is None
    ended = f"epoch {epoch}" if step is None else f"stop {epoch} {step}"
    assert heard[-2:] == [ended, "end"] and heard.count(f"epoch {epoch}") == (step is None)
    for of_worker in ThreadCluster(lambda _: run_twice(epoch, step, rank), NUM_WORKERS).run():
        assert difference((heard, found, left), of_worker) is None


def of_a_drawing_run(folder: Path, stops_at: int | None) -> Any:
    """Losses of a run whose validation draws random numbers; stopped, and gone on with."""
    for is_resumed in (False, True)[: 1 if stops_at is None else 2]:
        net = plain_net(place=True)
        optimizer, data = adam(net), TensorDataset(*map(torch.cat, zip(*batches(), strict=True)))
        loader, validation = DataLoader(data, 8, shuffle=True), DataLoader(data, 12)
        model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        last, best = Last(), gs.callbacks.EarlyStopping("Loss", patience=9)
        calls: list[Any] = [last, best, gs.callbacks.LearningRateScheduler(schedule)]
        calls.append(gs.callbacks.Checkpoint(folder / "{num_steps}", every_epochs=None))
        if is_resumed:
            model.load(folder / str(stops_at))
        elif stops_at is not None:
            calls.append(Stops(2, stops_at - len(loader), None))
        model.train(3, loader, calls, validation=validation)
    return last.losses, best.state_dict(), schedule.state_dict(), all_of(model)


@on_threads
@pytest.mark.parametrize("stops_at", [4, 6])  # within the epoch, and after its last step
def test_a_run_that_goes_on_where_it_was_stopped(tmp_path: Path, stops_at: int):
    whole = of_a_drawing_run(tmp_path, None)
    assert difference(whole, of_a_drawing_run(tmp_path / "one", stops_at)) is None
    there = ThreadCluster(lambda _: of_a_drawing_run(tmp_path / "all", stops_at), NUM_WORKERS).run()
    for found in there:
        assert difference(whole, found) is None


def watched(values: list[float], folder: Path | None = None, **options: Any) -> Any:
    net = plain_net(place=True)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    stops = gs.callbacks.EarlyStopping(lambda context: values[context.epoch - 1], **options)
    keeps = []
    if folder is not None:
        keeps.append(gs.callbacks.KeepBest(folder, lambda context: values[context.epoch - 1]))
    model.train(len(values), batches(), [stops, *keeps])
    epochs = model.position.num_epochs
    if folder is not None:
        model.load(folder)
    return epochs, model.position.num_epochs, all_of(model)


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([3.0, 2.0, 2.0, 1.0], {}, 3),
        ([3.0, 4.0, 2.0, 2.5, 2.5, 0.0], {"patience": 1}, 2),
        ([3.0, 4.0, 2.0, 2.5, 2.5, 0.0], {"patience": 2}, 5),
        ([1.0, 2.0, 3.0], {"mode": "max"}, 3),
        ([1.0, 1.2, 1.3], {"mode": "max", "min_delta": 0.5}, 2),
        ([float("nan"), 1.0, 2.0], {"patience": 0}, 1),
    ],
)
def test_early_stopping(
    values: list[float],
    options: dict[str, Any],
    epochs: int,
    capsys: pytest.CaptureFixture[str],
):
    assert watched(values, **options)[0] == epochs
    line = rf"epoch: {epochs}, what is watched has not improved for \d epochs?( \(best .*\))?"
    expected = rf"{line}: training ends\n" if epochs < len(values) else ""
    assert re.fullmatch(expected, capsys.readouterr().out)


@on_threads
def test_the_best_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    values = [3.0, 1.0, 2.0, 2.0, 2.0]
    here = watched(values, tmp_path / "one", patience=2)
    assert here[:2] == (4, 2)
    line = "epoch: 4, what is watched has not improved for 2 epochs (best 1): training ends\n"
    assert capsys.readouterr().out == line
    cluster = ThreadCluster(lambda _: watched(values, tmp_path / "all", patience=2), NUM_WORKERS)
    for found in cluster.run():
        assert difference(here, found) is None
    assert capsys.readouterr().out == line


class Halves(gs.callbacks.Callback):
    """Changes the weights at an epoch's end, and remembers what the first one left."""

    def on_epoch_end(self, context: gs.callbacks.RunContext) -> None:
        with torch.no_grad():
            for _, parameter in context.owned_parameters():
                parameter.mul_(0.5)
        if context.epoch == 1:
            self.left = {k: v.clone() for k, v in context.model.state_dict().items()}


def kept_after_others(folder: Path) -> Any:
    net, halves = plain_net(place=True), Halves()
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    keeps = gs.callbacks.KeepBest(folder, lambda context: float(context.epoch))
    model.train(2, batches(), [keeps, halves])
    model.load(folder)
    return halves.left, dict(model.state_dict())


@on_threads
def test_the_best_is_saved_after_all_other_callbacks(tmp_path: Path):
    left, kept = kept_after_others(tmp_path / "one")
    assert difference(left, kept) is None
    cluster = ThreadCluster(lambda _: kept_after_others(tmp_path / "all"), NUM_WORKERS)
    for found in cluster.run():
        assert difference((left, kept), found) is None


def exploding() -> Any:
    net = plain_net(place=True)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    good, bad = next(iter(batches())), (torch.full((8, 4), float("nan")), torch.zeros(8).long())
    model.train(3, [good, bad, good], [gs.callbacks.TerminateOnNaN()])
    return model.position.num_steps


@on_threads
def test_a_loss_of_nan_ends_training(capsys: pytest.CaptureFixture[str]):
    assert exploding() == 2
    assert capsys.readouterr().out == "epoch: 1 step: 2, loss is nan: training ends\n"
    assert ThreadCluster(lambda _: exploding(), NUM_WORKERS).run() == [2] * NUM_WORKERS
    assert capsys.readouterr().out == "epoch: 1 step: 2, loss is nan: training ends\n"


class Notes(gs.callbacks.Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_epoch_end(self, context: gs.callbacks.RunContext) -> None:
        self.found.append(dict(context.metrics))


def validated() -> Any:
    net, notes = plain_net(place=True), Notes()
    monitor = gs.callbacks.LossMonitor()
    metrics = {"Loss": gs.metrics.Loss()}
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), metrics=metrics)
    loader = [next(iter(batches()))]
    stops = gs.callbacks.EarlyStopping("Loss", patience=3)
    model.train(2, batches(), [notes, stops, monitor], validation=loader)
    return notes.found, model.eval(loader) == notes.found[-1]


@on_threads
def test_validation_after_each_epoch(capsys: pytest.CaptureFixture[str]):
    here = validated()
    assert here[1] and len(here[0]) == 2
    told = capsys.readouterr().out
    assert f"\nepoch: 2 validation: Loss {here[0][1]['Loss']:.6g}\n" in told
    for found in ThreadCluster(lambda _: validated(), NUM_WORKERS).run():
        assert found == here
    assert capsys.readouterr().out == told


def train_with(*callbacks: Any, **options: Any) -> None:
    net = plain_net(place=False)
    gs.Model(net, nn.CrossEntropyLoss(), adam(net)).train(1, batches(), callbacks, **options)


def helper(context: gs.callbacks.RunContext) -> None:
    context.stop()


class Hidden(gs.callbacks.Callback):
    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        helper(context)


class Shown(Hidden):
    may_stop = True


def test_a_stop_that_nobody_can_foresee_is_an_error():
    with pytest.raises(ConfigurationError, match="set may_stop = True"):
        train_with(Hidden())
    train_with(Shown())


def test_a_stop_outside_of_train_is_an_error():
    context = gs.callbacks.RunContext(None, 0, 1, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no train is under way"):
        context.stop()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: gs.callbacks.EarlyStopping(3), "metric=3; expected the name"),  # type: ignore[arg-type]
        (lambda: gs.callbacks.EarlyStopping("a", mode="up"), "mode='up'"),  # type: ignore[arg-type]
        (lambda: gs.callbacks.EarlyStopping("a", patience=-1), "patience=-1"),
        (lambda: train_with(gs.callbacks.EarlyStopping("a")), "watches 'a', but there is no metr"),
        (lambda: train_with(validation=batches()), "eval needs metrics"),
    ],
)
def test_bad_arguments(run: Callable[[], Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        run()


class Metrics(gs.callbacks.Callback):
    """Puts a metric there; notes each step."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.num_steps += 1
        context.metrics["Own"] = 1.0


def test_a_metric_that_there_will_not_be_is_found_before_the_first_step(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(ConfigurationError, match="watches 'Los', but there is no metric at all"):
        train_with(gs.callbacks.LossMonitor(every=1), gs.callbacks.EarlyStopping("Los"))
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigurationError, match="there is 'Loss'; did you mean 'Loss'"):
        gs.callbacks.EarlyStopping("loss").check_watched(["Loss"])
    own = Metrics()
    train_with(own, gs.callbacks.EarlyStopping("Own"))
    assert own.num_steps == 3
