"""``gs.place`` and ``gs.op`` reach the captured graph, wherever they stand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_helpers import captured, operations, placed
from simulated.equivalence import assert_same_bits
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import graphsplit as gs
from graphsplit.capture.graph import CapturedGraph
from graphsplit.errors import CaptureError, PlacementError

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Running(nn.Module):
    """A network of two layers that runs what a test gives it."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self._body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._body(self, x)


def asked(graph: CapturedGraph) -> dict[str, int | None]:
    """The worker that a block asks for, by operation."""
    return {n.name: n.annotation.rank if n.annotation else None for n in operations(graph)}


def asked_in(body: Callable[..., torch.Tensor], **options: Any) -> dict[str, int | None]:
    return asked(captured(Running(body), X, **options))


def test_the_innermost_block_wins() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 1):
            x = x + 1
            with gs.place("MS_WORKER", 2):
                x = self.a(x)
            x = x * 2
        return x.sum()

    assert asked_in(body) == {"add": 1, "linear": 2, "mul": 1, "sum_1": None}


def test_a_block_is_a_decorator_too_and_the_role_may_be_left_out() -> None:
    @gs.place(1)
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        return gs.op(torch.sum).place(2)(shifted(shifted(x)) * 2)

    assert asked_in(body) == {"add": 1, "add_1": 1, "mul": None, "sum_1": 2}


@pytest.mark.parametrize("ask", [gs.Model.explain, gs.Model.train_step])
def test_a_block_that_is_not_entered_is_an_error(ask: Callable[..., Any]) -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        gs.place("MS_WORKER", 1)
        return self.a(x).sum()

    network = Running(body)
    model = gs.Model(network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1))
    line = rf"{__file__}:{body.__code__.co_firstlineno + 1}\n"
    problem = rf"gs.place\('MS_WORKER', 1\) places nothing: it is not entered\n +{line}"
    with pytest.raises(PlacementError, match=problem + r"  Fix: write `with gs.place\("):
        ask(model, X)


def test_an_operation_placed_by_itself_wins_over_the_block_around_it() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 1):
            x = gs.op(torch.add).place("MS_WORKER", 2)(x, other=x, alpha=2)
            return x.sum()

    assert asked_in(body) == {"add": 2, "sum_1": 1}


def test_methods_and_modules_are_placed_as_operations() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        x = gs.op(self.a).place("MS_WORKER", 1)(x)
        x = gs.op(x.clamp).place("MS_WORKER", 2)(min=0.0)
        return gs.op(torch.Tensor.sum).place("MS_WORKER", 3)(x)

    assert asked_in(body) == {"linear": 1, "clamp": 2, "sum_1": 3}


def test_a_random_operation_is_placed() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        x = gs.op(F.dropout).place("MS_WORKER", 1)(x, p=0.5, training=True)
        with gs.place("MS_WORKER", 2):
            noise = torch.randn_like(x)
        return (self.a(x) + noise).sum()

    found = asked_in(body)
    assert (found["dropout"], found["randn_like"], found["linear"]) == (1, 2, None)


def test_all_elements_of_a_tuple_are_placed() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        values, indices = gs.op(torch.max).place("MS_WORKER", 1)(self.a(x), dim=1)
        return values.sum() + indices.sum()

    found = asked_in(body)
    assert [found[name] for name in ("max_1", "getitem", "getitem_1")] == [1, 1, 1]


def test_an_operation_made_of_others_is_placed_whole() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        attention = gs.op(F.scaled_dot_product_attention).place("MS_WORKER", 1)
        with gs.place("MS_WORKER", 2):
            y = torch.einsum("ij,kj->ik", self.a(x), x)
        return attention(x[None], x[None], x[None]).sum() + y.sum()

    found = asked_in(body)
    assert found["scaled_dot_product_attention"] == 1
    assert found["einsum"] == 2


def test_a_block_in_a_loss_function_is_honoured() -> None:
    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 2):
            errors = outputs - target
        return errors.square().mean()

    network = nn.Linear(4, 4)
    assert asked(captured(network, X, X, loss_fn=loss_fn)) == {
        "linear": None,
        "sub": 2,
        "square": None,
        "mean": None,
    }


def test_a_block_around_and_inside_no_grad_is_honoured() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 1), torch.no_grad():
            y = x.exp()
        with torch.no_grad():
            with gs.place("MS_WORKER", 2):
                y = self.b(y)
            y = y.neg()
        return (self.a(x) * y).sum()

    found = asked_in(body)
    assert [found[n] for n in ("exp", "linear", "neg", "linear_1")] == [1, 2, None, None]


def test_a_module_inside_no_grad_keeps_its_path() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.b(x)
        return self.a(x).sum()

    paths = {n.name: n.module_path for n in operations(captured(Running(body), X))}
    assert paths == {"linear": "b", "linear_1": "a", "sum_1": ""}


