"""Results that a call kept whole must not return, given where everything around it runs.

A call may hand back an operand itself, or one tensor twice. In eager mode these are one tensor,
whose uses are added up in one order::

    y = call(h)         y is h              (d + c) + b, latest use first
    b = g(h)            as two values       y's uses first, d + c, as one term of h: the same here,
    c = f(y)                                but b + (d + c) if g(h) were to run last
    d = f(y)

Within a segment autograd sees one tensor too. Where uses lie elsewhere, the order is compared with
eager's; what would come in another is refused when it happens, and only then.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node as FxNode

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.capture.opaque.handed_out import WRITTEN_LATER, WrittenLater
from graphsplit.capture.operations.memory_calls import MemoryCall
from graphsplit.capture.operations.opaque_call import Limits, OpaqueCall, Pair
from graphsplit.partition.plan import PartitionPlan

# In ``Node.meta`` of a call kept whole: pairs of tensors that the graph takes for one.
KNOWN_SAME = "graphsplit_known_same"

Use = tuple[int, int]


def limits_of(plan: PartitionPlan, position: int) -> Limits:
    """The results that a call must not return.

    Args:
        plan: The plan.
        position: The call.
    """
    return _Returned(plan, position).limits()


@dataclass(frozen=True)
class _Tensor:
    """An operand or output of the call.

    Attributes:
        number: Its number; see ``opaque.Traits.sharing``.
        value: The node that stands for it.
        index: Which operand it is; -1 for an output.
    """

    number: int
    value: int
    index: int = -1


class _Returned:
    def __init__(self, plan: PartitionPlan, position: int) -> None:
        self._plan = plan
        self._call = position
        self._lane = position - plan.in_first_lane(position)
        self._graph = plan.placed.graph
        self._nodes = plan.placed.graph.nodes
        self._segment_of = plan.segmentation.segment_of
        self._fx = self._graph.fx_nodes[self._nodes[position].name]
        self._leaf_of = {
            use: leaf.index
            for leaf in plan.contributions
            for use in leaf.uses
            if leaf.segment == self._segment_of[position]
        }

    def limits(self) -> Limits:
        assert isinstance(self._fx.target, OpaqueCall)
        written = self._fx.meta.get(WRITTEN_LATER, ())
        num_operands = len(self._fx.args)
        return Limits(
            same=self._fx.meta.get(KNOWN_SAME, ()),
            distinct=tuple(self._distinct()) if self._graph.has_gradients else (),
            as_captured=tuple(w.pair for w in written if not self._runs_in_place(w)),
            detached=tuple(sorted({w.pair[1] - num_operands for w in written})),
            keeps_gradients=self._graph.mode.records_gradients,
            unwritten=tuple(self._unwritten()),
        )

    def _unwritten(self) -> Iterator[int]:
        """Buffers that it was not seen to write to; and parameters, which replicas borrow."""
        assert isinstance(self._fx.target, OpaqueCall)
        for one in self._operands():
            node = self._nodes[one.value]
            is_kept = node.is_state if self._plan.is_replicated else node.kind is NodeKind.BUFFER
            if is_kept and one.number not in self._fx.target.traits.written:
                yield one.number

    def _runs_in_place(self, written: WrittenLater) -> bool:
        """Whether all that uses the memory runs in the call's segment, as it is written."""
        here = self._segment_of[self._call]
        return not written.is_kept and all(
            (position := self._at(name)) is not None
            and self._segment_of[position] == here
            and not isinstance(self._graph.fx_nodes[name].target, MemoryCall)
            for name in written.touching | written.writes
        )

    def _distinct(self) -> list[Pair]:
        operands, outputs = self._operands(), self._outputs()
        pairs = [(one, two) for two in outputs for one in operands if self._may_be_one(one, two)]
        found = [(a.number, b.number) for a, b in pairs if not self._operand_in_order(a, b)]
        for index, two in enumerate(outputs):
            found += [
                (one.number, two.number)
                for one in outputs[:index]
                if self._may_be_one(one, two) and not self._outputs_in_order(one.value, two.value)
            ]
        return found

    def _operands(self) -> list[_Tensor]:
        reads = self._nodes[self._call].reads
        slots = [i for i, argument in enumerate(self._fx.args) if isinstance(argument, FxNode)]
        return [_Tensor(i, value, k) for k, (i, value) in enumerate(zip(slots, reads, strict=True))]

    def _outputs(self) -> list[_Tensor]:
        first = len(self._fx.args)
        if self._nodes[self._call].meta is not None:
            return [_Tensor(first, self._call)]
        elements = [user for user in self._fx.users if user.target is operator.getitem]
        made = ((int(str(e.args[1])), self._at(e.name)) for e in elements)
        found = [_Tensor(first + index, value) for index, value in made if value is not None]
        return sorted(found, key=lambda tensor: tensor.value)

    def _at(self, name: str) -> int | None:
        """The number of a node in the lane of the call; None for one that the graph left out."""
        found = self._graph.positions.get(name)
        return None if found is None else self._lane + self._plan.in_first_lane(found)

    def _is_loss(self, value: int) -> bool:
        return self._plan.in_first_lane(value) == self._graph.loss_node

    def _may_be_one(self, one: _Tensor, two: _Tensor) -> bool:
        first, second = self._nodes[one.value], self._nodes[two.value]
        if not (first.requires_grad and second.requires_grad) or one.number == two.number:
            return False
        return _look(first) == _look(second)

    def _uses(self, value: int) -> list[Use]:
        """The uses that carry a gradient, latest first; of what they may hand on as well."""
        found: list[Use] = []
        if self._is_loss(value):
            found.append((len(self._nodes), 0))
        for use in self._plan.gradient_uses.get(value, ()):
            found.append(use)
            if use[0] != self._call:
                found += self._uses_handed_on(value, use[0])
        return sorted(set(found), key=lambda use: (-use[0], use[1]))

    def _uses_handed_on(self, value: int, position: int) -> list[Use]:
        fx_node = self._graph.fx_nodes[self._nodes[position].name]
        if not isinstance(fx_node.target, OpaqueCall):
            return []
        names = [fx_node.name, *(user.name for user in fx_node.users)]
        made = [at for name in names if (at := self._at(name)) is not None]
        return [
            use
            for result in made
            if _look(self._nodes[result]) == _look(self._nodes[value])
            for use in self._uses(result)
        ]

    def _operand_in_order(self, operand: _Tensor, output: _Tensor) -> bool:
        """Whether the gradient of an operand comes in eager's order if it is also an output."""
        of_output = self._uses(output.value)
        later = [use for use in self._own_uses(operand.value) if use[0] > self._call]
        if not later or not of_output:
            return True
        leaf = self._leaf_of.get((self._call, operand.index))
        if all(self._is_here(use, leaf) for use in later):
            return all(self._is_here(use, None) for use in of_output)
        return self._is_one_term_before(of_output, later)

    def _own_uses(self, value: int) -> list[Use]:
        handed_on = [
            other
            for use in self._plan.gradient_uses.get(value, ())
            if use[0] != self._call
            for other in (use, *self._uses_handed_on(value, use[0]))
        ]
        ends = [(len(self._nodes), 0)] if self._is_loss(value) else []
        return [*ends, *handed_on]

    def _is_here(self, use: Use, leaf: int | None) -> bool:
        if use[0] >= len(self._nodes) or self._segment_of[use[0]] != self._segment_of[self._call]:
            return False
        return self._leaf_of.get(use) == leaf

    def _is_one_term_before(self, uses: Sequence[Use], later: Sequence[Use]) -> bool:
        """Whether some uses are one term that eager mode adds after other, later ones."""
        (position, index), *others = uses
        if others or (position < len(self._nodes) and bool(self._nodes[position].repeated)):
            return False
        if len(later) == 1 and later[0][0] == position:  # two terms of one operation, a + b = b + a
            return True
        return all(use[0] > position or (use[0] == position and use[1] < index) for use in later)

    def _outputs_in_order(self, earlier: int, later: int) -> bool:
        """Whether gradients come in eager's order if two outputs are one tensor."""
        one, two = self._uses(earlier), self._uses(later)
        if not one or not two or all(self._is_here(use, None) for use in (*one, *two)):
            return True
        # What comes from elsewhere enters backward output by output, the one used latest first.
        first, second = (one, two) if _is_later(one[0], two[0]) else (two, one)
        return len(first) == 1 and self._is_one_term_before(second, first)


def _is_later(use: Use, other: Use) -> bool:
    return (-use[0], use[1]) < (-other[0], other[1])


def _look(node: Node) -> object:
    return None if node.meta is None else (node.meta.dtype, str(node.meta.shape))
