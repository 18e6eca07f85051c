"""The cells of README's table about torch.distributed.pipelining that are marked *ran*.

    python benchmarks/torch_limits.py

Each row is run here, on Gloo, by processes of its own, and what came of it is printed. Nothing is
timed, and graphsplit takes no part.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

DEADLINE_S = 60
Step = Callable[[int], Any]


class Chain(nn.Module):
    """Three layers; what each reads is up to ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Skipping(Chain):
    """Two later stages use the first one's value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        first = self.a(x)
        return self.c(torch.relu(self.b(first)) + first) * first


class LateMask(Chain):
    """The last stage is the first to use the mask."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.c(self.b(self.a(x)) * mask)


class Reusing(Chain):
    """The first layer runs a second time at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.a(torch.relu(self.b(torch.relu(self.a(x)))))


class Dropping(Chain):
    """Dropout between the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.b(F.dropout(self.a(x), 0.5, self.training))


class Tied(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens that count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def square(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean square error."""
    return ((outputs - target) ** 2).mean()


def cut(net: nn.Module, example: Sequence[torch.Tensor], *before: str) -> Any:
    """The network, cut before some of its modules."""
    spec = dict.fromkeys(before, SplitPoint.BEGINNING)
    return pipeline(net, mb_args=tuple(example), split_spec=spec)


def step(
    rank: int,
    net: nn.Module,
    inputs: Sequence[torch.Tensor],
    target: torch.Tensor,
    *before: str,
    microbatches: int = 1,
    loss_fn: Callable[..., torch.Tensor] = square,
    traced: int | None = None,
) -> tuple[list[torch.Tensor], Any]:
    """One training step; the losses that this rank was told, and its stage."""
    rows = traced or inputs[0].shape[0] // microbatches
    pipe = cut(net, [x[:rows] for x in inputs], *before)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=microbatches, loss_fn=loss_fn)
    losses: list[torch.Tensor] = []
    is_last = rank == dist.get_world_size() - 1
    given = {"target": target, "losses": losses} if is_last else {}
    schedule.step(*(inputs if rank == 0 else ()), **given)
    return losses, stage.submod


def rows_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    torch.manual_seed(1)
    return torch.randn(number, 6), torch.randn(number, 6)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels; in the second half of the rows most labels do not count."""
    torch.manual_seed(2)
    ids, labels = torch.randint(0, 12, (8, 10)), torch.randint(0, 12, (8, 10))
    labels[4:, 2:] = -1
    return ids, labels


def skip(rank: int) -> Any:
    """A value that two later stages use, in one piece."""
    x, y = rows_of(4)
    step(rank, Skipping(), [x], y, "b", "c")
    return "runs"


def skip_in_microbatches(rank: int) -> Any:
    """The same, with microbatches."""
    x, y = rows_of(4)
    step(rank, Skipping(), [x], y, "b", "c", microbatches=2)
    return "runs"


def late_input(rank: int) -> Any:
    """An input that a later stage is the first to use."""
    x, y = rows_of(4)
    step(rank, LateMask(), [x, (x > 0).float()], y, "b", "c")
    return "runs"


def reused(rank: int) -> Any:
    """The names of the parameters, by stage."""
    pipe = cut(Reusing(), [rows_of(4)[0]], "b")
    return [sorted(pipe.get_stage_module(i).state_dict()) for i in range(pipe.num_stages)]


def tied(rank: int) -> Any:
    """The norm of the gradient of each copy of the tied weight that is here."""
    torch.manual_seed(0)
    ids, labels = tokens()
    _, stage = step(rank, Tied(), [ids], labels, "body", loss_fn=token_loss)
    held = stage.state_dict(keep_vars=True)
    return {
        name: "none" if held[name].grad is None else f"{held[name].grad.norm():.3f}"
        for name in held
        if held[name].shape == (12, 6)
    }


def dropout_after_eval(rank: int) -> Any:
    """Whether two evaluations of one input differ."""
    x, _ = rows_of(4)
    stage = cut(Dropping(), [x], "b").get_stage_module(0)
    stage.eval()
    return "stays on" if not torch.equal(stage(x)[0], stage(x)[0]) else "off"


def ragged(rank: int) -> Any:
    """A batch whose rows the microbatches do not divide."""
    x, y = rows_of(5)
    step(rank, Chain(), [x], y, "b", microbatches=2, traced=2)
    return "runs"


def masked_mean(rank: int) -> Any:
    """How far gradients are from those of the whole batch, relative to their norm."""
    torch.manual_seed(0)
    ids, labels = tokens()
    net = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12))
    token_loss(net(ids), labels).backward()
    true = {tuple(p.shape): p.grad.clone() for p in net.parameters() if p.grad is not None}
    net.zero_grad()
    _, stage = step(rank, net, [ids], labels, "1", microbatches=2, loss_fn=token_loss)
    return [
        f"{float((p.grad - true[tuple(p.shape)]).norm() / true[tuple(p.shape)].norm()):.0%}"
        for p in stage.parameters()
    ]


def who_knows_the_loss(rank: int) -> Any:
    """How many losses this rank was told."""
    x, y = rows_of(4)
    losses, _ = step(rank, Chain(), [x], y, "b", microbatches=2)
    return f"{len(losses)} losses"


def killed(rank: int) -> Any:
    """The last rank ends without a word."""
    x, y = rows_of(4)
    if rank == 1:
        os._exit(1)
    step(rank, Chain(), [x], y, "b")
    return "runs"


# README's row, the case, and how many processes run it.
CASES: tuple[tuple[str, Step, int], ...] = (
    ("value used by two later stages", skip, 3),
    ("input first used late", late_input, 3),
    ("A→B→A on one module", reused, 1),
    ("tied parameters", tied, 2),
    ("dropout after .eval()", dropout_after_eval, 1),
    ("ragged and short batches", ragged, 2),
    ("mean over tokens, some ignored", masked_mean, 2),
    ("skips with microbatches", skip_in_microbatches, 3),
    ("who knows the loss", who_knows_the_loss, 2),
    ("a killed worker", killed, 2),
)


def _run(rank: int, num_ranks: int, port: int, case: Step, folder: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch says of its own failures
    where = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=DEADLINE_S / 2)
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=num_ranks, timeout=limit
    )
    torch.manual_seed(0)
    try:
        found = str(case(rank))
    except Exception as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    Path(folder, str(rank)).write_text(found, encoding="utf-8")
    os._exit(0)  # a group that has lost a member would wait for it


def outcome(case: Step, num_ranks: int) -> list[str]:
    """What came of a case, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run, args=(rank, num_ranks, port, case, folder), daemon=True)
            for rank in range(num_ranks)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(DEADLINE_S)
            one.kill()
        told = [Path(folder, str(rank)) for rank in range(num_ranks)]
        return [
            path.read_text(encoding="utf-8") if path.exists() else "ended without a word"
            for path in told
        ]


def main() -> int:
    """Run all, or those whose row holds a word of the command line."""
    print(f"torch {torch.__version__}, torch.distributed.pipelining, Gloo")
    for row, case, num_ranks in CASES:
        if len(sys.argv) == 1 or any(word in row for word in sys.argv[1:]):
            print(f"\n{row}", flush=True)
            for rank, text in enumerate(outcome(case, num_ranks)):
                print(f"  rank {rank}: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
