"""Operations that stand inside ``torch.no_grad()``, ``enable_grad()`` or ``torch.autocast`` blocks.

``torch.export`` packs such a block into one operation, which could not be placed on several
workers; and it loses a ``no_grad`` block that stands inside an ``autocast`` block. So the blocks
are kept flat, between marks, as they are recorded::

    _set_grad_enabled(False)                           linear     grad off
    linear = aten.linear(x, w, b)           =>         mul
    _set_grad_enabled(True)
    mul = aten.mul(linear, y)

The marks are then taken out, and every operation between them remembers its `Region`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from graphsplit.errors import CaptureError
from graphsplit.torch_ext.private import (
    EXPORT_PASSES,
    enter_autocast,
    exit_autocast,
    set_grad_enabled,
)
from graphsplit.torch_ext.replaced import ENTER_INFERENCE, LEAVE_INFERENCE, replaced

_KEY = "graphsplit_region"  # in ``Node.meta``


@dataclass(frozen=True)
class Region:
    """How an operation runs because of the blocks around it.

    Attributes:
        grad_enabled: Whether autograd is on; None: as for the whole step.
        autocasts: For each kind of device on which autocast is on, its name and the lower dtype.
        block: Which outermost autocast block it stands in, counted from 1; 0: in none.
        keeps_casts: Whether a parameter is cast once for the whole block (``cache_enabled``).
    """

    grad_enabled: bool | None = None
    autocasts: tuple[tuple[str, torch.dtype], ...] = ()
    block: int = 0
    keeps_casts: bool = False

    def __str__(self) -> str:
        parts = [] if self.grad_enabled is None else [f"grad {self.grad_enabled}"]
        parts += [f"autocast {device} {dtype}" for device, dtype in self.autocasts]
        return ", ".join(parts)


ORDINARY = Region()


def region_of(node: Node) -> Region:
    """The region of a node whose graph ``mark_regions`` has seen."""
    region: Region = node.meta.get(_KEY, ORDINARY)
    return region


def set_region(node: Node, region: Region) -> None:
    """Put an operation that was added later into a region."""
    node.meta[_KEY] = region


@contextmanager
def in_region(region: Region, *, grad_enabled: bool) -> Iterator[None]:
    """Run as operations of a region do, but casting a parameter anew at every use.

    Args:
        region: The region.
        grad_enabled: Whether autograd is on for the whole step.
    """
    on = grad_enabled if region.grad_enabled is None else region.grad_enabled
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(on))
        for device, dtype in region.autocasts:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        yield


@contextmanager
def blocks_kept_flat() -> Iterator[None]:
    """Have ``torch.export`` leave the marks of blocks in the graph, as it has recorded them.

    Blocks inside subgraphs, those of branches and loops, are packed as ever.
    """
    with ExitStack() as stack:
        for path in EXPORT_PASSES:
            module, name = importlib.import_module(path), path.rpartition(".")[2]
            inside = _inside_subgraphs(getattr(module, name))
            stack.enter_context(replaced(module, name, inside))
        yield


def _inside_subgraphs(original: Callable[..., Any]) -> Callable[..., Any]:
    def replace(whole: GraphModule, signature: Any) -> tuple[GraphModule, Any]:
        for node in whole.graph.nodes:
            subgraph = getattr(whole, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(subgraph, GraphModule):
                setattr(whole, str(node.target), original(subgraph, None)[0])
        return whole, signature

    return replace


@contextmanager
def blocks_as_in_eager_mode(*, keeps_casts: bool) -> Iterator[None]:
    """Let the network's code enter its blocks as in eager mode, while it is recorded.

    The tracer switches autocast's cache off, so that blocks would look as if their author had.
    ``inference_mode`` leaves no mark; what it computes is what ``no_grad`` computes.

    Args:
        keeps_casts: Whether autocast's cache is on where the user calls.
    """
    enter, leave = getattr(*ENTER_INFERENCE), getattr(*LEAVE_INFERENCE)
    befores: list[tuple[Any, bool]] = []

    def enter_marked(self: Any) -> None:
        if not self.mode and not befores:
            enter(self)
            return
        befores.append((self, torch.is_grad_enabled()))
        torch.set_grad_enabled(not self.mode)

    def leave_marked(self: Any, *exception: Any) -> None:
        if befores and befores[-1][0] is self:
            torch.set_grad_enabled(befores.pop()[1])
        else:
            leave(self, *exception)

    before = torch.is_autocast_cache_enabled()
    with replaced(*ENTER_INFERENCE, enter_marked), replaced(*LEAVE_INFERENCE, leave_marked):
        torch.set_autocast_cache_enabled(keeps_casts)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(before)


def mark_regions(graph: Graph, *, grad_enabled: bool) -> None:
    """Take the marks of blocks out of a freshly exported graph; note every operation's region.

    Args:
        graph: The graph.
        grad_enabled: Whether autograd is on for the whole step.
    """
    marks: list[Node] = []
    enclosing: dict[Node, tuple[dict[str, torch.dtype], bool]] = {}  # by entry: what was before
    casts: dict[str, torch.dtype] = {}
    grad, keeps_casts, num_blocks = grad_enabled, False, 0
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            grad = bool(node.args[0])
        elif node.target is enter_autocast:
            num_blocks += not enclosing
            enclosing[node] = (casts, keeps_casts)
            casts, keeps_casts = _entered(node, casts)
        elif node.target is exit_autocast:
            entry = node.args[0]
            assert isinstance(entry, Node)
            casts, keeps_casts = enclosing.pop(entry)
        else:
            is_plain = grad == grad_enabled and not casts
            if node.op == "call_function" and not is_plain:
                node.meta[_KEY] = Region(
                    None if grad == grad_enabled else grad,
                    tuple(sorted(casts.items(), key=str)),
                    num_blocks if enclosing else 0,
                    keeps_casts,
                )
            continue
        marks.append(node)
    for node in reversed(marks):
        graph.erase_node(node)


def _entered(mark: Node, casts: dict[str, torch.dtype]) -> tuple[dict[str, torch.dtype], bool]:
    device, dtype, is_enabled, keeps_casts = mark.args
    if not isinstance(device, str) or not isinstance(dtype, torch.dtype):
        raise CaptureError(
            f"torch.autocast was entered with {mark.args}; expected a device type and a dtype"
        )
    others = {k: v for k, v in casts.items() if k != device}
    return ({**others, device: dtype} if is_enabled else others), bool(keeps_casts)
