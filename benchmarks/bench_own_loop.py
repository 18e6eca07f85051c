"""A script's own loop against ``Model.train``: under ``gs.distribute``, and by a Model's parts.

    python benchmarks/bench_own_loop.py [--rounds 5] [--only lenet gpt gpipe 1f1b] [--json FILE]

Two networks alike, on the same workers: one is trained by ``Model.train``, the other by the loop
that everybody writes, with the criterion outside and no value asked for. In ``gpipe`` and ``1f1b``
one is trained by ``zero_grad``, ``forward_backward`` and ``step``, eight microbatches, the other by
``Model.train`` with a barrier at each step. They take turns, A B A B, each behind a barrier.
Parameters and last losses are compared bit by bit.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from common import Row, parser
from common_cluster import breakdown, launch, report, row_of, run, same_parameters, take_turns
from common_models import CASES, GPT, Batch, Case, LastLoss, made, place_gpt, token_batches
from torch import nn
from torch.nn import functional

import graphsplit as gs
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

OURS, PARTS, THEIRS = "own loop", "forward_backward and step", "Model.train"


@dataclass(frozen=True)
class Bound:
    """A case, and the ratio that is wanted.

    Attributes:
        case: The network on its workers.
        reach: The bound on the ratio.
        turns: How many turns of each side make a round.
        schedule: That of both sides, where a Model's parts are measured.
    """

    case: Case
    reach: float
    turns: int
    schedule: str = ""


BOUNDS = {
    "lenet": Bound(CASES["lenet"], 1.35, 4),
    "gpt": Bound(
        Case("GPT-like, 8 blocks", GPT, lambda n: token_batches(n, 8), place_gpt, 2), 1.05, 2
    ),
    "gpipe": Bound(CASES["gpt"], 1.05, 1, "gpipe"),
    "1f1b": Bound(CASES["gpt"], 1.05, 1, "1f1b"),
}


class Barrier(LastLoss):
    """Has all workers meet after each step."""

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        """Wait for all."""
        super().on_step_end(context)
        gs.barrier()


def own_loop(
    net: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> torch.Tensor:
    """One epoch; the last loss."""
    loss = torch.zeros(())
    for inputs, target in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(inputs), target)
        loss.backward()
        optimizer.step()
    return loss


def by_parts(model: gs.Model, batches: Sequence[Batch]) -> torch.Tensor:
    """The same by the parts of ``train_step``."""
    loss = torch.zeros(())
    for batch in batches:
        model.zero_grad()
        loss = model.forward_backward(*batch)
        model.step()
    return loss


def work_by_parts(bound: Bound, arguments: Namespace) -> None:
    """One worker's part, where a Model's parts are measured."""
    batches = bound.case.batches(arguments.steps)
    keep, losses = Barrier(), list[torch.Tensor]()
    mine, model = (bound.case.model(schedule=bound.schedule) for _ in range(2))
    turns = take_turns(
        {
            PARTS: lambda: losses.append(by_parts(mine, batches)),
            THEIRS: lambda: model.train(1, batches, callbacks=[keep]),
        },
        rounds=arguments.rounds,
        steps=arguments.steps,
        turns=bound.turns,
    )
    own = {n: p for n, p in mine.network.named_parameters() if not is_elsewhere(p)}
    same = same_parameters(model.network, own)
    if losses[-1].item() != float(keep.loss):
        same = f"losses differ: {losses[-1].item()} and {float(keep.loss)}"
    report({"turns": turns, "bits": same, "breakdown": breakdown(model, batches)})


def work(arguments: Namespace) -> None:
    """One worker's part."""
    (name,) = arguments.only
    bound = BOUNDS[name]
    if bound.schedule:
        work_by_parts(bound, arguments)
        return
    batches = bound.case.batches(arguments.steps)
    model, keep = bound.case.model(), LastLoss()
    net, optimizer = made(bound.case.build)
    assert bound.case.place is not None
    bound.case.place(net)
    net = gs.distribute(net)
    losses: list[torch.Tensor] = []
    turns = take_turns(
        {
            OURS: lambda: losses.append(own_loop(net, optimizer, batches)),
            THEIRS: lambda: model.train(1, batches, callbacks=[keep]),
        },
        rounds=arguments.rounds,
        steps=arguments.steps,
        turns=bound.turns,
    )
    found = losses[-1].item()
    with DisableTorchFunctionSubclass():
        mine = {n: p for n, p in net.named_parameters() if not is_elsewhere(p)}
        same = same_parameters(model.network, mine)
    if found != float(keep.loss):
        same = f"losses differ: {found} and {float(keep.loss)}"
    report({"turns": turns, "bits": same, "breakdown": breakdown(model, batches)})


def rows(arguments: Namespace) -> Iterator[Row]:
    """One row for each case."""
    for name in arguments.only:
        case, bound = BOUNDS[name].case, BOUNDS[name]
        steps = arguments.steps or case.num_steps
        reports = launch(__file__, case.num_workers, arguments, only=[name], steps=steps)
        what = f"{PARTS}, {bound.schedule}" if bound.schedule else OURS
        yield row_of(
            f"{case.title}, {case.num_workers} workers, {what}, {steps} steps in a row",
            [reports],
            PARTS if bound.schedule else OURS,
            THEIRS,
            reach=bound.reach,
        )


def main() -> None:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=BOUNDS, default=list(BOUNDS))
    options.add_argument("--steps", type=int, help="steps between two barriers")
    run(options, work, rows)


if __name__ == "__main__":
    main()
