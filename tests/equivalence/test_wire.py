"""``gs.wire`` gives the bits of two casts in a plain loop, and its edges carry the small dtype."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence_helpers import (
    assert_same_wherever_placed,
    batches_of,
    on_three,
    on_two,
    rows_against_target,
)
from simulated.equivalence import assert_same_bits
from simulated.memory import MemoryTransport
from simulated.simulate import SimulatedCluster
from torch import nn
from torch.nn.utils import parametrize

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError
from graphsplit.partition.explain.plan import explain_plan
from graphsplit.partition.plan import EdgeKind
from graphsplit.partition.replicas.blocks import sent_per_step
from graphsplit.transport.base import ChannelSpec, Sender
from graphsplit.transport.metered import MeteredTraffic

BF16, FP16 = torch.bfloat16, torch.float16
Round = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the loop without graphsplit writes."""
    return x.to(dtype).to(x.dtype)


class Net(nn.Module):
    """Three layers whose values are rounded between them."""

    def __init__(self, rounded: Round) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.rounded = rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.rounded(self.first(x), BF16)
        h = self.drop(torch.relu(self.second(h)))
        return self.third(self.rounded(h, FP16))


class UsedByMany(Net):
    """A rounded value that several workers use, its own among them, and others for each use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.rounded(self.first(x), BF16)
        g = self.second(h) * h
        once, again = self.rounded(g, BF16), self.rounded(g.t(), BF16)
        return self.third(h + once) + torch.sin(h) * again.t()


class Normed(Net):
    """Under autocast one value is float32, and the other one has the small dtype already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.softmax(self.first(x), -1)
        return self.third(self.rounded(self.second(self.rounded(h, BF16)), BF16))


class Parametrized(Net):
    """Rounded inputs and weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.rounded(x, BF16))
        return nn.functional.linear(h, self.rounded(self.second.weight, BF16)) + self.third(h)


class Halves(nn.Module):
    """Returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"halves": y.chunk(2, -1), "best": y.argmax(-1), "name": "halves"}


class AroundHalves(nn.Module):
    """Uses what a module returns; ``rounded`` where the module is not wired."""

    def __init__(self, rounded: Round | None) -> None:
        super().__init__()
        self.first, self.second = Halves(), nn.Linear(4, 4)
        if rounded is None:
            assert gs.wire(gs.wire(self.first, FP16), BF16) is self.first
        self.rounded = rounded or (lambda value, dtype: value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        one, two = (self.rounded(half, BF16) for half in made["halves"])
        return self.second(one) * two + made["best"].unsqueeze(-1)


def first_plain(make: Callable[[Any], nn.Module], wired: Any = gs.wire) -> Callable[[], nn.Module]:
    """A network for the loop, which comes first, and those of the workers."""
    rounded = itertools.chain([cast], itertools.repeat(wired))
    return lambda: make(next(rounded))


def same(make: Callable[[Any], nn.Module] = Net, wired: Any = gs.wire, **options: Any) -> Any:
    settings = {"num_workers": 3, "place": on_three, "loss_fn": rows_against_target, **options}
    return assert_same_bits(first_plain(make, wired), batches_of(8, 8), **settings)


@pytest.mark.parametrize("make", [Net, UsedByMany, Parametrized])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_wired_values_are_those_of_two_casts(make: Any, microbatches: int) -> None:
    counted = itertools.count()

    def network() -> nn.Module:
        # Each placement makes one for the loop, and one for each worker, which is sure to be wired.
        return make(cast if next(counted) == 0 else gs.wire)

    assert_same_wherever_placed(network, batches_of(6, 8), microbatches=microbatches)
    same(make, microbatches=microbatches)
    same(make, num_workers=2, place=on_two)
    same(make, num_workers=1, place=None)


def test_a_wired_modules_outputs_are_rounded() -> None:
    def place(net: Any) -> None:
        net.first.place("MS_WORKER", 0)
        net.second.place("MS_WORKER", 1)

    same(AroundHalves, None, num_workers=2, place=place)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "auto"])
def test_any_schedule(schedule: str) -> None:
    same(schedule=schedule, microbatches=4)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"make": Normed, "autocast": BF16},
        {"make_scaler": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)},
        {"make_scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**40)},
        {"accumulate": 2},
        {"dynamic_dims": {0: 16}},
    ],
    ids=["recompute", "autocast", "scaler", "scaler that overflows", "accumulate", "sizes"],
)
def test_beside_other_options(options: dict[str, Any]) -> None:
    same(**options)


