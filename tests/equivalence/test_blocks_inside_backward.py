"""Replicas send the blocks of gradients that a backward completes while it still runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of
from replica_helpers import planned, same_over_two, whole
from torch import nn
from torch.utils import checkpoint

import graphsplit as gs
from graphsplit.partition.plan import EdgeKind
from graphsplit.program.early import early_needs, shares_sent
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.runtime import runner
from graphsplit.runtime.segments import backward
from graphsplit.schedule.costs import Costs, LinkCost
from graphsplit.schedule.simulation import simulate

BLOCK, BACKWARD = "a block was sent", "a backward has ended"


class Layers(nn.Module):
    """Large layers, one used twice and one never, a norm that all share, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.norm = nn.LayerNorm(40)
        self.unused = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.tanh(layer(self.norm(x))), 0.2, self.training)
        found: torch.Tensor = self.layers[1](x)
        return found


class Recomputed(Layers):
    """The second half is computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        found: torch.Tensor = checkpoint.checkpoint(self._rest, x, use_reentrant=False)
        return found

    def _rest(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers[1:]]:
            x = torch.relu(layer(self.norm(x)))
        return x


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """What each worker's thread has done, in order."""
    found: dict[int, list[str]] = {}
    bind, run = runner.bind_send_block, backward.run_torchs_backward

    def note(what: str) -> None:
        found.setdefault(threading.get_ident(), []).append(what)

    def bind_and_note(*given: Any) -> Any:
        send = bind(*given)

        def send_and_note(state: Any) -> None:
            send(state)
            note(BLOCK)

        return send_and_note

    def run_and_note(*given: Any, **options: Any) -> None:
        run(*given, **options)
        note(BACKWARD)

    monkeypatch.setattr(runner, "bind_send_block", bind_and_note)
    monkeypatch.setattr(backward, "run_torchs_backward", run_and_note)
    return found


@pytest.mark.parametrize("make", [Layers, Recomputed])
def test_blocks_are_sent_before_the_backward_that_makes_them_has_ended(
    make: Any, noted: dict[int, list[str]]
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        net: nn.Module = make()
        return net

    same_over_two(build, batches_of(8, 40, num=3), microbatches=4, gradient_order="pairs")
    early = [BACKWARD in what[what.index(BLOCK) :] for what in noted.values() if BLOCK in what]
    assert early and all(early)


def _programs(make: Any = Layers, **options: Any) -> tuple[Any, list[tuple[Instruction, ...]]]:
    found = planned(whole(0, 1), make=make, order="pairs", **options)
    return found, [program.instructions for program in found.programs[:2]]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def test_blocks_come_in_the_order_in_which_autograd_has_them_and_their_owner_expects() -> None:
    found, programs = _programs(Small)
    edges = found.plan.edges
    for do, other in (programs, programs[::-1]):
        (position,) = early_needs(found.plan, do)
        assert do[position].opcode is Opcode.BACKWARD
        sent = [i.operand for i in do[position:] if i.opcode is Opcode.SEND]
        sent = [edge for edge in sent if edges[edge].kind is EdgeKind.BLOCK]
        awaited = [i.operand for i in other if i.opcode is Opcode.RECEIVE]
        assert sent == [edge for edge in awaited if edges[edge].kind is EdgeKind.BLOCK]


def test_a_step_is_predicted_with_its_blocks_beside_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, programs = _programs(Small)
    count = range(len(found.plan.segments))
    costs = Costs(
        forward=dict.fromkeys(count, 1.0),
        backward_input=dict.fromkeys(count, 2.0),
        backward_weight={},
        links={(0, 1): LinkCost(0.0, 5000.0), (1, 0): LinkCost(0.0, 5000.0)},
    )
    beside = simulate.simulate(found.plan, found.programs, costs).step_s
    assert all(0 < share <= 1 for do in programs for share in shares_sent(found.plan, do).values())
    monkeypatch.setattr(simulate, "shares_sent", lambda *_: {})
    assert beside < simulate.simulate(found.plan, found.programs, costs).step_s


def test_code_kept_whole_runs_nothing_inside_its_backward() -> None:
    found, programs = _programs(lambda: nn.Sequential(gs.opaque(Small())))
    assert not any(early_needs(found.plan, do) for do in programs)
