"""What the tests of the pure passes share: capturing small networks, and graphs made by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from graphsplit.batches.step_functions import run_predict, run_train
from graphsplit.capture.export import CaptureRequest, capture
from graphsplit.capture.graph import CapturedGraph, Mode, Node, NodeKind, Output
from graphsplit.marks.annotations import Annotation
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import (
    EVERYWHERE,
    PlacedGraph,
    UnplacedRule,
    branches_to_open,
    resolve,
)
from graphsplit.planning.passes import placement_rules
from graphsplit.planning.task import Task
from graphsplit.rewrite.branches import take_branches_apart
from graphsplit.tensor_meta import TensorMeta

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "lenet_mnist"))

META = TensorMeta(torch.float32, (2, 2), (2, 1))


def captured(
    network: nn.Module,
    *args: Any,
    loss_fn: Callable[..., Any] | None = None,
    mode: Mode = Mode.TRAIN,
    **kwargs: Any,
) -> CapturedGraph:
    """Capture a network; in train mode it returns the loss, or ``loss_fn`` makes it."""
    run = run_train if mode is Mode.TRAIN else run_predict
    loss = 0 if mode is Mode.TRAIN else None
    network.train(mode is Mode.TRAIN)
    return capture(CaptureRequest(network, loss_fn, run, mode, loss, args, kwargs))


def operations(graph: CapturedGraph) -> list[Node]:
    return [node for node in graph.nodes if node.kind is NodeKind.OPERATION]


def targets(graph: CapturedGraph) -> list[str]:
    return [node.target.removeprefix("aten.") for node in operations(graph)]


def find(graph: CapturedGraph, name: str) -> int:
    """Position of the node with a name."""
    return next(position for position, node in enumerate(graph.nodes) if node.name == name)


def placed(
    network: nn.Module,
    graph: CapturedGraph,
    *,
    num_workers: int = 3,
    unplaced: UnplacedRule = "affinity",
    loss_fn: Any = None,
    owners: Mapping[str, int] | None = None,
) -> PlacedGraph:
    task = Task(network, loss_fn, None, unplaced, False)
    rules = placement_rules(task, num_workers=num_workers, owners=owners or {})
    return resolve(take_branches_apart(graph, branches_to_open(graph, rules)), rules)


def lenet_plan() -> PartitionPlan:
    """LeNet over five workers, as in the example."""
    from lenet import LeNet5

    network = LeNet5()
    for rank, name in enumerate(("fc1", "fc2", "fc3", "conv1", "conv2")):
        getattr(network, name).place("MS_WORKER", rank)
    loss_fn = nn.CrossEntropyLoss()
    target = torch.zeros(32, dtype=torch.int64)
    graph = captured(network, torch.zeros(32, 1, 32, 32), target, loss_fn=loss_fn)
    return partition(placed(network, graph, num_workers=5, loss_fn=loss_fn))


@dataclass(frozen=True)
class Op:
    """An operation of a graph made by hand: where it runs and what it reads."""

    worker: int
    reads: tuple[str, ...]
    is_random: bool = False
    requires_grad: bool = True
    makes_tuple: bool = False
    changes_inputs: bool = False
    annotation: Annotation | None = None
    runs_after: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()


def placed_graph(
    ops: Mapping[str, Op],
    *,
    parameters: Mapping[str, int] | None = None,
    num_workers: int | None = None,
    loss: str | None = None,
    mode: Mode = Mode.TRAIN,
) -> PlacedGraph:
    """A placed graph made by hand: an input ``x``, parameters with their owners, operations.

    The last operation is the loss, unless another one is named.
    """
    parameters = parameters or {}
    position = {name: i for i, name in enumerate(["x", *parameters, *ops])}
    nodes = [Node("x", NodeKind.INPUT, "0", meta=META)]
    nodes += [Node(p, NodeKind.PARAMETER, p, meta=META, requires_grad=True) for p in parameters]
    for name, op in ops.items():
        reads = tuple(position[r] for r in op.reads)
        nodes.append(
            Node(
                name,
                NodeKind.OPERATION,
                f"aten.{name}.default",
                reads=reads,
                runs_after=tuple(position[r] for r in op.runs_after),
                meta=None if op.makes_tuple else META,
                is_random=op.is_random,
                with_producer=any(r in ops and ops[r].makes_tuple for r in op.reads),
                requires_grad=op.requires_grad,
                changes_inputs=op.changes_inputs,
                repeated=tuple(position[r] for r in op.repeated),
                annotation=op.annotation,
            )
        )
    workers = (EVERYWHERE, *parameters.values(), *(op.worker for op in ops.values()))
    graph = graph_of(nodes, loss=position[loss or list(ops)[-1]], mode=mode)
    size = num_workers if num_workers is not None else max(workers) + 1
    return PlacedGraph(graph, workers, ("by hand",) * len(nodes), size)


def graph_of(nodes: Sequence[Node], *, loss: int, mode: Mode = Mode.TRAIN) -> CapturedGraph:
    return CapturedGraph(
        mode=mode,
        nodes=tuple(nodes),
        fx_graph=torch.fx.Graph(),
        fx_owner=nn.Module(),
        constants={},
        outputs=(Output(loss),),
        output_spec=pytree.tree_structure(0),
        loss=0,
        state_names={},
    )


@st.composite
def placed_graphs(
    draw: st.DrawFn, *, max_operations: int = 12, max_workers: int = 4
) -> PlacedGraph:
    """Any graph on any placement: shared parameters, tuples, randomness, dead ends."""
    num_workers = draw(st.integers(1, max_workers))
    worker = st.integers(0, num_workers - 1)
    parameters = {f"w{i}": draw(worker) for i in range(draw(st.integers(1, 2)))}
    has_gradient = set(parameters)
    tensors = ["x", *parameters]
    ops: dict[str, Op] = {}
    for i in range(draw(st.integers(1, max_operations))):
        # Old values as likely as new ones, so that some have many uses.
        reads = tuple(draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3)))
        grad = any(r in has_gradient for r in reads) and draw(st.integers(0, 5)) > 0
        is_tuple = draw(st.integers(0, 6)) == 0
        is_random = draw(st.integers(0, 6)) == 0
        # Rarely one that uses an operand several times inside, like attention.
        whole = reads[:1] if draw(st.integers(0, 4)) == 0 else ()
        op = Op(draw(worker), reads, is_random, grad, is_tuple, repeated=whole)
        made = {f"op{i}": op}
        if is_tuple:
            for k in range(draw(st.integers(1, 2))):
                made[f"op{i}_{k}"] = Op(op.worker, (f"op{i}",), requires_grad=grad)
        ops |= made
        tensors += [name for name, new in made.items() if not new.makes_tuple]
        if grad:
            has_gradient |= set(made)
    ends = tuple(draw(st.lists(st.sampled_from(tensors[-3:]), min_size=1, max_size=3)))
    ops["loss"] = Op(draw(worker), ends, requires_grad=any(e in has_gradient for e in ends))
    return placed_graph(ops, parameters=parameters, num_workers=num_workers)
