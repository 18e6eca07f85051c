"""A run that is ended anywhere and goes on from a save equals one that was never ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

import graphsplit as gs
from graphsplit.errors import CheckpointError, ConfigurationError
from graphsplit.train.epochs import load_callbacks

assert threads_as_workers
EPOCHS = 3
DATA = TensorDataset(
    torch.randn(10, 4, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 3
)


class Noisy(Dataset[Any]):
    """Draws from the default generator for every sample, and counts how many were asked for."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        value, target = DATA[index]
        return value + torch.rand(4) * 0.1, target


class OwnOrder(Sampler[int]):
    """An order of its own from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(10, generator=self.generator).tolist()

    def __len__(self) -> int:
        return 10


class Stateful:
    """A loader that says where it stands, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.epoch = self.given = 0
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(10, generator=torch.Generator().manual_seed(self.epoch))
        while self.given < 5:
            indices = order[2 * self.given : 2 * self.given + 2]
            self.given += 1
            self.drawn += 1
            yield DATA.tensors[0][indices], DATA.tensors[1][indices]
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class TakesItsStateLate:
    """Takes its state in ``iter``, and puts its generator back to where the epoch began.

    So does torchdata's StatefulDataLoader. Every ``iter`` also draws a seed for worker processes.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.to_load: dict[str, Any] | None = None
        self.now = self._begin()

    def _begin(self, state: dict[str, Any] | None = None) -> dict[str, Any]:
        torch.randint(9, (1,), generator=self.generator)
        if state is not None:
            self.generator.set_state(state["start"])
        start = self.generator.get_state()
        order = torch.randperm(10, generator=self.generator).tolist()
        return {"start": start, "order": order, "given": state["given"] if state else 0}

    def __iter__(self) -> Iterator[Any]:
        state, self.to_load = self.to_load, None
        self.now = self._begin(state)
        if self.now["given"] == 5:
            self.now = self._begin()
        return self._rest(self.now)

    def _rest(self, now: dict[str, Any]) -> Iterator[Any]:
        while now["given"] < 5:
            indices = now["order"][2 * now["given"] :][:2]
            now["given"] += 1
            yield DATA.tensors[0][indices], DATA.tensors[1][indices]

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.now["start"], "given": self.now["given"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.to_load = state


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(DATA, batch_size=2),
    "shuffled": lambda: DataLoader(DATA, batch_size=2, shuffle=True),
    "shuffled by a generator of its own": lambda: DataLoader(
        DATA, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "with replacement": lambda: DataLoader(
        DATA, batch_size=2, sampler=RandomSampler(DATA, replacement=True, num_samples=10)
    ),
    "a sampler of its own": lambda: DataLoader(DATA, batch_size=2, sampler=OwnOrder()),
    "random samples": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "a loader with a state": Stateful,
    "a loader with a state and a generator": TakesItsStateLate,
    "a list": lambda: [(DATA.tensors[0][i : i + 2], DATA.tensors[1][i : i + 2]) for i in (0, 2, 4)],
}


class Stopped(Exception):
    """The run ends here."""


class Record(gs.callbacks.Callback):
    """Keeps what a run has seen; saves, and ends it, where it is told to."""

    def __init__(self, stop: tuple[int, int] | None = None, path: Path | None = None) -> None:
        self.stop, self.path = stop, path
        self.seen: list[Any] = []

    def _look(self, context: gs.callbacks.RunContext, what: str) -> None:
        loss = None if context.loss is None else context.loss.clone()
        self.seen.append((what, context.epoch, context.step, loss, torch.get_rng_state()))

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        torch.rand(1)  # callbacks may draw, too
        if context.step == 0:
            self._look(context, "begin")

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self._look(context, "step")
        self._perhaps_stop(context, (context.epoch, context.step))

    def on_epoch_end(self, context: gs.callbacks.RunContext) -> None:
        torch.rand(1)
        self._look(context, "end")
        self._perhaps_stop(context, (context.epoch, 99))

    def _perhaps_stop(self, context: gs.callbacks.RunContext, here: tuple[int, int]) -> None:
        if here == self.stop:
            assert self.path is not None
            context.model.save(self.path)
            raise Stopped


def make(**options: Any) -> tuple[gs.Model, list[gs.callbacks.Callback]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    metrics = {"Loss": gs.metrics.Loss()}
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, metrics, **options)
    return model, [gs.callbacks.LearningRateScheduler(schedule, "step")]


def run(
    loader: Any, record: Record, *, load: Path | None = None, **options: Any
) -> tuple[gs.Model, Any]:
    model, callbacks = make(**options)
    if load is not None:
        model.load(load)
        torch.rand(3)  # what happens between changes nothing
    try:
        model.train(EPOCHS, loader, [*callbacks, record])
    except Stopped:
        return model, None
    optimizer = model.optimizer_state_dict()
    return model, (model.state_dict(), optimizer, torch.get_rng_state(), model.position)


def assert_resumes(
    make_loader: Callable[[], Any], stop: tuple[int, int], path: Path, **options: Any
) -> Any:
    whole = Record()
    _, expected = run(make_loader(), whole, **options)
    first = Record(stop, path)
    run(make_loader(), first, **options)
    rest, loader = Record(), make_loader()
    _, found = run(loader, rest, load=path, **options)
    assert difference(expected, found) is None
    assert difference(whole.seen, first.seen + rest.seen) is None
    return loader


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [(1, 1), (2, 2), (2, 99)])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, name: str, stop: tuple[int, int]
) -> None:
    assert_resumes(LOADERS[name], stop, tmp_path)


@pytest.mark.parametrize("stop", [(1, 5), (3, 5), (3, 99)])
def test_a_run_resumes_after_the_last_step_of_an_epoch_and_after_the_last_epoch(
    tmp_path: Path, stop: tuple[int, int]
) -> None:
    assert_resumes(LOADERS["shuffled"], stop, tmp_path)


def test_microbatches_go_on_with_their_seed_and_step(tmp_path: Path) -> None:
    assert_resumes(
        lambda: DataLoader(DATA, batch_size=5, shuffle=True), (2, 1), tmp_path, microbatches=2
    )


def test_gradients_added_in_pairs_are_saved_between_batches_and_another_order_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_resumes(
        lambda: DataLoader(DATA, batch_size=10, shuffle=True),
        (2, 99),
        tmp_path,
        microbatches=5,
        accumulate=3,
        gradient_order="pairs",
    )
    assert not [r for r in caplog.records if "gradient_order" in r.message]
    net = nn.Sequential(nn.Linear(4, 3))
    for order in ("pairs", "left"):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = gs.Model(
            net, nn.CrossEntropyLoss(), optimizer, microbatches=2, gradient_order=order
        )
        if order == "pairs":
            model.save(tmp_path / "pairs")
    model.load(tmp_path / "pairs")
    assert "made with gradient_order='pairs', and this Model has 'left'" in caplog.text


@pytest.mark.parametrize("stop", [(1, 2), (2, 99)])
def test_gradients_that_are_being_added_up_are_saved(tmp_path: Path, stop: tuple[int, int]) -> None:
    assert_resumes(LOADERS["shuffled"], stop, tmp_path, accumulate=3)


def test_gradients_that_become_zeros_or_belong_to_no_optimizer_are_saved(tmp_path: Path) -> None:
    for set_to_none in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
        model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, set_to_none=set_to_none)
        model.train(1, LOADERS["in order"]())
        model.save(tmp_path / str(set_to_none))
        gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        for parameter in net.parameters():
            parameter.grad = None
        model.load(tmp_path / str(set_to_none))
        kept = [parameter.grad for parameter in net.parameters()]
        assert [g is None for g in kept] == [set_to_none] * 2 + [False] * 2
        assert difference(gradients[2:], kept[2:]) is None


def test_no_gradient_is_left_that_the_save_does_not_hold(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, set_to_none=False)
    model.save(tmp_path)
    model.train_step(*DATA[:4])
    model.load(tmp_path)
    assert net.weight.grad is None and net.bias.grad is None


def test_a_scaler_goes_on_with_its_scale(tmp_path: Path) -> None:
    def make_loader() -> Any:
        nonlocal scaler
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return LOADERS["shuffled"]()

    scaler: Any = None
    whole, rest = Record(), Record()
    _, expected = run(make_loader(), whole, scaler=scaler)
    end = scaler.state_dict()
    run(make_loader(), Record((2, 2), tmp_path), scaler=scaler)
    _, found = run(make_loader(), rest, load=tmp_path, scaler=scaler)
    assert difference(expected, found) is None
    assert scaler.state_dict() == end


def test_a_run_that_was_resumed_is_resumed_again(tmp_path: Path) -> None:
    whole, make_loader = Record(), LOADERS["shuffled by a generator of its own"]
    _, expected = run(make_loader(), whole)
    run(make_loader(), Record((1, 3), tmp_path))
    run(make_loader(), Record((1, 4), tmp_path), load=tmp_path)
    run(make_loader(), Record((2, 99), tmp_path), load=tmp_path)
    _, found = run(make_loader(), Record(), load=tmp_path)
    assert difference(expected, found) is None


def test_a_loader_with_a_state_draws_nothing_in_vain(tmp_path: Path) -> None:
    loader = assert_resumes(Stateful, (2, 2), tmp_path)
    assert loader.drawn == 3 + 5


def test_metrics_after_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path: Path) -> None:
    data = LOADERS["in order"]()
    model, _ = run(LOADERS["shuffled"](), Record())
    expected = model.eval(data)
    run(LOADERS["shuffled"](), Record((2, 2), tmp_path))
    model, _ = run(LOADERS["shuffled"](), Record(), load=tmp_path)
    assert model.eval(data) == expected


def test_a_state_saved_outside_of_train_starts_a_new_one(tmp_path: Path) -> None:
    model, callbacks = make()
    model.train(1, LOADERS["in order"](), callbacks)
    model.save(tmp_path)
    other, callbacks = make()
    loaded = other.load(tmp_path)
    assert (loaded.position.num_steps, loaded.position.num_epochs) == (5, 1)
    assert (loaded.position.epoch, loaded.position.step) == (0, 0)
    record = Record()
    other.train(1, LOADERS["in order"](), [record])
    assert next((e, s) for what, e, s, *_ in record.seen if what == "step") == (1, 1)
    assert other.position.num_steps == 10


def test_resume_false_counts_from_the_first_epoch_again(tmp_path: Path) -> None:
    run(LOADERS["shuffled"](), Record((2, 2), tmp_path))
    model, _ = make()
    model.load(tmp_path)
    record = Record()
    model.train(1, LOADERS["shuffled"](), [record], resume=False)
    assert next((e, s) for what, e, s, *_ in record.seen if what == "step") == (1, 1)


def test_fewer_epochs_than_were_saved_are_refused(tmp_path: Path) -> None:
    run(LOADERS["shuffled"](), Record((3, 2), tmp_path))
    model, callbacks = make()
    model.load(tmp_path)
    with pytest.raises(ConfigurationError, match=r"stands in epoch 3, but train\(1, \.\.\.\)"):
        model.train(1, LOADERS["shuffled"](), callbacks)


def test_a_loader_that_is_too_short_is_refused(tmp_path: Path) -> None:
    run(LOADERS["shuffled"](), Record((2, 4), tmp_path))
    model, callbacks = make()
    model.load(tmp_path)
    with pytest.raises(ConfigurationError, match=r"trained on 4 batches.*has only 3"):
        model.train(EPOCHS, LOADERS["a list"](), callbacks)


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ("a loader with a state", "in order", "it has no load_state_dict"),
        ("a sampler of its own", "in order", r"it has generators \[\]; \['sampler.generator'\]"),
    ],
)
def test_another_kind_of_loader_is_refused(
    tmp_path: Path, saved: str, given: str, message: str
) -> None:
    run(LOADERS[saved](), Record((2, 2), tmp_path))
    model, callbacks = make()
    model.load(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        model.train(EPOCHS, LOADERS[given](), callbacks)


def test_a_callback_whose_state_was_saved_must_be_there(tmp_path: Path) -> None:
    run(LOADERS["in order"](), Record((1, 2), tmp_path))
    model, _ = make()
    model.load(tmp_path)
    with pytest.raises(ConfigurationError, match="no such callback"):
        model.train(EPOCHS, LOADERS["in order"](), [])


def test_what_a_callback_makes_of_its_state_is_not_given_once_more() -> None:
    class Keeps(gs.callbacks.Callback):
        kept: Any = None

        def load_state_dict(self, state: Any) -> None:
            self.kept = state
            state["mean"].add_(1)

    saved = [[Keeps.__qualname__, {"mean": torch.zeros(2)}]]
    for _ in range(2):  # as where a job goes back to before the first step
        load_callbacks([callback := Keeps()], saved)
        assert torch.equal(callback.kept["mean"], torch.ones(2))


# Saving while it trains.


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_checkpoints_are_saved_and_the_last_ones_kept(tmp_path: Path) -> None:
    model, _ = make()
    keep = gs.callbacks.Checkpoint(tmp_path / "at-{num_steps:03d}", every_steps=2, keep=2)
    model.train(EPOCHS, LOADERS["in order"](), [keep])
    assert names(tmp_path) == ["at-014", "at-015"]  # after step 14, and at the end of epoch 3
    assert gs.latest_checkpoint(tmp_path) == tmp_path / "at-015"


def test_a_checkpoint_holds_what_later_callbacks_changed(tmp_path: Path) -> None:
    whole = Record()
    _, expected = run(LOADERS["shuffled"](), whole)
    model, callbacks = make()
    keep = gs.callbacks.Checkpoint(tmp_path / "{epoch}-{step}", every_steps=1, keep=None)
    model.train(EPOCHS, LOADERS["shuffled"](), [keep, *callbacks, Record()])
    assert len(names(tmp_path)) == 15
    for name in ("1-4", "2-5", "3-1"):
        _, found = run(LOADERS["shuffled"](), Record(), load=tmp_path / name)
        assert difference(expected, found) is None, name


def test_a_template_without_fields_replaces_the_save_before(tmp_path: Path) -> None:
    model, _ = make()
    model.train(EPOCHS, LOADERS["in order"](), [gs.callbacks.Checkpoint(tmp_path / "last")])
    assert names(tmp_path) == ["last"]
    assert len(names(tmp_path / "last")) == 3
    assert make()[0].load(tmp_path / "last").position.num_steps == 15


def test_only_saves_of_the_series_are_removed(tmp_path: Path) -> None:
    for name in ("mine", "at-x", "at-000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "at-001").mkdir()
    (tmp_path / "at-001" / "weights.safetensors.part").write_text("never finished")
    model, _ = make()
    keep = gs.callbacks.Checkpoint(tmp_path / "at-{num_steps:03d}", keep=1)
    model.train(2, LOADERS["in order"](), [keep])
    assert names(tmp_path) == ["at-010", "at-x", "mine"]


def test_the_latest_is_the_one_saved_last_and_complete(tmp_path: Path) -> None:
    assert gs.latest_checkpoint(tmp_path) is None
    assert gs.latest_checkpoint(tmp_path / "none") is None
    model, _ = make()
    for name in ("b", "a", "c"):
        model.save(tmp_path / name)
    (tmp_path / "c" / "manifest.json").unlink()
    assert gs.latest_checkpoint(tmp_path) == tmp_path / "a"


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("at-{steps}", {}, "is no template of a path"),
        ("at-{", {}, "is no template of a path"),
        ("{epoch}/at", {}, "in its last part only"),
        ("at", {"keep": 0}, "keep=0; expected an int of 1 or more"),
        ("at", {"every_steps": 0}, "every_steps=0"),
        ("at", {"every_epochs": True}, "every_epochs=True"),
    ],
)
def test_arguments_of_a_checkpoint_are_checked(
    path: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        gs.callbacks.Checkpoint(path, **options)


def test_a_save_that_fails_ends_training_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, _ = make()
    with pytest.raises(CheckpointError, match="Not a directory"):
        model.train(
            1, LOADERS["in order"](), [gs.callbacks.Checkpoint(tmp_path / "file" / "{epoch}")]
        )


def test_weights_and_optimizers_are_streamed_and_loaded_by_path(tmp_path: Path) -> None:
    model, _ = run(LOADERS["shuffled"](), Record())
    assert model.state_dict(to=tmp_path / "w.safetensors") is None
    assert model.optimizer_state_dict(to=tmp_path / "o.safetensors") is None
    other, _ = make()
    other.load_state_dict(tmp_path / "w.safetensors")
    other.load_optimizer_state_dict(tmp_path / "o.safetensors")
    assert difference(model.state_dict(), other.state_dict()) is None
    assert difference(model.optimizer_state_dict(), other.optimizer_state_dict()) is None


class Counting(nn.Module):
    """A loss that counts its calls, and keeps an average and what came last."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.average: Any = None
        self.seen: Any = {"outputs": []}

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(output, target)
        before = loss.detach() if self.average is None else self.average
        self.average = 0.9 * before + 0.1 * loss.detach()
        self.seen["outputs"] = [output]
        return loss / self.average / self.calls