@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2]])
def test_replicas(order: str, ranks: list[int]) -> None:
    def place(net: Any) -> None:
        net.first.place("MS_WORKER", ranks)
        net.second.place("MS_WORKER", 2)
        net.third.place("MS_WORKER", ranks)

    same(place=place, microbatches=4, gradient_order=order)
    same(Parametrized, place=lambda net: net.place(ranks), microbatches=4, gradient_order=order)


def sent(cluster: SimulatedCluster, kind: EdgeKind, mode: Mode = Mode.TRAIN) -> dict[str, int]:
    """Bytes of each edge of a plan, as its channels and its texts know them."""
    plan = cluster.latest(mode).plan
    edges = [e for e in plan.edges if e.kind is kind and e.meta.shape == (8, 8)]
    return {
        f"{e.value} {e.source}->{e.destination}": e.meta.size_bytes
        for e in edges
        if not plan.placed.graph.nodes[e.value].is_state
    }


def test_edges_carry_half_the_bytes_there_and_back() -> None:
    cluster = same(place=on_two, num_workers=2)
    assert list(sent(cluster, EdgeKind.VALUE).values())[:1] == [128]
    assert list(sent(cluster, EdgeKind.GRADIENT).values()) == [128]
    assert sent(cluster, EdgeKind.VALUE, Mode.EVAL) == sent(cluster, EdgeKind.VALUE)
    told = explain_plan(cluster.latest(Mode.TRAIN).plan)
    assert re.search(r"\(network\).* 0 +1 +128 B +128 B", told), told
    whole = same(lambda rounded: Net(lambda x, dtype: x), place=on_two, num_workers=2)
    assert list(sent(whole, EdgeKind.GRADIENT).values()) == [256]


def test_half_the_bytes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, plain = MeteredTraffic(), MemoryTransport.open_sender

    def open_sender(self: MemoryTransport, spec: ChannelSpec) -> Sender:
        sender = plain(self, spec)
        return traffic.sender(sender, spec) if "wire (network)" in spec.label else sender

    monkeypatch.setattr(MemoryTransport, "open_sender", open_sender)
    same(place=on_two, num_workers=2, evaluate_after=())
    found = {peer: (one.sent, one.sent_bytes) for peer, one in traffic.peers().items()}
    assert found == {0: (2, 256), 1: (2, 256)}  # of two steps


def test_a_value_stays_where_it_is_made_whatever_is_placed_around_it() -> None:
    def place(net: Any) -> None:
        on_two(net)
        net.place("MS_WORKER", 2)

    plan = same(place=place).latest(Mode.TRAIN).plan
    wired = [p for p, node in enumerate(plan.placed.graph.nodes) if node.wire is not None]
    assert [plan.placed.workers[p] for p in wired] == [0, 2]


def test_gradients_that_are_added_on_arrival_are_sent_whole() -> None:
    cluster = same(UsedByMany)
    assert 256 in sent(cluster, EdgeKind.GRADIENT).values()
    plan = cluster.latest(Mode.TRAIN).plan
    for edge in plan.edges:
        node = plan.placed.graph.nodes[edge.value]
        if node.wire is not None and edge.kind is EdgeKind.VALUE:
            assert edge.meta.dtype is node.wire


class RoundedWeight(nn.Module):
    """A parametrization: what uses the weight is given it rounded."""

    def __init__(self, rounded: Round) -> None:
        super().__init__()
        self.rounded = rounded

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return self.rounded(weight, BF16)


def with_rounded_weights(rounded: Round) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for layer in (net[0], net[2]):
        parametrize.register_parametrization(layer, "weight", RoundedWeight(rounded))
    return net


def test_borrowed_parameters_that_are_rounded_go_there_and_their_parts_back() -> None:
    def place(net: nn.Module) -> None:
        net.place("MS_WORKER", [0, 1, 2])

    told = []
    for order, part in (("left", BF16), ("pairs", torch.float32)):
        options: Any = {"gradient_order": order, "microbatches": 6, "place": place}
        plan = same(with_rounded_weights, **options).latest(Mode.TRAIN).plan
        nodes = plan.placed.graph.nodes
        weights = [edge for edge in plan.edges if "weight" in nodes[edge.value].target]
        assert {e.meta.dtype for e in weights if e.kind is EdgeKind.VALUE} == {BF16}
        assert {e.meta.dtype for e in weights if e.kind is not EdgeKind.VALUE} == {part}
        told.append({worker: left for worker, (left, _) in sent_per_step(plan).items()})
        if order == "left":
            sent = Counter[int]()
            for edge in plan.edges:
                if edge.kind is EdgeKind.GRADIENT:
                    lane = plan.lanes[plan.lane_of(edge.value)]
                    sent[edge.source] += len(lane) * edge.meta.size_bytes
            assert told == [sent]
    assert told[0] == told[1]


