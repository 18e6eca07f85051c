"""Which results lie in memory that nobody writes to: beside what really lies there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export
from torch.fx import Interpreter, Node
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from graphsplit.capture.operations.effects import never_written


class Shares(nn.Module):
    """Takes a value by some operation, and gives back what lies beside it."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), nn.Buffer(torch.ones(4, 4))
        self.normalise, self.take = nn.BatchNorm1d(4), take

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.linear(x)
        read = made * 2
        return self.normalise(read.t().relu()) + made.sum(), *self.take(x, made, self.held)


def in_place(x: torch.Tensor, made: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, ...]:
    held.add_(1)
    new = torch.zeros(4, 4)
    new.t().add_(made)
    return ((new + held[:1]) * 2,)


TAKEN = {
    "nothing more": lambda x, made, held: (),
    "views that are outputs": lambda x, made, held: (made.view(-1), held.t(), x[0]),
    "written": in_place,
    "written, as it is": lambda x, made, held: (made.exp().add_(1).mul_(x) + 1,),
    "by einsum": lambda x, made, held: (torch.einsum("ij->ji", made), x),
    "of its own type": lambda x, made, held: (made.type_as(x), x.type_as(made) + 1),
    "dropout that drops nothing": lambda x, made, held: (F.dropout(x, training=False).exp() + 1,),
    "channels that are not dropped": lambda x, made, held: (F.dropout1d(x, training=False) + 1,),
    "pieces": lambda x, made, held: (*made.unsafe_chunk(2), *(part + 1 for part in x.split(2))),
    "attention": lambda x, made, held: (
        F.scaled_dot_product_attention(made[None], x[None], made[None]).softmax(-1) * 2,
    ),
}
LEAVES = {"by einsum", "of its own type", "pieces"}


class Memories(Interpreter):
    """Runs a graph, and notes where each value lies, and what it was when it was made."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if isinstance(result, torch.Tensor):
            self.made[node.name] = result, result.detach().clone()
        return result


def places(values: Any) -> set[int]:
    leaves = pytree.tree_leaves(values)
    return {v.untyped_storage().data_ptr() for v in leaves if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("taken", TAKEN)
def test_what_nobody_writes_to_lies_apart_from_all_that_others_see(
    taken: str, is_training: bool
) -> None:
    network, x = Shares(TAKEN[taken]).train(is_training), torch.randn(4, 4)
    program = export(network, (x,))
    found = never_written(program.graph)
    run = Memories(program.graph_module)
    others = [*network.state_dict().values(), x]
    outputs = run.run(*network.parameters(), *network.buffers(), x)
    seen = places([others, outputs])
    for name in found:
        value, when_made = run.made[name]
        assert value.untyped_storage().data_ptr() not in seen, name
        assert torch.equal(value, when_made), name
    assert bool(found) == (taken not in LEAVES)
    assert not found or {"linear", "mul", "relu"} & found


def test_code_that_the_graph_does_not_show_may_keep_what_it_sees() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    graph = export(network, (torch.randn(4, 4),)).graph
    assert never_written(graph) == {"linear", "relu"}
    relu = next(node for node in graph.nodes if node.name == "relu")
    relu.target = torch.relu
    assert never_written(graph) == frozenset()
