"""Nodes for ``torch.cond`` whose branches are taken apart, to run on several workers.

Every operation of both branches becomes a node of its own that looks at the predicate first, and
makes nothing if its branch is not the taken one. Absent values are None, and travel as such::

    y = cond(p, true, false, (x,))          x_in, token = EnterBranches(x)
                                            a = Guarded(linear, when p)(p, x_in, w_in)
                                     =>     b = Guarded(sin, when p)(p, a)
                                            c = Guarded(cos, when not p)(p, x_in)
                                            (y,) = JoinBranches(p, [b], [c], [token])

Gradients are those of ``torch.cond``: all uses of an operand inside are added to each other first,
and what the taken branch does not use gets zeros, not None. So every operand goes through
`EnterBranches`, and `JoinBranches` tells each of them, by the gradient of its empty token, that
backward has come to the branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphsplit.capture.operations.memory_calls import MemoryCall, Outside, copy_of, filled
from graphsplit.torch_ext.attributes import schema_of


class Guarded(MemoryCall):
    """Runs an operation of a branch if that is taken: ``(predicates, operands) -> results``.

    Without it, all results are None.

    Args:
        target: The operation.
        args: Its arguments, with ``Outside`` for its operands.
        kwargs: Its keyword arguments.
        when: What the predicates must be, that of the outermost branch first.
        num_results: How many results a tuple has that it returns; None where it is no tuple.
        is_random: Whether it draws from the default generator.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        when: tuple[bool, ...],
        num_results: int | None,
        is_random: bool,
    ) -> None:
        super().__init__(f"in_branch[{target}]", is_random=is_random)
        self.target = target
        self._args = args
        self._kwargs = kwargs
        self._when = when
        self._num_results = num_results

    def __call__(self, *operands: Any) -> Any:
        """Look at the predicates, and run the operation."""
        predicates, others = operands
        if is_taken(predicates, self._when):
            return self._run(others)
        return None if self._num_results is None else (None,) * self._num_results

    def as_taken(self, *operands: Any) -> Any:
        """Run the operation, whatever the predicates are."""
        return self._run(operands[1])

    def _run(self, operands: Sequence[Any]) -> Any:
        def operand(marker: Any) -> Any:
            return operands[marker.index]

        return self.target(*filled(self._args, operand), **filled(self._kwargs, operand))

    def aliased(self, args: Sequence[Any]) -> Sequence[Any]:
        """Operands that the result may be a view of: any; fake tensors tell which."""
        schema = schema_of(self.target)
        arguments = schema.arguments if schema is not None else ()
        may_alias = torch.Tag.maybe_aliasing_or_mutating in getattr(self.target, "tags", ())
        if may_alias or any(argument.alias_info is not None for argument in arguments):
            return tuple(args[1])
        return ()

    def text(self) -> str:
        """The arguments that are no operands, and the branch; part of the plan."""
        parts = [_shown(argument) for argument in self._args]
        parts += [f"{key}={_shown(value)}" for key, value in self._kwargs.items()]
        return f"{', '.join(parts)}, when {self._when}"


def _shown(value: Any) -> str:
    if isinstance(value, Outside):
        return f"${value.index}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


def is_taken(predicates: Sequence[Any], when: Sequence[bool]) -> bool:
    """Whether a branch inside others is taken. The predicate of a branch not taken is not there."""
    return all(
        bool(predicate) == wanted for predicate, wanted in zip(predicates, when, strict=True)
    )


class EnterBranches(MemoryCall):
    """Hands an operand to both branches: ``(predicates, operand) -> (operand, token)``.

    Args:
        when: What the predicates around both branches must be.
    """

    def __init__(self, when: tuple[bool, ...]) -> None:
        super().__init__("enter_branches")
        self._when = when

    def __call__(self, *operands: Any) -> Any:
        """Make the alias and the token."""
        predicates, operand = operands
        return _entered(operand) if is_taken(predicates, self._when) else (None, None)

    def as_taken(self, *operands: Any) -> Any:
        """Make them, whatever the predicates are."""
        return _entered(operands[1])

    def aliased(self, args: Sequence[Any]) -> Sequence[Any]:
        """The operand."""
        return (args[1],)


def _entered(operand: torch.Tensor) -> Any:
    enter: Any = _Enter.apply
    return enter(operand)


class JoinBranches(MemoryCall):
    """Picks the results of the taken branch: ``(predicates, true, false, tokens) -> results``.

    Args:
        when: What the predicates must be, all but the last, which picks the branch.
        copies: Whether something modifies the results in place. What the branches keep for
            backward may be the very same memory, so these are then copied.
    """

    def __init__(self, when: tuple[bool, ...], *, copies: bool) -> None:
        super().__init__("join_branches")
        self._when = when
        self._copies = copies

    def __call__(self, *operands: Any) -> Any:
        """Pick."""
        predicates, if_true, if_false, tokens = operands
        if not is_taken(predicates[:-1], self._when):
            return (None,) * len(if_true)
        return self._pick(if_true if predicates[-1] else if_false, tokens)

    def as_taken(self, *operands: Any) -> Any:
        """Hand on the results of the first branch."""
        return self._pick(operands[1], operands[3])

    def _pick(self, results: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor]) -> Any:
        if tokens:
            join: Any = _Join.apply
            return join(self._copies, len(results), *results, *tokens)
        return tuple(copy_of(result) if self._copies else result for result in results)


class _Enter(torch.autograd.Function):
    """An alias, whose gradient is zeros where only the token gets one."""

    @staticmethod
    def forward(ctx: Any, operand: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(operand)
        return operand.view_as(operand), operand.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient, token = gradients
        if gradient is None and token is not None:
            return torch.zeros_like(ctx.saved_tensors[0])
        return gradient


class _Join(torch.autograd.Function):
    """The results of one branch; all of them ask for a gradient, as those of ``torch.cond`` do."""

    @staticmethod
    def forward(
        ctx: Any, copies: bool, num_results: int, *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.tokens = [token.dtype for token in operands[num_results:]]
        results = operands[:num_results]
        return tuple(copy_of(r).detach() if copies else r.view_as(r) for r in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *gradients, *(torch.zeros(0, dtype=dtype) for dtype in ctx.tokens)
