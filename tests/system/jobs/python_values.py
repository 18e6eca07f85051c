"""Losses that live on Python state, beside the plain loop; or workers that disagree."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).parents[2]))
from quiet_time import quiet_time

SCALE = 1.0
CALLS = 0
CONFIG = {"weight": 1.0, "other": 0}
STEPS = 5
Case = tuple[nn.Module, Callable[..., Any], Callable[[int], None]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.tanh(self.bn(self.first(x))))
        return made


def a_global() -> Case:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, target) * SCALE * CONFIG["weight"]

    def change(step: int) -> None:
        global SCALE
        SCALE = 0.9**step
        CONFIG["weight"] = 1.0 + step

    return Net(), loss, change


def a_global_counter() -> Case:
    global CALLS
    CALLS = 0

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return F.mse_loss(outputs, target) * min(1.0, CALLS / 6)

    return Net(), loss, lambda step: None


def a_closure() -> Case:
    calls, weights = 0, [1.0, 0.5, 0.25] * 20

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(outputs, target) * weights.pop(0) + calls

    return Net(), loss, lambda step: None


def a_frozen_batch_norm() -> Case:
    net = Net()

    def change(step: int) -> None:
        if step == 2:
            net.bn.eval()

    return net, F.mse_loss, change


def a_replaced_layer() -> Case:
    net = Net()

    def change(step: int) -> None:
        if step == 2:
            net.bn = nn.Sequential(net.bn)
        if step == 3:
            net.bn = nn.Identity()

    return net, F.mse_loss, change


def a_quantised_layer() -> Case:
    net = Net()
    config = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    net.first = torch.ao.nn.qat.Linear(3, 4, qconfig=config)  # its scale grows in the first step
    return net, F.mse_loss, lambda step: None


def tensors_in_python() -> Case:
    net, seen, average, reset = Net(), {}, None, [torch.tensor(2.0)]
    net.first.register_forward_hook(lambda module, args, out: seen.update(h=out))
    total, weights = torch.tensor(1.0), list(net.parameters())

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal average
        made = F.mse_loss(outputs, target)
        average = made.detach() if average is None else 0.9 * average + 0.1 * made.detach()
        total.add_(made.detach())
        return made / average + seen["h"].abs().mean() / total + weights[-1].square().sum()

    def change(step: int) -> None:
        nonlocal average
        if step == 3:
            average = reset[0]

    return net, loss, change


class Drawing(nn.Module):
    """Skips its layer at random, and adds noise of its own: kept whole unasked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(4, 4), torch.Generator().manual_seed(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if random.random() < 0.4:
            return x
        return x + self.layer(x) * torch.rand(x.shape, generator=self.own)


def draws_beside_torchs_generator() -> Case:
    random.seed(3)
    net, own = Net(), random.Random(4)
    net.bn = nn.Sequential(net.bn, Drawing())

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        share = own.betavariate(0.4, 0.4) + own.gauss(0.0, 0.01)  # which draws every other time
        return share * F.mse_loss(outputs, target) + (1 - share) * F.l1_loss(outputs, target)

    def change(step: int) -> None:
        net.bn[0].momentum = own.random() * 0.1 + random.random() * 0.1

    return net, loss, change


CASES = (
    tensors_in_python,
    draws_beside_torchs_generator,
    a_global,
    a_global_counter,
    a_closure,
    a_frozen_batch_norm,
    a_replaced_layer,
    a_quantised_layer,
)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def plain(make: Callable[[], Case], num_parts: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, loss_fn, change = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        change(step)
        optimizer.zero_grad()
        parts = []
        for inputs, target in zip(*(t.chunk(num_parts) for t in batch(step)), strict=True):
            loss = loss_fn(net(inputs), target)
            (loss * (1 / num_parts) if num_parts > 1 else loss).backward()
            parts.append(loss.detach() * (1 / num_parts) if num_parts > 1 else loss.detach())
        optimizer.step()
        losses.append(sum(parts[1:], parts[0]))
    found = [*losses, *(p.detach().clone() for p in net.parameters())]
    net.eval()
    with torch.no_grad():
        return [*found, net(batch(0)[0])]


def cut(make: Callable[[], Case], num_parts: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, loss_fn, change = make()
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = gs.Model(net, loss_fn, optimizer, microbatches=num_parts)
    losses = []
    for step in range(STEPS):
        change(step)
        losses.append(model.train_step(*batch(step)))
    state = model.state_dict()
    found = [*losses, *(state[name] for name, _ in net.named_parameters())]
    return [*found, model.predict(batch(0)[0])]


def follow() -> None:
    for make in CASES:
        for num_parts in (1, 4):
            pairs = zip(plain(make, num_parts), cut(make, num_parts), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (make.__name__, num_parts)
    print("equal", flush=True)


def disagree() -> None:
    net = Net()
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)
    model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
    for step in range(5):
        if step == 3 and gs.get_rank() == 1:
            net.bn.eps = 0.25
            print(f"changed at {quiet_time()}", flush=True)
        try:
            model.train_step(*batch(step))
        except BaseException:
            print(f"ended at {quiet_time()}", flush=True)
            raise


gs.init()
for what in sys.argv[1:]:
    {"follow": follow, "disagree": disagree}[what]()