def test_a_parameter_that_is_also_used_whole_is_borrowed_whole() -> None:
    class Both(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.rounded(self.first.weight, BF16)
            return x @ weight + self.second(x) @ self.first.weight

    def place(net: Any) -> None:
        net.place("MS_WORKER", 1)
        gs.apply_placement(net, {"parameters": {"first.weight": 0}})

    plan = same(Both, num_workers=2, place=place).latest(Mode.TRAIN).plan
    found = [e.meta.dtype for e in plan.edges if e.destination == 1 and e.kind is EdgeKind.VALUE]
    assert found == [torch.float32]


@pytest.mark.parametrize("turn", [lambda x: x, torch.t, lambda x: x[:, :1].expand(4, 4)])
def test_one_operation_is_two_casts(turn: Any) -> None:
    def run(rounded: Round, source: torch.dtype, dtype: torch.dtype) -> list[Any]:
        x = torch.linspace(-9e4, 9e4, 16, dtype=source).view(4, 4).requires_grad_()
        y = rounded(turn(x), dtype)
        y.sum(0).square().mean().backward()
        y.detach().square_()
        return [y.detach(), y.stride(), y.dtype, x.grad, x.grad.stride()]

    for source, dtype in [(torch.float32, BF16), (torch.float32, FP16), (torch.float64, FP16)]:
        found, expected = run(gs.wire, source, dtype), run(cast, source, dtype)
        assert found[1:3] == expected[1:3] and found[4] == expected[4]
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[3].view(torch.uint8), expected[3].view(torch.uint8))
    assert gs.wire(torch.tensor(7e4), FP16).isinf()
    assert gs.wire(torch.tensor(1 / 3, dtype=torch.float64), torch.float32) == 0.3333333432674408


def test_no_gradient_stays_none_and_the_second_derivative_is_there() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> None:
            return None

    x = torch.ones(2, requires_grad=True)
    Nothing.apply(gs.wire(x, BF16)).sum().backward()
    assert x.grad is None
    (first,) = torch.autograd.grad(gs.wire(x, BF16).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [6, 6]


def test_what_has_the_dtype_is_left_as_it_is() -> None:
    x = torch.ones(2, dtype=BF16)
    assert gs.wire(x, BF16) is x


@pytest.mark.parametrize(
    ("value", "dtype", "problem"),
    [
        (torch.ones(2), torch.float64, "torch.float64 is none of the dtypes"),
        (torch.ones(2), "bfloat16", "'bfloat16' is none of the dtypes"),
        (torch.ones(2), torch.int8, "torch.int8 is none of the dtypes"),
        (nn.Linear(2, 2), torch.complex64, "torch.complex64 is none of the dtypes"),
        (torch.ones(2, dtype=FP16), BF16, "torch.bfloat16 is not smaller than torch.float16"),
        (torch.ones(2, dtype=BF16), torch.float32, "is not smaller than torch.bfloat16"),
        (torch.ones(2, dtype=torch.int64), BF16, "the value holds torch.int64"),
        (torch.ones(2, dtype=torch.complex64), BF16, "the value holds torch.complex64"),
        ([torch.ones(2)], BF16, "expected a tensor or a module; got a list"),
    ],
)
def test_what_cannot_be_wired_is_refused(value: Any, dtype: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as caught:
        gs.wire(value, dtype)
    assert "Fix: " in str(caught.value)


def test_a_module_that_returns_no_floating_point_tensor_is_refused_by_name() -> None:
    class Best(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(-1)

    with pytest.raises(ConfigurationError, match="what Best returns holds no floating-point"):
        gs.wire(Best(), BF16)(torch.ones(2, 2))


def test_the_error_of_a_networks_wire_names_it_when_it_is_captured() -> None:
    with pytest.raises(gs.errors.GraphsplitError, match=r"gs.wire: .* is not smaller than"):
        assert_same_bits(
            first_plain(lambda rounded: Net(rounded).to(BF16)),
            [(torch.ones(6, 8, dtype=BF16), torch.ones(6, dtype=BF16))],
            num_workers=2,
            loss_fn=rows_against_target,
            place=on_two,
        )
