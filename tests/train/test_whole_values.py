"""Functions of torch that look at values of modules after the first step: those of others, too."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphsplit as gs
from graphsplit.checkpoint import whole_values
from graphsplit.errors import CheckpointError, PlanMismatchError
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.torch_ext.replaced import FILLING, LOOKING, SAVING

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning"),
]
INPUTS = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(2))
BATCHES = list(zip(INPUTS, TARGETS, strict=True))
Change = Callable[[Any], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if hasattr(nn.Module, "place"):
            self.first.place("MS_WORKER", 0)
            self.second.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return made


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def layers(net: Any) -> tuple[nn.Linear, nn.Linear]:
    return net.first, net.second


def of_each(change: Change) -> Change:
    return lambda net: [change(layer) for layer in layers(net)]


def globally(net: Any) -> None:
    named = [(layer, "weight") for layer in layers(net)]
    prune.global_unstructured(named, pruning_method=prune.L1Unstructured, amount=0.4)


def masked(layer: Any) -> None:
    prune.custom_from_mask(layer, "weight", torch.ones(4, 4).triu())


# After the first step, after the second; whether parameters are other tensors then.
CASES: dict[str, tuple[Change, Change | None, bool]] = {
    "smallest": (
        of_each(lambda layer: prune.l1_unstructured(layer, "weight", amount=0.4)),
        of_each(lambda layer: prune.remove(layer, "weight")),
        False,
    ),
    "pruned twice": (
        of_each(lambda layer: prune.random_unstructured(layer, "weight", amount=0.3)),
        of_each(lambda layer: prune.ln_structured(layer, "weight", amount=0.3, n=2, dim=0)),
        False,
    ),
    "globally": (globally, None, False),
    "masked": (of_each(masked), None, False),
    "parametrized": (
        of_each(lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric())),
        of_each(lambda layer: parametrize.remove_parametrizations(layer, "weight")),
        False,
    ),
    "weight norm": (of_each(parametrizations.weight_norm), None, True),
    "spectral norm": (of_each(parametrizations.spectral_norm), None, True),
    "old weight norm": (
        of_each(nn.utils.weight_norm),
        of_each(nn.utils.remove_weight_norm),
        True,
    ),
    "orthogonal": (of_each(parametrizations.orthogonal), None, True),
    "truncated": (
        of_each(lambda layer: nn.init.trunc_normal_(layer.weight, std=0.2)),
        of_each(lambda layer: nn.init.trunc_normal_(layer.weight, std=0.2, a=0.1, b=0.5)),
        False,
    ),
    "identity": (of_each(lambda layer: nn.init.eye_(layer.weight)), None, False),
}


def train(case: str, make: Any, microbatches: int) -> Any:
    torch.manual_seed(0)
    first, second, makes_parameters = CASES[case]
    net = Net()

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    model = make(net, F.mse_loss, optimizer(), microbatches=microbatches)
    found: list[Any] = []
    for change, batch in zip((None, first, second, None), BATCHES, strict=True):
        if change is not None:
            change(net)
            if makes_parameters:
                model.optimizer = optimizer()
        found += [model.train_step(*batch).clone(), model.predict(batch[0])]
    return copy.deepcopy([found, model.state_dict(), torch.rand(3)])


def compare(run: Callable[[Any], Any]) -> None:
    assert_as_alone(lambda: run(PlainModel), lambda: run(gs.Model))


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_layers_may_be_changed_after_the_first_step(case: str, microbatches: int) -> None:
    compare(lambda make: train(case, make, microbatches))


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_an_average_may_begin_after_the_first_step(options: dict[str, Any]) -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Net()
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        found = [model.train_step(*BATCHES[0]).clone()]
        average: Any = AveragedModel(net, **options)
        averaged = make(average)
        for step, batch in enumerate(BATCHES):
            found.append(model.train_step(*batch).clone())
            average.update_parameters(net)
            if step:
                found.append(averaged.predict(batch[0]))
        return copy.deepcopy([found, model.state_dict(), averaged.state_dict()])

    compare(run)


class Keeping(nn.Module):
    """A buffer, and tensors of its form in an attribute and a dictionary: none in eager mode."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)
        self.first.place("MS_WORKER", 0)
        self.last.place("MS_WORKER", 1)
        self.register_buffer("center", torch.zeros(4))
        self.attribute, self.held = torch.ones(4), lambda: held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        self.center.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.attribute.mul_(0.9).add_(h.detach().mean(0))
        held = self.held()
        held["entry"] = held["entry"] * 0.9 + h.detach().mean(0)
        return self.last(h - self.center) * self.attribute * held["entry"]


