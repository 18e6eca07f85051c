"""Scripts that use what training offers, one thing or a few at a time.

Each takes whether to place the network, builds everything anew, and returns what is to be compared
with the plain loop.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

import graphsplit as gs
from graphsplit.runtime import joined

FEATURES: dict[str, Callable[..., Any]] = {}


def feature(script: Callable[..., Any]) -> Callable[..., Any]:
    FEATURES[script.__name__] = script
    return script


def pairs(rows: int = 24, columns: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, columns, generator=generator)
    return TensorDataset(values, torch.arange(rows) % 3)


def batches(size: int = 8, rows: int = 24) -> DataLoader[Any]:
    return DataLoader(pairs(rows), batch_size=size, shuffle=True)


def put(net: nn.Module, *names: str, place: bool = True) -> nn.Module:
    """Each named module on the next of three workers."""
    for index, name in enumerate(names):
        if place:
            net.get_submodule(name).place("MS_WORKER", index % 3)
    return net


def plain_net(*, place: bool, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, width), nn.Dropout(0.3), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 3),
    )  # fmt: skip
    return put(net, "0", "2", "4", place=place)


def all_of(*models: gs.Model, is_end: bool = True) -> Any:
    """All that a run leaves behind, of every Model.

    A worker that comes back has the generator's state again where the script goes on, not before.
    """
    found: list[Any] = []
    for model in models:
        optimizers = model.optimizer_state_dict()
        for state in optimizers if isinstance(optimizers, list) else [optimizers]:
            state["state"] = dict(sorted(state["state"].items()))
        found += [model.state_dict(), optimizers, model.position]
    return copy.deepcopy([*found, torch.get_rng_state() if is_end else None])


def adam(net: nn.Module, rate: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=rate)


class Last(gs.callbacks.Callback):
    """Keeps what it sees; all losses that count, whoever was lost."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        assert context.loss is not None
        self.losses.append(context.loss.clone())

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def trained(
    model: gs.Model,
    loader: Any = None,
    epochs: int = 3,
    *callbacks: gs.callbacks.Callback,
    is_end: bool = True,
) -> Any:
    last = Last()
    model.train(epochs, batches() if loader is None else loader, [last, *callbacks])
    return last.losses, all_of(model, is_end=is_end)


# How a step is computed.


def scheduled(schedule: str, microbatches: int) -> Callable[..., Any]:
    def script(place: bool = True) -> Any:
        net = plain_net(place=place)
        model = gs.Model(
            net, nn.CrossEntropyLoss(), adam(net), microbatches=microbatches, schedule=schedule
        )
        return trained(model)

    script.__name__ = f"schedule_{schedule}"
    return feature(script)


for _name in ("1f1b", "gpipe", "zero_bubble"):
    scheduled(_name, 3)


@feature
def schedule_interleaved_1f1b(place: bool = True) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    put(net, *"012345", place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), microbatches=4, schedule="interleaved_1f1b"
    )
    return trained(model)


@feature
def schedule_auto(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), microbatches=2, schedule="auto", accumulate=2
    )
    return trained(model, None, 5)


@feature
def accumulated_uneven_microbatches(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), microbatches=4, accumulate=3,
        clip=gs.clip.GlobalNorm(0.1),
    )  # fmt: skip
    found = trained(model, batches(10))
    return found, model.last_gradient_norm


@feature
def accumulated_zeros(place: bool = True) -> Any:
    net = plain_net(place=place)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), optimizer, accumulate=2, set_to_none=False,
        clip=gs.clip.Value(0.01),
    )  # fmt: skip
    losses = [model.train_step(x, y) for _ in range(3) for x, y in batches(8)]
    return losses, all_of(model)


class Exploding(nn.Module):
    """A loss that is infinite for one batch."""

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs, target)
        return loss * torch.where(target[0] == 1, torch.inf, 1.0)


@feature
def scaled_and_clipped(place: bool = True) -> Any:
    net = plain_net(place=place)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    model = gs.Model(
        net, Exploding(), adam(net), scaler=scaler, clip=gs.clip.GlobalNorm(0.5), microbatches=2
    )
    found = trained(model)
    return found, scaler.state_dict(), model.last_gradient_norm


@feature
def autocast(place: bool = True) -> Any:
    net = plain_net(place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net), autocast=torch.bfloat16))


