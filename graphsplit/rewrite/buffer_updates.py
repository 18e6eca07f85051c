"""Buffers that forward only updates: their updates are taken out, to be made afterwards.

Replicas do not wait for each other. But running statistics must meet the microbatches in order, and
these are elsewhere. Nothing in a training step looks at them, so the step is the same without::

    batch_norm(x, w, b, mean, var, True, 0.1)   =>   m, v = zeros, zeros
                                                     batch_norm(x, w, b, m, v, True, 1.0)
                                                     fold: m and v into mean and var, later

With a momentum of 1 the norm leaves the statistics of its own input; see ``fold_statistics``.
They, and ``x``, are kept until their microbatch's turn has come; an instance norm is run again for
its statistics then. The same holds for every buffer of
which nobody reads more than its own updates do: counters, moving averages of what forward computes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from graphsplit.capture.checkpoints import CHECKPOINT_KEY
from graphsplit.capture.graph import BufferUpdate, CapturedGraph, NodeKind
from graphsplit.capture.numbers.sizes import is_number
from graphsplit.capture.operations.effects import alias_roots, written_operands
from graphsplit.rewrite.rebuild import rebuilt
from graphsplit.torch_ext.private import OpOverload, has_kernel

_TAKEN_APART = "CompositeImplicitAutograd"
_BATCH_NORM = torch.ops.aten.batch_norm.default
_INSTANCE_NORM = torch.ops.aten.instance_norm.default
_NORMS = (_BATCH_NORM, _INSTANCE_NORM)  # of the same arguments
_STATISTICS, _MOMENTUM = slice(3, 5), 6


def take_updates_apart(graph: CapturedGraph) -> CapturedGraph:
    """The graph without updates that can wait until forward has run: its ``buffer_updates``.

    Args:
        graph: The graph of a training step.
    """
    found = list(_Finder(graph).updates())
    if not found:
        return graph
    taken = {op for update in found for op in update.operations}
    made = Graph()
    made.owning_module = graph.fx_owner  # type: ignore[assignment]
    copies: dict[FxNode, FxNode] = {}
    origins: dict[str, str] = {}
    for node in graph.fx_graph.nodes:
        if node in taken and node.target not in _NORMS:
            continue
        own = _own_statistics(node, made) if node in taken else ()
        origins.update((one.name, node.name) for one in own if one is not None)
        copies[node] = copy = made.node_copy(node, copies.__getitem__)
        if own:
            before, after = copy.args[: _STATISTICS.start], copy.args[_MOMENTUM + 1 :]
            copy.args = (*before, *own, True, 1.0, *after)
    updates = tuple(_fold(graph, update, copies) for update in found)
    return dataclasses.replace(rebuilt(graph, made, origins=origins), buffer_updates=updates)


def _own_statistics(node: FxNode, made: Graph) -> tuple[FxNode | None, FxNode | None]:
    """Where a norm leaves the statistics of its input; None where it is run again for them."""
    if node.target is _INSTANCE_NORM:
        return None, None
    x, *statistics = (node.args[0], *node.args[_STATISTICS])
    assert isinstance(x, FxNode)
    found: list[FxNode] = []
    for one in statistics:
        assert isinstance(one, FxNode)
        value, like = one.meta["val"], x.meta["val"]
        if value.dtype is not like.dtype:
            return None, None
        # They read nothing: then they are made where the norm is, and when it runs.
        layout = {"dtype": value.dtype, "device": value.device}
        zeros = made.call_function(torch.ops.aten.zeros.default, ([*value.shape],), layout)
        zeros.meta = {**node.meta, "val": like.new_zeros(value.shape)}
        found.append(zeros)
    mean, var = found
    return mean, var


@dataclass(frozen=True)
class _Update:
    """Buffers that are updated together.

    Attributes:
        buffers: Their placeholders.
        operations: What updates them, in program order.
        reads: The values that these read besides.
    """

    buffers: tuple[FxNode, ...]
    operations: tuple[FxNode, ...]
    reads: tuple[FxNode, ...]


class _Finder:
    """Finds the updates of a graph."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self._order = {node: number for number, node in enumerate(graph.fx_graph.nodes)}
        self._node = {f: graph.nodes[graph.positions[f.name]] for f in self._known()}
        self._roots = alias_roots(graph.fx_graph) if graph.modified else {}
        names, nodes = graph.fx_nodes, graph.nodes
        self._touching = {
            value: {f for p in positions if self._touches(f := names[nodes[p].name], value)}
            for value, positions in graph.touching.items()
        }
        self._writes = [  # memories, each with who writes to it
            (root, node)
            for node in graph.fx_graph.nodes
            for operand in (written_operands(node) if graph.modified else ())
            for root in self._roots[operand]
        ]

    def _known(self) -> Iterator[FxNode]:
        return (f for name, f in self._graph.fx_nodes.items() if name in self._graph.positions)

    def _touches(self, node: FxNode, value: int) -> bool:
        """Whether it reads or writes a value's memory, and need not just run after what does."""
        memory = self._graph.fx_nodes[self._graph.nodes[value].name]
        return any(memory in self._roots[one] for one in (node, *node.all_input_nodes))

    def updates(self) -> Iterator[_Update]:
        done: set[int] = set()
        for value in sorted(self._graph.modified):
            if value in done:
                continue
            buffers, operations = self._together(value)
            done |= buffers
            update = self._update(buffers, operations)
            if update is not None:
                yield update

    def _together(self, value: int) -> tuple[set[int], set[FxNode]]:
        """The modified values that are updated together with one, and what touches them."""
        buffers, operations = {value}, set[FxNode]()
        waiting = [value]
        while waiting:
            new = self._touching[waiting.pop()] - operations
            while new:  # what is computed from a buffer goes with it
                operations |= new
                pure = [node for node in new if node.target not in _NORMS]
                new = {u for node in pure for u in node.users if u.op != "output"} - operations
            for other, touching in self._touching.items():
                if other not in buffers and touching & operations:
                    buffers.add(other)
                    waiting.append(other)
        return buffers, operations

    def _update(self, buffers: set[int], operations: set[FxNode]) -> _Update | None:
        """An update, if it can be made later."""
        graph = self._graph
        if any(graph.nodes[b].kind is not NodeKind.BUFFER for b in buffers):
            return None
        held = tuple(graph.fx_nodes[graph.nodes[b].name] for b in sorted(buffers))
        ordered = tuple(sorted(operations, key=self._order.__getitem__))
        reads: dict[FxNode, None] = {}
        for node in ordered:
            written = {root for root, writer in self._writes if writer is node}
            if not (self._can_wait(node, operations) and written <= operations.union(held)):
                return None
            others = self._read_by(node)
            for operand in others:
                is_made = operand in operations and operand.target not in _NORMS
                if operand in held or is_made:
                    continue
                if not self._can_be_kept(operand, node):
                    return None
                reads[operand] = None
            if node.target in _NORMS and not set(node.args[_STATISTICS]) <= {*held}:
                return None
        return _Update(held, ordered, tuple(reads))

    @staticmethod
    def _read_by(node: FxNode) -> Sequence[FxNode]:
        """The operands that an update needs."""
        if node.target not in _NORMS:
            return node.all_input_nodes
        read = (node.args[0], *node.args[_STATISTICS], node.args[_MOMENTUM])
        return [n for n in read if isinstance(n, FxNode)]

    def _can_wait(self, node: FxNode, operations: set[FxNode]) -> bool:
        """Whether what an operation does to buffers can be done later."""
        one = self._node.get(node)
        if one is None or not isinstance(node.target, OpOverload):
            return False
        if (node.meta.get("custom") or {}).get(CHECKPOINT_KEY):
            return False  # backward would do it once more
        if node.target is _BATCH_NORM:
            return self._is_as_without_statistics(node)
        autocasts = one.region.autocasts
        keys = _TAKEN_APART, *(f"Autocast{device.upper()}" for device, _ in autocasts)
        if autocasts and any(has_kernel(node.target.name(), key) for key in keys):
            return False  # it, or what it is made of, would see other dtypes
        if node.target is _INSTANCE_NORM:
            return self._is_as_without_statistics(node)
        if one.requires_grad or one.is_random or (one.meta is None and node.users):
            return False
        return all(user in operations for user in node.users)

    def _is_as_without_statistics(self, node: FxNode) -> bool:
        """Whether a batch norm computes the same without its statistics, and only updates them."""
        weight, mean = node.args[1], node.args[_STATISTICS.start]
        dtypes = [self._dtype(n) for n in (node.args[0], mean) if isinstance(n, FxNode)]
        is_mixed = isinstance(weight, FxNode) and self._dtype(weight) != dtypes[0]
        return node.args[5] is True and (len(set(dtypes)) == 1 or is_mixed)

    def _dtype(self, node: FxNode) -> torch.dtype | None:
        meta = self._node[node].meta
        return meta.dtype if meta is not None else None

    def _can_be_kept(self, value: FxNode, user: FxNode) -> bool:
        """Whether a value is the same when the update is made."""
        if is_number(value):
            return True
        one = self._node.get(value)
        is_input = one is not None and one.kind is NodeKind.INPUT and user.target in _NORMS
        if one is None or one.meta is None or not (is_input or one.kind is NodeKind.OPERATION):
            return False
        return not any(
            root in self._roots[value] and self._order[writer] > self._order[user]
            for root, writer in self._writes
        )


