"""Make explicit that autocast casts a parameter once in a block, however often it is used.

In an autocast block eager mode casts activations at every use, but keeps what a parameter was cast
to, where autograd is on, until the outermost block ends. That decides over bits: the gradients of a
parameter's uses are then added in the lower dtype, and their sum is cast back once::

    with torch.autocast("cpu", torch.bfloat16):        cast = w.to(bfloat16)
        y = linear(linear(x, w), w)             =>     y = linear(linear(x, cast), cast)

So the cast becomes an operation of its own, with a worker and with edges like any other. All other
casts stay inside the operations, which run under autocast with its cache off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from graphsplit.capture.operations.regions import in_region, region_of, set_region
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_of_node
from graphsplit.torch_ext.fakes import copy_notes, on_fakes, value_of
from graphsplit.torch_ext.private import OpOverload, TorchDispatchMode, pytree

_CASTS = (torch.ops.aten._to_copy.default,)


def keep_casts(graph: Graph, parameters: Mapping[Node, torch.Tensor]) -> None:
    """Cast parameters explicitly where autocast would keep the result.

    Args:
        graph: The graph, its regions marked.
        parameters: The parameter behind each placeholder that stands for one.

    Raises:
        CaptureError: An operation uses a parameter both as it is and cast; what autocast does
            inside it cannot be told apart.
    """
    kept: dict[tuple[int, int], Node] = {}  # by block and parameter
    for node in list(graph.nodes):
        region = region_of(node)
        if not region.autocasts or not region.keeps_casts or region.grad_enabled is False:
            continue
        candidates = [n for n in node.all_input_nodes if _may_be_kept(parameters.get(n))]
        for operand, dtype in _casts_inside(node, candidates).items():
            key = (region.block, id(parameters[operand]))
            if key not in kept:
                kept[key] = _add_cast(graph, node, operand, dtype)
            node.replace_input_with(operand, kept[key])


def _may_be_kept(parameter: torch.Tensor | None) -> bool:
    """The facts that autocast asks of a tensor; a user's parameter is a leaf in any case."""
    return parameter is not None and parameter.requires_grad and parameter.dtype is torch.float32


def _casts_inside(node: Node, candidates: Sequence[Node]) -> dict[Node, torch.dtype]:
    """The operands that an operation casts to the lower dtype, each with that dtype."""
    if not candidates:
        return {}
    recorder = _run(node, candidates)
    if recorder is None:
        return {}
    found: dict[Node, torch.dtype] = {}
    lower = {dtype for _, dtype in region_of(node).autocasts}
    for operand in candidates:
        dtypes = recorder.casts.get(operand, set()) & lower
        if not dtypes:
            continue
        if operand in recorder.other_uses or len(dtypes) > 1:
            raise CaptureError(
                f"{node.target} uses the parameter {operand.name} both as it is and cast by "
                f"autocast, inside one operation\n"
                f"  {users_line_of_node(node)}\n"
                f"  Fix: pass cache_enabled=False to torch.autocast, or call this operation "
                f"outside of the autocast block."
            )
        found[operand] = dtypes.pop()
    return found


class _Recorder(TorchDispatchMode):
    """Notes what happens to some tensors themselves."""

    def __init__(self, watched: Mapping[int, Node]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = watched
        self.casts: dict[Node, set[torch.dtype]] = {}
        self.other_uses: set[Node] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            operand = self._watched.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
            if operand is None:
                continue
            if func in _CASTS:
                self.casts.setdefault(operand, set()).add((kwargs or {})["dtype"])
            elif func is not torch.ops.prim.device.default:  # fake tensors ask for it
                self.other_uses.add(operand)
        return func(*args, **(kwargs or {}))


def _run(node: Node, candidates: Sequence[Node]) -> _Recorder | None:
    """Run an operation on fake tensors as it runs in its region; None if it needs values."""
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    recorder = _Recorder({id(n.meta["val"]): n for n in candidates})

    def run() -> _Recorder:
        with in_region(region_of(node), grad_enabled=False), recorder:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
            target(*args, **kwargs)
        return recorder

    return on_fakes(node, run)


def _add_cast(graph: Graph, user: Node, operand: Node, dtype: torch.dtype) -> Node:
    """Cast a parameter right before the operation that uses it first, as part of that module."""
    value = operand.meta["val"]
    with graph.inserting_before(user):
        cast = graph.create_node(
            "call_function",
            torch.ops.aten.to.dtype,
            (operand, dtype),
            name=f"{operand.name}_cast",
        )
    copy_notes(cast, user)
    with value.fake_mode, torch.no_grad():
        cast.meta["val"] = value.to(dtype)
    set_region(cast, region_of(user))
    return cast
