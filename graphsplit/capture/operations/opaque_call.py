"""Calls that are kept whole: one node of the graph, run as ordinary eager code.

While a network is captured, a call that must not be taken apart (a custom autograd function, a
module marked by ``gs.opaque``) is recorded as one node. ``torch.export`` allows operators only, so
the node names an operator of ours and the call's number; afterwards ``put_in_place`` lets it call
the recorded ``OpaqueCall`` itself::

    during export     graphsplit_opaque(0, x, weight)
    afterwards        GeLUFunction.apply(x, weight)         an OpaqueCall; operands are tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphsplit.capture.reach.at_calls import standing
from graphsplit.capture.reach.holders import Holder, unchanged
from graphsplit.capture.reach.state import Reached
from graphsplit.guards.places import Place
from graphsplit.guards.values import freeze, same
from graphsplit.tensor_meta import fits
from graphsplit.torch_ext.attributes import writes_of
from graphsplit.torch_ext.private import FakeTensor, HigherOrderOperator


class Placeholder(HigherOrderOperator):
    """Stands for something else while ``torch.export`` works; never runs."""

    def __init__(self, name: str) -> None:
        super().__init__(name, cacheable=False)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Never runs."""
        raise AssertionError(f"{self} is a placeholder")


PLACEHOLDER = Placeholder("graphsplit_opaque")  # for a call kept whole


Pair = tuple[int, int]


@dataclass(frozen=True)
class Limits:
    """Results that a call must not return, as the graph around it would compute something else.

    What a call hands out is known only when it has run: something new, an operand itself, a view of
    one, one tensor twice. Nearly always all of that is right.

    Attributes:
        distinct: Pairs that must not be one tensor: their gradients would be added up in another
            order than in eager mode.
        same: Pairs that must be one tensor: the graph takes them for one.
        as_captured: Pairs that must share memory just as they did when the network was captured,
            since something is written to it later, on another worker or in another segment.
        detached: Outputs that are written to later, in place. An operand that came from elsewhere
            is a leaf here, which autograd lets nobody write to.
        keeps_gradients: Whether a gradient that was not expected would be lost.
        unwritten: Operands that must be left as they are: the plan takes them for the same in all
            microbatches, or on all workers.
    """

    distinct: tuple[Pair, ...] = ()
    same: tuple[Pair, ...] = ()
    as_captured: tuple[Pair, ...] = ()
    detached: tuple[int, ...] = ()
    keeps_gradients: bool = True
    unwritten: tuple[int, ...] = ()


@dataclass(frozen=True)
class Traits:
    """Known facts about a call. Operands and outputs are given by position.

    Attributes:
        in_parts: Whether autograd sees what it does inside, not one function.
        is_random: Whether it draws from the default generator.
        draws_from_process: Whether it may draw from Python's or NumPy's generator.
        written: Operands that it modifies in place.
        aliased: Operands whose memory an output shares.
        sharing: Pairs of tensors that share memory, of which the second is an output. Tensors are
            numbered: the operands first, then the outputs.
        same: Of these, the pairs that were one tensor.
        carries_grad: For each output, whether its ``requires_grad`` is set.
        repeated: Operands to whose gradient it adds several terms in an order of its own.
        outputs: For each output, its dtype and shape; None as a size that may change.
        strides: For each output, its strides; None as one that may change.
    """

    in_parts: bool = True
    is_random: bool = False
    draws_from_process: bool = False
    written: tuple[int, ...] = ()
    aliased: tuple[int, ...] = ()
    sharing: frozenset[Pair] = frozenset()
    same: frozenset[Pair] = frozenset()
    carries_grad: tuple[bool, ...] = ()
    repeated: tuple[int, ...] = ()
    outputs: tuple[tuple[torch.dtype, tuple[int | None, ...]], ...] = ()
    strides: tuple[tuple[int | None, ...], ...] = ()


