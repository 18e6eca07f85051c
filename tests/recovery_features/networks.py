"""What a network is made of."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import graphsplit as gs
from recovery_features.parts import adam, all_of, batches, feature, pairs, put, trained


@feature
def built_later(place: bool = True) -> Any:
    torch.manual_seed(0)
    with gs.deferred_init():
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))
    put(net, "0", "1", "2", place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.middle = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.middle(self.embedding(tokens)))
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        found: torch.Tensor = self.head(hidden + self.mean)
        return found


@feature
def tied_over_workers(place: bool = True) -> Any:
    torch.manual_seed(0)
    net = put(Tied(), "embedding", "middle", "head", place=place)
    net.norm.place("MS_WORKER", 2)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    tokens = torch.arange(24) % 6
    return trained(model, DataLoader(TensorDataset(tokens, (tokens + 1) % 6), 8, shuffle=True))


class Rescaled(nn.Module):
    """Leaves attributes behind: another graph follows after eval, as with RWKV of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.is_scaled = False
        self.length: Any = None
        self.kinds: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_scaled == self.training:
            with torch.no_grad():
                if self.is_scaled:
                    self.second.weight.mul_(2.0)
                else:
                    self.second.weight.div_(2.0)
            self.is_scaled = not self.is_scaled
        self.length, self.kinds = x.shape[0], {"rows": x.shape[0], "now": self.training}
        found: torch.Tensor = self.second(torch.relu(self.first(x)))
        return found


@feature
def attributes_left_by_forward(place: bool = True) -> Any:
    torch.manual_seed(0)
    net: Any = put(Rescaled(), "first", "second", place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    found: list[Any] = []
    data = batches()
    for _ in range(3):
        model.train(1, data)
        found.append(model.eval(data))
        found += [model.train_step(x, y) for x, y in data]
        found.append(model.predict(pairs()[:8][0]))
    return found, all_of(model), net.is_scaled, net.length, net.kinds


@feature
def attributes_and_microbatches(place: bool = True) -> Any:
    torch.manual_seed(0)
    net: Any = put(Rescaled(), "first", "second", place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()}, microbatches=4
    )
    found: list[Any] = []
    data = batches()
    for _ in range(3):
        found.append(model.eval(data))
        model.train(1, data)
    return found, all_of(model), net.is_scaled, net.length


def shifting() -> Any:
    table = {"by": 0.0}

    def shift(hidden: torch.Tensor, *, twice: float = 0.0) -> torch.Tensor:
        return hidden + table["by"] + 2 * twice

    shift.by = table  # type: ignore[attr-defined]
    return shift


class Weighed(nn.Module):
    """Reads what the script anneals, counts, and keeps tensors in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale, self.calls, self.flag = 1.0, 0, False
        self.space, self.shift = SimpleNamespace(bias=0.0, unused=object()), shifting()
        self.means: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None
        self.rate, self.counted, self.levels = np.float64(1), np.int64(0), np.ones(2, np.float32)
        self.recent = deque([0.5], maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.counted = self.calls + 1, self.counted + 1
        hidden = torch.relu(self.first(x)) * self.scale + self.calls / 100
        hidden = hidden * self.rate + float(self.levels[0]) * self.recent[-1] + self.counted
        self.means = [*self.means[-1:], hidden.detach().mean(0)]
        hidden = self.last = hidden + sum(self.means)
        hidden = self.shift(hidden) + self.space.bias
        found: torch.Tensor = self.third(self.second(hidden if self.flag else hidden * 2))
        return found


class Annealing(gs.callbacks.Callback):
    def __init__(self, net: Any) -> None:
        self.net = net

    def on_step_end(self, context: Any) -> None:
        self.net.scale, self.net.rate = self.net.scale * 0.9, self.net.rate * 0.9
        self.net.flag = not self.net.flag
        self.net.space.bias, self.net.space.unused = self.net.space.bias + 0.125, object()
        self.net.shift.__kwdefaults__["twice"] += 0.25
        self.net.shift.by["by"] -= 0.5


@feature
def python_values(place: bool = True) -> Any:
    torch.manual_seed(0)
    net: Any = put(Weighed(), "first", "second", "third", place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    found: list[Any] = []
    data = batches()
    for _ in range(2):
        model.train(1, data, callbacks=[Annealing(net)])
        for x, y in data:
            net.scale += 0.25
            net.rate = net.rate + 0.1
            found.append(model.train_step(x, y))
        found.append(model.eval(data))
        net.levels[0] *= 0.5
        net.recent.append(net.recent[-1] / 3)
    of_numpy = [(type(v), v.tobytes()) for v in (net.rate, net.counted, net.levels)]
    return found, all_of(model), net.scale, net.calls, net.flag, of_numpy, list(net.recent)


class Scaled(nn.Module):
    """Reads tensors of one element: in an attribute, in a dictionary, and by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale, self.table = torch.tensor(0.5), {"by": torch.tensor([0.25]), "at": 1.0}
        self.row = [torch.tensor(3), torch.tensor(0.125)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x)) * self.scale + self.table["by"] * self.table["at"]
        hidden = self.second(hidden) * self.row[1].item() + self.row[0]
        found: torch.Tensor = self.third(hidden)
        return found


