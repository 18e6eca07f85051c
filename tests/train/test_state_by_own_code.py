"""States go through the network's and the optimizer's own code: hooks, overrides, extra state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alone_helpers import assert_as_alone
from recovery_helpers import Generators, ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import StateError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(8) % 3


class Net(nn.Module):
    """Lives on two workers; notes what it is told while a state is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(()))
        self.told: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))) * self.scale


class HookBefore(Net):
    """Renames a key of old, and looks at the values that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(HookBefore.before)

    def before(self, state: Any, prefix: str, *rest: Any) -> None:
        if "old.weight" in state:
            state["first.weight"] = state.pop("old.weight")
        state["last.bias"] = state["last.bias"] + self.first.weight.sum() + self.last.weight.sum()


class HookAfter(Net):
    """Changes what was loaded, by values on both workers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(HookAfter.after)

    def after(self, keys: Any) -> None:
        with torch.no_grad():
            self.last.weight.div_(self.last.weight.norm())
            self.scale.fill_(float(self.first.bias.sum() + self.last.bias.sum()))
        self.told.append(float(self.first.weight.detach().sum()))


class HookOnSaving(Net):
    """What is saved is not what the parameters hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(HookOnSaving.saved)
        self.register_load_state_dict_pre_hook(HookOnSaving.loaded)

    def saved(self, state: Any, prefix: str, metadata: Any) -> None:
        state["first.weight"] = state["first.weight"] * 2
        state["mean"] = self.last.weight.detach().mean()

    def loaded(self, state: Any, prefix: str, *rest: Any) -> None:
        state["first.weight"] = state["first.weight"] / 2
        del state["mean"]


class Versioned(Net):
    """Overrides what loads its own entries."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.told.append(str(metadata.get("version")))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Lenient(Net):
    """Overrides the whole."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        own = {key.removeprefix("module."): value for key, value in state.items()}
        return super().load_state_dict(own, strict=False)


class Extra(Net):
    """Has a state beside tensors, made of values on both workers."""

    def get_extra_state(self) -> dict[str, float]:
        return {"sum": float((self.first.weight.sum() + self.last.bias.sum()).detach())}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.told.append(state["sum"])


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def made(
    kind: Callable[[], Net], place: bool, optimizer: Callable[[nn.Module], Any] = adam
) -> tuple[Net, gs.Model]:
    net = kind()
    if place:
        net.first.place("MS_WORKER", 0)
        net.norm.place("MS_WORKER", 1)
        net.last.place("MS_WORKER", 1)
    return net, gs.Model(net, nn.CrossEntropyLoss(), optimizer(net))


def steps(model: gs.Model, number: int = 2) -> list[torch.Tensor]:
    return [model.train_step(INPUTS, TARGETS) for _ in range(number)]


def compare(script: Callable[[bool], Any], *, is_recoverable: bool = False) -> None:
    def seeded(place: bool) -> Any:
        torch.manual_seed(0)
        return copy.deepcopy(script(place))

    alone, on_a_worker = (functools.partial(seeded, place) for place in (False, True))
    assert_as_alone(alone, on_a_worker, is_recoverable=is_recoverable)


def as_it_is(state: dict[str, Any]) -> dict[str, Any]:
    return state


def with_an_old_key(state: dict[str, Any]) -> dict[str, Any]:
    state["old.weight"] = state.pop("first.weight")
    return state


def with_another_prefix(state: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{key}": value for key, value in state.items() if key != "scale"}


@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (HookBefore, as_it_is),
        (HookBefore, with_an_old_key),
        (HookAfter, as_it_is),
        (HookOnSaving, as_it_is),
        (Versioned, as_it_is),
        (Lenient, with_another_prefix),
        (Extra, as_it_is),
    ],
)
def test_a_state_in_memory_goes_through_the_networks_own_code(kind, change, has_run) -> None:
    def script(place: bool) -> Any:
        net, model = made(kind, place)
        _, other = made(kind, place)
        found: list[Any] = steps(other)
        state = copy.deepcopy(other.state_dict())
        found += [list(state), copy.deepcopy(state), *(steps(model) if has_run else [])]
        model.load_state_dict(change(state))
        found += [*steps(model), copy.deepcopy(model.state_dict())]
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        return [*found, *steps(model), model.state_dict(), net.told, model.predict(INPUTS)]

    compare(script)


@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize("kind", [HookBefore, HookAfter, HookOnSaving, Versioned])
def test_a_state_in_a_file_does_too(kind, has_run: bool, tmp_path: Path) -> None:
    def script(place: bool) -> Any:
        file = tmp_path / f"{place}.safetensors"
        net, model = made(kind, place)
        _, other = made(kind, place)
        steps(other)
        other.state_dict(to=file)
        found: list[Any] = steps(model) if has_run else []
        model.load_state_dict(file)
        return [*found, *steps(model), model.state_dict(), net.told]

    compare(script)


@pytest.mark.parametrize("kind", [HookAfter, Versioned])
def test_a_state_in_a_folder_does_too(kind, tmp_path: Path) -> None:
    def script(place: bool) -> Any:
        net, model = made(kind, place)
        _, other = made(kind, place)
        steps(other)
        other.save(tmp_path / str(place))
        steps(model)
        model.load(tmp_path / str(place))
        return [*steps(model), model.state_dict(), net.told]

    compare(script)


@pytest.mark.parametrize("is_recoverable", [True, False])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("first.weight"),
        lambda state: state.update(unknown=torch.ones(1)),
        lambda state: state.update({"last.bias": torch.ones(7)}),
    ],
)
def test_what_does_not_fit_is_loaded_as_far_as_in_one_process_and_may_be_caught(
    spoil: Callable[[Any], Any], is_recoverable: bool
) -> None:
    def script(place: bool) -> Any:
        _, model = made(Net, place)
        steps(model)
        good = copy.deepcopy(model.state_dict())
        bad = {key: value + 1 for key, value in good.items()}
        spoil(bad)
        with pytest.raises(RuntimeError, match="Error\\(s\\) in loading state_dict for Net"):
            model.load_state_dict(bad)
        found = [copy.deepcopy(model.state_dict()), *steps(model)]
        model.load_state_dict(good)
        return [*found, *steps(model), model.state_dict()]

    compare(script, is_recoverable=is_recoverable)


def test_an_error_of_a_hook_is_raised_on_all_workers_alike() -> None:
    def script(place: bool) -> Any:
        net, model = made(Net, place)
        steps(model)
        net.norm.register_load_state_dict_post_hook(lambda module, keys: {}["nothing"])
        with pytest.raises(StateError if place else KeyError, match="nothing"):
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        return steps(model)

    compare(script)


def test_a_state_that_fits_on_one_worker_alone_ends_the_job() -> None:
    def script(rank: int) -> None:
        torch.manual_seed(0)
        _, model = made(Net, True)
        steps(model)
        state = model.state_dict()
        if rank == 1:
            del state["scale"]
        model.load_state_dict(state)

    with pytest.raises(gs.errors.GraphsplitError) as caught:
        ThreadCluster(script, 2, is_recoverable=False).run()
    assert "loading a state into the network ended otherwise on some workers" in str(caught.value)
    assert "Fix: pass the same state on every worker" in str(caught.value)


@pytest.mark.parametrize("loaded", ["model", "optimizer", "own loop"])
def test_values_that_differ_between_workers_are_not_mixed(loaded: str) -> None:
    def script(rank: int) -> None:
        torch.manual_seed(0)
        net, model = made(Net, True)
        if loaded != "own loop":
            steps(model)
        if loaded == "model":
            state = copy.deepcopy(model.state_dict())
            state["last.bias"] += rank
            model.load_state_dict(state)
        elif loaded == "optimizer":
            entries = copy.deepcopy(model.optimizer_state_dict())
            next(iter(entries["state"].values()))["exp_avg"] += rank
            model.load_optimizer_state_dict(entries)
        else:
            net.last.place("MS_WORKER", 0)
            net = gs.distribute(net)
            state = copy.deepcopy(net.state_dict())
            state["last.bias"] += rank
            net.load_state_dict(state)

    with pytest.raises(gs.errors.ConfigurationError) as caught:
        ThreadCluster(script, 2, is_recoverable=False).run()
    assert "the workers load different values into the" in str(caught.value)
    assert "call gs.barrier() in between" in str(caught.value)


def test_a_network_that_an_optimizer_steps_later_has_what_was_loaded() -> None:
    def trained(place: bool) -> Any:
        torch.manual_seed(0)
        nets: Any = [nn.Linear(4, 2), nn.Linear(4, 2)]
        optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], 0.1, 0.9)
        loaded = optimizer.state_dict()
        buffers = [p.detach() + 1 for net in nets for p in net.parameters()]
        loaded["state"] = {n: {"momentum_buffer": value} for n, value in enumerate(buffers)}
        if place:
            for net in nets:
                net.place("MS_WORKER", 0)
            nets = [gs.distribute(net) for net in nets]
        optimizer.load_state_dict(loaded)
        losses = []
        for used in ([nets[0]], nets, nets):
            loss = sum(net(torch.ones(3, 4)).square().sum() for net in used)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [net.state_dict() for net in nets], optimizer.state_dict()["state"]

    expected = trained(False)
    for found in ThreadCluster(lambda rank: trained(True), 2, is_recoverable=False).run():
        assert difference(expected, found) is None


def test_a_state_that_does_not_fit_is_an_error_that_an_own_loop_may_catch() -> None:
    def trained(place: bool) -> Any:
        torch.manual_seed(0)
        net: Any = Net()
        if place:
            net.first.place("MS_WORKER", 0)
            net.norm.place("MS_WORKER", 1)
            net.last.place("MS_WORKER", 1)
            net = gs.distribute(net)
        optimizer, losses = adam(net), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(INPUTS), TARGETS)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
            bad = {key: value + 1 for key, value in copy.deepcopy(net.state_dict()).items()}
            del bad["last.weight"]
            with pytest.raises(RuntimeError, match="Missing key"):
                net.load_state_dict(bad)
        return [float(loss) for loss in losses], copy.deepcopy(net.state_dict())

    losses, state = trained(False)
    for found, there in ThreadCluster(lambda rank: trained(True), 2, is_recoverable=False).run():
        assert found == losses
        assert difference(dict(there), dict(state)) is None


def test_a_parameter_that_loading_replaces_is_refused() -> None:
    def replace(net: Net, keys: Any) -> None:
        net.first.weight = nn.Parameter(net.first.weight.detach() * 2)

    def script(rank: int) -> None:
        torch.manual_seed(0)
        net, model = made(Net, True)
        steps(model)
        net.register_load_state_dict_post_hook(replace)
        model.load_state_dict(model.state_dict())

    with pytest.raises(StateError, match=r"another tensor in the place of first\.weight"):
        ThreadCluster(script, 2, is_recoverable=False).run()


def test_the_state_of_an_optimizer_has_that_of_layers_that_were_taken_out() -> None:
    def train() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        for rank, layer in enumerate((net[0], net[1], net[2])):
            layer.place("MS_WORKER", rank % 2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        model = gs.Model(net, nn.functional.mse_loss, optimizer)
        model.train_step(torch.ones(4, 3), torch.ones(4, 2))
        net[1] = nn.Identity()
        model.train_step(torch.ones(4, 3), torch.zeros(4, 2))
        return copy.deepcopy(model.optimizer_state_dict())

    before = Generators.now()
    expected = train()
    before.put_back()
    for found in ThreadCluster(lambda rank: train(), 2, is_recoverable=False).run():
        assert difference(expected, found) is None
    assert len(expected["state"]) == 6


def test_entries_of_an_optimizer_stand_in_the_order_of_their_first_steps(tmp_path: Path) -> None:
    def orders(path: Path) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        for rank, layer in enumerate(net):
            layer.place("MS_WORKER", rank % 2)
            layer.requires_grad_(rank == 2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        model = gs.Model(net, nn.functional.mse_loss, optimizer)
        found = []
        for step in range(5):
            if step in (1, 3):
                net[1 if step == 1 else 0].requires_grad_(True)
            if step == 2:
                optimizer.state.pop(net[2].weight, None)
            model.train_step(torch.ones(4, 3), torch.ones(4, 2))
            found.append(list(model.optimizer_state_dict()["state"]))
        model.optimizer_state_dict(to=path)
        model.load_optimizer_state_dict(path)
        found.append(list(model.optimizer_state_dict()["state"]))
        model.load_optimizer_state_dict(model.optimizer_state_dict())
        optimizer.state.pop(net[1].weight, None)
        model.train_step(torch.ones(4, 3), torch.ones(4, 2))
        return [*found, list(model.optimizer_state_dict()["state"])]

    before = Generators.now()
    expected = orders(tmp_path / "alone")
    before.put_back()
    together = ThreadCluster(lambda rank: orders(tmp_path / "both"), 2, is_recoverable=False).run()
    assert together == [expected, expected]
    assert expected[1:3] == [[4, 5, 2, 3], [5, 2, 3, 4]]
    assert expected[-2:] == [[5, 2, 3, 4, 0, 1], [5, 3, 4, 0, 1, 2]]


def test_the_networks_own_method_names_the_models() -> None:
    def script(rank: int) -> None:
        torch.manual_seed(0)
        net, model = made(Net, True)
        steps(model)
        net.load_state_dict(model.state_dict())

    with pytest.raises(RuntimeError, match=r"call model\.load_state_dict\(state\) on every worker"):
        ThreadCluster(script, 2, is_recoverable=False).run()


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(net, Net)
    rest = [*net.first.parameters(), *net.norm.parameters()]
    groups = [{"params": net.last.parameters(), "lr": 0.03}, {"params": rest}]
    return torch.optim.AdamW(groups)


@pytest.mark.parametrize("optimizer", [adam, two_groups])
@pytest.mark.parametrize(
    "number", [lambda n: n + 100, lambda n: 50 - n, lambda n: f"parameter {n}"]
)
def test_numbers_of_parameters_are_matched_in_the_order_of_the_groups(number, optimizer) -> None:
    def script(place: bool) -> Any:
        _, other = made(Net, place, optimizer)
        steps(other)
        state = copy.deepcopy(other.optimizer_state_dict())
        renumbered = {
            "state": {number(n): entry for n, entry in state["state"].items()},
            "param_groups": [
                {**group, "params": [number(n) for n in group["params"]]}
                for group in state["param_groups"]
            ],
        }
        _, model = made(Net, place, optimizer)
        found = steps(model, 1)
        model.load_optimizer_state_dict(renumbered)
        return [*found, *steps(model), model.optimizer_state_dict()]

    compare(script)


class Halving(torch.optim.Adam):
    """Overrides both methods, and looks at all entries."""

    def load_state_dict(self, state: Any) -> None:
        halved = {n: {**e, "exp_avg": e["exp_avg"] / 2} for n, e in state["state"].items()}
        super().load_state_dict({**state, "state": halved})

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["sum"] = float(sum(e["exp_avg_sq"].sum() for e in state["state"].values()))
        return state


def hooked(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(net)

    def before(optimizer: Any, state: Any) -> Any:
        halved = {n: {**e, "exp_avg": e["exp_avg"] / 2} for n, e in state["state"].items()}
        return {**state, "state": halved}

    def after(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * len(optimizer.state)

    def saved(optimizer: Any, state: Any) -> Any:
        return {**state, "number": len(state["state"])}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.register_state_dict_post_hook(saved)
    return optimizer


def halving(net: nn.Module) -> torch.optim.Optimizer:
    return Halving(net.parameters(), lr=0.01)


@pytest.mark.parametrize("optimizer", [hooked, halving])
@pytest.mark.parametrize("has_run", [True, False])
def test_an_optimizers_state_goes_through_its_own_code(optimizer, has_run: bool) -> None:
    def script(place: bool) -> Any:
        _, other = made(Net, place, optimizer)
        steps(other)
        state = copy.deepcopy(other.optimizer_state_dict())
        _, model = made(Net, place, optimizer)
        found: list[Any] = steps(model) if has_run else []
        model.load_optimizer_state_dict(copy.deepcopy(state))
        return [*found, state, *steps(model), model.optimizer_state_dict()]

    compare(script)


@pytest.mark.parametrize(("optimizer", "code"), [(hooked, "the hook"), (halving, "Halving.state")])
def test_an_optimizer_with_code_of_its_own_is_not_streamed(optimizer, code, tmp_path) -> None:
    def script(place: bool) -> Any:
        _, model = made(Net, place, optimizer)
        steps(model)
        with pytest.raises(StateError, match=f"cannot be saved piece by piece: {code}"):
            model.save(tmp_path / "folder")
        with pytest.raises(StateError, match=r"Fix: call model\.optimizer_state_dict\(\)"):
            model.optimizer_state_dict(to=tmp_path / "file")
        return steps(model)

    compare(script)


def test_a_state_of_other_groups_may_be_caught() -> None:
    def script(place: bool) -> Any:
        _, model = made(Net, place)
        steps(model)
        with pytest.raises(ValueError, match="number of parameter groups"):
            model.load_optimizer_state_dict({"state": {}, "param_groups": []})
        return [*steps(model), model.optimizer_state_dict()]

    compare(script)
