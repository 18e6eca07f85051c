"""Watch code run on fake tensors that ``torch.export`` does not record.

Autograd works on fake tensors as on real ones. So what a call draws, what it modifies and whose
memory it hands out can be seen below autograd, operation by operation, before it ever runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
)
from torch.nn.modules.module import register_module_buffer_registration_hook

from graphsplit.capture.operations.effects import written_arguments
from graphsplit.capture.reach.contents import content_of
from graphsplit.capture.reach.holders import NUMPYS, PYTHONS, Holder
from graphsplit.capture.reach.reach import holders
from graphsplit.capture.rounds import Rounds
from graphsplit.marks.annotations import NODE_KEY
from graphsplit.torch_ext.attributes import (
    buffers_of,
    by_name,
    draws_by_default,
    schema_of,
    storage_of,
)
from graphsplit.torch_ext.fakes import formed_like
from graphsplit.torch_ext.function_modes import TRACERS, TorchCalls, may_write, without_modes
from graphsplit.torch_ext.private import (
    DataDependentOutputException,
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    active_fake_mode,
    disable_current_modes,
    leaves_of,
    pytree,
)
from graphsplit.torch_ext.replaced import ANNOTATE, replaced

_QUESTIONS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_MAX_ANSWERS = 1000
Overwritten = dict[int, tuple[torch.Tensor, torch.Tensor]]  # tensors, and what they held


class TooManyQuestionsError(Exception):
    """Code went on asking for the values of tensors, as a loop until convergence does.

    Args:
        observer: What was seen of it until then.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__(
            f"it asked for values {observer.num_answers} times, and was told "
            f"{observer.answer} each time"
        )
        self.observer = observer


