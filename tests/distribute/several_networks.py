"""Loops of scripts' own with several networks, and with gradients into inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, Loop, placed
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graphsplit as gs


def layers(*sizes: int, ranks: list[int], end: nn.Module | None = None) -> nn.Sequential:
    """Linear layers, each placed."""
    linear: list[nn.Module] = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    between = [module for one in linear for module in (one, nn.LeakyReLU(0.2))][:-1]
    net = nn.Sequential(*between, *([] if end is None else [end]))
    made: nn.Sequential = placed(net, linear, ranks)
    return made


def adversaries(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A generator and a discriminator, each distributed (a GAN)."""
    generator = layers(4, 16, 8, ranks=ranks, end=nn.Tanh())
    judge = layers(8, 16, 16, 1, ranks=ranks[::-1])
    its, own = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, judge))
    generator, judge = distribute(generator), distribute(judge)
    for _ in range(3):
        real, fake = torch.randn(6, 8), generator(torch.randn(6, 4))
        own.zero_grad()
        scores = judge(real), judge(fake.detach())
        targets = torch.ones(6, 1), torch.zeros(6, 1)
        losses = [
            functional.binary_cross_entropy_with_logits(s, t)
            for s, t in zip(scores, targets, strict=True)
        ]
        (losses[0] + losses[1]).backward()
        own.step()
        its.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(judge(fake), targets[0])
        loss.backward()
        yield [p.grad for p in generator.parameters()], [p.grad for p in judge.parameters()]
        its.step()
        yield loss.item(), losses[0].item(), losses[1].item(), fake.detach().mean().item()
    yield generator.state_dict(), judge.state_dict()


def perturbed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Adversarial training: the gradient of an input; a saliency map by autograd.grad."""
    net = distribute(layers(8, 16, 16, 4, ranks=ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        x.requires_grad_()
        functional.cross_entropy(net(x), y).backward()
        assert x.grad is not None
        yield x.grad
        optimizer.zero_grad()
        x = (x + 0.1 * x.grad.sign()).detach()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()
    x = torch.randn(6, 8, requires_grad=True)
    scaled = x * 2
    (found,) = torch.autograd.grad(net(scaled).square().sum() + scaled.sum(), x)
    yield found
    yield net.state_dict()


class Twice(nn.Module):
    """Uses its input several times, on several workers; one output is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, and the input."""
        h = self.second(x) * x + torch.sigmoid(self.first(x) * mask) * x
        return self.last(h + x), x


def chained(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A backbone and a head that uses its input several times; hidden state carried on."""
    backbone, head = layers(8, 8, ranks=ranks[1:]), Twice()
    placed(head, [head.first, head.second, head.last], ranks)
    backbone, head = distribute(backbone), distribute(head)
    both = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(both, lr=0.01)
    hidden = torch.zeros(6, 8)
    for step in range(3):
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(2):
            hidden = torch.tanh(backbone(torch.randn(6, 8) + hidden))
            scores, same = head(hidden.clone(), torch.ones(8))
            total = total + scores.square().mean() + same.detach().abs().mean() * step
        total.backward()
        yield torch.nn.utils.clip_grad_norm_(both, 1.0).item(), total.item()
        optimizer.step()
        hidden = hidden.detach()
    yield backbone.state_dict(), head.state_dict(), hidden


