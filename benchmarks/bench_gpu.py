"""A GPT-like network on a GPU: ``gs.Model`` in one process against the plain loop.

    python benchmarks/bench_gpu.py [--rounds 9] [--steps 10] [--widths 256 512 1024] [--json FILE]

Two networks alike, float32 and under autocast with bfloat16, take turns, A B A B, of ten steps; the
device is waited for at the end of each. Parameters are compared bit by bit.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator

import torch
from common import Row, Samples, compared, environment, parser, timed, write
from torch import nn
from torch.nn import functional

import graphsplit as gs

LENGTH, VOCABULARY = 256, 256
BLOCKS_AND_ROWS = {256: (4, 4), 512: (8, 8), 1024: (8, 16)}  # by width
OURS, THEIRS = "gs.Model", "plain loop"


class GPT(nn.Module):
    """Blocks of torch's own, with a causal mask."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, LENGTH) to (rows * LENGTH, VOCABULARY)."""
        found = self.blocks(self.token(tokens), mask=self.mask, is_causal=True)
        return self.head(found).flatten(0, 1)


def made(width: int, num_blocks: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network on the device, and its optimizer."""
    torch.manual_seed(0)
    net = GPT(width, num_blocks).to(device)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def measured(arguments: Namespace, width: int, dtype: torch.dtype | None) -> Row:
    """One row of the table."""
    num_blocks, rows = BLOCKS_AND_ROWS[width]
    device, steps = arguments.device, arguments.steps
    shape = (2, rows, LENGTH)
    drawn = (torch.randint(0, VOCABULARY, shape).to(device) for _ in range(steps))
    batches = [(tokens, target.flatten()) for tokens, target in drawn]
    net, optimizer = made(width, num_blocks, device)
    other, other_optimizer = made(width, num_blocks, device)
    model = gs.Model(
        other, loss_fn=functional.cross_entropy, optimizer=other_optimizer, autocast=dtype
    )

    def wait() -> None:
        if device != "cpu":
            torch.get_device_module(device).synchronize()

    def plain() -> None:
        kind = torch.device(device).type
        for inputs, target in batches:
            optimizer.zero_grad()
            with torch.autocast(kind, dtype, enabled=dtype is not None):
                loss = functional.cross_entropy(net(inputs), target)
            loss.backward()
            optimizer.step()
        wait()

    def ours() -> None:
        for batch in batches:
            model.train_step(*batch)
        wait()

    sides = {OURS: (ours, Samples()), THEIRS: (plain, Samples())}
    for number in range(arguments.rounds + 1):
        for run, samples in sides.values():
            seconds, faults = timed(run)
            if number:  # the first warms up
                samples.seconds.append(seconds / steps)
                samples.faults.append(faults / steps)
    is_same = all(map(torch.equal, net.parameters(), other.parameters()))
    name = "float32" if dtype is None else f"autocast {dtype}".replace("torch.", "")
    return compared(
        f"width {width}, {num_blocks} blocks, batch {rows}, {name}, on {device}",
        *((side, samples) for side, (_, samples) in sides.items()),
        reach=None,
        bits="equal" if is_same else "DIFFERENT",
    )


def rows(arguments: Namespace) -> Iterator[Row]:
    """All rows."""
    for width in arguments.widths:
        for dtype in (None, torch.bfloat16):
            yield measured(arguments, width, dtype)


if __name__ == "__main__":
    options = parser(__doc__, rounds=9, steps=10)
    options.add_argument("--device", default="cuda", help="where the network is")
    options.add_argument("--widths", type=int, nargs="+", default=list(BLOCKS_AND_ROWS))
    given = options.parse_args()
    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        options.error("there is no GPU here; --device cpu runs the same on the CPU")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    write(given, rows(given), environment())