@pytest.mark.parametrize("first", [0, 2])
def test_an_average_has_the_buffers_of_eager_mode(first: int) -> None:
    """Its buffers and those of the network are paired by their order."""

    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Keeping({"entry": torch.ones(4)})
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        found = []
        for step in range(4):
            if step == first:
                average: Any = AveragedModel(net)
            found.append(model.train_step(torch.randn(6, 3), torch.randn(6, 4)).clone())
            if step >= first:
                average.update_parameters(net)
        return copy.deepcopy([found, model.state_dict(), average.module.state_dict()])

    compare(run)


def test_a_copy_after_the_first_step_is_whole_on_every_worker() -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Net()
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        found = [model.train_step(*BATCHES[0]).clone()]
        with torch.no_grad():
            net.second.weight.mul_(0.5)
        copied = copy.deepcopy([net, {"layer": net.second}])
        states = [copied[0].state_dict(), copied[1]["layer"].state_dict()]
        found += [copy.deepcopy(states), copied[0](INPUTS[0]).detach()]
        other = make(copied[0], F.mse_loss, torch.optim.SGD(copied[0].parameters(), lr=0.05))
        found += [other.train_step(*BATCHES[1]).clone(), model.train_step(*BATCHES[2]).clone()]
        net.second = copied[1]["layer"]
        model.optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        found.append(model.train_step(*BATCHES[3]).clone())
        return copy.deepcopy([found, model.state_dict(), other.state_dict()])

    compare(run)


def averaged(make: Any) -> Any:
    """A teacher that is copied, an average, and a layer swapped for its copy."""
    torch.manual_seed(0)
    net = Net()
    model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
    found = [model.train_step(*BATCHES[0]).clone()]
    teacher, average = copy.deepcopy(net), AveragedModel(net)
    for batch in BATCHES[1:]:
        average.update_parameters(net)
        found.append(model.train_step(*batch).clone())
    net.second = copy.deepcopy(net.second)
    model.optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    found += [model.train_step(*BATCHES[0]).clone(), teacher(INPUTS[0]).detach()]
    return copy.deepcopy([found, model.state_dict(), teacher.state_dict(), average.state_dict()])


