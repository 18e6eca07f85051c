"""Training loops of scripts' own: each runs with ``gs.distribute`` and without."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from loop_helpers import Distribute, Loop, placed
from several_networks import layers
from torch import nn
from torch.nn import functional


@dataclass
class Found:
    """What a network returns that computes its loss."""

    loss: torch.Tensor
    logits: torch.Tensor


class Small(nn.Module):
    """Dropout, a skip over the cut, a value that both workers use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.last, self.drop = nn.Linear(16, 4), nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        h = self.drop(torch.relu(self.first(x)))
        return self.last(self.norm(torch.relu(self.second(h))) + h)


class Language(nn.Module):
    """A small transformer with tied embeddings, which computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Found:
        """Loss and scores."""
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        return Found(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def small(ranks: list[int]) -> Small:
    """The network, placed."""
    net = Small()
    for module, rank in zip((net.first, net.second, net.last), ranks, strict=False):
        module.place("MS_WORKER", rank)
    return net


def usual(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """The loop of most scripts: clipping, a schedule, an evaluation."""
    net = small(ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    net, criterion = distribute(net), nn.CrossEntropyLoss()
    for _ in range(4):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        optimizer.zero_grad()
        outputs = net(x)
        loss = criterion(outputs, y)
        yield loss.item(), (outputs.argmax(1) == y).sum().item()
        loss.backward()
        yield torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).item()
        yield [None if p.grad is None else p.grad.norm().item() for p in net.parameters()]
        optimizer.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        yield net(torch.randn(3, 8)).tolist()
    yield {name: value.clone() for name, value in net.state_dict().items()}


def several(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Two calls under one backward, accumulation, random numbers of the script's own."""
    net = small(ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net = distribute(net)
    for step in range(4):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        loss = functional.cross_entropy(net(x), y) / 2
        if step % 2:
            loss = loss + functional.mse_loss(functional.dropout(net(x * 2), 0.3), net(x))
        loss.backward()
        yield float(loss.detach()), torch.rand(2)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    yield {name: value.clone() for name, value in net.state_dict().items()}


def language(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A network that computes its loss, given a mapping; a scaler."""
    net = Language()
    for module, rank in zip((net.embed, *net.layers, net.head), ranks, strict=False):
        module.place("MS_WORKER", rank)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net = distribute(net)
    for _ in range(3):
        tokens = torch.randint(0, 20, (2, 6))
        found = net(tokens=tokens, labels=tokens)
        optimizer.zero_grad()
        scaler.scale(found.loss).backward()
        scaler.unscale_(optimizer)
        yield torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
        scaler.step(optimizer)
        scaler.update()
        yield found.loss.item(), found.logits.sum().item(), scaler.get_scale()
    yield {name: value.clone() for name, value in net.state_dict().items()}


def penalty(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Parameters in the loss: before and after the network's own uses, and twice in one product."""
    net = small(ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net = distribute(net)
    for step in range(4):
        before = sum(p.pow(2).sum() for p in net.parameters())
        loss = net(torch.randn(6, 8)).square().mean()
        after = torch.stack([p.abs().sum() for p in net.parameters() if p.ndim > 1]).sum()
        tied = (net.last.weight * net.last.weight).sum() + (
            net.first.bias * net.last.bias.sum()
        ).sum()
        total = torch.zeros(())
        for one in (loss, 0.01 * before, 0.02 * after, tied)[: 1 + step]:
            total += one
        optimizer.zero_grad()
        total.backward()
        yield total.item(), [p.grad for p in net.parameters()]
        optimizer.step()
    yield {name: value.clone() for name, value in net.state_dict().items()}


def by_hand(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Steps without an optimizer; norms, a look at the values of parameters, a new start."""
    net = distribute(small(ranks))
    momentum: dict[str, Any] = {}
    for step in range(4):
        loss = net(torch.randn(6, 8)).square().mean()
        net.zero_grad()
        loss.backward()
        yield torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.1)
        with torch.no_grad():
            for name, p in net.named_parameters():
                momentum[name] = momentum.get(name, torch.zeros_like(p)).mul(0.9).add(p.grad)
                if step == 0:
                    p -= 0.1 * momentum[name]
                elif step == 1:
                    p.add_(momentum[name], alpha=-0.1)
                elif step == 2:
                    p.data = p.data - 0.1 * momentum[name]
                else:
                    p.copy_(p - 0.1 * momentum[name])
                yield (
                    p.norm().item(),
                    p.detach().abs().max().item(),
                    p.detach().numpy()[:1].tolist(),
                )
    nn.init.normal_(net.last.weight)
    flat = nn.utils.parameters_to_vector(net.parameters())
    yield flat.norm().item(), repr(net.last.bias), torch.rand(2)
    nn.utils.vector_to_parameters(flat * 2, net.parameters())
    yield {name: value.clone() for name, value in net.state_dict().items()}


def sharpness(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Two backwards per step, at two places (SAM)."""
    net = small(ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net = distribute(net)
    for _ in range(3):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        functional.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(2) for p in net.parameters()]), 2)
            moved = {}
            for p in net.parameters():
                moved[p] = p.grad * (0.05 / (norm + 1e-12))
                p.add_(moved[p])
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(moved[p])
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), norm.item()
    yield {name: value.clone() for name, value in net.state_dict().items()}


def asked(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Gradients by ``torch.autograd.grad``, of parameters and of values; backward of several."""
    net = distribute(small(ranks))
    scale = torch.ones(4, requires_grad=True)
    for _ in range(2):
        outputs = net(torch.randn(6, 8))
        loss = (outputs * scale).square().mean()
        found = torch.autograd.grad(loss, [*net.parameters(), outputs, scale])
        yield [gradient for gradient in found], [p.grad is None for p in net.parameters()]
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), found, strict=False):
                p -= 0.1 * gradient
    first, second = (
        net(torch.randn(6, 8)).sum(),
        net(torch.randn(6, 8)).square().sum() * scale.sum(),
    )
    torch.autograd.backward([first, second], [torch.tensor(0.5), None])
    yield [p.grad for p in net.parameters()], scale.grad
    net.zero_grad()
    (net(torch.randn(6, 8)) * scale).sum().backward(inputs=[net.first.weight, scale])
    yield [p.grad for p in net.parameters()], scale.grad


def resumed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Whole states of network and optimizer, loaded again; also as a part of another module."""
    net = small(ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net = distribute(net)
    kept: Any = None
    for step in range(6):
        optimizer.zero_grad()
        net(torch.randn(6, 8)).square().sum().backward()
        optimizer.step()
        if step == 2:
            kept = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            yield kept
        if step == 4:
            found = net.load_state_dict({**kept[0], "other": torch.zeros(1)}, strict=False)
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
            yield list(found.missing_keys), list(found.unexpected_keys)
    yield optimizer.state_dict(), nn.Sequential(net).state_dict()
    net.second = nn.Identity()  # the optimizer keeps what it knows of the layer that was there
    optimizer.zero_grad()
    net(torch.randn(6, 8)).square().sum().backward()
    optimizer.step()
    yield optimizer.state_dict()


def averaged(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Averages of parameters and buffers, in copies of the network that run too."""
    net = small(ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net = distribute(net)
    early = torch.optim.swa_utils.AveragedModel(net)
    late, multi = None, torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    for step in range(4):
        optimizer.zero_grad()
        net(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        early.update_parameters(net)
        if late is None:
            late = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=multi, use_buffers=True)
            target = copy.deepcopy(net).requires_grad_(False)
        late.update_parameters(net)
        with torch.no_grad():
            for average, value in zip(target.parameters(), net.parameters(), strict=True):
                average.mul_(0.9).add_(value, alpha=0.1)
            yield late(torch.randn(3, 8)).tolist(), target(torch.randn(3, 8)).tolist()
            yield net.norm.running_mean.norm().item(), net.norm.num_batches_tracked.item(), step
    yield early.state_dict(), late.state_dict(), target.state_dict(), net.state_dict()


def similar(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Pairs of views that are told from all others by their direction, under autocast."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
    net = distribute(placed(net, [net[0], net[2]], ranks))
    optimizer, scaler = torch.optim.Adam(net.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    mask = torch.eye(8, dtype=torch.bool)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            found = functional.normalize(net(torch.randn(8, 8)), dim=1)
            scores = (found @ found.T)[~mask].view(8, 7) / 0.1
            scores = scores[[*range(8)]][[True] * 8][:, [6, 0, *range(1, 6)]]
            loss = functional.cross_entropy(scores, torch.arange(3, 11) % 7)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss.item(), scores.argmax(1).tolist()
    yield net.state_dict()


def by_closures(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Steps with a closure, as skorch makes them; the first one makes the network's first call."""
    net = small(ranks)
    body = torch.optim.Adam([*net.first.parameters(), *net.second.parameters()], lr=0.01)
    head = torch.optim.SGD(net.last.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(head, 2, 0.5)
    net = distribute(net)
    for step in range(5):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        optimizer: Any = (body, head)[step % 2]

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            return loss

        with torch.no_grad():  # the closure has gradients all the same
            loss = optimizer.step(closure) if step < 3 else optimizer.step(closure=closure)
        yield loss.item(), len(body.state), len(head.state)
        if optimizer is head:
            schedule.step()
    yield body.state_dict(), head.state_dict()
    yield {name: value.clone() for name, value in net.state_dict().items()}


def overflowing(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A scaler that meets infinite gradients, on one worker alone: no worker may step."""
    net = small(ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    net = distribute(net)
    for step in range(6):
        optimizer.zero_grad()
        loss = net(torch.randn(6, 8)).square().mean()
        scaler.scale(loss).backward()
        if step % 2:
            weight = (net.first, net.second, net.last)[step // 2].weight
            weight.grad[0, 0] = float("inf")
        if step % 3:
            scaler.unscale_(optimizer)
            yield torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).item()
        scaler.step(optimizer)
        scaler.update()
        yield loss.item(), scaler.get_scale(), [p.norm().item() for p in net.parameters()]
    yield net.state_dict(), optimizer.state_dict(), scaler.state_dict()


def actor_and_critic(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Two heads on a trunk, which thaws and joins the optimizer later; actions are drawn."""
    nets = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 4), nn.Linear(16, 1)
    for part, rank in zip(nets, ranks, strict=False):
        part.place("MS_WORKER", rank)  # type: ignore[operator]
    nets[0].requires_grad_(False)
    optimizer = torch.optim.Adam([*nets[1].parameters(), *nets[2].parameters()], lr=0.01)
    trunk, actor, critic = map(distribute, nets)
    for step in range(4):
        if step == 2:
            trunk.requires_grad_(True)
            optimizer.add_param_group({"params": trunk.parameters(), "lr": 0.001})
        state = torch.randn(6, 8)
        hidden = trunk(state)
        policy = torch.distributions.Categorical(logits=actor(hidden))
        action, value = policy.sample(), critic(hidden).squeeze(-1)
        reward = (action == 0).float() - 0.1 * state[:, 0]
        gained = policy.log_prob(action) * (reward - value.detach())
        loss = functional.mse_loss(value, reward) - gained.mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        yield loss.item(), action.tolist(), [p.grad for p in trunk.parameters()]
        optimizer.step()
    yield [net.state_dict() for net in (trunk, actor, critic)], optimizer.state_dict()


def of_its_class(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """The script asks for the network's class, and makes others of it: slices, a second one."""
    net = distribute(layers(8, 16, 4, ranks=ranks))
    head = distribute(placed(nn.Linear(4, 2), [], ranks))
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    for _ in range(2):
        inputs = torch.randn(6, 8)
        optimizer.zero_grad()
        loss = head(net(inputs)).square().mean() + 0.1 * net[:2](inputs).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item(), net[:-1](inputs).detach()
    other = type(head)(4, 2)
    yield type(head) in (nn.Linear,), type(head) in {nn.Linear}, isinstance(other, type(head))
    other.load_state_dict(head.state_dict())
    head.apply(lambda one: nn.init.zeros_(one.weight) if type(one) in (nn.Linear,) else None)
    yield copy.copy(head)(torch.ones(2, 4)).detach()
    yield other(torch.ones(1, 4)).detach(), head(torch.ones(1, 4)).detach(), head.state_dict()


def all_at_once(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A step with a closure that makes the first call of the network, and no ``zero_grad``."""
    net = small(ranks)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1)
    net, x = distribute(net), torch.randn(6, 8)

    def closure() -> Any:
        loss = net(x).square().sum()
        loss.backward()
        return loss

    yield optimizer.step(closure).item()  # type: ignore[no-untyped-call]
    yield dict(net.state_dict())


LOOPS: tuple[Loop, ...] = (
    all_at_once,
    of_its_class,
    usual,
    overflowing,
    actor_and_critic,
    by_closures,
    similar,
    several,
    language,
    resumed,
    penalty,
    by_hand,
    sharpness,
    averaged,
    asked,
)
