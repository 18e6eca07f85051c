"""Keep what forward read of a buffer before it assigned another tensor to it.

``self.h = h.detach()`` leaves the old tensor as it is: autograd may have saved it. In the graph the
new tensor is copied into the buffer, so what was read before is read from a copy::

    y = matmul(h, w)                    old = clone(h);  y = matmul(old, w)
    copy_(h, y)                  =>     copy_(h, y)

So is what forward writes into the old tensor (``self.h.mul_(0.9)``) before it assigns another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.fx.traceback
from torch.fx import Graph, Node

from graphsplit.capture.operations.effects import OWN_MEMORY, alias_roots, written_operands
from graphsplit.capture.operations.regions import region_of
from graphsplit.errors import CaptureError

_KEY = "graphsplit_assigned"  # in the notes of a copy: (the user's line, whether it has a gradient)
MODIFIED = "graphsplit_modified"  # of a buffer that is written to before another is assigned
_NOTED = ("nn_module_stack", "stack_trace")


@contextmanager
def noted_as_assignment(line: str, *, has_gradient: bool) -> Iterator[None]:
    """Note that a copy into a buffer stands for an assignment.

    Args:
        line: The user's line.
        has_gradient: Whether what is assigned has one.
    """
    with torch.fx.traceback.annotate({_KEY: (line, has_gradient)}):
        yield


def keep_old_values(graph: Graph, *, loss: int | None) -> None:
    """Let what reads a buffer before an assignment read a copy.

    Args:
        graph: A freshly exported graph that is trained, tied tensors united, regions marked.
        loss: Position of the loss among the outputs.

    Raises:
        CaptureError: A gradient would flow to the step before.
    """
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        line, has_gradient = _assignment(node)
        if not line:
            continue
        buffer = _as_it_came(node)
        node.update_arg(0, buffer)
        readers = [user for user in buffer.users if user is not node]
        if not readers:
            continue
        if has_gradient:
            _check_not_in_loss(graph, readers, loss, line)
        if _is_modified(graph, buffer):
            buffer.meta[MODIFIED] = True
        with graph.inserting_after(last[0] if buffer.op == "placeholder" else buffer):
            old = graph.call_function(torch.ops.aten.clone.default, (buffer,))
        # Views of the copy were recorded as views of the buffer.
        old.meta.update(val=buffer.meta["val"], **{OWN_MEMORY: True})
        old.meta.update({key: readers[0].meta[key] for key in _NOTED if key in readers[0].meta})
        for reader in readers:
            reader.replace_input_with(buffer, old)


def _assignment(node: Node) -> tuple[str, bool]:
    """The user's line of a copy that stands for an assignment, and whether it has a gradient."""
    if node.target is not torch.ops.aten.copy_.default:
        return "", False
    found: tuple[str, bool] = (node.meta.get("custom") or {}).get(_KEY, ("", False))
    return found


def _as_it_came(assignment: Node) -> Node:
    """The buffer of an assignment before forward wrote into it."""
    (buffer,) = written_operands(assignment)
    while not _assignment(buffer)[0] and (before := written_operands(buffer)):
        buffer = before[0]
    return buffer


def _is_modified(graph: Graph, buffer: Node) -> bool:
    roots = alias_roots(graph)
    return any(
        buffer in roots[operand]
        for node in graph.nodes
        if not _assignment(node)[0]
        for operand in written_operands(node)
    )


def _check_not_in_loss(graph: Graph, readers: Sequence[Node], loss: int | None, line: str) -> None:
    """In eager mode a gradient of the loss would flow on to the step before, which has had its."""
    outputs = next(iter(reversed(graph.nodes))).args[0]
    goals: list[object] = []
    if isinstance(outputs, (list, tuple)):  # without a loss, any of them may be part of one
        goals = list(outputs) if loss is None else [outputs[loss]]
    waiting, seen = list(readers), set(readers)
    while waiting:
        node = waiting.pop()
        if node.target is torch.ops.aten.detach.default or region_of(node).grad_enabled is False:
            continue
        if any(node is goal for goal in goals):
            raise CaptureError(
                f"forward assigns a tensor with a gradient to a buffer that it reads at the next "
                f"step: backward would go through the step before a second time\n  {line}\n"
                f"  Fix: assign it without its history, with .detach()."
            )
        more = [user for user in node.users if user not in seen]
        seen.update(more)
        waiting += more
