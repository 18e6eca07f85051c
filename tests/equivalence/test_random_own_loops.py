"""Random networks, cut at random, under own loops: the bits of the loop without graphsplit.

In CI the same few examples run every time. ``GS_TEST_LONG=<minutes>`` looks for new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from hypothesis import assume, event
from hypothesis import strategies as st
from loop_helpers import Distribute, assert_same_bits, plain, results
from recovery_helpers import CAPTURES, threads_as_workers
from simulated.scattered import Scattered
from test_random_networks import WIDTH, RandomNetwork, Step, drawn, steps
from torch.nn import functional

from graphsplit.errors import ConfigurationError
from graphsplit.planning import planner
from graphsplit.planning.passes import capture_graph

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


@dataclass(frozen=True)
class Own:
    """An own loop of a random network.

    Attributes:
        network: The steps of the network.
        batch: Rows of a batch.
        into_inputs: Whether gradients flow into inputs.
        several: Whether two calls share a backward, in which the script uses a parameter, too.
    """

    network: tuple[Step, ...]
    batch: int
    into_inputs: bool
    several: bool

    def __call__(self, distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        """Two steps and an evaluation."""
        net = distribute(RandomNetwork(self.network))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for x, y in batches_of(self.batch, WIDTH, WIDTH):
            x.requires_grad_(self.into_inputs)
            outputs = net(x)
            loss = rows_against_target(outputs, y)
            if self.several:
                again = functional.dropout(net(x.detach() * 0.5), 0.2)
                loss = loss + again.tanh().mean() + net.first.weight.square().sum()
            optimizer.zero_grad()
            loss.backward()
            yield loss.item(), outputs.detach(), x.grad, [p.grad for p in net.parameters()]
            optimizer.step()
        net.eval()
        with torch.no_grad():
            yield net(torch.ones(self.batch, WIDTH, WIDTH)).softmax(-1)
        yield dict(net.state_dict()), optimizer.state_dict()


def _captures(network: tuple[Step, ...]) -> Any:
    """Captured graphs, which workers share where none puts a tensor in a buffer's place."""
    assigns = any(step.name == "averaging" for step in network)

    def graph(task: Any, mode: Any, signature: Any, lift: Any) -> Any:
        capture = capture_graph if assigns else CAPTURES.graph
        return capture(task, mode, signature, lift=lift)

    return SimpleNamespace(graph=graph)


def _without_answers(captures: Scattered) -> Any:
    def graph(*arguments: Any, answers: object, **options: Any) -> Any:
        return captures.graph(*arguments, **options)  # these networks ask tensors for nothing

    return graph


def runs_in_eager(loop: Own) -> bool:
    try:
        results(loop, plain, 1)
    except RuntimeError:  # some modify in place what autograd still needs
        return False
    return True


@drawn(
    10,
    loop=st.builds(
        Own,
        st.lists(steps(), min_size=3, max_size=12).map(tuple),
        st.integers(2, 4),
        st.booleans(),
        st.booleans(),
    ),
    placements=st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(2, 4)), min_size=2, max_size=2
    ),
)
def test_random_networks_under_own_loops(loop: Own, placements: list[tuple[int, int]]) -> None:
    assume(runs_in_eager(loop))
    base = _captures(loop.network)
    for seed, num_workers in placements:
        captures = Scattered(base, seed=seed, num_workers=num_workers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "capture_graph", _without_answers(captures))
            try:
                assert_same_bits(loop, num_workers)
            except ConfigurationError as error:  # the order of its sums cannot be had
                assert "by several calls under one backward(): the order" in str(error)
                event("refused")