def attended(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A decoder that is called step by step on an encoder's value, which the script uses too."""
    encoder, decoder = layers(8, 8, ranks=ranks[1:]), Twice()
    placed(decoder, [decoder.first, decoder.second, decoder.last], ranks)
    encoder, decoder = distribute(encoder), distribute(decoder)
    both = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(both, lr=0.01)
    for _ in range(2):
        memory = encoder(torch.randn(6, 8))
        loss = memory.sin().mean()
        for _ in range(3):
            scores, same = decoder(memory, torch.ones(8))
            loss = loss + scores.square().mean() + (same * 0.1).cos().mean()
        loss = loss + memory.square().mean()
        unused, _ = decoder(memory, torch.ones(8))
        last = memory.exp().mean() * unused.detach().mean()
        (found,) = torch.autograd.grad(loss + last, memory)
        yield found, loss.item()
    for _ in range(2):
        optimizer.zero_grad()
        memory, total = encoder(torch.randn(6, 8)), torch.zeros(())
        memory.retain_grad()
        for _ in range(2):
            scores, _ = decoder(memory, torch.ones(8))
            total = total + scores.abs().mean() + memory.tanh().mean()
        total.backward()
        yield memory.grad, total.item(), [p.grad for p in both]
        optimizer.step()
    given = encoder(torch.randn(6, 8)).detach().requires_grad_()
    for _ in range(2):
        (decoder(given, torch.ones(8))[0].mean() + given.sin().sum()).backward()
        yield given.grad, given.is_leaf
    yield encoder.state_dict(), decoder.state_dict(), optimizer.state_dict()


class Both(nn.Module):
    """A backbone and a head, which are networks of their own as well; one in a checkpoint."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        h = checkpoint(self.backbone, x, use_reentrant=False)
        made: torch.Tensor = self.head(h) + self.head(h.detach())
        return made


def nested(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A distributed network of which parts are distributed too, and run by themselves."""
    parts = layers(8, 12, 8, ranks=ranks, end=nn.Dropout(0.1)), layers(8, 8, 4, ranks=ranks[1:])
    backbone, head = map(distribute, parts)
    both = distribute(Both(backbone, head))
    optimizer = torch.optim.AdamW(both.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = both(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone = head(backbone(torch.randn(6, 8))).abs().mean()
        alone.backward()
        yield loss.item(), alone.item(), [p.grad for p in both.parameters()]
        optimizer.step()
    yield both.state_dict(), head.state_dict(), optimizer.state_dict()


class Counted(nn.Module):
    """A buffer that counts its calls decides what it computes."""

    count: torch.Tensor

    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        self.layers = layers(8, 12, 4, ranks=ranks)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        self.count += 1
        made: torch.Tensor = self.layers(x * 2 if self.count % 2 == 0 else x)
        return made


def counted(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A buffer that steers Python code: trained, written to by the script, copied."""
    net = distribute(Counted(ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            net.count.fill_(4)
        optimizer.zero_grad()
        loss = net(torch.randn(6, 8)).square().mean()
        loss.backward()
        yield loss.item(), int(net.count)
        optimizer.step()
    made = copy.deepcopy(net)
    with torch.no_grad():
        yield made(torch.ones(6, 8)).tolist(), int(made.count), int(net.count)
    yield net.state_dict(), made.state_dict(), optimizer.state_dict()


def projected(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Tasks over a shared trunk: where their gradients conflict, each is projected (PCGrad)."""
    trunk = layers(8, 16, 8, ranks=ranks)
    heads = [layers(8, 4, ranks=ranks[place:]) for place in range(3)]
    trunk, *heads = map(distribute, (trunk, *heads))
    shared = list(trunk.parameters())
    optimizer = torch.optim.Adam([*shared, *(p for head in heads for p in head.parameters())], 0.01)
    for step in range(3):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        losses = [
            functional.cross_entropy(head(trunk(x)), y.roll(k)) for k, head in enumerate(heads)
        ]
        found = []
        for loss in losses:
            optimizer.zero_grad()
            if step == 0:
                grads = list(torch.autograd.grad(loss, shared, retain_graph=True))
            else:
                loss.backward(retain_graph=True)
                grads = [p.grad.clone() for p in shared]
            found.append(torch.cat([grad.flatten() for grad in grads]))
        kept = [one.clone() for one in found]
        for one in kept:
            for other in found:
                dot = torch.dot(one, other)
                if dot < 0:
                    one -= dot / other.norm() ** 2 * other
        optimizer.zero_grad()
        merged, at = torch.stack(kept).mean(0), 0
        for p in shared:
            p.grad = merged[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
        yield merged.norm().item(), [loss.item() for loss in losses]
    yield trunk.state_dict(), optimizer.state_dict()


def distilled(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A teacher on other workers than its student, which is averaged by its state dictionary."""
    teacher, student = layers(8, 16, 4, ranks=ranks), layers(8, 8, 4, ranks=ranks[::-1])
    teacher, student = distribute(teacher).eval(), distribute(student)
    average, heat = copy.deepcopy(student), 3.0
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    for _ in range(3):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        with torch.no_grad():
            told = teacher(x)
        said = student(x)
        soft = functional.kl_div(
            functional.log_softmax(said / heat, 1),
            functional.softmax(told / heat, 1),
            reduction="batchmean",
        )
        loss = 0.7 * soft * heat**2 + 0.3 * functional.cross_entropy(said, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for kept, value in zip(
            average.state_dict().values(), student.state_dict().values(), strict=True
        ):
            kept.copy_(0.9 * kept + 0.1 * value)
        yield loss.item(), soft.item(), (said.argmax(1) == told.argmax(1)).sum().item()
    yield average(torch.ones(2, 8)).tolist(), student.state_dict(), average.state_dict()


class Heads(nn.Module):
    """Two heads on a trunk with dropout, a part of which is computed again in backward."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        self.trunk, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 1)
        placed(self, [self.trunk, self.first, self.second, self.again], ranks)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What each head says; the second one uses a weight of the trunk."""
        h = checkpoint(self._recomputed, torch.relu(self.trunk(x)), use_reentrant=False)
        return self.first(h), self.second(functional.linear(h, self.again.weight))

    def _recomputed(self, h: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.tanh(self.again(h)), 0.2, self.training)


def kept(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Several backwards through the same calls, whose graphs are kept."""
    heads, head = Heads(ranks), Twice()
    placed(head, [head.first, head.second, head.last], ranks[::-1])
    heads.first.weight.register_hook(lambda gradient: gradient * 2)
    encoder, heads, head = map(distribute, (layers(8, 8, ranks=ranks[1:]), heads, head))
    every = [p for net in (encoder, heads, head) for p in net.parameters()]
    optimizer = torch.optim.SGD(every, lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 8, requires_grad=True)
        one, two = heads(x)
        yield torch.autograd.grad(one.square().mean(), x, retain_graph=True)
        functional.cross_entropy(one, torch.arange(6) % 4).backward(retain_graph=True)
        yield x.grad, [p.grad for p in heads.parameters()]
        (two.square().mean() + one.mean()).backward(retain_graph=step == 1)
        memory = encoder(torch.randn(6, 8))
        scores, same = head(memory, torch.ones(8))
        loss = scores.square().mean() + memory.sin().mean()
        loss.backward(retain_graph=True)
        yield [p.grad for p in every]
        other = scores.abs().mean() + (memory.exp() + same).mean()
        yield torch.autograd.grad(other, [memory, *head.parameters()], retain_graph=True)
        other.backward(retain_graph=True)
        memory.cos().sum().backward(retain_graph=True)
        (loss * 2 + other + head.last.weight.square().sum()).backward()
        yield x.grad, [p.grad for p in every], loss.item(), other.item()
        optimizer.step()
    yield optimizer.state_dict()


class Shifted(nn.Module):
    """Adds a parameter of the output's size, whose gradient is that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Linear(8, 4), nn.Parameter(torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> Any:
        """The sum."""
        return self.first(x) + self.shift


def handed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Gradients that the script has given or kept, and that are not those changed later."""
    net = Shifted()
    net = distribute(placed(net, [net.first], ranks[1:]))
    given, leaf = torch.randn(6, 4), torch.zeros(6, 4, requires_grad=True)
    shift = net.shift
    for step in range(3):
        out, kept = net(torch.randn(6, 8)), []
        if step == 0:
            out.backward(given, inputs=[shift])
        elif step == 1:
            torch.autograd.backward([out, net(torch.randn(6, 8)) * 0], [given, given])
        else:
            out.register_hook(kept.append)
            (out.square().sum() + leaf.sum()).backward(inputs=[shift])
            (net(torch.randn(6, 8)) + leaf).backward(given, inputs=[leaf])
            leaf.grad.mul_(3)
        shift.grad.mul_(3)
        yield given.clone(), shift.grad, [one.norm().item() for one in kept], leaf.grad
        net.zero_grad()


class Apart(nn.Module):
    """Two ways that share no operation of which autograd keeps anything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 5), nn.Linear(8, 5)
        self.third, self.fourth = nn.Linear(5, 5), nn.Linear(5, 3)
        self.scale, self.drop = nn.Parameter(torch.randn(5)), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Two values of each way, the earlier one first."""
        one = torch.relu_(self.first(x))
        two = self.drop(torch.relu_(self.second(x)))
        return one, two, self.third(two) + self.scale, self.fourth(one * self.scale)


def apart(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Backwards from outputs that share nothing, each frees its own way."""
    net = Apart()
    net = placed(net, [net.first, net.second, net.third, net.fourth], ranks)
    optimizer = torch.optim.Adam(net.parameters())
    net = distribute(net)
    for step in range(4):
        x = torch.randn(4, 8, requires_grad=step % 2 == 1)
        one, two, three, four = net(x)
        optimizer.zero_grad()
        if step == 0:
            four.sum().backward()
            with pytest.raises((RuntimeError, gs.errors.ConfigurationError)):
                one.sum().backward()
            three.square().mean().backward()
        elif step == 1:
            three.sum().backward()
            yield x.grad, [p.grad for p in net.parameters()]
            (one.sum() + four.mean()).backward()
            yield x.grad
        elif step == 2:
            one.sum().backward(retain_graph=True)
            four.sum().backward()
            two.sum().backward(retain_graph=True)
            three.mean().backward()
        else:
            yield torch.autograd.grad(four.sum(), x)
            three.exp().sum().backward()
        yield [p.grad for p in net.parameters()]
        optimizer.step()
    yield net.state_dict()


class Reversed(torch.autograd.Function):
    """The identity; its gradient is turned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        """The value."""
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient, turned."""
        return -gradient * ctx.strength, None


class Rounded(torch.autograd.Function):
    """Rounding with a scale that is trained, and a count that is not."""

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rounded values, and how many are positive."""
        return torch.round(x / scale) * scale, (x > 0).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep what backward needs."""
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        """Straight through, where values are small."""
        x, scale = ctx.saved_tensors
        return gradient * (x.abs() < 3), (gradient * torch.tanh(x / scale)).sum()


reverse = Reversed.apply  # by a name of its own, from before any network is distributed


def functions(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Functions with a backward of their own, between networks (DANN), and on parameters."""
    features = layers(8, 6, 6, ranks=ranks)
    classes, domains = layers(6, 4, ranks=ranks[1:]), layers(6, 2, ranks=ranks[2:])
    scale = nn.Parameter(torch.tensor(0.3))
    networks = [features, classes, domains]
    optimizer = torch.optim.Adam([*nn.ModuleList(networks).parameters(), scale], lr=0.01)
    features, classes, domains = map(distribute, networks)
    y = torch.arange(6)
    for _ in range(3):
        found = features(torch.randn(6, 8))
        loss = functional.cross_entropy(classes(found), y % 4)
        loss = loss + functional.cross_entropy(domains(reverse(found, 0.5)), y % 2)
        rounded, count = Rounded.apply(found, scale)
        weight = next(classes.parameters())
        loss = loss + rounded.square().mean() + Reversed.apply(weight, 0.1).exp().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), count.item(), scale.detach()
    yield features.state_dict(), domains.state_dict(), optimizer.state_dict()


def outside(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Layers of the script that write to what they have, and a checkpoint around some."""
    net = layers(8, 6, 6, ranks=ranks[1:])
    own = nn.ModuleDict(
        {
            "batch": nn.BatchNorm1d(6),
            "instance": nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
            "near": nn.Embedding(6, 6, max_norm=0.5),
            "bag": nn.EmbeddingBag(6, 6, max_norm=0.4),
            "head": nn.Linear(6, 3),
        }
    )
    optimizer = torch.optim.Adam([*net.parameters(), *own.parameters()], lr=0.02)
    net = distribute(net)

    def end(value: torch.Tensor) -> torch.Tensor:
        scores = own["head"](torch.dropout(torch.tanh(value), 0.2, True))
        weight = own["head"].weight.exp().sum() + next(net.parameters()).square().mean()
        return functional.cross_entropy(scores, torch.arange(4) % 3) + 0.01 * weight

    for _ in range(3):
        value = own["batch"](net(torch.randn(4, 8)))
        indices = value.argmax(1)
        value = own["instance"](value.view(2, 2, 6)).view(4, 6)
        value = value + own["near"](indices) + own["bag"](indices[:, None])
        statistics = own["batch"].running_mean, own["batch"].running_var  # torch's own order
        value = torch.batch_norm(value, None, None, *statistics, True, 0.1, 1e-5, False)
        loss = checkpoint(end, value, use_reentrant=False)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), own.state_dict()
    own.eval()
    yield own["batch"](net(torch.randn(4, 8))).sum().item()
    yield net.state_dict(), own.state_dict(), optimizer.state_dict()


MORE: tuple[Loop, ...] = (apart, functions, outside)
LOOPS: tuple[Loop, ...] = (
    *(adversaries, perturbed, chained, attended, nested, counted),
    *(projected, distilled, kept, handed),
)
