"""A step of a GPT-like model on two workers, against torch.distributed.pipelining on Gloo.

    python benchmarks/bench_pipeline.py [--rounds 5] [--steps 5] [--launches 3]
        [--microbatches 4 8 32] [--schedule 1f1b zero_bubble auto] [--json FILE]

8 blocks of width 256, 128 tokens, 32 rows, SGD with momentum; four blocks on each worker. The same
two processes hold both models, made from one seed, and train them on the same batches in turn.
After the last round every parameter and its gradient are compared byte by byte, and the loss.
Steps follow each other as they do in an epoch; there is a barrier before each side's round, and
none inside one. With ``--steps 1`` no worker can begin a step while another ends the one before.

Where memory comes to lie differs from launch to launch, and with it the time of the same matrix
products, on either side: by several percent. So rounds of several launches are put together.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from typing import Any

from common import Row, compared, environment, equal_conditions, parser, write
from common_cluster import (
    agreed,
    breakdown,
    breakdowns,
    by_launch,
    free_port,
    is_worker,
    launch,
    report,
    same_parameters,
    slowest_of_all,
    take_turns,
)
from common_models import GPT, LastLoss, made, token_batches
from torch.nn import functional as F

# By number of microbatches.
REACH = {4: 0.88, 8: 0.90, 32: 0.98}
STEPS = 5
SETTLE = 10  # steps after which "auto" has measured its costs and chosen


def place(net: Any) -> None:
    """The first half here, the second half there."""
    net.embedding.place("MS_WORKER", 0)
    for index, block in enumerate(net.blocks):
        block.place("MS_WORKER", index // 4)
    net.norm.place("MS_WORKER", 1)
    net.head.place("MS_WORKER", 1)


class TorchPipeline:
    """torch.distributed.pipelining, as its documentation shows it.

    Its ``scale_grads`` divides the gradients of a mean by the number of microbatches at the end,
    ours are weighted at the start: for a power of two both are exact, so bits can be compared.
    """

    def __init__(self, rank: int, port: int, microbatches: int) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        class Half(nn.Module):
            """This worker's modules, under the names they have in the whole."""

            def __init__(self, whole: nn.Module) -> None:
                super().__init__()
                names = [str(4 * rank + i) for i in range(4)]
                self.blocks = nn.ModuleDict({n: whole.blocks[int(n)] for n in names})
                if rank == 0:
                    self.embedding = whole.embedding
                else:
                    self.norm, self.head = whole.norm, whole.head

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if rank == 0:
                    x = self.embedding(x)
                for block in self.blocks.values():
                    x = block(x)
                return self.head(self.norm(x)).transpose(1, 2) if rank == 1 else x

        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        self.rank = rank
        self.net = Half(made(GPT)[0])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        stage = PipelineStage(self.net, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=F.cross_entropy)
        self.microbatches = microbatches
        self.loss = 0.0

    def train(self, batches: Any) -> None:
        """A step for every batch."""
        for inputs, target in batches:
            self.optimizer.zero_grad()
            losses: list[Any] = []
            if self.rank == 0:
                self.schedule.step(inputs)
            else:
                self.schedule.step(target=target, losses=losses)
                self.loss = float(sum(loss * (1 / self.microbatches) for loss in losses))
            self.optimizer.step()

    def close(self) -> None:
        """Leave its process group."""
        import torch.distributed as dist

        dist.destroy_process_group()


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    equal_conditions()
    import graphsplit as gs

    gs.init()
    rank = gs.get_rank()
    batches = token_batches(arguments.steps)
    net, optimizer = made(GPT)
    place(net)
    (number,) = arguments.microbatches
    (schedule,) = arguments.schedule
    model = gs.Model(net, F.cross_entropy, optimizer, microbatches=number, schedule=schedule)
    theirs = TorchPipeline(rank, arguments.port, number)
    keep = LastLoss()
    for _ in range(-(-SETTLE // arguments.steps)):
        model.train(1, batches)
        theirs.train(batches)
    turns = take_turns(
        {
            "graphsplit": lambda: model.train(1, batches, callbacks=[keep]),
            "torch 1F1B": lambda: theirs.train(batches),
        },
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    same = same_parameters(net, theirs.net)
    if rank == 1 and float(keep.loss) != theirs.loss:
        same = f"losses differ: {float(keep.loss)!r} and {theirs.loss!r}"
    theirs.close()
    report({"turns": turns, "bits": same, "breakdown": breakdown(model, batches)})


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """One row for each number of microbatches and schedule."""
    for number, schedule in itertools.product(arguments.microbatches, arguments.schedule):
        options = ["--rounds", str(arguments.rounds), "--microbatches", str(number)]
        options += ["--schedule", schedule, "--steps", str(arguments.steps)]
        launches = [
            launch(os.path.abspath(__file__), 2, [*options, "--port", str(free_port())])
            for _ in range(arguments.launches)
        ]
        sides = ("graphsplit", "torch 1F1B")
        yield compared(
            f"GPT-like, 8 blocks, 2 workers, {number} microbatches, {schedule}, {arguments.steps} "
            "steps in a row",
            *((side, slowest_of_all(launches, side)) for side in sides),
            reach=REACH.get(number) if schedule == "auto" else None,
            bits=agreed([report["bits"] for reports in launches for report in reports]),
            breakdown=breakdowns(launches[-1]),
            notes=by_launch(launches, *sides),
        )


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__, steps=STEPS)
    made_parser.add_argument("--launches", type=int, default=3)
    made_parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 32])
    made_parser.add_argument("--schedule", nargs="+", default=["1f1b", "zero_bubble", "auto"])
    made_parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = made_parser.parse_args()
    if is_worker():
        work(arguments)
    else:
        conditions = environment()
        write(arguments, rows(arguments), conditions)


if __name__ == "__main__":
    main()
