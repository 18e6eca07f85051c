"""Training loops of scripts' own, under ``gs.distribute``: the bits of the same loops without it.

Prints one line for each loop; each runs first on a network that is not distributed.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import graphsplit as gs

TESTS = Path(__file__).parent.parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "distribute")]

from example_loops import LOOPS as OF_EXAMPLES  # noqa: E402
from loop_helpers import is_same, plain, ranks_for, results  # noqa: E402
from loops import LOOPS, small  # noqa: E402
from several_networks import distilled, projected  # noqa: E402


def refused(ranks: list[int]) -> Iterator[str]:
    """What is not possible, each with the beginning of its error."""
    net = gs.distribute(small(ranks))
    x = torch.randn(6, 8)
    first = net(x).sum()
    first.backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, differentiable=True)
    forms: tuple[Callable[[], Any], ...] = (
        lambda: first.backward(),
        lambda: net(x).sum().backward(create_graph=True),
        lambda: pickle.dumps(net),
        lambda: optimizer.step(),
        lambda: net.compile(),
    )
    for form in forms:
        try:
            form()
        except gs.errors.GraphsplitError as error:
            has_fix = "Fix:" in str(error)
            yield f"refused, {'with a' if has_fix else 'without a'} fix: {str(error)[:40]!r}"
        else:
            yield "nothing was raised"


class Plain(torch.optim.Optimizer):
    """An optimizer of the script's own, which treats each parameter by itself, or not."""

    def __init__(self, parameters: Any, *, is_global: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.is_global = is_global

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Momentum; by the norm of all gradients."""
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.pow(2).sum() for p in trained) if self.is_global else 1.0
        for p in trained:
            kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
            kept.mul_(0.9).add_(p.grad)
            p.sub_(kept * 0.1 / norm)


def global_optimizer(distribute: Any, ranks: list[int]) -> Iterator[Any]:
    """Steps of one that is found to look at all parameters."""
    return own_optimizer(distribute, ranks, is_global=True)


def own_optimizer(distribute: Any, ranks: list[int], *, is_global: bool = False) -> Iterator[Any]:
    """Steps of an optimizer that is tried out in forked children first."""
    net = small(ranks)
    optimizer = Plain(net.parameters(), is_global=is_global)
    net = distribute(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    yield {name: value.clone() for name, value in net.state_dict().items()}
    yield optimizer.state_dict()


def alone(what: str) -> None:
    """Ask for a gradient on worker 0 alone, or die."""
    net = gs.distribute(small([0, 1, 0]))
    net(torch.ones(6, 8)).sum().backward()
    if what == "killed":
        if gs.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    elif gs.get_rank() == 0:
        print(net.first.weight.grad is None)
    net(torch.ones(6, 8)).sum().backward()


def main() -> None:
    """Run those that are named; and what is refused, if that is."""
    gs.init()
    num_workers = gs.get_world_size()
    if sys.argv[1] in ("one-gradient", "killed"):
        alone(sys.argv[1])
    for loop in (*LOOPS, *OF_EXAMPLES, own_optimizer, global_optimizer, projected, distilled):
        if loop.__name__ not in sys.argv[1:]:
            continue
        expected = results(loop, plain, num_workers)
        found = results(loop, gs.distribute, num_workers)
        pairs = enumerate(zip(expected, found, strict=True))
        wrong = [index for index, pair in pairs if not is_same(*pair)]
        print(f"{loop.__name__}: {'same bits' if not wrong else f'other bits at {wrong}'}")
    if "refused" in sys.argv[1:]:
        for line in refused(ranks_for(num_workers)):
            print(line)


if __name__ == "__main__":
    main()
