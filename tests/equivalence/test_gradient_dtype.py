"""``gradient_dtype`` halves what replicas exchange, with one result for all numbers of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from replica_helpers import Net, planned, whole
from simulated.equivalence import assert_same_bits
from simulated.memory import MemoryTransport
from simulated.simulate import Captures
from test_microbatches import num_tokens, tokens
from test_replicas import SmallGPT, stage
from test_replicated_gradients import Kinds, Sums, Wide, halve
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError
from graphsplit.partition.explain.plan import explain_plan
from graphsplit.partition.plan import EdgeKind
from graphsplit.transport.base import ChannelSpec, Sender
from graphsplit.transport.metered import MeteredTraffic

BF16, FP16 = torch.bfloat16, torch.float16
_net = Captures()


def same(make: Any = Net, ranks: tuple[int, ...] = (0, 1), **options: Any) -> Any:
    settings = {
        "num_workers": len(ranks),
        "place": whole(*ranks) if len(ranks) > 1 else None,
        "loss_fn": rows_against_target,
        "microbatches": 8,
        "gradient_order": "pairs",
        "gradient_dtype": BF16,
        **options,
    }
    return assert_same_bits(make, batches_of(16, 6, 6, num=2), **settings)


@pytest.mark.parametrize("microbatches", [4, 7])
def test_every_number_of_replicas_has_the_bits_of_the_loop(microbatches: int) -> None:
    found = []
    for num_workers in (1, 2, 3, 4):
        ranks = tuple(range(num_workers))
        cluster = same(ranks=ranks, microbatches=microbatches, captures=_net)
        found.append(cluster.owner_of("head.weight").task.network.head.weight.detach())
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("make", [Kinds, Sums, Wide])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_parameters_of_any_dtype_in_one_message_or_many(make: Any, dtype: torch.dtype) -> None:
    same(make, gradient_dtype=dtype)


def hooked() -> nn.Module:
    net = Net()
    net.body[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    net.head.weight.register_post_accumulate_grad_hook(halve)
    return net


@pytest.mark.parametrize(
    "options",
    [
        {"make": hooked},
        {"accumulate": 2},
        {"accumulate": 2, "accumulate_by": "microbatch"},
        {"accumulate": 2, "accumulate_by": "microbatch", "steps": 3, "ranks": (0, 1, 2)},
        {"schedule": "zero_bubble", "clip": gs.clip.GlobalNorm(0.05)},
        {"make_scaler": lambda: torch.amp.GradScaler("cpu"), "gradient_dtype": FP16},
        {"place": stage, "ranks": (0, 1, 2), "num_workers": 3},
        {"recompute": True, "plan_everywhere": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_beside_other_options(options: Any) -> None:
    same(**options)


def test_tied_weights_and_batches_of_other_sizes() -> None:
    assert_same_bits(
        SmallGPT,
        tokens(8, 5, 3),
        num_workers=2,
        place=whole(0, 1),
        microbatches=4,
        loss_weight=num_tokens,
        gradient_order="pairs",
        gradient_dtype=BF16,
    )


@pytest.mark.parametrize("microbatches", [8, 6])  # blocks that are sums, and others
def test_gradients_take_half_of_the_bytes_in_the_plan(microbatches: int) -> None:
    sent = []
    for dtype in (None, BF16):
        plan = planned(whole(0, 1), Wide, microbatches, order="pairs", dtype=dtype).plan
        edges = [edge for edge in plan.edges if edge.kind is EdgeKind.BLOCK]
        # Of small parameters one message says, byte by byte, which gradients there are.
        flags = sum(len(plan.members_of(e.value)) for e in edges if e.meta.dtype is torch.uint8)
        sent.append(sum(edge.meta.size_bytes for edge in edges) - flags)
    assert sent[0] == 2 * sent[1] > 0
    (weight,) = (line for line in explain_plan(plan).split("\n") if "layers.0.weight" in line)
    assert weight.split()[-4:] == ["144", "B", "72", "B"]


def test_gradients_take_half_of_the_bytes_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sent = MemoryTransport.open_sender, []

    def open_sender(self: MemoryTransport, spec: ChannelSpec) -> Sender:
        sender = plain(self, spec)
        return traffic.sender(sender, spec) if "sum of gradients" in spec.label else sender

    monkeypatch.setattr(MemoryTransport, "open_sender", open_sender)
    for dtype in (None, BF16):
        traffic = MeteredTraffic()
        planned(whole(0, 1), order="pairs", dtype=dtype)
        sent.append(sum(one.sent_bytes for one in traffic.peers().values()))
    num_parameters = len(list(Net().parameters()))
    assert sent[0] - num_parameters == 2 * (sent[1] - num_parameters)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"gradient_dtype": torch.int8}, r"gradient_dtype=torch.int8; expected one of torch.bf"),
        ({"gradient_dtype": "bfloat16"}, r"gradient_dtype='bfloat16'; expected one of torch.bf"),
        ({"gradient_dtype": BF16, "gradient_order": "left"}, "without gradient_order='pairs'"),
        ({"gradient_dtype": BF16, "microbatches": 1}, "without microbatches of 2 or more"),
    ],
)
def test_what_does_not_go_together_is_refused(options: Any, problem: str) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {"gradient_order": "pairs", "microbatches": 4, **options}
    with pytest.raises(ConfigurationError, match=problem):
        gs.Model(net, rows_against_target, optimizer, **settings)
