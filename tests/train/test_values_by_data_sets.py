"""A data set, or a script whose worker is lost, changes what network and loss read."""

from __future__ import annotations

import copy
import enum
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import Generators, ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import graphsplit as gs
from graphsplit.errors import PlanMismatchError
from graphsplit.guards.check import Guards, Watched
from graphsplit.guards.places import entry
from graphsplit.guards.values import MISSING, freeze
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
NUM_WORKERS = 3


class Scaled(nn.Module):
    """Worker 2 computes nothing, and so reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(3, 4), nn.Linear(4, 2), 1.0
        self.a.place("MS_WORKER", 0)
        self.b.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale)


class Changing(Dataset[Any]):
    """Changes something whenever a sample is asked for, and counts how many were."""

    def __init__(self, change: Callable[[int, int], object]) -> None:
        self._change, self.num_read = change, 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        self._change(index, self.num_read)
        return torch.arange(3.0) * 0.1 + index, torch.full((2,), index * 0.2)


class Losses(gs.callbacks.Callback):
    """Keeps them."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        assert context.loss is not None
        self.seen.append(context.loss.clone())


def by_attribute() -> Any:
    net = Scaled()

    def change(index: int, num_read: int) -> None:
        net.scale = 1 + index / 10

    return net, F.mse_loss, change


def by_its_count_from_the_second_epoch_on() -> Any:
    net = Scaled()

    def change(index: int, num_read: int) -> None:
        if num_read > 12:
            net.scale = num_read / 10

    return net, F.mse_loss, change


def by_flag() -> Any:
    net, flags = Scaled(), {"absolute": False}

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (F.l1_loss if flags["absolute"] else F.mse_loss)(outputs, target)

    return net, loss_fn, lambda index, num_read: flags.update(absolute=index > 6)


def by_flags_put_together() -> Any:
    """What forward puts together its class keeps, whoever asks for it later."""

    class Parts(enum.Flag):
        SIGN, SCALE, SHIFT = 1, 2, 4

    parts = {"on": Parts.SIGN}

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(outputs, target) * (parts["on"] | Parts.SHIFT).value
        return loss * 2 if Parts.SCALE in parts["on"] else loss

    def change(index: int, num_read: int) -> None:
        parts["on"] = Parts(1 + index // 4) | Parts.SIGN

    return Scaled(), loss_fn, change


def by_putting_a_counter_back() -> Any:
    """Each epoch begins with 0, which is there already in the first one."""
    counts = {"calls": 0, "of": 3}

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        return F.mse_loss(outputs, target) * counts["calls"] / counts["of"]

    def change(index: int, num_read: int) -> None:
        if index == 0:
            counts["calls"] = 0
        counts["of"] = 3 + index // 4

    return Scaled(), loss_fn, change


def by_an_entry_that_it_adds() -> Any:
    entries: dict[str, float] = {}

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, target) * entries["scale"]

    return Scaled(), loss_fn, lambda index, num_read: entries.update(scale=1 + index / 8)


def train_on(make: Callable[[], Any], microbatches: int) -> Any:
    torch.manual_seed(0)
    net, loss_fn, change = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    metrics = {"Loss": gs.metrics.Loss()}
    model = gs.Model(net, loss_fn, optimizer, metrics, microbatches=microbatches)
    loader, losses = DataLoader(Changing(change), 4), Losses()
    model.train(2, loader, [losses])
    found = [model.eval(loader), model.state_dict()]
    return copy.deepcopy([losses.seen, found, net.scale])


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        *(by_attribute, by_flag, by_flags_put_together, by_putting_a_counter_back),
        *(by_an_entry_that_it_adds, by_its_count_from_the_second_epoch_on),
    ],
)
def test_what_a_data_set_changes_is_changed_on_all_workers(
    make: Callable[[], Any], microbatches: int
) -> None:
    before = Generators.now()
    expected = train_on(make, microbatches)
    before.put_back()
    cluster = ThreadCluster(lambda rank: train_on(make, microbatches), NUM_WORKERS)
    for found in cluster.run():
        assert difference(expected, found) is None


class Dropped(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.dropout(x, 0.5, self.training))


class Evaluating(Losses):
    """Leaves the network in eval mode, as one does who forgets to put it back."""

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        super().on_step_end(context)
        context.model.network.eval()


def test_each_step_finds_the_network_in_train_mode_as_in_one_process() -> None:
    def train() -> Any:
        torch.manual_seed(0)
        net, losses = Dropped(), Evaluating()
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.01))
        model.train(1, DataLoader(Changing(lambda index, num_read: None), 4), [losses])
        return losses.seen

    before = Generators.now()
    expected = train()
    before.put_back()
    for found in ThreadCluster(lambda rank: train(), NUM_WORKERS).run():
        assert difference(expected, found) is None


