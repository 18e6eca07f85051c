"""The networks of the examples under the loops that anybody would write, whole or distributed."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from loop_helpers import Distribute, Loop, placed
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphsplit as gs

EXAMPLES = Path(__file__).parents[2] / "examples"


def _load(name: str) -> Any:
    """An example, imported under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"loop_of_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _place(role: str, rank: int) -> Any:
    """Where there is no third worker, the last one takes its part."""
    return gs.place(role, min(rank, gs.get_world_size() - 1))


NAMES = ("ddp_toy", "two_stage_pipeline", "clip_towers", "gan", "encoder_decoder", "gpt_like")
EXAMPLE = {name: _load(name) for name in (*NAMES, "loop_that_survives", "lenet_mnist/lenet")}
EXAMPLE["clip_towers"].gs = SimpleNamespace(place=_place)


def _end(*networks: Any, of: tuple[Any, ...]) -> Any:
    """Parameters, buffers and the states of optimizers."""
    return [net.state_dict() for net in networks], [one.state_dict() for one in of]


def ddp_toy(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """The toy of DDP's tutorial."""
    net = EXAMPLE["ddp_toy"].ToyModel()
    net = placed(net, [net.net1, net.net2], ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    net, loss_fn = distribute(net), nn.MSELoss()
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_fn(net(torch.randn(20, 10)), torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield _end(net, of=(optimizer,))


def linear(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """MegEngine's linear classifier: its only layer on a worker that does not read the batches."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(32 * 32, 10))
    net = placed(net, [net[1]], ranks[1:])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net = distribute(net)
    for _ in range(4):
        x, y = torch.rand(16, 1, 32, 32), torch.randint(10, (16,))
        optimizer.zero_grad()
        logits = net(x)
        loss = cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        yield loss.item(), (logits.argmax(1) == y).sum().item()
    yield _end(net, of=(optimizer,))


def lenet(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """LeNet, layer by layer."""
    net = EXAMPLE["lenet_mnist/lenet"].LeNet5()
    net = placed(net, [net.conv1, net.conv2, net.fc1, net.fc2, net.fc3], ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    net, loss_fn = distribute(net), nn.CrossEntropyLoss()
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(net(torch.rand(8, 1, 32, 32)), torch.randint(10, (8,)))
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield _end(net, of=(optimizer,))


def two_stage_pipeline(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """MegEngine's pipeline; the script divides its batches by itself."""
    net = EXAMPLE["two_stage_pipeline"].network()
    net = placed(net, list(net), ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    net = distribute(net)
    for _ in range(3):
        x, y = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
        optimizer.zero_grad()
        for rows, targets in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = cross_entropy(net(rows), targets) / 4
            loss.backward()
            yield loss.item()
        optimizer.step()
    yield _end(net, of=(optimizer,))


def clip_towers(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """CLIP's towers; the loss is inside, on a worker of its own."""
    net = EXAMPLE["clip_towers"].Clip()
    net = placed(net, [net.image, net.words, net.text, net.image_head], ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net = distribute(net)
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 3, 16, 16), torch.randint(50, (8, 8)))
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield _end(net, of=(optimizer,))


def gan(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """The two networks of the GAN, each with an optimizer of its own."""
    nets = EXAMPLE["gan"].networks()
    nets = [placed(net, [net[0], net[2]], ranks[k:]) for k, net in enumerate(nets)]
    making, judging = (torch.optim.Adam(net.parameters(), 1e-3, (0.5, 0.999)) for net in nets)
    maker, judge = map(distribute, nets)
    ones = torch.ones(16, 1)
    for _ in range(3):
        real, noise = torch.randn(16, 2) + 3, torch.randn(16, 8)
        right, wrong = judge(real), judge(maker(noise).detach())
        judged = binary_cross_entropy_with_logits(right, ones)
        judged = judged + binary_cross_entropy_with_logits(wrong, 0 * ones)
        judging.zero_grad()
        judged.backward()
        judging.step()
        made = binary_cross_entropy_with_logits(judge(maker(noise)), ones)
        making.zero_grad()
        made.backward()
        making.step()
        yield judged.item(), made.item()
    yield _end(maker, judge, of=(making, judging))


def encoder_decoder(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """The translation, with its loss outside."""
    example = EXAMPLE["encoder_decoder"]
    net = example.Translate()
    net = placed(net, [net.source, net.target, net.encoder, net.decoder, net.head], ranks)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net = distribute(net)
    for _ in range(3):
        source, target, following = example.sentences()
        optimizer.zero_grad()
        loss = example.loss_of(net(source, target), following)
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield _end(net, of=(optimizer,))


def gpt_like(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """The small GPT: accumulation and clipping; another one goes on from what was kept."""
    example = EXAMPLE["gpt_like"]
    kept: Any = None
    for first in (0, 8):
        net = example.Gpt()
        net = placed(net, [net.words, *net.blocks], ranks)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        net = distribute(net)
        if kept is not None:
            net.load_state_dict(kept[0][0])
            optimizer.load_state_dict(kept[1][0])
        for number in range(first, first + 8):
            tokens, following = example.batch(number)
            loss = example.loss_of(net(tokens), following)
            (loss / 4).backward()
            yield loss.item()
            if number % 4 == 3:
                yield clip_grad_norm_(net.parameters(), 1.0).item()
                optimizer.step()
                optimizer.zero_grad()
        kept = copy.deepcopy(_end(net, of=(optimizer,)))
        yield kept


def loop_that_survives(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """The loop with an average and a schedule, over its own shuffled loader."""
    example = EXAMPLE["loop_that_survives"]
    net = example.Classifier()
    net = placed(net, [net.first, net.head, net.norm], ranks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    net = distribute(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader = example.batches()
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        yield clip_grad_norm_(net.parameters(), 1.0).item(), loss.item()
        optimizer.step()
        scheduler.step()
        average.update_parameters(net)
    average.eval()
    with torch.no_grad():
        yield sum((average(x).argmax(1) == y).sum().item() for x, y in loader)
    yield _end(net, average.module, of=(optimizer, scheduler))


LOOPS: tuple[Loop, ...] = (
    *(ddp_toy, two_stage_pipeline, clip_towers, gan, encoder_decoder),
    *(gpt_like, loop_that_survives, linear, lenet),
)
