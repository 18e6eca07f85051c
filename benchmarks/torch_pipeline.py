"""GPT on two workers by ``torch.distributed.pipelining`` on Gloo, and its halves alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from common_models import GPT, LENGTH, WIDTH, Batch, made
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

NUM_WORKERS = 2
# The class of each schedule, and which of four stages, or of two, each worker has.
SCHEDULES: dict[str, tuple[Any, Sequence[Sequence[int]]]] = {
    "torch 1F1B": (Schedule1F1B, ((0,), (1,))),
    "torch interleaved": (ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "torch zero bubble": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "torch ZBV": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}


def join(rank: int, port: int) -> None:
    """Make the process group that all schedules of this process use."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_WORKERS)


class Stage(nn.Module):
    """A part of the blocks, and what stands at its end, under the names they have in the whole.

    Args:
        whole: The whole network.
        index: Which part.
        count: How many parts there are.
    """

    def __init__(self, whole: nn.Module, index: int, count: int) -> None:
        super().__init__()
        size = len(whole.blocks) // count
        names = [str(index * size + i) for i in range(size)]
        self.blocks = nn.ModuleDict({name: whole.blocks[int(name)] for name in names})
        self.is_first, self.is_last = index == 0, index == count - 1
        if self.is_first:
            self.embedding = whole.embedding
        if self.is_last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, LENGTH) or (rows, LENGTH, WIDTH) to the latter, or what the loss wants."""
        if self.is_first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2) if self.is_last else x


class TorchPipeline:
    """One worker's part of a schedule, as torch's documentation shows it. After ``join``.

    Its ``scale_grads`` divides the gradients of a mean by the number of microbatches at the end,
    ours are weighted at the start: for a power of two both are exact, so bits can be compared.

    Attributes:
        net: This worker's stages.
        loss: The loss of the last step, on the worker that has the last stage.
    """

    def __init__(self, name: str, rank: int, microbatches: int) -> None:
        make, stages_of = SCHEDULES[name]
        count = sum(map(len, stages_of))
        whole = made(GPT)[0]
        self.net = nn.ModuleList(Stage(whole, index, count) for index in stages_of[rank])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        device = torch.device("cpu")
        stages = [
            PipelineStage(stage, index, count, device)
            for stage, index in zip(self.net, stages_of[rank], strict=True)
        ]
        given: Any = stages if count > NUM_WORKERS else stages[0]
        self.schedule = make(given, microbatches, loss_fn=F.cross_entropy)
        self.has_first = 0 in stages_of[rank]
        self.has_last = count - 1 in stages_of[rank]
        self.microbatches = microbatches
        self.loss: float | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """This worker's parameters, by their names in the whole network."""
        return {name: p for stage in self.net for name, p in stage.named_parameters()}

    def train(self, batches: Sequence[Batch]) -> None:
        """A step for every batch."""
        for inputs, target in batches:
            self.optimizer.zero_grad()
            losses: list[Any] = []
            more = {"target": target, "losses": losses} if self.has_last else {}
            self.schedule.step(*((inputs,) if self.has_first else ()), **more)
            if self.has_last:
                self.loss = float(sum(loss.detach() / self.microbatches for loss in losses))
            self.optimizer.step()


class HalfAlone:
    """One worker's half with nothing to wait for: the floor of a step on two workers.

    It computes what the worker computes, on values that are there already.
    """

    def __init__(self, rank: int, microbatches: int) -> None:
        self._stage = Stage(made(GPT)[0], rank, NUM_WORKERS)
        self._optimizer = torch.optim.SGD(self._stage.parameters(), lr=0.01, momentum=0.9)
        self._microbatches = microbatches

    def train(self, batches: Sequence[Batch]) -> None:
        """A step for every batch."""
        for inputs, target in batches:
            self._optimizer.zero_grad()
            parts = zip(
                *(whole.chunk(self._microbatches) for whole in (inputs, target)), strict=True
            )
            for part, part_target in parts:
                shape = (len(part), LENGTH, WIDTH)
                if self._stage.is_last:
                    value = torch.ones(shape, requires_grad=True)
                    loss = F.cross_entropy(self._stage(value), part_target)
                    (loss / self._microbatches).backward()
                else:
                    self._stage(part).backward(torch.ones(shape))
            self._optimizer.step()
