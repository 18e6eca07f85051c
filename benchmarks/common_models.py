"""The networks that benchmarks train, where they are placed, and the plain loop beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "lenet_mnist"))

Batch = tuple[torch.Tensor, torch.Tensor]
LENET = {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}
WIDTH, HEADS, LENGTH, VOCABULARY = 256, 4, 128, 256


class Block(nn.Module):
    """A transformer's block: attention, then two linear layers, each beside a skip."""

    def __init__(self, *, causal: bool = True, memory: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if memory:
            self.norm3 = nn.LayerNorm(WIDTH)
            self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.project_memory = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, LENGTH, WIDTH) to the same."""
        query, key, value = self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        x = x + self.project(_attend(query, key, value, causal=self.causal))
        if memory is not None:
            key, value = self.key_value(memory).split(WIDTH, dim=-1)
            found = _attend(self.query(self.norm3(x)), key, value, causal=False)
            x = x + self.project_memory(found)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
) -> torch.Tensor:
    rows, length, width = query.shape
    heads = [t.view(rows, -1, HEADS, width // HEADS).transpose(1, 2) for t in (query, key, value)]
    found = F.scaled_dot_product_attention(*heads, is_causal=causal)
    return found.transpose(1, 2).reshape(rows, length, width)


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place_of = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, LENGTH) to (rows, LENGTH, WIDTH)."""
        positions = torch.arange(tokens.shape[1])
        return self.token(tokens) + self.place_of(positions)


class GPT(nn.Module):
    """GPT-like: the embedding, blocks, and a head."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, LENGTH) to (rows, VOCABULARY, LENGTH), as the loss wants it."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class Tower(nn.Module):
    """An embedding and four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, LENGTH) to (rows, LENGTH, WIDTH)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Towers(nn.Module):
    """Two towers over the same tokens, concatenated, and a head."""

    def __init__(self, num_towers: int = 2) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower() for _ in range(num_towers))
        self.head = nn.Linear(num_towers * WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, LENGTH) to (rows, VOCABULARY, LENGTH)."""
        found = torch.cat([tower(tokens) for tower in self.towers], dim=-1)
        return self.head(found).transpose(1, 2)


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = Embedding(), Embedding()
        self.encoder = nn.ModuleList(Block(causal=False) for _ in range(5))
        self.decoder = nn.ModuleList(Block(memory=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, LENGTH) to (rows, VOCABULARY, LENGTH)."""
        memory = self.source(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self.target(tokens)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x).transpose(1, 2)


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Down and up again, with a skip from every level to its counterpart."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            _convolutions(inputs, outputs)
            for inputs, outputs in zip([3, *widths], widths, strict=False)
        )
        self.bottom = _convolutions(4 * width, 8 * width)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths)
        self.up = nn.ModuleList(_convolutions(2 * w, w) for w in widths)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(rows, 3, H, W) to (rows, 2, H, W)."""
        x, kept = image, []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, level, skip in zip(
            reversed(self.widen), reversed(self.up), reversed(kept), strict=True
        ):
            x = level(torch.cat([widen(x), skip], dim=1))
        return self.head(x)


class Residual(nn.Module):
    """Two convolutions with batch norms, beside a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, inputs, H, W) to (rows, outputs, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-like: six blocks over images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.blocks = nn.Sequential(*(Residual(*one) for one in widths))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 3, 32, 32) to (rows, 10)."""
        return self.head(self.blocks(x).mean((2, 3)))


def lenet() -> nn.Module:
    """The example's network."""
    from lenet import LeNet5

    return LeNet5()