@feature
def compiled(place: bool = True) -> Any:
    net = plain_net(place=place)
    options = {"backend": "eager"}
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net), compile=options))


@feature
def recomputed(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), recompute=True, microbatches=2)
    return trained(model)


@feature
def sizes_that_change(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), dynamic_dims={0: 32})
    data = [pairs()[:size] for size in (8, 5, 7, 8, 3)]
    return trained(model, data, 2)


# What a network is made of.


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


class Counting(nn.Module):
    """Python that capture does not see: kept whole, it may remember what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mixed: torch.Tensor = self.inner(x) / self.calls
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


# What steps it.


@feature
def several_optimizers_and_groups(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    first = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(
        [{"params": [net[2].weight]}, {"params": [net[2].bias], "lr": 0.3}], amsgrad=True
    )
    third = torch.optim.Adagrad(net[4].parameters(), lr=0.05)
    model = gs.Model(net, nn.CrossEntropyLoss(), [first, second, third])
    return trained(model)


@feature
def groups_that_are_added(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    for name in ("0", "2"):
        net.get_submodule(name).requires_grad_(False)
    optimizer = torch.optim.SGD(net[4].parameters(), lr=0.1, momentum=0.9)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for index, (x, y) in enumerate(list(batches()) * 3):
        if index in (4, 5):
            module = net[2] if index == 4 else net[0]
            module.requires_grad_(True)
            optimizer.add_param_group({"params": list(module.parameters()), "lr": 0.01 * index})
        losses.append(model.train_step(x, y))
    return losses, all_of(model)


class Unfreezes(gs.callbacks.Callback):
    """Trains the first layer from the second epoch on."""

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        if context.epoch == 2 and context.step == 0:
            context.model.network.get_submodule("0").requires_grad_(True)


@feature
def unfrozen_by_a_callback(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
    return trained(model, None, 3, Unfreezes()), [p.requires_grad for p in net.parameters()]


@feature
def schedulers_of_rates(place: bool = True) -> Any:
    net = plain_net(place=place)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=40)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()})
    data = batches()
    rates = [
        gs.callbacks.LearningRateScheduler(cycle, "step"),
        gs.callbacks.LearningRateScheduler(
            plateau, metric=lambda context: context.model.eval(data)["Loss"]
        ),
    ]
    found = trained(model, data, 3, *rates, is_end=False)
    for x, y in data:
        model.train_step(x, y)
        cycle.step()
    return found, all_of(model), cycle.state_dict(), plateau.state_dict()


@feature
def first_steps_only(place: bool = True) -> Any:
    """Short: deaths fall before or into the first step of a lazy optimizer."""
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    return [model.train_step(x, y) for x, y in batches()], all_of(model)


# What it is fed with.


class Own(Sampler[int]):
    """Another order in every epoch, counted by itself."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.length, generator=generator).tolist()

    def __len__(self) -> int:
        return self.length


