"""Training loops of scripts' own, under ``gs.distribute``: the bits of the same loops without it.

Prints one line for each loop; each runs first on a network that is not distributed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import graphsplit as gs

TESTS = Path(__file__).parent.parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "distribute")]

from loop_helpers import is_same, plain, ranks_for, results  # noqa: E402
from loops import LOOPS, small  # noqa: E402


def refused(ranks: list[int]) -> Iterator[str]:
    """What is not possible, each with the beginning of its error."""
    net = gs.distribute(small(ranks))
    x = torch.randn(6, 8)
    first = net(x).sum()
    first.backward()
    optimizer = torch.optim.LBFGS(net.parameters())
    forms: tuple[Callable[[], Any], ...] = (
        lambda: first.backward(),
        lambda: net(x).sum().backward(create_graph=True),
        lambda: copy.copy(net),
        lambda: optimizer.step(lambda: net(x).sum()),
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


def main() -> None:
    """Run those that are named; and what is refused, if that is."""
    gs.init()
    num_workers = gs.get_world_size()
    for loop in LOOPS:
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
