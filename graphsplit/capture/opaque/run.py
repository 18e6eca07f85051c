"""How a call kept whole is made: with its operands in the places of its tensors.

The operands are the tensors among the arguments, and the parameters and buffers that the code reads
from modules. At run time the latter stand in those modules while the call runs, so that gradients
flow to them wherever they live.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphsplit.capture.observe import Pretence
from graphsplit.capture.operations.opaque_call import OpaqueCallError
from graphsplit.capture.structure import take_apart
from graphsplit.guards.values import SYMBOLIC
from graphsplit.torch_ext.attributes import PARAMETERS, steps_behind
from graphsplit.torch_ext.private import FakeTensor, pytree
from graphsplit.torch_ext.stand_ins import unwatched


@dataclass(frozen=True)
class AttributeSlot:
    """Where a module keeps a parameter or buffer.

    Attributes:
        module: The module.
        kind: ``"_parameters"`` or ``"_buffers"``.
        name: Its name there.
    """

    module: nn.Module
    kind: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, tensors and symbolic numbers taken out.

    Attributes:
        leaves: All flattened arguments; None in place of operands.
        slots: Which of them are operands.
        spec: Their structure.
    """

    leaves: tuple[Any, ...]
    slots: tuple[int, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Arguments, list[Any]]:
        """The arguments without their operands, and the operands."""
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        slots = tuple(
            i for i, leaf in enumerate(leaves) if isinstance(leaf, (torch.Tensor, *SYMBOLIC))
        )
        rest = tuple(None if i in slots else leaf for i, leaf in enumerate(leaves))
        return cls(rest, slots, spec), [leaves[i] for i in slots]

    def filled(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with operands in place."""
        leaves = list(self.leaves)
        for slot, operand in zip(self.slots, operands, strict=False):
            leaves[slot] = operand
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def text(self) -> str:
        """The arguments that are no operands, for people and for comparing plans."""
        shown = (_shown(leaf) for i, leaf in enumerate(self.leaves) if i not in self.slots)
        return ", ".join(shown)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return repr(value)
    return type(value).__name__


@dataclass(frozen=True)
class Runnable:
    """A call kept whole, ready to run.

    Attributes:
        function: What is called.
        arguments: Its arguments.
        places: For each operand after those of the arguments, where modules keep it.
        recorded: Which flattened results are its outputs.
        plain: The other flattened results, by position: numbers and None, as they were captured.
        label: What it is, for people.
        modes: The user's ``TorchFunctionMode``s that it runs under.
        outside: By number (``id``), tensors that the code can reach and that are not made by it.
        checks_graph: Whether a gradient might flow to something that is no operand.
        pretended: Where the code cannot run on tensors without values, and parameters may have
            been missed when it was captured: tensors like its outputs.
        assigned: Which of the state's buffers the code replaces by new tensors.
    """

    function: Callable[..., Any]
    arguments: Arguments
    places: tuple[tuple[AttributeSlot, ...], ...]
    recorded: tuple[int, ...]
    plain: Mapping[int, Any]
    label: str
    modes: tuple[TorchFunctionMode, ...] = ()
    outside: frozenset[int] = frozenset()
    checks_graph: bool = False
    pretended: tuple[torch.Tensor, ...] | None = None
    assigned: tuple[int, ...] = ()

    def __call__(self, *operands: Any) -> list[torch.Tensor]:
        """Run the call; returns its outputs."""
        if self.pretended is not None and any(isinstance(o, FakeTensor) for o in operands):
            pretend: Any = Pretence.apply
            return [pretend(output, *operands, *operands) for output in self.pretended]
        num_arguments = len(self.arguments.slots)
        args, kwargs = self.arguments.filled(operands[:num_arguments])
        with ExitStack() as stack:
            state = operands[num_arguments:]
            marks = [tensor.requires_grad for tensor in state]
            stack.enter_context(state_in_place(self.places, state, self.assigned))
            stack.enter_context(unwatched(operands))
            for mode in self.modes:
                stack.enter_context(mode)
            found = self.function(*args, **kwargs)
            self._check_places(state)
        self._check_marks(marks, state)
        leaves = [found] if isinstance(found, torch.Tensor) else take_apart(found)[0]
        self._check_structure(leaves)
        for position, value in self.plain.items():
            if type(leaves[position]) is not type(value) or leaves[position] != value:
                raise OpaqueCallError(
                    f"{self.label} returned {leaves[position]!r} where it returned {value!r} when "
                    f"the network was captured\n  Fix: return numbers that depend on the values of "
                    f"tensors as tensors."
                )
        outputs = [leaves[position] for position in self.recorded]
        if self.checks_graph:
            self._check_graph(outputs, operands)
        return outputs

    def _check_places(self, state: Sequence[torch.Tensor]) -> None:
        """Refuse another parameter in a place: workers and optimizers know the one before."""
        for tensor, where in zip(state, self.places, strict=True):
            for place in where:
                held = getattr(place.module, place.kind)  # of a scripted module it is no dictionary
                is_own = place.kind == PARAMETERS and isinstance(held, dict)
                if is_own and held.get(place.name) is not tensor:
                    raise OpaqueCallError(
                        f"{self.label} puts another parameter into {place.name} of "
                        f"{type(place.module).__name__} while it runs; the optimizer and the other "
                        f"workers would not know it\n"
                        f"  Fix: write new values into what is there "
                        f"(self.{place.name}.data.copy_(value)), or make it a buffer."
                    )

    def _check_marks(self, marks: Sequence[bool], state: Sequence[torch.Tensor]) -> None:
        """Refuse to train what was frozen when the plan was made, or the reverse."""
        for was_trained, tensor, (place, *_) in zip(marks, state, self.places, strict=True):
            if tensor.requires_grad is not was_trained:
                what = "freezes" if was_trained else "thaws"
                raise OpaqueCallError(
                    f"{self.label} {what} {place.name} of {type(place.module).__name__} while it "
                    f"runs (requires_grad_); which gradients travel is known before\n"
                    f"  Fix: call requires_grad_ in a forward that is not kept whole, or between "
                    f"two steps."
                )

    def _check_structure(self, leaves: Sequence[Any]) -> None:
        are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        expected = [i in self.recorded for i in range(len(self.recorded) + len(self.plain))]
        if are_tensors != expected:
            shown = ["a tensor" if is_tensor else "a value" for is_tensor in are_tensors]
            raise OpaqueCallError(
                f"{self.label} returned {', '.join(shown) or 'nothing'}, which is not what it "
                f"returned when the network was captured: {sum(expected)} tensors and "
                f"{len(self.plain)} other values\n"
                f"  Fix: let what is kept whole return as many results each time, in one order."
            )

    def _check_graph(self, outputs: Sequence[torch.Tensor], operands: Sequence[Any]) -> None:
        """Refuse a gradient that would flow to something that is no operand."""
        ends = {
            torch.autograd.graph.get_gradient_edge(o).node
            for o in operands
            if isinstance(o, torch.Tensor) and o.requires_grad
        }
        for step in steps_behind(outputs, ends):
            variable = getattr(step, "variable", None)
            is_outside = isinstance(variable, nn.Parameter) or id(variable) in self.outside
            if isinstance(variable, torch.Tensor) and is_outside:
                raise OpaqueCallError(
                    f"{self.label} uses a {list(variable.shape)} tensor with a gradient that was "
                    f"not seen when the network was captured; its gradient would be lost\n"
                    f"  Fix: use gs.opaque on the module that holds it, or pass it as an argument."
                )


@contextmanager
def state_in_place(
    places: Sequence[Sequence[AttributeSlot]],
    tensors: Sequence[torch.Tensor],
    assigned: Collection[int] = (),
) -> Iterator[None]:
    """Let modules hold given tensors for a while.

    Args:
        places: Where, for each tensor.
        tensors: Parameters and buffers.
        assigned: Positions of buffers that the code replaces: what it leaves in their places is
            copied into them. It works on copies of them, so that autograd can keep the old values.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    named: list[torch.Tensor] = []
    held_by = [[(getattr(p.module, p.kind), p.name) for p in where] for where in places]
    try:
        for index, (where, tensor) in enumerate(zip(held_by, tensors, strict=True)):
            given = tensor.clone() if index in assigned else tensor
            for held, name in where:
                if held[name] is not given:
                    before.append((held, name, held[name]))
                    if isinstance(held[name], nn.Parameter) and type(given) is torch.Tensor:
                        named.append(given)  # code may ask it for its class
                        given.__class__ = nn.Parameter
                    held[name] = given
        yield
        for index in assigned:
            held, name = held_by[index][0]
            with torch.no_grad():
                tensors[index].copy_(held[name])
    finally:
        for held, name, tensor in before:
            held[name] = tensor
        for given in named:
            given.__class__ = torch.Tensor