class OpaqueCall:
    """The function of a node that stands for code kept whole.

    Called with its operands, it returns the one tensor it makes, or the tuple of several.

    Args:
        label: What it runs, for people: ``STE.apply``.
        text: Its arguments that are no tensors; part of the plan on which workers must agree.
        run: Takes the operands, and returns the list of its outputs.
        traits: What is known of it.
        source: The user's line.
        reached: The Python state that it can reach.
        limits: What it must not return; None: all must be related as it was captured.
        watched: Python state that it must leave as it is, each with the line of a call elsewhere
            that can reach it too.
    """

    def __init__(
        self,
        label: str,
        text: str,
        run: Callable[..., Sequence[torch.Tensor]],
        traits: Traits,
        source: str,
        reached: Reached | None = None,
        limits: Limits | None = None,
        watched: tuple[tuple[Holder, str], ...] = (),
    ) -> None:
        self.label = label
        self.text = text
        self.traits = traits
        self.source = source
        self.reached = reached or Reached()
        self._run = run
        self._limits = limits
        self._watched = watched
        # The generated code of a graph names what it calls.
        self.__name__ = self.__qualname__ = "".join(c if c.isalnum() else "_" for c in label)
        self.__module__ = "graphsplit_opaque"

    def __str__(self) -> str:
        return self.label

    def within(self, limits: Limits | None, watched: Iterable[tuple[Holder, str]]) -> OpaqueCall:
        """The same call, free to return and to change all but what this forbids."""
        known = self.label, self.text, self._run, self.traits, self.source, self.reached
        return OpaqueCall(*known, limits, tuple(watched))

    def __call__(self, *operands: Any) -> Any:
        """Run the call."""
        if any(isinstance(operand, FakeTensor) for operand in operands):
            with self.reached.kept():  # a plan is being made
                return self._called(operands)
        reached = self.reached
        if not (reached.read_outside or reached.constants or reached.at_call):
            return self._called(operands)
        refuse = partial(_changes_what_is_set, self)
        with standing(reached.at_call, refuse), leaving_what_is_read(self):
            return self._called(operands)

    def _called(self, operands: Sequence[Any]) -> Any:
        unwritten = self._limits.unwritten if self._limits is not None else ()
        before = [writes_of(operands[index]) for index in unwritten]
        with leaves_state(self.label, self.source, self._watched):
            outputs = list(self._run(*operands))
        if before != [writes_of(operands[index]) for index in unwritten]:
            raise OpaqueCallError(
                f"{self.label} writes to a parameter or buffer, which it did not when the network "
                f"was captured; others would go on with what it was\n  {self.source}\n"
                f"  Fix: keep what it writes to in a buffer that it writes to each time, or write "
                f"between two steps."
            )
        for index, (output, expected) in enumerate(zip(outputs, self.traits.outputs, strict=True)):
            dtype, shape = expected
            if output.dtype != dtype or not fits(output.shape, shape):
                raise OpaqueCallError(
                    f"output {index} of {self.label} is {output.dtype} {list(output.shape)}, but "
                    f"was {dtype} {list(shape)} when the network was captured\n  {self.source}\n"
                    f"  Fix: let what is kept whole return the same shapes for every batch of one "
                    f"shape."
                )
        if not any(isinstance(output, FakeTensor) for output in outputs):
            self._check_returned(operands, outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _check_returned(self, operands: Sequence[Any], outputs: list[torch.Tensor]) -> None:
        limits = self._limits or self._as_captured(operands)
        tensors = [*operands, *outputs]
        for first, second in limits.distinct:
            if tensors[first] is tensors[second]:
                raise OpaqueCallError(
                    f"{self._what(first, second, operands)} are one tensor, of which several "
                    f"segments make gradients; they would be added up in another order than in "
                    f"one process\n  {self.source}\n"
                    f"  Fix: return a copy, x.clone(), or place all that uses the two on its "
                    f"worker."
                )
        for first, second in limits.same:
            if tensors[first] is not tensors[second]:
                raise OpaqueCallError(
                    f"{self._what(first, second, operands)} are two tensors, but were one when the "
                    f"network was captured, and several segments make gradients of it\n"
                    f"  {self.source}\n"
                    f"  Fix: return a copy each time, x.clone(), or place all that uses the two "
                    f"on its worker."
                )
        self._check_memory(limits, operands, outputs)
        self._check_strides(outputs)
        for index, carries in enumerate(self.traits.carries_grad):
            if limits.keeps_gradients and outputs[index].requires_grad and not carries:
                raise OpaqueCallError(
                    f"output {index} of {self.label} carries a gradient, but carried none when the "
                    f"network was captured; it would be lost\n  {self.source}\n"
                    f"  Fix: use gs.opaque(..., outputs=f), which expects gradients of all."
                )
        for index in limits.detached:
            if outputs[index].is_leaf and outputs[index].requires_grad:
                apart: Any = _WritableLeaf.apply
                outputs[index] = apart(outputs[index])

    def _check_memory(
        self, limits: Limits, operands: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> None:
        tensors = [*operands, *outputs]
        for pair in limits.as_captured:
            is_shared = share_memory(tensors[pair[0]], tensors[pair[1]])
            if is_shared != (pair in self.traits.sharing):
                raise OpaqueCallError(
                    f"{self._what(*pair, operands)} {'' if is_shared else 'do not '}share memory, "
                    f"which was otherwise when the network was captured; what is written to it "
                    f"later in place would be seen in the wrong places\n  {self.source}\n"
                    f"  Fix: return a copy, x.clone(), or do not write to what it returns in "
                    f"place."
                )

    def _check_strides(self, outputs: Sequence[torch.Tensor]) -> None:
        for index, (output, strides) in enumerate(zip(outputs, self.traits.strides, strict=True)):
            if output.layout is not torch.strided or not output.numel():
                continue
            told = [s for s, size in zip(strides, output.shape, strict=True) if size != 1]
            found = [s for s, size in zip(output.stride(), output.shape, strict=True) if size != 1]
            if not fits(found, told):
                raise OpaqueCallError(
                    f"output {index} of {self.label} has strides {list(output.stride())}, but had "
                    f"{list(strides)} when the network was captured; contiguous() and the like "
                    f"were recorded for those\n  {self.source}\n"
                    f"  Fix: return x.contiguous()."
                )

    def _as_captured(self, operands: Sequence[Any]) -> Limits:
        first = len(operands)
        tensors = [*operands, *self.traits.outputs]
        pairs = tuple(
            (i, j) for j in range(first, len(tensors)) for i in range(j) if tensors[i] is not None
        )
        return Limits(as_captured=pairs)

    def _what(self, first: int, second: int, operands: Sequence[Any]) -> str:
        def name(number: int) -> str:
            is_operand = number < len(operands)
            return f"operand {number}" if is_operand else f"output {number - len(operands)}"

        return f"{name(first)} and {name(second)} of {self.label}"


ONE_STATE = (
    "place both calls on one worker; or give each a state of its own; or hand it from one to the "
    "other as a tensor."
)


@contextmanager
def drawing_nothing(calls: Sequence[OpaqueCall]) -> Iterator[None]:
    """Run the backward of some calls, whose random numbers would be no others' after it.

    Raises:
        OpaqueCallError: It has drawn from PyTorch's generator.
    """
    before = torch.default_generator.get_state()
    yield
    if not torch.equal(before, torch.default_generator.get_state()):
        lines = "".join(f"\n  {call.source}" for call in calls)
        raise OpaqueCallError(
            f"the backward of {' or '.join(call.label for call in calls)} draws random numbers, as "
            f"by a hook on a gradient; over workers and microbatches they would be other numbers "
            f"than in one process{lines}\n"
            f"  Fix: draw in forward, and let the hook use what was drawn."
        )


def leaves_state(
    label: str, source: str, watched: Sequence[tuple[Holder, str]]
) -> AbstractContextManager[None]:
    """Run code that must leave Python state as it is.

    Args:
        label: What runs, for people.
        source: The user's line.
        watched: The state, each with the line of a call elsewhere that can reach it too.

    Raises:
        OpaqueCallError: It has changed some of it.
    """

    def refusal(holder: Holder, elsewhere: str) -> OpaqueCallError:
        if elsewhere == source:
            return OpaqueCallError(
                f"{label} changes {holder.name}, which its next microbatch, or a call at the same "
                f"line elsewhere, would find otherwise than in one process\n  {source}\n"
                f"  Fix: change it between two steps; or place what changes it on one worker, and "
                f"set microbatches=1. It cannot be seen before it runs."
            )
        return OpaqueCallError(
            f"{label} changes {holder.name}, which a call elsewhere can reach too; it would find "
            f"something else there than in one process\n  {source}\n  {elsewhere}\n"
            f"  Fix: {ONE_STATE} It cannot be seen before it runs; one process, or one microbatch "
            f"on one worker, has no such limit."
        )

    return unchanged(watched, refusal)


@contextmanager
def leaving_what_is_read(call: OpaqueCall) -> Iterator[None]:
    """Run a call, or its backward, that must leave what the code around it reads as it is.

    Raises:
        OpaqueCallError: It has changed some of it, which it did not when it was recorded.
    """
    before = [(place, freeze(place.read())) for place in call.reached.read_outside]
    writes = [(tensor, writes_of(tensor)) for tensor in call.reached.constants]
    yield
    for place, was in before:
        if not same(was, place.read()):
            raise OpaqueCallError(changes_what_is_read(call, place.label, place.source))
    for tensor, number in writes:
        if writes_of(tensor) != number:
            what = f"a {list(tensor.shape)} tensor that is neither parameter nor buffer"
            raise OpaqueCallError(changes_what_is_read(call, what))


def changes_what_is_read(call: OpaqueCall, label: str, source: str = "") -> str:
    """The error of a call that changes what the code around it reads.

    Args:
        call: The call.
        label: The place, or what is changed.
        source: The line that reads it.
    """
    lines = "".join(f"  {one}\n" for one in (call.source, source) if one)
    return (
        f"{call.label} changes {label}, which is read outside of it as well; the graph "
        f"would keep what was there before the change\n{lines}"
        f"  Fix: return what it counts as a tensor, or keep all that reads it whole together, with "
        f"gs.opaque."
    )


def _changes_what_is_set(call: OpaqueCall, place: Place) -> OpaqueCallError:
    return OpaqueCallError(
        f"{call.label} changes {place.label}, which the code around it changes as well\n"
        f"  {call.source}\n  {place.source}\n"
        f"  Fix: let one of the two change it; or keep the code around it whole with gs.opaque."
    )


class _WritableLeaf(torch.autograd.Function):
    """A leaf's own memory, as a tensor that may be written to."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        """The same memory."""
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
            leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient as it is."""
        return gradients[0]


def share_memory(one: Any, other: Any) -> bool:
    """Whether two tensors lie in one piece of memory."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one is other:
        return True
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    memory = one.untyped_storage().data_ptr()
    return memory != 0 and memory == other.untyped_storage().data_ptr()


class OpaqueCallError(RuntimeError):
    """A call kept whole returns something else than when the network was captured."""


def opaque_call(node: Node) -> OpaqueCall | None:
    """The call that a node stands for, if it is one kept whole."""
    return node.target if isinstance(node.target, OpaqueCall) else None


def operands_at(node: Node, positions: Sequence[int]) -> tuple[Node, ...]:
    """Some operands of a call kept whole."""
    found = (node.args[position] for position in positions)
    return tuple(operand for operand in found if isinstance(operand, Node))


def put_in_place(graph_module: GraphModule, calls: Sequence[OpaqueCall]) -> None:
    """Let the nodes of a freshly exported graph, and of its subgraphs, call what they stand for."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        changed = False
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is PLACEHOLDER:
                number, *operands = node.args
                node.target, node.args = calls[number], tuple(operands)
                changed = True
        if changed:
            module.recompile()
