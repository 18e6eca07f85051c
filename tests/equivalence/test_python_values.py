"""What network and loss read from Python is what the plain loop would read at that step."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import SimulatedCluster
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError

Change = Callable[[int, Any, Any], None]
pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads")


class Settings:
    def __init__(self) -> None:
        self.scale = 1.5
        self.unused = 0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.25


class Config(dict[str, float]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Net(nn.Module):
    shared_scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.bn, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.beta, self.flag, self.power, self.slope = 0.5, True, 2, 0.1
        self.settings, self.slotted = Settings(), Slotted()
        self.table = {"a": 1.0, "b": 2.0}
        self.row, self.queue = [1.0, 2.0, 3.0], deque([1.0, 2.0])
        self.numbers = np.array([0.5, 1.5])
        self.space = SimpleNamespace(x=1.0)
        self.mask = torch.ones(4)
        self.activation = F.relu
        self.config, self.first.weight.scale = Config(scale=1.0, other=2.0), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.dropout(self.bn(self.first(x)))
        h = h * self.beta + self.settings.scale * h
        h = self.activation(h) * self.slotted.scale * self.shared_scale
        if self.flag:
            h = h + self.table["a"] * h
        for number in self.row:
            h = h + number
        h = F.leaky_relu(h * self.queue[0], self.slope) * self.mask
        h = h * float(self.numbers[0]) * self.space.x
        h = h * self.first.weight.scale * getattr(self.first.bias, "scale", 1.0)
        made: torch.Tensor = self.second(h) ** self.power * self.config.scale
        return made


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)


def follows(
    change: Change, *, microbatches: int = 1, loss_fn: Any = rows_against_target, **options: Any
) -> SimulatedCluster:
    return assert_same_bits(
        options.pop("make_network", Net),
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=loss_fn,
        microbatches=microbatches,
        before_step=change,
        plan_everywhere=True,
        **options,
    )


def _set(path: str, values: Callable[[int], Any]) -> Change:
    def change(step: int, net: Any, loss_fn: Any) -> None:
        *owners, name = path.split(".")
        one = net
        for owner in owners:
            one = getattr(one, owner)
        setattr(one, name, values(step))

    return change


def _scaled(original: Callable[..., Any], scale: float) -> Callable[..., Any]:
    return lambda module, x: original(module, x) * scale


def _freeze_bn(step: int, net: Any, loss_fn: Any) -> None:
    if step >= 2:
        net.bn.eval()


def _replace_weight(step: int, net: Any, loss_fn: Any) -> None:
    if step == 3:
        net.second.weight = nn.Parameter(torch.ones(4, 4))


def _replace_layer(step: int, net: Any, loss_fn: Any) -> None:
    if step == 2:
        net.dropout = nn.Identity()
    if step == 4:
        net.bn = nn.Sequential(net.bn)


def _hook(step: int, net: Any, loss_fn: Any) -> None:
    if step == 2:
        net.first.register_forward_hook(lambda module, args, output: output * 2)


def _own_forward(step: int, net: Any, loss_fn: Any) -> None:
    if step == 3:
        original = net.first.forward
        net.first.forward = lambda x: original(x) * 3


def _equal_mask_that_is_written_to(step: int, net: Any, loss_fn: Any) -> None:
    """The second one is equal to the first, and then changes; the first does not."""
    if step in (0, 1):
        net.mask = torch.full((4,), 0.5)
    else:
        net.mask.mul_(0.5)


CHANGES: dict[str, Change] = {
    "an equal tensor that is written to": _equal_mask_that_is_written_to,
    "attribute": _set("beta", lambda step: 0.5 * 0.9**step),
    "attribute of an object": _set("settings.scale", lambda step: 1.0 + step),
    "slot": _set("slotted.scale", lambda step: 1.0 / (step + 1)),
    "flag": _set("flag", lambda step: step % 2 == 0),
    "int power": _set("power", lambda step: 2 + step % 2),
    "int for float": _set("beta", lambda step: [1, 1.0, True][step % 3]),
    "dropout p": _set("dropout.p", lambda step: 0.1 * step),
    "momentum": _set("bn.momentum", lambda step: 0.1 + 0.1 * step),
    "eps": _set("bn.eps", lambda step: 1e-5 * 2**step),
    "function": _set("activation", lambda step: F.relu if step < 3 else torch.tanh),
    "slope": _set("slope", lambda step: 0.1 / (step + 1)),
    "entry": lambda step, net, loss: net.table.update(a=float(step)),
    "list item": lambda step, net, loss: net.row.__setitem__(1, step / 2),
    "list grows": lambda step, net, loss: net.row.append(1.0),
    "deque": lambda step, net, loss: net.queue.rotate(),
    "array": lambda step, net, loss: net.numbers.__setitem__(0, step + 0.5),
    "namespace": lambda step, net, loss: setattr(net.space, "x", 1.0 + step),
    "dictionary of attributes": lambda step, net, loss: net.config.update(scale=1.0 + step),
    "attribute of a weight": _set("first.weight.scale", lambda step: 1.0 + step),
    "attribute that a bias gets": _set("first.bias.scale", lambda step: 1.0 + step),
    "tensor in place": lambda step, net, loss: net.mask.mul_(0.5),
    "tensor replaced": lambda step, net, loss: setattr(net, "mask", torch.full((4,), 0.5 + step)),
    "frozen batch norm": _freeze_bn,
    "weight replaced": _replace_weight,
    "layer replaced": _replace_layer,
    "hook": _hook,
    "forward replaced": _own_forward,
    "requires_grad": _set("first.weight.requires_grad", lambda step: step % 2 == 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_script_changes_between_steps_counts(name: str) -> None:
    follows(CHANGES[name], evaluate_after=())


@pytest.mark.parametrize("name", ["forward", "__call__", "_call_impl"])
def test_what_runs_when_a_module_of_a_class_is_called_is_watched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(nn.Linear, name)

    def change(step: int, net: Any, loss_fn: Any) -> None:
        scale = 3.0 if step in (2, 3) else 1.0
        monkeypatch.setattr(nn.Linear, name, _scaled(original, scale), raising=False)

    follows(change, evaluate_after=())


@pytest.mark.parametrize(
    "name", ["attribute", "dropout p", "frozen batch norm", "layer replaced", "list item"]
)
def test_it_counts_for_microbatches_eval_and_predict(name: str) -> None:
    follows(CHANGES[name], microbatches=4, evaluate_after=(3,))


class Counting:
    """A loss that counts its calls, keeps what it was given, and weighs by that."""

    scale = 1.0

    def __init__(self) -> None:
        self.calls, self.seen, self.table = 0, [0.0], {"n": 0}
        self.schedule = [1.0, 0.5, 0.25, 0.125] * 20

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.table["n"] += 2
        self.seen.append(self.calls / 7)
        weight = min(1.0, self.calls / 10) + self.table["n"] + self.seen[-1]
        return rows_against_target(outputs, target) * weight * self.schedule.pop(0)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_loss_keeps_state_in_attributes_lists_and_dictionaries(microbatches: int) -> None:
    def nothing(step: int, net: Any, loss_fn: Any) -> None:
        pass

    follows(nothing, microbatches=microbatches, loss_fn=Counting())


def num_captures(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> int:
    from graphsplit.planning import planner

    made: list[Any] = []
    original = planner.capture_graph

    def count(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(planner, "capture_graph", count)
    monkeypatch.delenv("GS_RECAPTURE_EVERY")
    run()
    return len(made)


def test_a_number_that_changes_at_each_step_takes_three_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> None:
        assert_same_bits(
            Net,
            batches_of(4, 3),
            steps=1000,
            num_workers=1,
            loss_fn=rows_against_target,
            before_step=lambda step, net, loss: setattr(net, "beta", net.beta * 0.99),
            plan_everywhere=True,
            evaluate_after=(),
        )

    assert num_captures(monkeypatch, run) == 3


class OfNumPy(nn.Module):
    """Computes with NumPy's numbers, and counts in one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.beta, self.calls = np.float64(0.5), np.float64(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 0.1
        weight = self.beta**1.7 + 1 / self.calls
        made: torch.Tensor = self.second(torch.tanh(self.first(x) * self.beta)) * weight
        return made