@feature
def sampler_that_counts_epochs(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    data = DataLoader(pairs(), batch_size=8, sampler=Own(24))
    found = trained(model, data, 4, is_end=False)
    return found, model.eval(data), trained(model, data, 2)


class SetsEpoch(gs.callbacks.Callback):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        self.sampler.set_epoch(context.epoch)


@feature
def sampler_with_set_epoch(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    sampler: Any = torch.utils.data.DistributedSampler(pairs(), 1, 0, seed=3)
    data = DataLoader(pairs(), batch_size=8, sampler=sampler)
    found: list[Any] = [trained(model, data, 3, SetsEpoch(sampler), is_end=False)]
    for epoch in range(10, 13):
        sampler.set_epoch(epoch)
        found.append(model.eval(data))
        sampler.set_epoch(epoch + 10)
        model.train(1, data)
    return found, all_of(model)


@feature
def generators_of_loaders(place: bool = True) -> Any:
    """The loaders of training and of evaluation in a callback each have a generator."""
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    data, validation = (
        DataLoader(
            pairs(), batch_size=8, sampler=RandomSampler(
                pairs(), num_samples=16, generator=torch.Generator().manual_seed(seed)
            ),
        )
        for seed in (5, 6)
    )  # fmt: skip

    class Validates(Last):
        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            self.losses.append(torch.tensor(context.model.eval(validation)["Loss"]))

    validates = Validates()
    model.train(3, data, [validates])
    found = [model.eval(validation), model.eval(data)]
    return validates.losses, found, all_of(model)


class Augmented(Dataset[Any]):
    """Transforms its samples by the numbers of Python and NumPy, as many libraries do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x, y = pairs()[index]
        return x * random.random() + float(np.random.rand()) * torch.rand(4), y


@feature
def numbers_of_python_and_numpy(place: bool = True) -> Any:
    net = plain_net(place=place)
    random.seed(3)
    np.random.seed(4)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    data = DataLoader(Augmented(), batch_size=8, shuffle=True)
    last = Last()
    model.train(3, data, [last])
    return last.losses, all_of(model, is_end=False), model.eval(data)


# What calls there are.


@feature
def two_models_in_turn(place: bool = True) -> Any:
    """Two networks that train each other, as those of a GAN."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    judge = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    put(maker, "0", "2", place=place)
    put(judge, "2", "0", place=place)
    score = nn.BCEWithLogitsLoss()
    making = gs.Model(maker, nn.MSELoss(), adam(maker))
    judging = gs.Model(judge, score, torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.5))
    found: list[Any] = []
    for real, _ in list(batches()) * 3:
        made = making.predict(torch.randn(8, 2))
        found.append(judging.train_step(made, torch.zeros(8, 1)))
        found.append(judging.train_step(real, torch.ones(8, 1)))
        verdict = judging.predict(made)
        found.append(making.train_step(torch.randn(8, 2), real * torch.sigmoid(verdict)))
    return found, all_of(making, judging)


class Adversaries(nn.Module):
    """The maker through the judge: trains what its optimizer has."""

    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.judge(self.maker(noise))
        return found


@feature
def two_models_of_the_same_modules(place: bool = True) -> Any:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    put(maker, "0", "2", place=place)
    put(judge, "0", "2", place=place)
    score = nn.BCEWithLogitsLoss()
    judging = gs.Model(judge, score, adam(judge))
    making = gs.Model(Adversaries(maker, judge), score, adam(maker))
    found: list[Any] = []
    for real, _ in list(batches()) * 3:
        found.append(judging.train_step(real, torch.ones(8, 1)))
        found.append(making.train_step(torch.randn(8, 2), torch.ones(8, 1)))
    return found, all_of(making, judging)


@feature
def evaluation_and_prediction_between(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    found: list[Any] = []
    for x, y in list(batches()) * 2:
        found.append(model.train_step(x, y))
        found.append(model.predict(x + torch.rand(1)))
        found.append(model.eval(batches()))
        if len(found) == 9:
            kept = copy.deepcopy((model.state_dict(), model.optimizer_state_dict()))
    model.load_state_dict(kept[0])
    model.load_optimizer_state_dict(kept[1])
    for x, y in batches():
        found.append(model.train_step(x, y))
    return found, all_of(model)


@feature
def changed_between_calls(place: bool = True) -> Any:
    """The script itself writes to a parameter, on the worker that has it."""
    net: Any = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    losses = []
    for x, y in list(batches()) * 3:
        losses.append(model.train_step(x, y))
        if joined.get_rank() == 1 or not place:
            with torch.no_grad():
                net[2].weight.clamp_(-0.1, 0.1)
    return losses, all_of(model)


class Averages(gs.callbacks.Callback):
    """A running mean of what lives here; its own state is what it knows."""

    def __init__(self) -> None:
        self.means: dict[str, torch.Tensor] = {}

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        for name, value in context.owned_parameters():
            mean = self.means.setdefault(name, torch.zeros_like(value).detach())
            mean.lerp_(value.detach(), 0.1)

    def on_train_end(self, context: gs.callbacks.RunContext) -> None:
        with torch.no_grad():
            for name, value in context.owned_parameters():
                value.copy_(self.means[name])

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self.means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = dict(state["means"])


@feature
def callback_that_keeps_what_lives_here(place: bool = True) -> Any:
    net = plain_net(place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)), None, 3, Averages())


class Late(gs.callbacks.Callback):
    """Has no state before it has seen something."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        if context.epoch == 2:
            self.seen["count"] = self.seen.get("count", 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


@feature
def callback_whose_state_begins_late(place: bool = True) -> Any:
    net = plain_net(place=place)
    late = Late()
    found = trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)), None, 3, late)
    return found, late.seen
