"""Operations of the script that other workers run: one step of the autograd graph stands for each.

The first time an operation of torch meets operands of certain forms, it is followed, with each step
of its autograd graph. From the second time on there is one step, whose backward gives gradients of
the forms that were found out. It stands where those of the operation would: so backward comes in
one order to all that moves values between workers.

This holds where the result is a new tensor, and each operand gets its gradient from one place.
Everything else is followed each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit.distribute.following.forms import Following, Form, form_of, is_form
from graphsplit.distribute.workers.loop import META, shape_of
from graphsplit.torch_ext.attributes import base_of, storage_of
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, SingleLevelFunction

Together = Callable[[Sequence[Any]], Any]  # puts arguments together from operands


@dataclass(frozen=True)
class OneStep:
    """An operation on operands of certain forms, as one step.

    Attributes:
        run: Runs it on tensors without memory, given those with a history.
        form: The form of its result.
        operands: Those with a history, by place; empty where the result has none.
        inputs: The forms of those with a history.
        of_gradients: The forms of the gradients of these, by that of the result's gradient.
    """

    run: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    form: Form
    operands: Sequence[int]
    inputs: Sequence[Form]
    of_gradients: dict[Form, list[Form | None]] = field(default_factory=dict)

    def result(self, operands: Sequence[Any]) -> torch.Tensor:
        """A tensor of the result's form, with a history if it has one.

        Args:
            operands: All operands.
        """
        if not self.operands:
            return _empty(self.form)
        made: torch.Tensor = _step(self, *[operands[place] for place in self.operands])
        return made

    def gradients(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of the operands with a history."""
        form = form_of(gradient)
        known = self.of_gradients.get(form)
        if known is None:
            known = self.of_gradients[form] = self._found_out(gradient)
        return [None if one is None else _empty(one) for one in known]

    def _found_out(self, gradient: torch.Tensor) -> list[Form | None]:
        with torch.enable_grad(), DisableTorchFunctionSubclass(), Following():
            inputs = [_empty(form).requires_grad_() for form in self.inputs]
            result = self.run(inputs)
            found = torch.autograd.grad(result, inputs, gradient, allow_unused=True)
        return [None if one is None else form_of(one) for one in found]


class _Step(SingleLevelFunction):  # type: ignore[misc]
    """An operation that another worker runs."""

    @staticmethod
    def forward(ctx: Any, known: OneStep, *operands: torch.Tensor) -> torch.Tensor:
        """A tensor of the form of its result."""
        ctx.known, ctx.graphsplit_one_step = known, True
        ctx.set_materialize_grads(False)
        return _empty(known.form)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        """Gradients of the forms of the true ones."""
        known = ctx.known
        if gradient is None:
            return None, *(None for _ in known.operands)
        return None, *known.gradients(gradient)


_step: Callable[..., torch.Tensor] = _Step.apply


def _empty(form: Form) -> torch.Tensor:
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype, device=META)


def found_out(
    func: Callable[..., Any], result: Any, operands: Sequence[Any], together: Together
) -> OneStep | None:
    """Find out about an operation that was followed; None where it has to be each time.

    Args:
        func: The operation.
        result: What it has made.
        operands: Its operands, tensors without memory.
        together: Puts arguments together from operands.
    """
    if not _is_new(result, operands):
        return None
    history = [place for place, one in enumerate(operands) if _has_history(one)]
    if result.requires_grad and not _are_used_once(result, [operands[p] for p in history]):
        return None
    without = [shape_of(one) if isinstance(one, torch.Tensor) else one for one in operands]

    def run(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        given = list(without)
        for place, one in zip(history, inputs, strict=True):
            given[place] = one
        args, kwargs = together(given)
        made: torch.Tensor = func(*args, **kwargs)
        return made

    inputs = [form_of(operands[place]) for place in history]
    return OneStep(run, form_of(result), history if result.requires_grad else (), inputs)


def _has_history(operand: Any) -> bool:
    return isinstance(operand, torch.Tensor) and operand.requires_grad and torch.is_grad_enabled()


def _is_new(result: Any, operands: Sequence[Any]) -> bool:
    """Whether a result is a tensor without memory that shares nothing with any operand."""
    if type(result) is not torch.Tensor or not is_form(result):
        return False
    if base_of(result) is not result or result.is_leaf == result.requires_grad:
        return False
    shared = {storage_of(one) for one in operands if isinstance(one, torch.Tensor)}
    return storage_of(result) not in shared


def _are_used_once(result: torch.Tensor, history: Sequence[torch.Tensor]) -> bool:
    """Whether an operation's own steps give each operand its gradient from one place."""
    if any(one.is_leaf for one in history):
        return False
    wanted = Counter((one.grad_fn, one.output_nr) for one in history)
    found: Counter[Any] = Counter()
    waiting, seen = [result.grad_fn], set()
    while waiting:
        step: Any = waiting.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        ends = [edge for edge in step.next_functions if edge in wanted]
        found.update(ends)
        waiting += [edge[0] for edge in step.next_functions if edge not in wanted]
    return found == wanted


class _Followed(SingleLevelFunction):  # type: ignore[misc]
    """An operation that is followed by its values, as a step of the script's autograd graph."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        """The shape of its result."""
        ctx.operands = [shape_of(one) for one in operands]
        return shape_of(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Shapes of gradients."""
        return None, *ctx.operands


def shape_after(result: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
    """The shape of an operation's result, which has a history where its operands have one."""
    history = [one for one in operands if isinstance(one, torch.Tensor) and one.requires_grad]
    return _followed(result, *history)


_followed: Callable[..., torch.Tensor] = _Followed.apply
