"""Rules for operations and owners, which only the captured graph can answer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from pass_helpers import captured, placed
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import Mode, NodeKind
from graphsplit.errors import PlacementError
from graphsplit.placement.resolve import PlacedGraph

X = torch.zeros(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.softmax(self.fc(x), -1) + 1.0
        return torch.log_softmax(x, -1) + 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        low, high = self.dropout(x).chunk(2, -1)
        return (low * high).sum()


def resolved(source: Any, network: nn.Module | None = None, **options: Any) -> PlacedGraph:
    network = network if network is not None else Net()
    mode = options.pop("mode", Mode.TRAIN)
    loss_fn = options.pop("loss_fn", None)
    args = (X, X) if loss_fn is not None else (X,)
    gs.apply_placement(network, source)
    graph = captured(network, *args, mode=mode, loss_fn=loss_fn)
    return placed(network, graph, unplaced="worker0", loss_fn=loss_fn, **options)


def where(result: PlacedGraph) -> dict[str, int]:
    """Operations that are not on worker 0."""
    return {
        node.name: worker
        for node, worker in zip(result.graph.nodes, result.workers, strict=True)
        if node.kind is NodeKind.OPERATION and worker
    }


def refused(source: Any, network: nn.Module | None = None, **options: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        resolved(source, network, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "operation", "names"),
    [
        ("blocks.1", "softmax", {"softmax_1"}),
        ("blocks.*", "*softmax", {"softmax", "log_softmax", "softmax_1", "log_softmax_1"}),
        ("blocks[0:1]", "add", {"add", "add_1"}),
        ("blocks.{0..1}", "add[1]", {"add_1", "add_3"}),
        ("blocks.0", "*[-2:]", {"log_softmax", "add_1"}),
        ("blocks.0.**", "*", {"linear", "softmax", "add", "log_softmax", "add_1"}),
        ("", "chunk", {"chunk", "getitem", "getitem_1"}),
        ("(network)", "mul", {"mul"}),
    ],
)
def test_a_rule_names_operations_of_modules(path: str, operation: str, names: set[str]) -> None:
    found = where(resolved({"operations": {path: {operation: 2}}}))
    assert found == dict.fromkeys(names, 2)


def test_a_rule_for_operations_wins_over_modules_and_later_ones_over_earlier_ones() -> None:
    source = {
        "modules": {"blocks": 1},
        "operations": {"blocks.*": {"*softmax": 2}, "blocks.1": {"softmax": 0}},
    }
    found = where(resolved(source))
    assert {name for name, worker in found.items() if worker == 2} == {
        "softmax",
        "log_softmax",
        "log_softmax_1",
    }
    assert "softmax_1" not in found
    assert found["linear"] == found["add"] == 1


def test_the_reason_names_the_rule() -> None:
    result = resolved({"operations": {"blocks.1": {"softmax": 2}}})
    names = [node.name for node in result.graph.nodes]
    reason = result.reasons[names.index("softmax_1")]
    assert reason.startswith("rule 'softmax' at ")
    assert "test_operation_rules.py" in reason


def test_the_loss_is_placed_by_rule_whether_it_is_a_module_or_not() -> None:
    source = {"operations": {"(loss)": {"*": 2}}}
    for loss_fn in (nn.MSELoss(), lambda a, b: (a - b).sum()):
        network = nn.Sequential(nn.Linear(4, 4))
        found = where(resolved(source, network, loss_fn=loss_fn))
        assert found
        assert set(found.values()) == {2}
        assert "linear" not in found


def test_every_fault_is_listed_together() -> None:
    class Placed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with gs.place("MS_WORKER", 1):
                return super().forward(x).mul(2)

    network = Placed()
    network.dropout.place("MS_WORKER", 9)
    source = {
        "operations": {
            "blocks.0": {"sofmax": 1, "add[7]": 1, "add": 1, "ad*": 1, "*": 1},
            "blocks.1": {"linear": 1},
            "blocks": {"*": 1},
            "": {"chunk": 2, "mul[0]": 1},
            "dropout": {"dropout": 8},
        }
    }
    text = refused(source, network)
    for expected in (
        "module 'dropout' is placed on MS_WORKER 9 at ",
        "'dropout': 'dropout' -> 8 is placed on MS_WORKER 8 at ",
        "'sofmax' -> 1: the modules that it names run no such operation; did you mean 'softmax'?",
        "'add[7]' -> 1: no module that it names has so many of these operations",
        "'add' -> 1: all that it matches is decided by later rules",
        "'blocks.1': 'linear' -> 1: the modules that it names run no such operation; there is "
        "add, log_softmax, softmax",
        "'blocks': '*' -> 1: the modules that it names run no operation themselves; 'blocks.0' "
        "inside does",
        "'': 'chunk' -> 2: operation 'chunk' is placed on MS_WORKER 1 by gs.place in the code",
        "Fix: start 10 workers (graphsplit run -n 10, ",
    ):
        assert expected in text, f"lacks {expected}\n{text}"
    assert "mul" not in text  # says what the code says


def test_a_rule_for_operations_inside_names_the_module_that_has_them() -> None:
    text = refused({"operations": {"blocks": {"softmax": 1}}})
    assert "the modules that it names run no operation themselves; 'blocks.0' inside does" in text


def test_a_rule_that_only_training_can_honour_is_named_in_other_graphs_once() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    gs.apply_placement(network, {"operations": {"1": {"dropout": 1}, "0": {"linear": 1}}})
    graph = captured(network, X, mode=Mode.PREDICT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = placed(network, graph)
        placed(network, graph)
    assert "dropout" not in [node.name for node in graph.nodes]
    assert ["dropout" in str(w.message) for w in caught] == [True]
    assert any("dropout" in note for note in result.notes)


def test_rules_for_the_loss_are_not_missed_where_there_is_none() -> None:
    network = nn.Sequential(nn.Linear(4, 4))
    gs.apply_placement(network, {"operations": {"(loss)": {"*": 1}}})
    assert placed(network, captured(network, X, mode=Mode.PREDICT)).notes == ()


def test_an_owner_may_be_any_worker() -> None:
    network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    network[1].weight = network[0].weight
    loss_fn = nn.MSELoss()
    for name in ("0.weight", "1.weight"):
        source = {"parameters": {name: 2}, "modules": {"0": 0, "1": 1}}
        result = resolved(source, network, loss_fn=loss_fn)
        (position,) = result.graph.state_names
        assert result.workers[position] == 2
        assert result.reasons[position].startswith("rule at ")


def test_a_placement_that_decides_nothing_is_noted() -> None:
    network = Net()
    network.spare = nn.Linear(1, 1)
    network.spare.place("MS_WORKER", 2)
    network.place("MS_WORKER", 1)
    result = placed(network, captured(network, X))
    (note,) = result.notes
    assert note.startswith(
        "module 'spare' is placed on worker 2, but nothing in this graph is placed by that\n"
    )
    assert "test_operation_rules.py:" in note


def test_rules_at_every_grain_keep_the_bits() -> None:
    source = {
        "modules": {"blocks[0:1]": 1, "blocks.1.fc": 2},
        "operations": {"blocks.*": {"*softmax": 2, "add[0]": 0}, "": {"mul": 1}},
        "parameters": {"blocks.1.fc.weight": 0},
    }
    cluster = assert_same_bits(
        Net, [(X + 1,), (X + 2,)], num_workers=3, place=lambda net: gs.apply_placement(net, source)
    )
    owners = cluster.workers[0].planner.owners
    assert (owners["blocks.0.fc.weight"], owners["blocks.1.fc.weight"]) == (1, 0)