def made(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer, the same for a seed."""
    torch.manual_seed(seed)
    net = build()
    return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def token_batches(num_steps: int, rows: int = 32) -> list[Batch]:
    """Random tokens and targets, made before anything is timed."""
    generator = torch.Generator().manual_seed(1)
    shape = (rows, LENGTH)
    return [
        (
            torch.randint(0, VOCABULARY, shape, generator=generator),
            torch.randint(0, VOCABULARY, shape, generator=generator),
        )
        for _ in range(num_steps)
    ]


def digits(num_steps: int) -> list[Batch]:
    """Random images of one channel, and a class for each."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 1, 32, 32, generator=generator),
            torch.randint(0, 10, (32,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def classified(num_steps: int, rows: int = 16) -> list[Batch]:
    """Random images of 32 x 32, and a class for each."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 3, 32, 32, generator=generator),
            torch.randint(0, 10, (rows,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def image_batches(num_steps: int, rows: int = 16, size: int = 96) -> list[Batch]:
    """Random images, and a class for every pixel."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 3, size, size, generator=generator),
            torch.randint(0, 2, (rows, size, size), generator=generator),
        )
        for _ in range(num_steps)
    ]


def place_all(workers: Sequence[Sequence[nn.Module]]) -> None:
    """Place each worker's modules, rank by rank."""
    for rank, modules in enumerate(workers):
        for module in modules:
            module.place("MS_WORKER", rank)


def place_lenet(net: Any) -> None:
    """A layer on each of five workers, as in the example."""
    for name, rank in LENET.items():
        getattr(net, name).place("MS_WORKER", rank)


def place_gpt(net: Any) -> None:
    """The first half of the blocks here, the second half there."""
    half = len(net.blocks) // 2
    place_all([(net.embedding, *net.blocks[:half]), (*net.blocks[half:], net.norm, net.head)])


def place_towers(net: Any) -> None:
    """A tower on each worker."""
    place_all([(net.towers[0], net.head), (net.towers[1],)])


def place_unet_on_two(net: Any) -> None:
    """Down here, up there: every skip crosses."""
    place_all([(net.down, net.bottom), (net.widen, net.up, net.head)])


def place_unet_on_three(net: Any) -> None:
    """Down, the small images below, and up."""
    below = (net.widen, net.bottom, net.down[2], net.up[2])
    place_all([(net.down,), below, (*net.up[:2], net.head)])


def place_encoder_decoder(net: Any) -> None:
    """Encoder here, decoder there."""
    place_all([(net.source, net.encoder), (net.target, net.decoder, net.head)])


def place_encoder_decoder_on_three(net: Any) -> None:
    """The encoder's result goes to two workers, past the first."""
    here = (net.target, *net.decoder[:2])
    place_all([(net.source, net.encoder), here, (*net.decoder[2:], net.head)])


def place_replicas(net: Any) -> None:
    """All of it on both workers."""
    net.place("MS_WORKER", [0, 1])


def place_slow_piece(net: Any) -> None:
    """Four blocks of five, which are four fifths of a step, on two workers beside the first."""
    place_all([(net.embedding, net.blocks[0], net.norm, net.head)])
    for block in net.blocks[1:]:
        block.place("MS_WORKER", [1, 2])


@dataclass(frozen=True)
class Case:
    """A network on some workers, and how it is trained.

    Attributes:
        title: For people.
        build: Makes the network.
        batches: Makes some batches.
        place: Places the network; None: one worker has all of it.
        num_workers: On how many workers.
        microbatches: Into how many microbatches a batch is split.
        num_steps: Steps of a round.
        options: Further ones of its Model.
    """

    title: str
    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Batch]]
    place: Callable[[Any], None] | None = None
    num_workers: int = 1
    microbatches: int = 1
    num_steps: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self, **options: Any) -> gs.Model:
        """A new network, placed, in a ``Model``."""
        net, optimizer = made(self.build)
        if self.place is not None:
            self.place(net)
        options = {"microbatches": self.microbatches, **self.options, **options}
        return gs.Model(net, F.cross_entropy, optimizer, **options)


PAIRS = {"gradient_order": "pairs"}
CASES = {
    "lenet": Case("LeNet", lenet, digits, place_lenet, 5, num_steps=50),
    "lenet-1": Case("LeNet", lenet, digits, num_steps=50),
    "gpt": Case("GPT-like, 8 blocks", GPT, lambda n: token_batches(n), place_gpt, 2, 8),
    "gpt-1": Case("GPT-like, 8 blocks", GPT, lambda n: token_batches(n, 8), num_steps=2),
    "towers": Case("two towers", Towers, lambda n: token_batches(n, 16), place_towers, 2),
    "towers-8": Case("two towers", Towers, lambda n: token_batches(n, 16), place_towers, 2, 8),
    "unet-2": Case("U-Net", UNet, lambda n: image_batches(n), place_unet_on_two, 2, 8),
    "unet-3": Case("U-Net", UNet, lambda n: image_batches(n), place_unet_on_three, 3, 8),
    "encoder-decoder-2": Case(
        "encoder-decoder", EncoderDecoder, lambda n: token_batches(n), place_encoder_decoder, 2, 8
    ),
    "encoder-decoder-3": Case(
        *("encoder-decoder", EncoderDecoder, lambda n: token_batches(n)),
        *(place_encoder_decoder_on_three, 3, 8),
    ),
    "gpt-replicas": Case(
        *("GPT-like, 4 blocks", lambda: GPT(4), lambda n: token_batches(n, 16)),
        *(place_replicas, 2, 8, 4, PAIRS),
    ),
    "resnet-replicas": Case(
        "ResNet-like, 6 blocks", ResNet, classified, place_replicas, 2, 8, 4, PAIRS
    ),
    "slow-piece": Case(
        *("GPT-like, 4 blocks of 5 on two workers", lambda: GPT(5), lambda n: token_batches(n, 16)),
        *(place_slow_piece, 3, 8, 4, PAIRS),
    ),
}


def plain_loop(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    microbatches: int = 1,
    loss_fn: Callable[..., torch.Tensor] = F.cross_entropy,
) -> float:
    """The reference: ordinary PyTorch in this process. Returns the last loss."""
    loss = torch.zeros(())
    for inputs, target in batches:
        optimizer.zero_grad()
        if microbatches == 1:
            loss = loss_fn(net(inputs), target)
            loss.backward()
        else:
            total: Any = 0
            for (part, part_target), weight in gs.split_microbatches(
                (inputs, target), microbatches
            ):
                loss = loss_fn(net(part), part_target) * weight
                loss.backward()
                total = total + loss.detach()
            loss = total
        optimizer.step()
    return float(loss.detach())


class LastLoss(gs.callbacks.Callback):
    """Keeps the last loss, to compare it with the plain loop's."""

    loss = torch.zeros(())

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        """Remember it."""
        assert context.loss is not None
        self.loss = context.loss
