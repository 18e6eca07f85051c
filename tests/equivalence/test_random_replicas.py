"""Random networks on random replicas give the bits of the loop, whatever the order of sums.

In CI the same few examples run every time. ``GS_TEST_LONG=<minutes>`` looks for new ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from hypothesis import assume, event
from hypothesis import strategies as st
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from test_random_networks import (
    WIDTH,
    RandomNetwork,
    Step,
    drawn,
    runs_in_eager,
    steps,
)
from torch import nn

import graphsplit as gs
from graphsplit.errors import PlacementError

STATEFUL = "averaging"  # its buffers are read by more than their updates: refused, see below


def ranks_of(chosen: random.Random, num_workers: int, parts: int) -> Any:
    """One worker, or several that share the microbatches; sometimes by uneven rows."""
    number = chosen.randint(1, min(num_workers, parts))
    ranks = chosen.sample(range(num_workers), number)
    rows = [chosen.randint(1, 2) for _ in ranks] if number > 1 else None
    return ranks, rows if rows is not None and sum(rows) <= parts else None


def placing(seed: int, num_workers: int, parts: int) -> Callable[[nn.Module], None]:
    """Replicas for the network, and for some of its layers others."""

    def place(net: Any) -> None:
        chosen = random.Random(seed)
        for module in (net, net.first, *net.layers):
            if module is net or chosen.random() < 0.5:
                ranks, rows = ranks_of(chosen, num_workers, parts)
                module.place("MS_WORKER", ranks, rows=rows)

    return place


class Head(nn.Module):
    """A loss with parameters, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(WIDTH * WIDTH, 1), nn.Dropout(0.2)

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.line(self.drop(outputs.flatten(1))).squeeze(1), target)


def more_options(chosen: random.Random) -> dict[str, Any]:
    """What else a script may ask for, any of it together."""
    found: dict[str, Any] = {
        "clip": chosen.choice([None, gs.clip.GlobalNorm(0.05), gs.clip.Value(0.01)]),
        "set_to_none": chosen.random() < 0.7,
        "loss_fn": chosen.choice([rows_against_target, Head()]),
    }
    if chosen.random() < 0.3:
        found["make_scaler"] = lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10)
    if chosen.random() < 0.3:
        found["loss_weight"] = lambda x, target: float(target.abs().sum()) + 1
    return found


def made(
    network: tuple[Step, ...], *, ties: bool, freezes: bool, hooks: bool = False
) -> RandomNetwork:
    net = RandomNetwork(network)
    if hooks:
        net.first.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    linear = [one for one in net.layers if isinstance(one, nn.Linear)]
    if ties and linear:
        linear[-1].weight = net.first.weight
    if freezes:
        net.weights[0].requires_grad_(False)
        for layer in linear[:1]:
            layer.weight.requires_grad_(False)
    return net


@drawn(
    8,
    network=st.lists(steps(), min_size=3, max_size=10).map(tuple),
    parts=st.integers(2, 8),
    over=st.integers(0, 2),
    order=st.sampled_from(["left", "pairs"]),
    by=st.sampled_from(["batch", "microbatch"]),
    rounds=st.booleans(),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero_bubble"]),
    ties=st.booleans(),
    freezes=st.booleans(),
    hooks=st.booleans(),
    more=st.integers(0, 10_000),
    placements=st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from([2, 3, 4, 8])), min_size=2, max_size=2
    ),
)
def test_random_networks_on_random_replicas(
    network: tuple[Step, ...],
    parts: int,
    over: int,
    order: str,
    by: str,
    rounds: bool,
    schedule: str,
    ties: bool,
    freezes: bool,
    hooks: bool,
    more: int,
    placements: list[tuple[int, int]],
) -> None:
    batch = parts + over  # some microbatches have a row more than others
    short = random.Random(more).randint(1, batch)  # the last batch: some replicas may have nothing
    assume(all(runs_in_eager(network, rows, parts) for rows in (batch, short)))
    captures = Captures()
    for seed, num_workers in placements:
        try:
            assert_same_bits(
                lambda: made(network, ties=ties, freezes=freezes, hooks=hooks),
                [*batches_of(batch, WIDTH, WIDTH), *batches_of(short, WIDTH, WIDTH, num=1)],
                num_workers=num_workers,
                place=placing(seed, num_workers, parts),
                captures=captures,
                microbatches=parts,
                gradient_order=order,
                gradient_dtype=torch.bfloat16 if rounds and order == "pairs" else None,
                accumulate=2 if by == "microbatch" else 1,
                accumulate_by=by,
                schedule=schedule,
                **more_options(random.Random(more)),
            )
        except AssertionError as error:
            assume("No inf checks" not in str(error))  # eager steps nothing, and a scaler minds
            raise
        except PlacementError as error:
            assert str(error).startswith("replicas ")
            event("refused by name")
            captures = Captures()  # what was captured for a step that never was is not used again


def test_the_drawn_placements_are_of_all_kinds() -> None:
    found = [ranks_of(random.Random(seed), 4, 8) for seed in range(40)]
    assert {len(ranks) for ranks, _ in found} == {1, 2, 3, 4}
    assert {rows is None for _, rows in found} == {True, False}