def _fold(graph: CapturedGraph, update: _Update, copies: Mapping[FxNode, FxNode]) -> BufferUpdate:
    made = Graph()
    norms = [node for node in update.operations if node.target in _NORMS]
    left = [one for node in norms for one in copies[node].args[_STATISTICS] if one is not None]
    known = {node: made.placeholder(node.name) for node in (*update.buffers, *update.reads)}
    own = {one: made.placeholder(one.name) for one in left if isinstance(one, FxNode)}
    for node in update.operations:
        if node.target not in _NORMS:
            known[node] = made.node_copy(node, known.__getitem__)
            continue
        x, mean, var = (known[n] for n in (node.args[0], *node.args[_STATISTICS]))  # type: ignore[index]
        momentum: Any = node.args[_MOMENTUM]
        momentum = known.get(momentum, momentum)
        statistics = [own[n] for n in copies[node].args[_STATISTICS] if isinstance(n, FxNode)]
        if node.target is _INSTANCE_NORM:
            own_args = (x, None, None, mean, var, True, momentum, *node.args[_MOMENTUM + 1 :])
            made.call_function(_INSTANCE_NORM, own_args)
        elif statistics:
            made.call_function(fold_statistics, (x, mean, var, *statistics, momentum))
        else:
            arguments = (x, mean, var, momentum)
            made.call_function(torch.ops.aten.batch_norm_update_stats.default, arguments)
    made.output(())
    first = graph.nodes[graph.positions[update.operations[0].name]]
    beside = next((n for n in (*norms, *update.reads) if not is_number(n)), None)
    return BufferUpdate(
        tuple(node.name for node in update.buffers),
        tuple(node.name for node in (*update.reads, *own)),
        beside.name if beside is not None else None,
        first.module_path,
        first.source,
        made,
    )