@pytest.mark.parametrize("microbatches", [1, 4])
def test_numbers_of_numpy_are_lifted_too(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = np.linspace(0.9, 0.1, 30)

    def run() -> None:
        follows(
            lambda step, net, loss: setattr(net, "beta", schedule[step]),
            make_network=OfNumPy,
            microbatches=microbatches,
            steps=30,
            evaluate_after=(29,),
        )

    # Each of two workers: three of training, and again where several microbatches count.
    assert num_captures(monkeypatch, run) <= 2 * (3 * microbatches + 2)


def test_a_flag_that_toggles_takes_two_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        assert_same_bits(
            Net,
            batches_of(4, 3),
            steps=8,
            num_workers=1,
            loss_fn=rows_against_target,
            before_step=lambda step, net, loss: setattr(net, "flag", step % 2 == 0),
            plan_everywhere=True,
            evaluate_after=(),
        )

    assert num_captures(monkeypatch, run) == 2


def test_explain_prints_the_places_that_are_watched() -> None:
    net: Any = Net()
    model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    batch = (torch.randn(4, 3), torch.randn(4, 4))
    text = model.explain(*batch, detail="state")
    assert re.search(r"^  net\.beta = 0\.5 +# \S*test_python_values\.py:\d+$", text, re.MULTILINE)
    assert re.search(r"^  net\.flag = True +# ", text, re.MULTILINE)
    assert re.search(r"^Functions and classes that run\n  .*\bcode of Net\.forward\b", text, re.M)
    assert "net.forward = " not in text  # it counts of every module, and is said once for all
    assert "net.beta" not in model.explain(*batch)
    with pytest.raises(ConfigurationError, match="detail"):
        model.explain(*batch, detail="values")


class Turns:
    """Looks up a count under a key that it counts too: no number can stand for that."""

    def __init__(self) -> None:
        self.seen = {0: 0, 1: 0, 2: 0, "all": 0}

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.seen[self.seen["all"] % 3] += 1
        self.seen["all"] += 1
        return nn.functional.mse_loss(output, target) * (1 + self.seen[0])


def test_what_cannot_be_lifted_leaves_no_trace_in_buffers() -> None:
    assert_same_bits(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        [(torch.randn(8, 3), torch.randn(8, 4))],
        num_workers=1,
        steps=1,
        loss_fn=Turns(),
        microbatches=4,
        plan_everywhere=True,
    )


class CountsInside(nn.Linear):
    """Counts in containers that lie in others."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.table, self.pair = {"k": {0: 1.0, 1: 1.0}, "all": 0}, ({"n": 1.0}, [0.5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table["all"] += 1
        self.table["k"][self.table["all"] % 2] += 0.5
        self.pair[0]["n"] += 0.25
        return super().forward(x) * self.table["k"][0] + self.pair[0]["n"]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_forward_counts_in_a_container_inside_another(microbatches: int) -> None:
    net = CountsInside()
    inner = net.table["k"], net.pair[0]
    model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    model.explain(torch.randn(4, 3), torch.randn(4, 4))
    assert net.table["k"] is inner[0]  # a capture leaves them where they are
    assert net.pair[0] is inner[1]
    assert_same_bits(
        CountsInside,
        batches_of(4, 3),
        num_workers=2,
        steps=4,
        loss_fn=rows_against_target,
        microbatches=microbatches,
    )


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.size = nn.Conv1d(1, 4, 3), nn.Linear(4, 2), 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x[:, None], size=self.size, mode="linear")
        made: torch.Tensor = self.second(self.first(x).relu().mean(-1))
        return made


def test_a_size_that_grows_is_no_operand_but_a_graph_each() -> None:
    follows(_set("size", lambda step: 4 + step // 2 * 2), make_network=Resized)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.first, self.second = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.tanh(self.bn(torch.relu(self.first(x)))))
        return made


def _swap_layers(step: int, net: Any, loss_fn: Any) -> None:
    if step in (1, 3):
        net.first, net.second = net.second, net.first


def test_layers_of_two_workers_may_be_swapped_and_swapped_back() -> None:
    follows(_swap_layers, make_network=Three, steps=5)


class CountsUses(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.uses = getattr(self.weight, "uses", 0) + 1
        return super().forward(x) * self.weight.uses


@pytest.mark.parametrize("microbatches", [1, 4])
def test_forward_counts_in_an_attribute_of_a_weight(microbatches: int) -> None:
    assert_same_bits(
        lambda: CountsUses(3, 4),
        batches_of(4, 3),
        num_workers=1,
        steps=3,
        loss_fn=rows_against_target,
        microbatches=microbatches,
    )


class EverySecond(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x)
        return y * 2 if self.calls % 2 else y


def test_a_counter_that_decides_in_turns_takes_three_captures_a_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> None:
        assert_same_bits(
            EverySecond,
            batches_of(4, 3),
            steps=12,
            num_workers=1,
            loss_fn=rows_against_target,
            plan_everywhere=True,
            evaluate_after=(),
        )

    assert num_captures(monkeypatch, run) == 6


def test_what_is_not_read_takes_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(step: int, net: Any, loss: Any) -> None:
        net.unused = step
        net.settings.unused = step
        net.table["b"] = math.pi * step

    def run() -> None:
        assert_same_bits(
            Net,
            batches_of(4, 3),
            steps=5,
            num_workers=1,
            loss_fn=rows_against_target,
            before_step=change,
            plan_everywhere=True,
            evaluate_after=(),
        )

    assert num_captures(monkeypatch, run) == 1
