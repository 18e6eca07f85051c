"""Loops of kinds that were found to stumble: what they do besides training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from loop_helpers import Distribute, Loop, placed, plain
from loops import small
from several_networks import layers
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import graphsplit as gs


class Recurrent(nn.Module):
    """A network whose state the loop carries on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(10, 8), nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 10)

    def forward(
        self, words: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, and the state afterwards."""
        h, state = self.cell(self.embed(words), state)
        return self.out(h), state


def carried(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Truncated backward through time: None first, then the state of the step before."""
    net = Recurrent()
    net = distribute(placed(net, [net.embed, net.cell, net.out], ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    state = None
    for _ in range(3):
        words = torch.randint(0, 10, (2, 5))
        scores, state = net(words, state)
        loss = functional.cross_entropy(scores.flatten(0, 1), words.flatten())
        optimizer.zero_grad()
        loss.backward()
        yield nn.utils.clip_grad_norm_(net.parameters(), 0.25).item(), loss.item()
        optimizer.step()
        state = state.detach()
    yield net.state_dict(), state


def measured(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Counts by class, hooks on values, two losses weighed by a parameter of the script."""
    net = distribute(layers(8, 16, 4, ranks=ranks))
    weights = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.RMSprop([*net.parameters(), weights], lr=0.01)
    counts, seen = torch.zeros(4, 4, dtype=torch.long), []
    for _ in range(3):
        x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
        outputs = net(x)
        outputs.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        losses = [functional.cross_entropy(outputs, y), functional.l1_loss(outputs, x[:, :4])]
        loss = (torch.exp(-weights) * torch.stack(losses) + weights).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for right, guess in zip(y, outputs.argmax(1), strict=True):
            counts[right, guess] += 1
        seen.append(outputs.softmax(-1).detach())
        yield loss.item(), weights.grad
    yield counts, torch.cat(seen), net.state_dict()


def swapped(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A head of another size after a while; evaluation in inference mode."""
    net = distribute(layers(8, 16, 4, ranks=ranks))
    for size in (4, 3):
        net[2] = nn.Linear(16, size)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            loss = net(torch.randn(6, 8)).square().mean()
            loss.backward()
            yield loss.item(), [p.grad for p in net.parameters()]
            optimizer.step()
        with torch.inference_mode():
            yield net(torch.ones(2, 8)).tolist()
    yield net.state_dict(), optimizer.state_dict()


def logged(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Losses that one worker alone asks for: whole, scaled, in parts, and added up."""
    net = distribute(small(ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen, running = [], torch.zeros(()) if ranks[1] else 0.0
    for _ in range(3):
        optimizer.zero_grad()
        out = net(torch.randn(6, 8))
        parts = out.square().mean(), out.abs().mean()
        loss = parts[0] + 0.1 * parts[1]
        (loss / 4 * torch.tensor(2.0)).backward()
        optimizer.step()
        running += loss.detach()
        numbers = (loss, *parts, running, loss.detach() * 3 - 1)
        if gs.get_rank() == ranks[0]:
            seen = [number.item() for number in numbers]
        seen = [number.item() for number in numbers]
        yield seen


def mixed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Network and criterion under autocast, with a scaler and without; evaluation; then neither."""
    net = distribute(small(ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    labels = torch.arange(6) % 4
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            out = net(torch.randn(6, 8))
            scores = out @ torch.linspace(-1, 1, 16).view(4, 4)
            loss = functional.cross_entropy(scores, labels) + out.square().mean()
        yield out.dtype, scores.dtype, loss.dtype, scores.detach()
        if dtype is torch.float16:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            yield torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        yield loss.item()
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = net(torch.randn(6, 8))
        yield scores.argmax(1), scores.to("cpu") + 1  # the second is the first itself
    net.train()
    net(torch.randn(6, 8)).sum().backward()
    yield from (p.grad for p in net.parameters())
    yield dict(net.state_dict())


def contrastive(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Masks that all workers have, to read and to write (SimCLR)."""
    net = distribute(small(ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    off_diagonal, labels = ~torch.eye(6, dtype=torch.bool), torch.arange(6) % 3
    for _ in range(2):
        features = functional.normalize(net(torch.randn(6, 8)))
        alike = (features @ features.T)[off_diagonal].view(6, -1)
        positive = alike[(labels[:, None] == labels)[off_diagonal].view(6, -1)]
        features = features * 2
        features[labels == 1, 1:] = 0.0
        loss = alike.logsumexp(1).mean() - positive.mean() + features.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), positive.shape, [p.grad for p in net.parameters()]
    yield net.state_dict()


def masked(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Masks and numbers that are values themselves, to read and to write (pruning)."""
    net = distribute(small(ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        out = net(torch.randn(6, 8)) * 1.0
        out[out < 0] = 0.0
        out[out[0].argmax(), 1:] = out[-1].detach()[1:]
        loss = out.square().mean() + out[out > 0.1].sum() + out[out[:, 0].argmax()].sum()
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            p.grad[p.grad.abs() < 0.01] = 0
        optimizer.step()
        with torch.no_grad():
            weight = net.last.weight
            weight[weight.abs() < 0.15] = 0.0
            weight[weight.sum(1).argmax()].mul_(0.5)
            weight[weight[:, 1].argmin(), 1] += 1.0
            weight.index_put_((weight[:, 0] > 0, torch.tensor(2)), torch.tensor(0.25))
        probabilities = out.detach().softmax(1)
        probabilities[probabilities < 0.3] = 0
        yield loss.item(), probabilities, [p.grad for p in net.parameters()]
        table = torch.arange(8.0)
        table[(probabilities > 0).sum()] = 1.0
        yield table, probabilities[probabilities > 0], table[probabilities.argmax(1)].tolist()
        number = probabilities.sum()
        number[number > 1] = number[number > 0] / 2
        yield number, number[number < 0]
    yield net.state_dict()


def moved(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """``net.to(device)`` in mid-run, with gradients; steps in hooks of parameters."""
    net = distribute(small(ranks))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
    for step in range(3):
        net = net.to("cpu").float()
        net(torch.randn(6, 8)).square().mean().backward()
        yield [p.grad for p in net.parameters()]
        if step == 0:
            for p in net.parameters():
                p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    yield net.state_dict()


def traps(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Groups by weight decay, clipping by its own name, histograms, norms by layer, ``foreach``."""
    net = small(ranks)
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    net = distribute(net)
    for step in range(3):
        for _ in range(2):
            (net(torch.randn(6, 8)).square().mean() / 2).backward()
        yield {n: p.grad.norm(2).item() for n, p in net.named_parameters() if p.grad is not None}
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        yield [norm.item() for norm in torch._foreach_norm(gradients)]
        for gradient in gradients:
            yield torch.histc(gradient, 5), gradient.numpy().max(), gradient.abs().mean().item()
            one = torch.arange(9.0)[::9]  # of one element, with a stride of its own
            yield (gradient.mean() * one).tolist(), gradient.sum().expand(1).tolist()
            yield torch.histogram(gradient, 5).hist, torch.histogram(gradient.cpu(), 3)[1]
            edges = np.histogram(gradient.detach().cpu().numpy(), 4)[1]
            yield edges.tolist(), torch.quantile(gradient, 0.5).item(), gradient.std().item()
        yield clip_grad_norm_(net.parameters(), 0.1).item()
        torch._foreach_mul_(gradients, 0.5)
        torch._foreach_add_(gradients, 0.001)
        yield [gradient for gradient in gradients]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
        yield sum(p.numel() for p in net.parameters()), [p.norm().item() for p in others]
    yield net.state_dict(), optimizer.state_dict()


def reused(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Operations that use an operand several times: weights and values of other workers."""
    net = distribute(small(ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(6, 8))
    for _ in range(2):
        early = functional.normalize(net.second.weight.clone(), dim=1)
        out = net(torch.randn(6, 8))
        weight = net.last.weight
        late = functional.normalize(weight, dim=1)
        far = functional.triplet_margin_loss(
            net.second.weight[:6, :4], out.clone(), net.second.weight[:6, 4:8], swap=True, margin=9
        )
        loss = (out @ late).square().mean() + early.exp().mean() + far + out.exp().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), [p.grad for p in net.parameters()]
    yield net.state_dict()


def unfollowed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Losses and numbers whose shapes torch cannot follow without values (speech)."""
    net = distribute(small(ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    words, sizes = torch.tensor([[1, 2], [1, 1]]), torch.tensor([1, 2])
    for _ in range(2):
        out = net(torch.randn(6, 8))
        speech = out.view(3, 2, 4).log_softmax(-1)
        loss = functional.ctc_loss(speech, words, torch.tensor([3, 3]), sizes)
        loss = loss + functional.gaussian_nll_loss(out, torch.ones(6, 4), out.detach().square())
        loss = loss + torch.corrcoef(out).square().mean()
        loss = loss + torch.ormqr(out.tanh(), out[0].sin() / 9, torch.ones(6, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), [p.grad for p in net.parameters()]
        with torch.no_grad():
            yield torch.cov(net.last.weight), torch.corrcoef(out).requires_grad
    yield net.state_dict()


def watched(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A hook asks for the loss while backward runs, and then writes to it."""
    net, seen = distribute(small(ranks)), []
    for _ in range(3):
        outputs = net(torch.randn(6, 8))
        loss = outputs.square().mean()

        def look(gradient: torch.Tensor, loss: torch.Tensor = loss) -> None:
            seen.append(loss.item())
            with torch.no_grad():
                loss.mul_(gradient.abs().sum())

        outputs.register_hook(look)
        loss.backward()
        yield list(seen), loss.item(), [p.grad for p in net.parameters()]


class Causal(nn.Module):
    """Keeps a mask that is a view of another tensor, which nobody holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        made: torch.Tensor = self.last(self.first(x).masked_fill(self.mask[0, : len(x)] == 0, 0.5))
        return made


def viewed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Evaluation between steps, with a buffer that is a view."""
    net = Causal()
    net = distribute(placed(net, [net.first, net.last], ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            yield loss.item(), net(torch.randn(6, 8)).sum().item()
    yield net.state_dict()


def sliced(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Rows of few features, of which the script takes some from layer to layer."""
    net = distribute(layers(5, 7, 5, ranks=ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        rows = torch.randn(9, 5)
        optimizer.zero_grad()
        for first in range(1, 7, 2):
            hidden = net[0](rows[first : first + 3])
            made = net[2](torch.tanh(hidden[1:]))
            (made[1:] @ hidden[:, :5].mT).square().mean().backward()
            yield made.detach()[1:].square().mean().item()
        optimizer.step()
    yield net.state_dict()


class Rounding(nn.Module):
    """Layers between which values are rounded: by two casts, or by ``gs.wire``."""

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.is_plain = is_plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        h = self.first(x)
        h = h.to(torch.bfloat16).to(h.dtype) if self.is_plain else gs.wire(h, torch.bfloat16)
        made: torch.Tensor = self.last(torch.relu(h))
        return made.half().float() if self.is_plain else gs.wire(made, torch.float16)


def rounding(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """What is rounded between the workers, and on its way to the loop."""
    net = Rounding(distribute is plain)
    net = distribute(placed(net, [net.first, net.last], ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = net(torch.randn(6, 8))
        loss = outputs.square().mean() + outputs.norm()
        loss.backward()
        optimizer.step()
        yield loss.item(), [p.grad for p in net.parameters()]
    yield net.state_dict()


def of_keys(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """MoCo: a network of keys, an average of the other one from before its first call."""
    net, keys = layers(8, 16, 4, ranks=ranks), layers(8, 16, 4, ranks=ranks[1:])
    for of_keys, of_net in zip(keys.parameters(), net.parameters(), strict=True):
        of_keys.data.copy_(of_net.data)
        of_keys.requires_grad = False
    net, keys = distribute(net), distribute(keys)
    queue, optimizer = torch.randn(4, 8), torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        found = net(torch.randn(4, 8))
        with torch.no_grad():
            for of_keys, of_net in zip(keys.parameters(), net.parameters(), strict=True):
                of_keys.data = of_keys.data * 0.9 + of_net.data * 0.1
            key = keys(torch.randn(4, 8))
        logits = torch.cat([(found * key).sum(1, keepdim=True), found @ queue.clone()], 1)
        loss = nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[:, :4] = key.T
        yield loss.item(), queue
    yield keys.state_dict()


def in_one_piece(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Gradients that are views of one tensor of all, clipped afterwards."""
    net = distribute(layers(8, 16, 4, ranks=ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(6, 8)).square().mean().backward()
        whole, start = torch.cat([p.grad.flatten() for p in net.parameters()]) * 2, 0
        for p in net.parameters():
            p.grad = whole[start : start + p.numel()].view_as(p)
            start += p.numel()
        yield nn.utils.clip_grad_norm_(net.parameters(), 0.5).item()
        optimizer.step()
    yield net.state_dict()


def renewed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Statistics of BatchNorm and weights are other tensors now and then, made of those before."""
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    net = distribute(placed(net, list(net), ranks))
    optimizer, norm = torch.optim.SGD(net.parameters(), lr=0.1), net[1]
    for step in range(4):
        optimizer.zero_grad()
        net(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        if step == 1:
            norm.running_mean = torch.zeros_like(norm.running_mean)
            norm.running_var = 0.9 * norm.running_var + 0.1
            net[0].weight = nn.Parameter(net[0].weight * 0.5)
            net[2].bias = nn.Parameter(net[2].bias.detach().clone(), requires_grad=False)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            yield norm.running_var.sum().item(), net[0].weight.grad, net[2].bias.requires_grad
            other = copy.deepcopy(net).eval()
            yield other(torch.ones(2, 8)).tolist(), other.state_dict()
    yield net.state_dict()


class Encoder(nn.Module):
    """Attention; a part of it is a method that the script calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def encode(self, x: torch.Tensor) -> Any:
        """All but the last layer."""
        return self.layer(self.first(x))

    def forward(self, x: torch.Tensor) -> Any:
        """The whole."""
        return self.last(self.encode(x))


def attending(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Attention in the script: by a method of the network in eval mode, and by a function."""
    net = Encoder()
    parts = [net.first, net.layer.self_attn, net.layer.linear1, net.last]
    net = distribute(placed(net, parts, ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for dropout in (0.0, 0.2):
        optimizer.zero_grad()
        made = net(torch.randn(6, 5, 8)).view(6, 5, 2, 4).transpose(1, 2)
        loss = functional.scaled_dot_product_attention(made, made, made, dropout_p=dropout).sum()
        loss.backward()
        optimizer.step()
        yield loss.item()
        net.eval()
        with torch.no_grad():
            yield net.encode(torch.randn(6, 5, 8))
        net.train()
    yield net.state_dict()


LOOPS: tuple[Loop, ...] = (
    attending,
    renewed,
    carried,
    measured,
    of_keys,
    in_one_piece,
    swapped,
    logged,
    mixed,
    contrastive,
    masked,
    moved,
    reused,
    rounding,
    sliced,
    traps,
    unfollowed,
    viewed,
    watched,
)