class Keeps(nn.Module):
    """Keeps tensors in attributes, lists and dictionaries, and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)
        self.latest = [torch.zeros(4)]
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.first.place("MS_WORKER", 0)
        self.second.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        self.mean.mul_(0.5).add_(h.detach().mean(0))
        self.latest[0] = h.detach().sum(0)
        found: torch.Tensor = self.second(h + self.mean)
        return found


def test_buffers_that_a_script_goes_through_are_those_of_eager_mode() -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Keeps()
        teacher = copy.deepcopy(net)
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        found: list[Any] = []
        for batch in BATCHES:
            found.append(model.train_step(*batch).clone())
            names = [name for name, _ in net.named_buffers()]
            given = [name for name, _ in net.named_buffers("net", recurse=True)]
            found.append([*names, *given, len([*net.buffers()]), len([*net.norm.buffers()])])
        pairs = zip(teacher.named_buffers(), net.named_buffers(), strict=True)
        found.append([one[0] == other[0] for one, other in pairs])
        return copy.deepcopy([found, model.state_dict()])

    compare(run)


@pytest.mark.parametrize("at", [14, 22, 30])
@pytest.mark.parametrize("case", ["smallest", "pruned twice", "weight norm", "parametrized", ""])
def test_a_worker_that_comes_back_is_given_the_values_again(case: str, at: int) -> None:
    def run(make: Any) -> Any:
        return train(case, make, 1) if case else averaged(make)

    before = torch.default_generator.get_state()
    expected = run(PlainModel)
    torch.default_generator.set_state(before)
    cluster = ThreadCluster(lambda rank: run(gs.Model), 2, SnapshotSettings(every=2), {1: [at]})
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 1


class Counting(nn.Linear):
    """Hangs in the network, does not, and hangs there again."""

    calls = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        return super().forward(x) * self.calls


def taken_away_and_put_back(make: Any) -> Any:
    torch.manual_seed(0)
    net, counting = Net(), Counting(4, 4)
    net.second, other = counting, nn.Linear(4, 4)
    if hasattr(nn.Module, "place"):
        counting.place("MS_WORKER", 1)
        other.place("MS_WORKER", 1)
    model = make(net, F.mse_loss, torch.optim.SGD(net.first.parameters(), lr=0.05))

    class Swapping(gs.callbacks.Callback):
        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            swap(context.step)

    def swap(step: int) -> None:
        if step == 4:
            counting.calls += 3.0  # while it hangs nowhere
        net.second = other if 2 <= step < 6 else counting

    if make is gs.Model:
        model.train(2, BATCHES, [Swapping()])
    else:
        for _ in range(2):
            for step, batch in enumerate(BATCHES, 1):
                model.train_step(*batch)
                swap(step)
    net.second = counting
    return copy.deepcopy([model.train_step(*BATCHES[0]), net.first.bias.shape, counting.calls])


@pytest.mark.parametrize("at", [0, 25, 40])
def test_a_layer_that_hangs_there_again_is_as_it_was_or_workers_disagree(at: int) -> None:
    before = torch.default_generator.get_state()
    expected = taken_away_and_put_back(PlainModel)
    torch.default_generator.set_state(before)
    kills = {1: [at]} if at else {}
    cluster = ThreadCluster(
        lambda rank: taken_away_and_put_back(gs.Model), 2, SnapshotSettings(every=1), kills
    )
    try:
        results = cluster.run()
    except PlanMismatchError as error:
        assert at, error
        assert "net.second.calls" in str(error)
        return
    for found in results:
        assert difference(expected, found) is None


@pytest.mark.parametrize("at", [14, 20, 25])
def test_an_optimizer_may_hold_what_was_taken_out_of_the_network(at: int) -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        model = make(net, F.mse_loss, optimizer)
        found = [model.train_step(*BATCHES[0]).clone()]
        net.second = nn.Linear(4, 4)
        if hasattr(nn.Module, "place"):
            net.second.place("MS_WORKER", 1)
        found += [model.train_step(*batch).clone() for batch in BATCHES[1:]]
        return copy.deepcopy([found, model.state_dict()])

    before = torch.default_generator.get_state()
    expected = run(PlainModel)
    torch.default_generator.set_state(before)
    cluster = ThreadCluster(lambda rank: run(gs.Model), 2, SnapshotSettings(every=1), {1: [at]})
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 1


def test_a_worker_that_comes_back_behind_a_callback_that_has_pruned_says_so() -> None:
    def run(rank: int) -> None:
        torch.manual_seed(0)
        net = Net()
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))

        class Pruning(gs.callbacks.Callback):
            def on_step_end(self, context: gs.callbacks.RunContext) -> None:
                if (context.epoch, context.step) == (1, 2):
                    prune.l1_unstructured(net.first, "weight", amount=0.4)

        model.train(2, BATCHES, [Pruning()])

    cluster = ThreadCluster(run, 2, SnapshotSettings(every=1), {1: [30]})
    with pytest.raises(CheckpointError, match=r"has first.weight_orig(.|\n)*callback(.|\n)*Fix"):
        cluster.run()


def test_functions_of_torch_keep_their_names_and_arguments() -> None:
    functions = (*LOOKING, *FILLING, *SAVING)
    before = [inspect.signature(function) for function in functions]
    whole_values.install()
    for function, signature in zip(functions, before, strict=True):
        assert inspect.signature(function) == signature
        assert function.__name__ in inspect.getsource(inspect.getmodule(function) or torch)
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    assert int(layer.weight_mask.sum()) == 8
    with pytest.raises(TypeError, match="amount"):
        prune.l1_unstructured(layer, "weight")