class Thaws(gs.callbacks.Callback):
    """Trains the first layer too from the second epoch on, and keeps a list of the epochs."""

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        layers: Any = context.model.network
        layers[0].requires_grad_(context.epoch > 1)
        layers[0].epochs = [*getattr(layers[0], "epochs", ()), context.epoch]


def counted(folder: Path, resumes: bool) -> Any:
    torch.manual_seed(0)
    net, loss_fn = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), Counting()
    net[0].place("MS_WORKER", 0)
    net[2].place("MS_WORKER", 1)
    net[0].requires_grad_(False)
    model = gs.Model(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1))
    draws = torch.Generator().manual_seed(1)
    shape = (6, 4)
    loader = [(torch.randn(shape, generator=draws), torch.arange(6) % 3) for _ in range(3)]
    if resumes:
        model.load(folder / "7")  # within the third epoch, whose begin is heard again
    saves = gs.callbacks.Checkpoint(folder / "{num_steps}", every_steps=7, keep=9)
    model.train(3, loader, [] if resumes else [Thaws(), saves])
    flags, attributes = [p.requires_grad for p in net.parameters()], vars(net[0])["epochs"]
    if not resumes:
        model.load(folder / "3")  # back to where the first layer was not yet trained
        assert not net[0].weight.requires_grad and (loss_fn.calls, net[0].epochs) == (3, [1])
        model.load(folder / "9")
    return loss_fn.calls, flags, attributes, model.state_dict()


@pytest.mark.usefixtures("threads_as_workers")
def test_plain_attributes_and_what_is_trained_are_saved(tmp_path: Path) -> None:
    whole = counted(tmp_path, resumes=False)
    assert whole[:3] == (9, [True] * 4, [1, 2, 3])
    assert difference(whole, counted(tmp_path, resumes=True)) is None
    there = tmp_path / "all"
    for resumes in (False, True):
        for found in ThreadCluster(lambda _, r=resumes: counted(there, r), 2).run():
            assert difference(whole, found) is None