@pytest.mark.parametrize("by_calls", [False, True])
def test_a_step_compares_once_and_by_identity_alone_where_nothing_has_changed(
    by_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: dict[int, list[str]] = defaultdict(list)

    def counted(name: str) -> Callable[[Guards], Any]:
        compare = getattr(Guards, name)

        def count(guards: Guards) -> Any:
            compared[threading.get_ident()].append(name)
            return compare(guards)

        return count

    for name in ("hold", "failures"):
        monkeypatch.setattr(Guards, name, counted(name))

    def train(rank: int) -> list[str]:
        torch.manual_seed(0)
        net = Scaled()
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.01))
        batch = torch.ones(4, 3), torch.ones(4, 2)
        model.train_step(*batch)
        mine = compared[threading.get_ident()]
        mine.clear()
        if by_calls:
            for _ in range(6):
                model.train_step(*batch)
        else:
            model.train(1, [batch] * 6)
        return [*mine]

    for found in ThreadCluster(train, NUM_WORKERS).run():
        # Who follows compares while it waits, also for the news that the epoch is over. At the end
        # of an epoch all compare once more: reading the loader may have changed something.
        at_the_end = 0 if by_calls else 1
        assert found in (["hold"] * (6 + at_the_end), ["hold"] * (7 + at_the_end))


def changed_by_the_script() -> Any:
    torch.manual_seed(0)
    net = Scaled()
    model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.01))
    found = []
    for step in range(5):
        net.scale = 1 + step / 10
        if step == 2:
            net.b.eval()
        x = torch.arange(12.0).reshape(4, 3) + step
        found.append(model.train_step(x, torch.ones(4, 2)).clone())
    return copy.deepcopy([found, net.scale, net.b.training, model.state_dict()])


@pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning")
@pytest.mark.parametrize("progress", [15, 25])
def test_a_worker_that_comes_back_has_the_values_that_the_script_gives(progress: int) -> None:
    before = Generators.now()
    expected = changed_by_the_script()
    before.put_back()
    cluster = ThreadCluster(
        lambda rank: changed_by_the_script(), 2, SnapshotSettings(1, 100), {0: [progress]}
    )
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 1