# Running statistics from the statistics of a batch, in the bits of ``batch_norm``.
#
# A norm whose momentum is 1, and whose running statistics are zeros, leaves the mean and the
# variance of its input there, as it would have added them to others. So these need not be computed
# again::
#
#     mean  = momentum * m + (1 - momentum) * mean       all in the dtype of the input
#     var   = momentum * v + (1 - momentum) * var        the product and the sum in float64
#
# That is how torch 2 computes it on CPU for an input without gaps. Other inputs are gone through
# once more, and so are all where a try shows that this torch, on this machine, does it otherwise.

_DTYPES = (torch.float32, torch.float64)
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_MOMENTA = (0.1, 0.3, 1 / 7)


def fold_statistics(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    own_mean: torch.Tensor,
    own_var: torch.Tensor,
    momentum: float,
) -> None:
    """Do to running statistics what a norm of ``x`` would have done.

    Args:
        x: Its input, (rows, channels, ...).
        mean: The running mean, (channels,).
        var: The running variance, (channels,).
        own_mean: What the norm has left with a momentum of 1, (channels,).
        own_var: The same of the variance, (channels,).
        momentum: The momentum of the norm.
    """
    has_no_gaps = any(x.is_contiguous(memory_format=one) for one in _FORMATS)
    if has_no_gaps and x.is_cpu and x.dtype is mean.dtype and adds_so(x.dtype):
        _add(mean, var, own_mean, own_var, momentum)
    else:
        torch.ops.aten.batch_norm_update_stats.default(x, mean, var, momentum)


def _add(
    mean: torch.Tensor,
    var: torch.Tensor,
    own_mean: torch.Tensor,
    own_var: torch.Tensor,
    momentum: float,
) -> None:
    share, kept = _shares(momentum, mean.dtype)
    mean.mul_(kept).add_(own_mean * share)
    var.copy_(own_var.double().mul_(share).add_(var.mul_(kept)))


@functools.lru_cache(maxsize=64)  # a momentum may be another one at each step
def _shares(momentum: float, dtype: torch.dtype) -> tuple[float, float]:
    """A momentum and 1 - momentum, rounded to a dtype."""
    share = torch.tensor(momentum, dtype=dtype)
    return float(share), float(1 - share)


@functools.cache
def adds_so(dtype: torch.dtype) -> bool:
    """Whether this torch adds statistics as it is done here: tried once, with random numbers."""
    if dtype not in _DTYPES:
        return False
    generator = torch.Generator().manual_seed(0)
    norm, is_equal = torch.ops.aten.batch_norm.default, True
    with torch.no_grad():
        for momentum in _MOMENTA:
            for memory_format in _FORMATS[:2]:
                x = torch.randn(3, 67, 3, 5, generator=generator, dtype=dtype) * 3 + 1
                x = x.contiguous(memory_format=memory_format)
                mean, var = torch.rand(2, 67, generator=generator, dtype=dtype).unbind()
                own_mean, own_var = torch.zeros(2, 67, dtype=dtype).unbind()
                found_mean, found_var = mean.clone(), var.clone()
                norm(x, None, None, mean, var, True, momentum, 1e-5, False)
                norm(x, None, None, own_mean, own_var, True, 1.0, 1e-5, False)
                _add(found_mean, found_var, own_mean, own_var, momentum)
                is_equal &= torch.equal(mean, found_mean) and torch.equal(var, found_var)
    return is_equal
