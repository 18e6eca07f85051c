"""Refusals, by name, of networks that cannot run in replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from graphsplit.capture.failures import too_late
from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.capture.operations.effects import written_operands
from graphsplit.capture.operations.opaque_call import OpaqueCall, opaque_call
from graphsplit.capture.reach.holders import OF_THE_PROCESS
from graphsplit.capture.state.kept_names import told
from graphsplit.errors import PlacementError
from graphsplit.guards.changes import Change, Computed
from graphsplit.guards.places import PlaceKind
from graphsplit.guards.values import is_plain, with_leaves
from graphsplit.marks.annotations import Annotation
from graphsplit.tensor_meta import CPU

_OF_TENSORS = (PlaceKind.MARK, PlaceKind.BUFFER, PlaceKind.NUMBER)


def refuse_unreplicable(
    graph: CapturedGraph,
    replicas: Mapping[str, Annotation],
    num_microbatches: int,
    start: int = 0,
) -> None:
    """Refuse a graph whose microbatches cannot be shared among replicas with the same bits.

    Args:
        graph: The graph.
        replicas: All that is placed on several workers, in words.
        num_microbatches: Into how many microbatches the Model splits a batch.
        start: The number of the first microbatch that the graph is for.

    Raises:
        PlacementError: It cannot; names each reason, and the lines that place replicas.
        CaptureError: It ends in an error, and others would not have what one of them writes to.
    """
    if graph.ending is not None:
        raise too_late(str(graph.ending.error))
    if graph.mode is not Mode.TRAIN:
        raise PlacementError(
            f"replicas share the microbatches of a Model's training step; a network under the "
            f"script's own loop (gs.distribute) has none\n  {_sources(replicas)}\n"
            f"  Fix: train it by gs.Model, whose forward_backward leaves optimizer and loop to the "
            f"script; or place each module on one worker."
        )
    too_few = [
        f"{what} is placed on {len(a.replicas)} workers{f' by rows={a.rows}' if a.rows else ''}, "
        f"and the Model has microbatches={num_microbatches}; expected at least one microbatch for "
        f"each\n    {a.source}"
        for what, a in replicas.items()
        if not all(a.blocks(num_microbatches))
    ]
    problems = [*_problems_of(graph), *_left_again(graph.changes, start)]
    if problems or too_few:
        lines = "\n  ".join((*too_few, *problems))
        more = "" if problems else "raise microbatches, or "  # it mends nothing else
        raise PlacementError(
            f"replicas cannot run this network:\n  {lines}\n  Fix: {more}place on "
            f"one worker each what is placed on several at\n  {_sources(replicas)}"
        )


def is_evaluated_apart(graph: CapturedGraph) -> bool:
    """Whether a graph of eval or predict gives for each batch what it would after any other.

    Then replicas may run several batches at once, and loaders be read ahead.
    """
    nodes = graph.nodes
    draws = any(node.is_random for node in nodes)
    draws |= any(call.reached.may_write for _, call in _kept_whole(graph))
    is_state_out = any(o.node is not None and nodes[o.node].is_state for o in graph.outputs)
    return not (draws or is_state_out or graph.changes or any(_problems_of(graph)))


def _sources(replicas: Mapping[str, Annotation]) -> str:
    """The lines that place replicas."""
    return "\n  ".join(dict.fromkeys(a.source for a in replicas.values()))


def _left_again(changes: Iterable[Change], start: int) -> Iterator[str]:
    """The values that forward leaves in Python, and that replicas would have to take turns for.

    Every worker leaves plain values by itself, and for tensors a stand-in: one that the next
    microbatch reads is a buffer of the graph. The first microbatch may leave what the others find,
    for it runs before them; were each to find what the one before left, none could run beside it.
    """
    for change in changes:
        new = with_leaves(change.new, lambda leaf: None if _stands_for_it(leaf) else leaf)
        is_kept = change.place.kind not in _OF_TENSORS and is_plain(new)
        if not is_kept or (change.is_read and start):
            yield f"forward leaves {change.told()}, one microbatch after the other"


def _stands_for_it(leaf: Any) -> bool:
    return isinstance(leaf, (Computed, torch.Tensor))


def _problems_of(graph: CapturedGraph) -> Iterator[str]:
    """All that would have to pass from one microbatch to the next, so from replica to replica."""
    devices = {n.meta.device for n in graph.nodes if n.meta is not None} - {CPU}
    if devices:
        yield f"it has tensors on {', '.join(sorted(devices))}, and replicas add up on CPUs alone"
    by_kept: set[int] = set()
    for fx_node, call in _kept_whole(graph):
        written = {graph.positions.get(operand.name) for operand in written_operands(fx_node)}
        found = {p for p in graph.modified & written if graph.nodes[p].is_state}
        by_kept |= found
        names = [told(graph.nodes[p].kind.value, graph.nodes[p].target) for p in sorted(found)]
        names += _left_in_python(call)
        if names:
            yield f"{call.label} is kept whole, and changes {', '.join(names)} between microbatches"
    for position in sorted(graph.modified - by_kept):
        node = graph.nodes[position]
        what = "an input" if not node.is_state else told(node.kind.value, node.target)
        yield (
            f"forward changes {what} in place, microbatch after microbatch, and that cannot wait "
            f"until forward has run: more than its own updates read it, or it is inside a "
            f"checkpoint, or autocast casts what it is computed from"
        )
    if graph.draws_from_process:
        yield "forward draws from Python's or NumPy's generator, which runs through microbatches"


def _kept_whole(graph: CapturedGraph) -> Iterator[tuple[Node, OpaqueCall]]:
    """The calls kept whole, each with its node."""
    for node in graph.fx_nodes.values():
        if (call := opaque_call(node)) is not None:
            yield node, call


def _left_in_python(call: OpaqueCall) -> list[str]:
    """State that a call was seen to change, or draws from, and its next microbatch would find."""
    keys = call.reached.changed | call.reached.own_generators().keys()
    held = (call.reached.holders[key] for key in keys - OF_THE_PROCESS)
    return sorted({holder.name for holder in held if holder.decides})