class InThree(Scaled):
    """Worker 1 has parameters, and reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(2, 2)
        self.c.place("MS_WORKER", 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(super().forward(x)))


class Calling(Losses):
    """Calls something after each step."""

    def __init__(self, change: Callable[[int], object]) -> None:
        super().__init__()
        self._change = change

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        super().on_step_end(context)
        self._change(len(self.seen))


def train_at_rates(by_data: Callable[[Any, int], None], by_call: Callable[[Any, int], None]) -> Any:
    torch.manual_seed(0)
    net = InThree()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    model = gs.Model(net, F.mse_loss, optimizer)
    losses = Calling(lambda num_steps: by_call(group, num_steps))
    loader = DataLoader(Changing(lambda index, num_read: by_data(group, index)), 4)
    model.train(2, loader, [losses])
    return copy.deepcopy([losses.seen, model.state_dict()])


def nothing(group: Any, number: int) -> None:
    pass


def test_a_rate_that_the_data_set_changes_is_that_of_workers_that_read_nothing_too() -> None:
    def change(group: Any, index: int) -> None:
        group["lr"] = 0.1 / (1 + index)

    expected = train_at_rates(change, nothing)
    for found in ThreadCluster(lambda rank: train_at_rates(change, nothing), NUM_WORKERS).run():
        assert difference(expected, found) is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("lr", 0.5, "lr of the optimizer's group 0 is 0.5 on worker 1, 0.1 on worker 0"),
        ("dampening", 0.5, "dampening of the optimizer's group 0 is 0.5 on worker 1, 0.0 on"),
        ("dampening", -0.0, "dampening of the optimizer's group 0 is -0.0 on worker 1, 0.0 on"),
    ],
)
@pytest.mark.parametrize("step", [2, 5])  # where nothing was new in the step before, too
def test_a_setting_that_one_worker_alone_changes_is_named(
    key: str, value: float, said: str, step: int
) -> None:
    def train(rank: int) -> Any:
        def change(group: Any, num_steps: int) -> None:
            if rank == 1 and num_steps == step:
                group[key] = value

        return train_at_rates(nothing, change)

    with pytest.raises(PlanMismatchError, match=said):
        ThreadCluster(train, NUM_WORKERS, is_recoverable=False).run()


def another_loss(model: Any) -> None:
    model.loss_fn = F.l1_loss


def another_optimizer(model: Any) -> None:
    model.optimizer = torch.optim.Adam(model.network.parameters(), lr=0.02)


def train_swapping(swap: Callable[[Any], None]) -> Any:
    torch.manual_seed(0)
    net = InThree()
    model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = Losses()

    def change(index: int, num_read: int) -> None:
        if num_read in (5, 17):  # in the second step of both epochs
            swap(model)

    model.train(2, DataLoader(Changing(change), 4), [losses])
    return copy.deepcopy([losses.seen, model.state_dict(), model.optimizer_state_dict()])


@pytest.mark.parametrize("swap", [another_loss, another_optimizer])
def test_a_data_set_may_swap_what_the_model_holds(swap: Callable[[Any], None]) -> None:
    expected = train_swapping(swap)
    for found in ThreadCluster(lambda rank: train_swapping(swap), NUM_WORKERS).run():
        assert difference(expected, found) is None


@pytest.mark.parametrize("swap", [another_loss, another_optimizer])
@pytest.mark.parametrize("alone", range(NUM_WORKERS))
def test_a_swap_by_one_worker_alone_is_named(swap: Callable[[Any], None], alone: int) -> None:
    """Whether that is the worker that reads, another one, or one that reads nothing."""

    def train(rank: int) -> Any:
        torch.manual_seed(0)
        net = InThree()
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
        swapping = Calling(lambda num_steps: num_steps == 2 and rank == alone and swap(model))
        model.train(1, DataLoader(Changing(lambda index, num_read: None), 4), [swapping])

    one, all_others = {
        another_loss: (r"model\.loss_fn is <function l1_loss", "<function mse_loss"),
        another_optimizer: (r"model\.optimizer is Adam\(lr=0\.02\)", r"SGD\(lr=0\.1\)"),
    }[swap]
    said = rf"{one}.* on worker {alone}, {all_others}.* on worker"
    with pytest.raises(PlanMismatchError, match=said):
        ThreadCluster(train, NUM_WORKERS, is_recoverable=False).run()


def test_a_value_that_the_worker_that_reads_alone_changes_is_named_with_that_of_others() -> None:
    def train(rank: int) -> Any:
        torch.manual_seed(0)
        net = Scaled()
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
        changing = Calling(lambda num_steps: rank == 0 and setattr(net, "scale", 0.5))
        model.train(1, DataLoader(Changing(lambda index, num_read: None), 4), [changing])

    with pytest.raises(PlanMismatchError, match=r"net\.scale is 0\.5 on worker 0, 1\.0 on worker"):
        ThreadCluster(train, NUM_WORKERS, is_recoverable=False).run()


def test_a_value_is_found_by_the_name_under_which_its_change_is_told() -> None:
    held: dict[str, Any] = {"net": {"list": [1.0, ({"k": 2.0},)], "k": 0.5}, "mode": (1, {"k": 3})}
    places = [entry(held, name, f"held.{name}") for name in held]
    guards = Guards([Watched(place, freeze(place.read())) for place in places])
    assert guards.hold()
    held["net"]["list"][0] = held["net"]["list"][1][0]["k"] = held["mode"][1]["k"] = 7
    held["net"]["k"] = 7
    told = guards.failures()
    assert [failure.old for failure in told] == [1.0, 2.0, 0.5, 3]
    names = [failure.place.label for failure in told]
    assert names == ["held.net[0]", "held.net['k']", "held.net['k']", "held.mode['k']"]
    assert guards.value_at("held.net[0]") == 1.0
    assert guards.value_at("held.mode['k']") == 3
    assert guards.value_at("held.other") is MISSING


class OfEvaluation(nn.Module):
    """A loss whose weight only evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(outputs, target)
        return loss if torch.is_grad_enabled() else loss * self.weight


@pytest.mark.parametrize("through_model", [False, True])
def test_what_only_evaluation_reads_of_the_loss_may_be_changed_while_training(
    through_model: bool,
) -> None:
    def train() -> Any:
        torch.manual_seed(0)
        net, loss_fn = InThree(), OfEvaluation()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = gs.Model(net, loss_fn, optimizer, {"Loss": gs.metrics.Loss()})

        def by_model(index: int, num_read: int) -> None:
            changed: Any = model.loss_fn
            changed.weight = 1 / num_read

        def by_itself(index: int, num_read: int) -> None:
            loss_fn.weight = 1 / num_read

        loader = DataLoader(Changing(by_model if through_model else by_itself), 4)
        others, found = [(torch.ones(4, 3), torch.ones(4, 2))], list[Any]()
        for _ in range(3):
            model.train(1, loader)
            found.append(model.eval(others))
        return copy.deepcopy([found, model.state_dict()])

    expected = train()
    for found in ThreadCluster(lambda rank: train(), NUM_WORKERS).run():
        assert difference(expected, found) is None


class Counted:
    """A loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.mse_loss(outputs, target) * self.calls


def test_a_sampler_may_read_what_the_loss_counts() -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net, loss_fn = Scaled(), Counted()

        class Order(Sampler[int]):
            def __iter__(self) -> Any:
                return iter([(i + loss_fn.calls) % 12 for i in range(12)])

            def __len__(self) -> int:
                return 12

        loader = DataLoader(Changing(lambda index, num: None), batch_size=4, sampler=Order())
        model = make(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.05))
        model.train(3, loader)
        return model.state_dict(), loss_fn.calls

    assert_as_alone(lambda: run(PlainModel), lambda: run(gs.Model), NUM_WORKERS)