class Scaling(gs.callbacks.Callback):
    def __init__(self, net: Any) -> None:
        self.net = net

    def on_step_end(self, context: Any) -> None:
        self.net.scale.mul_(0.97)
        self.net.table["by"], self.net.table["at"] = self.net.table["by"] * 0.9, 0.5
        self.net.row[0] += 1


@feature
def tensors_of_one_element(place: bool = True) -> Any:
    torch.manual_seed(0)
    net: Any = put(Scaled(), "first", "second", "third", place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    found: list[Any] = []
    for _ in range(2):
        model.train(1, batches(), callbacks=[Scaling(net)])
        for x, y in batches():
            net.scale = net.scale - 0.01
            net.row[1].data.mul_(0.9)
            found.append(model.train_step(x, y))
    return found, all_of(model), net.scale, net.table, net.row


class Appending(nn.Module):
    """Reads the ends of lists that it and the script append to, and a buffer that steers it."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.seen, self.rates, self.calls = [0.5], [1.0], 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        if self.calls % 3 == 0:
            self.seen.append(self.seen[-1] * 0.9)
        hidden = torch.relu(self.first(x)) * self.rates[-1]
        hidden = self.second(hidden * 0.9 if self.count < 6 else hidden)
        found: torch.Tensor = self.third(hidden)
        return found + self.seen[-1]


class Appended(gs.callbacks.Callback):
    def __init__(self, net: Any) -> None:
        self.net = net

    def on_step_end(self, context: Any) -> None:
        self.net.rates.append(1 / (1 + self.net.calls))


@feature
def values_at_ends_of_lists(place: bool = True) -> Any:
    torch.manual_seed(0)
    net: Any = put(Appending(), "first", "second", "third", place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    for _ in range(4):
        model.train(1, batches(), callbacks=[Appended(net)])
    return all_of(model), net.seen, net.rates, net.calls, net.count.item()


class Counting(nn.Module):
    """Python that capture does not see: kept whole, it may remember what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = [0]
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        mixed: torch.Tensor = self.inner(x) / self.calls[0]
        if self.last is not None:
            mixed = mixed + 0.1 * self.last
        self.last = mixed.detach().mean(0)
        return mixed


@feature
def kept_whole_with_memory(place: bool = True) -> Any:
    torch.manual_seed(0)
    middle = gs.opaque(Counting(), outputs=lambda x: torch.empty_like(x))
    net = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 3))
    put(net, "0", "1", "2", place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)))


class WithExtra(nn.Linear):
    """Keeps something in its extra state that a hook changes."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


@feature
def extra_state_and_loss_with_buffers(place: bool = True) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), WithExtra(8, 8), nn.Linear(8, 3))
    put(net, "0", "1", "2", place=place)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
            return functional.cross_entropy(outputs - self.centre, target)

    class Counts(gs.callbacks.Callback):
        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            net[1].seen += 1  # type: ignore[operator]

    return trained(gs.Model(net, Centred(), adam(net)), None, 3, Counts()), net[1].seen


class OtherForms(nn.Module):
    """A table that is registered when it is needed, and a queue that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("queue", torch.zeros(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(8).cos(), persistent=False)
        self.queue = torch.cat([self.queue, hidden.detach()])[-3 * len(x) :]
        hidden = torch.relu(self.second(hidden * self.table + self.queue.mean(0)))
        found: torch.Tensor = self.third(hidden)
        return found


@feature
def buffers_of_other_forms(place: bool = True) -> Any:
    torch.manual_seed(0)
    net = put(OtherForms(), "first", "second", "third", place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)))