def test_a_block_inside_autocast_is_honoured() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), gs.place("MS_WORKER", 1):
            x = self.a(x)
        return x.float().sum()

    assert asked_in(body)["linear"] == 1


def test_a_block_inside_a_checkpoint_is_honoured() -> None:
    def body(self: Running, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            with gs.place("MS_WORKER", 1):
                return self.a(x)

        return checkpoint(inside, x, use_reentrant=False).sum()

    assert asked_in(body)["linear"] == 1


class Branching(nn.Module):
    """Two branches, each with a module of its own."""

    def __init__(self, inside: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self._inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: Any = torch.cond(
            x.sum() > 0, lambda x: self._inside(self.a, x), lambda x: self.b(x), (x,)
        )
        return result.sum()


def in_a_block(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with gs.place("MS_WORKER", 1):
        return module(x)


placed_neg = gs.op(torch.neg).place("MS_WORKER", 1)


def by_itself(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return placed_neg(module(x))


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's advice
@pytest.mark.parametrize("inside", [in_a_block, by_itself])
def test_a_block_inside_a_branch_is_refused(
    inside: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(CaptureError, match="a part of a branch or loop is placed") as caught:
        captured(Branching(inside), X)
    assert "Fix: put gs.place around the branch or loop." in str(caught.value)


def test_branches_are_one_operation_until_their_modules_are_placed_apart() -> None:
    network = Branching(lambda module, x: module(x))
    network.a.place("MS_WORKER", 1)
    graph = captured(network, X)
    result = placed(network, graph)
    (cond,) = (p for p, node in enumerate(graph.nodes) if node.target == "cond")
    assert result.workers[cond] == 1
    network.b.place("MS_WORKER", 2)
    result = placed(network, graph)
    workers = {
        node.module_path: worker
        for node, worker in zip(result.graph.nodes, result.workers, strict=True)
        if node.target == "in_branch[aten.linear.default]"
    }
    assert workers == {"a": 1, "b": 2}


class PlacedAtRandom(TorchFunctionMode):
    """Puts a block of its own around every single operation."""

    def __init__(self, seed: int, num_workers: int) -> None:
        super().__init__()
        self._choices, self._num_workers = random.Random(seed), num_workers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with gs.place("MS_WORKER", self._choices.randrange(self._num_workers)):
            return func(*args, **(kwargs or {}))


class EachPlaced(nn.Module):
    """Runs a network with every operation on a worker of its own choice, the same every time."""

    def __init__(self, inner: nn.Module, num_workers: int) -> None:
        super().__init__()
        self.inner, self._num_workers = inner, num_workers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with PlacedAtRandom(7, self._num_workers):
            return self.inner(*args, **kwargs)


class Handwritten(nn.Module):
    """Attention, a recurrent cell, normalisation, dropout, a no_grad block, tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cell, self.dropout = nn.GRUCell(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.fc(x))
        y, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        y = self.cell(self.dropout(y[0]), x)
        with torch.no_grad():
            scale = y.std() + 1
        low, high = (y / scale).chunk(2, -1)
        return torch.cat([high, F.gelu(low)], -1)


def of_tensors(graph: CapturedGraph) -> dict[str, int | None]:
    """The workers asked for, without checks that torch.export adds: they make no value."""
    found = asked(graph)
    return {name: rank for name, rank in found.items() if not name.startswith("_assert")}


def test_a_block_around_every_operation_reaches_every_operation() -> None:
    graph = captured(EachPlaced(Handwritten(), 100), X, X[:, :1], loss_fn=rows_against_target)
    outside = {n.name for n in operations(graph) if n.module_path == "(loss)"}
    found = of_tensors(graph)
    assert {name for name, rank in found.items() if rank is None} == outside
    assert len(set(found.values())) > 10


def rows_against_target(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs.mean(1, keepdim=True), target)


def test_operations_placed_each_by_a_block_keep_the_bits() -> None:
    batches = [(X * step, X[:, :1]) for step in (1, 2)]
    cluster = assert_same_bits(
        lambda: EachPlaced(Handwritten(), 3), batches, num_workers=3, loss_fn=rows_against_target
    )
    owners = set(cluster.workers[0].planner.owners.values())
    assert len(owners) > 1


def test_a_transformers_model_placed_operation_by_operation_keeps_the_bits() -> None:
    import transformers  # only where it is needed: it takes seconds

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    ids = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}

    def make() -> nn.Module:
        return EachPlaced(transformers.LlamaForCausalLM(config), 3)

    found = of_tensors(captured(make(), **batch))
    assert [name for name, rank in found.items() if rank is None] == []
    assert_same_bits(make, [batch], num_workers=3)
