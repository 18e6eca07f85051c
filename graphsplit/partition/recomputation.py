"""Which operations are run again in backward, so that what they save for it need not be kept.

Three ways lead there: ``torch.utils.checkpoint`` inside the network, ``Model(recompute=True)`` for
every segment, and ``Model(recompute=["layers.*"])`` for modules. Each gives groups of operations
that stand together in one segment::

    segment    embed  [norm  linear  gelu  linear  add]  [norm  linear  gelu  linear  add]  head
                       one group                          another one

Only what goes into a group is kept. Operations that modify memory from outside their group in
place would modify it twice, so a group with such a one is left as it is, and so is one whose
inputs are modified later; buffers are no obstacle, since their values are kept.

In eager mode ``torch.utils.checkpoint`` modifies buffers twice: running statistics count a batch in
forward and again in backward. That is repeated, where it can be: of several microbatches, later
ones have run forward before the backward of the first, so there only counters may be modified.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet

from torch import fx

from graphsplit.capture.checkpoints import CHECKPOINT_KEY
from graphsplit.capture.graph import Node
from graphsplit.capture.operations.effects import alias_roots, written_operands
from graphsplit.capture.operations.opaque_call import opaque_call
from graphsplit.errors import PlacementError
from graphsplit.partition.plan import PartitionPlan, RecomputedGroup

_Key = tuple[str, object]
_CHECKPOINT = "checkpoint"


def with_recomputation(
    plan: PartitionPlan, recompute: bool | Collection[str] = False
) -> PartitionPlan:
    """Add to a plan which operations are run again in backward.

    Args:
        plan: The plan.
        recompute: All operations, those of the modules with these paths, or only those in
            checkpoints of the network itself.

    Raises:
        PlacementError: A checkpoint of the network modifies a buffer, which backward would modify
            once more, and cannot in the same order.
    """
    if not plan.placed.graph.has_gradients:
        return plan
    finder = _Finder(plan, recompute)
    found = {segment.index: tuple(finder.groups(segment.nodes)) for segment in plan.segments}
    recomputed = {index: groups for index, groups in found.items() if groups}
    run_twice = finder.written_twice(recomputed.values())
    return dataclasses.replace(plan, recomputed=recomputed, run_twice=run_twice)


class _Finder:
    """Finds the groups of one segment after the other."""

    def __init__(self, plan: PartitionPlan, recompute: bool | Collection[str]) -> None:
        self.graph = plan.placed.graph
        self.is_microbatched = plan.is_microbatched
        self.nodes = self.graph.nodes
        self.everything = recompute is True
        self.paths = frozenset() if isinstance(recompute, bool) else frozenset(recompute)
        self.fx_nodes = self.graph.fx_nodes
        self.writers = [p for p, node in enumerate(self.nodes) if node.changes_inputs]
        self.roots = alias_roots(self.graph.fx_graph) if self.writers and self.fx_nodes else {}

    def groups(self, positions: tuple[int, ...]) -> Iterator[RecomputedGroup]:
        for key, run in itertools.groupby(positions, key=self._key):
            group = tuple(itertools.dropwhile(self._is_without_grad, run))
            saving = sum(self.nodes[p].requires_grad for p in group)
            if key is not None and saving > 1 and not self._is_torn(frozenset(group)):
                yield RecomputedGroup(group, repeats_writes=key[0] == _CHECKPOINT)

    def written_twice(self, groups: Iterable[tuple[RecomputedGroup, ...]]) -> frozenset[int]:
        """Counters that a checkpoint of the network modifies once more, and no group does.

        They depend on nothing but themselves, so forward can do it at once.
        """
        repeated = {
            position
            for group in itertools.chain.from_iterable(groups)
            for position in group.positions
            if group.repeats_writes and not self.is_microbatched
        }
        found: set[int] = set()
        for writer in self.writers:
            node = self.nodes[writer]
            shared = [self.nodes[p] for p, is_state in node.shares_modified if is_state]
            changed = next((other.target for other in shared if other.is_state), None)
            if changed is None or writer in repeated or self._checkpoint_of(node) is None:
                continue
            if all(self.nodes[p].is_state for p in node.reads):
                found.add(writer)
                continue
            raise PlacementError(
                f"{node.name} ({node.target}) modifies {changed!r} inside torch.utils.checkpoint, "
                f"whose backward would modify it once more, before the next microbatch\n"
                f"  {node.source}\n"
                f"  Fix: leave torch.utils.checkpoint out, and ask for the same by "
                f"Model(..., recompute=[...]); or call the module that modifies it outside of the "
                f"checkpoint."
            )
        return frozenset(found)

    def _is_without_grad(self, position: int) -> bool:
        """Whether autograd is off: a group begins where it is on."""
        return self.nodes[position].region.grad_enabled is False

    def _key(self, position: int) -> _Key | None:
        node = self.nodes[position]
        number = self._checkpoint_of(node)
        if number is not None:
            return _CHECKPOINT, number
        made_by = self.fx_nodes.get(node.name)
        call = opaque_call(made_by) if made_by is not None else None
        if call is not None and call.traits.in_parts:
            return None  # ordinary code: what it keeps in Python would change twice
        if self.everything:
            return "everything", None
        if self.paths:
            parts = node.module_path.split(".")
            for number in range(1, len(parts) + 1):
                path = ".".join(parts[:number])
                if path in self.paths:
                    return "module", path
        return None

    def _checkpoint_of(self, node: Node) -> int | None:
        """The number of the network's own checkpoint that an operation stands in."""
        made_by = self.fx_nodes.get(node.name)
        noted = (made_by.meta.get("custom") or {}).get(CHECKPOINT_KEY) if made_by else None
        return noted[0] if noted is not None else None

    def _is_torn(self, group: AbstractSet[int]) -> bool:
        """Whether memory that goes into a group is modified, other than that of buffers."""
        if not self.writers:
            return False
        first = min(group)
        made = {self.fx_nodes[self.nodes[p].name] for p in group}
        outside = {r for p in group for r in self.nodes[p].reads if r not in group}
        entering: set[fx.Node] = set()
        for position in outside:
            fx_node = self.fx_nodes.get(self.nodes[position].name)
            if fx_node is not None and not self.nodes[position].is_state:
                entering |= self.roots[fx_node]
        for writer in self.writers:
            if writer < first:
                continue
            written = self._written(writer) - made
            if written & entering:
                return True
        return False

    def _written(self, writer: int) -> set[fx.Node]:
        node = self.fx_nodes[self.nodes[writer].name]
        return set().union(*(self.roots[operand] for operand in written_operands(node)))