class Observer(TorchDispatchMode):
    """Notes what operations do to memory and to the generator.

    Attributes:
        is_random: Whether something was drawn from the default generator.
        written: Storages that were modified.
        foreign: Tensors that were read and that ``is_foreign`` is true of, in order of first use.
        placements: Lines of ``with gs.place(...)`` blocks that were entered.
        drawn_from: Python's and NumPy's generators, where something was drawn from them.
        assigned: Buffers that were replaced by new tensors, and are back in their places.
        overwritten: Tensors with values that were written, and what they held.
        answer: The answer that was given to all questions, if any is given.
        num_answers: How often it was given.

    Args:
        is_foreign: What to note as foreign.
        answer: What to answer, 0 or 1, to code that asks for the value of a tensor; and how many
            elements are found by what looks for some.
    """

    def __init__(
        self, is_foreign: Callable[[torch.Tensor], bool], *, answer: int | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_random = False
        self.written: set[int] = set()
        self.foreign: dict[int, torch.Tensor] = {}
        self.placements: list[str] = []
        self.drawn_from: list[Holder] = []
        self.assigned: dict[int, torch.Tensor] = {}
        self.overwritten: Overwritten = {}
        self._is_foreign = is_foreign
        self.answer = answer
        self.num_answers = 0
        self._rounds = Rounds(sys._getframe(1).f_code)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note one operation, and run it."""
        kwargs = kwargs or {}
        if self.answer is not None and func in _QUESTIONS:
            return self._answer_to(func, args)
        given_leaves = pytree.tree_leaves((args, kwargs))
        for leaf in given_leaves:
            if isinstance(leaf, torch.Tensor) and self._is_foreign(leaf):
                self.foreign.setdefault(id(leaf), leaf)
        schema = schema_of(func)
        if schema is not None:
            self._note_writes(schema, by_name(schema, args, kwargs))
            self.is_random |= draws_by_default(func, args, kwargs)
        if self.answer is None:
            return func(*args, **kwargs)
        result = (sized(func, self.answer) or func)(*args, **kwargs)
        self._rounds.note(func, given_leaves, pytree.tree_leaves(result))
        return result

    def _answer_to(self, func: Any, args: tuple[Any, ...]) -> bool | int | float:
        with contextlib.suppress(DataDependentOutputException):
            known: Any = func(*args)
            if isinstance(known, (bool, int, float)):  # made of sizes, not of values
                return known
        tensor: torch.Tensor = args[0]
        self.num_answers += 1
        if self.num_answers > _MAX_ANSWERS or not self._rounds.go_on():
            raise TooManyQuestionsError(self)
        if tensor.dtype is torch.bool or func is torch.ops.aten.equal.default:
            return bool(self.answer)
        return float(self.answer or 0) if tensor.is_floating_point() else int(self.answer or 0)

    def _note_writes(self, schema: torch.FunctionSchema, given: dict[str, Any]) -> None:
        for name in written_arguments(schema, given):
            for tensor in leaves_of(torch.Tensor, given.get(name)):
                self.written.add(storage_of(tensor))
                if not isinstance(tensor, FakeTensor) and id(tensor) not in self.overwritten:
                    with disable_current_modes():
                        self.overwritten[id(tensor)] = tensor, tensor.detach().clone()


def is_tracked(tensor: torch.Tensor) -> bool:
    """Whether the tracer knows a tensor as a value of the graph that it records."""
    mode = get_proxy_mode()
    return mode is not None and get_proxy_slot(tensor, mode.tracer, None) is not None


def reachable_values(function: Any, *, depth: int = 3) -> Iterator[Any]:
    """Values that a function sees without being passed them: cells, defaults, its ``self``."""
    if isinstance(function, functools.partial):
        held: list[Any] = [function.func, *function.args, *function.keywords.values()]
    else:
        defaults: tuple[Any, ...] = getattr(function, "__defaults__", None) or ()
        held = [getattr(function, "__self__", None), *defaults]
        held += map(content_of, getattr(function, "__closure__", None) or ())
    for value in held:
        yield value
        if depth and (callable(value) or isinstance(value, functools.partial)):
            yield from reachable_values(value, depth=depth - 1)


@contextmanager
def unrecorded(observer: Observer) -> Iterator[None]:
    """Run code on fake tensors as eager mode would run it, watched and not recorded."""
    with ExitStack() as stack:
        fake_mode = active_fake_mode()
        shape_env = getattr(fake_mode, "shape_env", None)
        if shape_env is not None:  # values that code asks for, and keeps to itself
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(_generators_kept(observer))
        stack.enter_context(disable_proxy_modes_tracing())
        stack.enter_context(without_modes(TRACERS))
        stack.enter_context(_placements_noted(observer))
        stack.enter_context(_assignments_noted(observer))
        stack.enter_context(_values_put_back(observer.overwritten))
        stack.enter_context(observer)
        yield


@contextmanager
def _values_put_back(overwritten: Overwritten) -> Iterator[None]:
    """Undo what was written into tensors with values: where no operand is a fake, it really is."""
    try:
        yield
    finally:
        with DisableTorchFunction(), disable_current_modes():
            for tensor, before in overwritten.values():
                tensor.data.copy_(before)


class _Writes(TorchCalls):
    """Takes note of the values of tensors that code is about to write into."""

    def __init__(self) -> None:
        super().__init__()
        self.overwritten: Overwritten = {}

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if may_write(function, kwargs):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if type(leaf) in (torch.Tensor, nn.Parameter) and id(leaf) not in self.overwritten:
                    with DisableTorchFunction(), disable_current_modes():
                        self.overwritten[id(leaf)] = leaf, leaf.detach().clone()
        return function(*args, **kwargs)


@contextmanager
def values_as_they_were() -> Iterator[None]:
    """Record code that may write into tensors with values; afterwards they hold what they held."""
    writes = _Writes()
    with _values_put_back(writes.overwritten), writes:
        yield


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory; no operation of what is recorded."""
    with _untraced(), torch.set_grad_enabled(tensor.requires_grad):
        return tensor.view_as(tensor)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A new fake tensor that looks the same; no operation of what is recorded."""
    with _untraced(), torch.set_grad_enabled(tensor.requires_grad):
        pretend: Any = Pretence.apply
        made: torch.Tensor = pretend(tensor, tensor)
        return made


class Pretence(torch.autograd.Function):
    """A result without value that depends on operands, on each in more than one way."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *operands: Any) -> torch.Tensor:
        """Make the result."""
        made = formed_like(output)
        if not output.requires_grad:
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Never runs."""
        raise AssertionError("nothing was computed")


@contextmanager
def _untraced() -> Iterator[None]:
    with disable_proxy_modes_tracing(), without_modes(TRACERS):
        yield


@contextmanager
def _generators_kept(observer: Observer) -> Iterator[None]:
    before = torch.default_generator.get_state()
    of_process, _ = holders((PYTHONS, NUMPYS))
    try:
        yield
    finally:
        observer.is_random |= not torch.equal(torch.default_generator.get_state(), before)
        torch.default_generator.set_state(before)
        for holder in of_process:
            if holder.has_changed():
                observer.drawn_from.append(holder)
                holder.put_back()


@contextmanager
def _assignments_noted(observer: Observer) -> Iterator[None]:
    """Note buffers that are replaced, and put them back afterwards."""
    before: list[tuple[nn.Module, str, torch.Tensor]] = []

    def note(module: nn.Module, name: str, value: Any) -> None:
        held = buffers_of(module).get(name)
        if isinstance(held, torch.Tensor) and value is not held:
            before.append((module, name, held))

    handle = register_module_buffer_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for module, name, held in reversed(before):
            buffers_of(module)[name] = held
            if observer._is_foreign(held):
                observer.foreign.setdefault(id(held), held)
            observer.assigned[id(held)] = held
            observer.written.add(storage_of(held))


@contextmanager
def _placements_noted(observer: Observer) -> Iterator[None]:
    """Note the blocks that would be lost: what is kept whole runs on one worker."""

    @contextmanager
    def annotate(noted: dict[str, Any]) -> Iterator[None]:
        if NODE_KEY in noted:
            observer.placements.append(noted[NODE_KEY][1])
        yield

    with replaced(*ANNOTATE, annotate):
        yield


# Give a size to results whose size depends on values, while there are no values.
#
# ``x.nonzero()`` has as many rows as we say, and ``x[mask]`` takes as many. What is made of them
# must in the end have a shape that does not depend on it.

_aten: Any = torch.ops.aten
_BY_MASK = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_MASKS = (torch.bool, torch.uint8)


def sized(func: Any, count: int) -> Callable[..., Any] | None:
    """The function to run instead of one whose result has no known size; None: itself.

    Args:
        func: The operation.
        count: How many elements or rows it is to find.
    """
    if func is _aten.nonzero.default:
        return lambda x: x.new_empty((count, x.dim()), dtype=torch.int64)
    if func is _aten.masked_select.default:
        return lambda x, mask: x.new_empty((count,))
    if func is _aten._unique2.default:
        return lambda x, *flags, **kwargs: _unique(x, max(count, 1))
    if func in _BY_MASK:
        return lambda x, indices, *args, **kwargs: func(
            x, _without_masks(indices, count), *args, **kwargs
        )
    return None


def _unique(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    whole = torch.int64
    counts = x.new_empty((count,), dtype=whole)
    return x.new_empty((count,)), x.new_empty(x.shape, dtype=whole), counts


def _without_masks(indices: Any, count: int) -> list[torch.Tensor | None]:
    """Positions in place of masks: one tensor for each dimension that a mask covers."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            found.append(index)
            continue
        found += [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]
    return found
