"""Record a call as one node while ``torch.export`` records everything around it.

The call is run once, unrecorded, on the fake tensors that stand for its operands. What it returns
are the node's outputs; what it was seen to do are the node's traits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor_tree

from graphsplit.capture.observe import Observer, alias_of, like, reachable_values, unrecorded
from graphsplit.capture.opaque.answers import run_with_answers
from graphsplit.capture.opaque.run import Arguments, AttributeSlot, Runnable
from graphsplit.capture.operations.opaque_call import PLACEHOLDER, OpaqueCall, Pair, Traits
from graphsplit.capture.reach.reach import is_of_library
from graphsplit.capture.reach.state import Reached
from graphsplit.capture.structure import take_apart
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now
from graphsplit.torch_ext.attributes import BUFFERS, PARAMETERS, storage_of, writes_of
from graphsplit.torch_ext.data_attribute import OfOperands
from graphsplit.torch_ext.function_modes import TRACERS, modes_of_others
from graphsplit.torch_ext.private import DisableTorchFunction, pytree
from graphsplit.torch_ext.replaced import Patch, replaced


@dataclass(frozen=True)
class OpaqueCode:
    """Something to be kept whole.

    Attributes:
        function: What is called.
        label: What it is, for people: ``STE.apply``.
        modules: Modules whose parameters and buffers it may use, whichever way it goes.
        outputs: Makes tensors like the outputs from the same arguments; None: found by running it.
        is_random: Whether it draws; None: found by running it.
        in_parts: Whether autograd sees what it does inside, not one function.
        forward: What is run when it is called; None: the function, and what it leads to.
        backward: What is known to run in backward.
    """

    function: Callable[..., Any]
    label: str
    modules: tuple[nn.Module, ...] = ()
    outputs: Callable[..., Any] | None = None
    is_random: bool | None = None
    in_parts: bool = True
    forward: tuple[Any, ...] | None = None
    backward: tuple[Any, ...] = ()


@dataclass
class _Run:
    """The findings of one run on fake tensors.

    Attributes:
        result: What the call returned.
        observer: What was seen.
        arguments: Its arguments afterwards.
        reached: The Python state that the call can reach.
        guessed: Whether code that asks for values was told made-up ones, or did not run at all.
    """

    result: Any
    observer: Observer
    arguments: Arguments
    reached: Reached
    guessed: bool = False


class OpaqueRecorder:
    """Records calls kept whole while one network is captured.

    Attributes:
        calls: What was recorded; nodes name them by position.
        modules: The modules whose parameters and buffers these calls may use, by identity.
        hooks: What the network's code has put on gradients of values.

    Args:
        root: The module that is captured.
        note: Called with what each call can reach, and its line, at its moment.
    """

    def __init__(self, root: nn.Module, note: Callable[[Reached, str], None]) -> None:
        self.calls: list[OpaqueCall] = []
        self.modules: dict[int, nn.Module] = {}
        self.hooks: list[Callable[..., Any]] = []
        self._root, self._note = root, note
        self._depth = 0

    @property
    def is_recording(self) -> bool:
        """Whether what is called now is being recorded, and not inside what is kept whole."""
        return self._depth == 0 and get_proxy_mode() is not None

    @property
    def is_inside(self) -> bool:
        """Whether what is called now runs inside something that is kept whole."""
        return self._depth > 0

    def record(self, whole: OpaqueCode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call on fake tensors, as one node of the graph.

        Raises:
            CaptureError: It does something that one node cannot stand for.
        """
        mode = get_proxy_mode()
        assert mode is not None
        tracer, source = mode.tracer, users_line_now()
        arguments, operands = Arguments.of(args, kwargs)
        modules = whole.modules
        if whole.outputs is not None:  # it does not run: what it reads cannot be seen
            modules += _modules_seen(whole.function, arguments)
        state = self._state_of(modules, operands)
        marks = [tensor.requires_grad for tensor in state]
        run = self._run(whole, args, kwargs, [*operands, *state], source)
        _check_marks(whole, run, marks != [tensor.requires_grad for tensor in state], source)
        state += [t for t in self._lifted(whole, run, source) if not _is_in(t, [*operands, *state])]
        _check_arguments(whole, arguments, run.arguments, source)
        _check_placements(whole, run.observer, source)
        found, structure = take_apart(run.result)
        _check_results(whole, found, source)
        given = [*operands, *state]
        returned = found
        found = _apart(whole, returned, given, run.observer.written)
        varies = run.guessed or run.reached.may_go_another_way()
        if varies and whole.outputs is None and _asks(given):
            _ask_gradients(found, given)
        recorded = [i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor)]
        outputs = [found[i] for i in recorded]
        runnable = Runnable(
            whole.function,
            arguments,
            tuple(self._places(t) for t in state),
            tuple(recorded),
            {i: leaf for i, leaf in enumerate(found) if not isinstance(leaf, torch.Tensor)},
            whole.label,
            modes_of_others(TRACERS),
            outside=run.reached.tensors(),
            checks_graph=run.guessed or (whole.in_parts and not modules),
            pretended=tuple(outputs) if run.guessed else None,
            assigned=_assigned(whole, run, state),
        )
        same = _same(given, [returned[i] for i in recorded], outputs)
        first = len(operands)
        unseen = {first + index for index in self._may_be_written(whole, run, state)}
        traits = replace(_traits(whole, run, given, outputs, unseen), same=same)
        self._note(run.reached, source)
        call = OpaqueCall(whole.label, arguments.text(), runnable, traits, source, run.reached)
        self._add_node(call, given, outputs, tracer)
        self.modules.update((id(m), m) for top in modules for m in top.modules())
        self.modules.update((id(p.module), p.module) for t in state for p in self._places(t))
        return structure.rebuild(found)

    def num_constants(self) -> int:
        """How many tensors the tracer took for constants, since it did not know them."""
        mode = get_proxy_mode()
        nodes = mode.tracer.graph.nodes if mode is not None else ()
        return sum(node.op == "get_attr" for node in nodes)

    def replace(self, tensor: torch.Tensor, whole: OpaqueCode) -> None:
        """Let all later uses of a tensor be uses of what a call makes of it."""
        made = self.record(whole, (tensor,), {})
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        track_tensor_tree(tensor, get_proxy_slot(made, tracer).proxy, constant=None, tracer=tracer)

    def _add_node(
        self, call: OpaqueCall, operands: Sequence[Any], outputs: list[torch.Tensor], tracer: Any
    ) -> None:
        proxies = [_proxy_of(operand, tracer) for operand in operands]
        proxy = tracer.create_proxy(
            "call_function", PLACEHOLDER, (len(self.calls), *proxies), {}, name=call.__name__
        )
        self.calls.append(call)
        if not outputs:
            proxy.node.meta["val"] = None
            return
        made = outputs[0] if len(outputs) == 1 else tuple(outputs)
        track_tensor_tree(made, proxy, constant=None, tracer=tracer)

    def instead(self, patch: Patch, call: Callable[..., Any]) -> AbstractContextManager[None]:
        """Let a function of torch be ``call(original, *args, **kwargs)`` where all is recorded."""
        original = getattr(*patch)

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self.is_recording:
                return original(*args, **kwargs)
            return call(original, *args, **kwargs)

        return replaced(*patch, called)

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        """Let what would be recorded run as it is."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _run(
        self,
        whole: OpaqueCode,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        operands: list[Any],
        source: str,
    ) -> _Run:
        tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
        known = {id(t) for t in operands}

        def is_foreign(tensor: torch.Tensor) -> bool:
            return id(tensor) not in known and get_proxy_slot(tensor, tracer, None) is not None

        given = (args, tuple(kwargs.values()))
        forward = (whole.function,) if whole.forward is None else whole.forward
        backward = (*whole.backward, *given) if whole.backward else ()
        reached = Reached()

        def attempt(function: Callable[..., Any], answer: int | None) -> _Run:
            observer = Observer(is_foreign, answer=answer)
            roots = (*forward, *whole.modules, *given)
            if whole.forward is None:
                roots = (*roots, function)
            apart = whole.forward or ()
            before = [*map(_gradient, operands)]
            with self.not_recording(), reached.leaving_no_trace(roots, backward, apart):
                with unrecorded(observer), OfOperands(operands) as asked:
                    result = function(*args, **kwargs)
                after = Arguments.of(args, kwargs)[0]
            pairs = zip(before, map(_gradient, operands), strict=True)
            adds = any(one[0] is not now[0] or one[1] != now[1] for one, now in pairs)
            reached.uses_gradients |= asked.reads_gradients or adds
            reached.note_changed(observer.drawn_from)
            return _Run(result, observer, after, reached, guessed=answer is not None)

        if whole.outputs is not None:
            example, output = whole.outputs, _like_output(_asks(operands))
            run = attempt(lambda *a, **k: pytree.tree_map(output, example(*a, **k)), None)
            run.guessed = True
            return run
        return run_with_answers(lambda answer: attempt(whole.function, answer), whole.label, source)

    def _state_of(
        self, modules: Sequence[nn.Module], operands: Sequence[Any]
    ) -> list[torch.Tensor]:
        found = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}
        return [t for key, t in found.items() if not any(t is o for o in operands)]

    def _lifted(self, whole: OpaqueCode, run: _Run, source: str) -> list[torch.Tensor]:
        """Tensors that the code reads without being given them: parameters and buffers only."""
        found = list(run.observer.foreign.values())
        for tensor in found:
            if not self._places(tensor):
                raise CaptureError(
                    f"{whole.label} is kept whole, but reads a {list(tensor.shape)} tensor of the "
                    f"surrounding code that is no argument of it\n  {source}\n"
                    f"  Fix: pass the tensor as an argument, or keep the function around it whole "
                    f"with gs.opaque."
                )
        return sorted(found, key=self._position)

    def _position(self, tensor: torch.Tensor) -> int:
        """Where a tensor stands among all: in which order code reads them may differ.

        What torch.jit has optimized reads them as it likes, on each worker.
        """
        held = (
            held
            for module in self._root.modules()
            for kind in (PARAMETERS, BUFFERS)
            for held in getattr(module, kind).values()
        )
        return next(position for position, one in enumerate(held) if one is tensor)

    def _may_be_written(
        self, whole: OpaqueCode, run: _Run, state: Sequence[torch.Tensor]
    ) -> Iterator[int]:
        """Which of the state code may write to that was not seen to run as it will: buffers.

        Where no code of the user's writes to anything, those of torch's own layers alone.
        """
        may_write = whole.outputs is not None or run.reached.may_write
        for index, tensor in enumerate(state if run.guessed else ()):
            held_by = [place.module for place in self._places(tensor)]
            is_of_torch = not held_by or any(map(_is_of_torch, held_by))
            if not isinstance(tensor, nn.Parameter) and (may_write or is_of_torch):
                yield index

    def _places(self, tensor: torch.Tensor) -> tuple[AttributeSlot, ...]:
        return tuple(
            AttributeSlot(module, kind, name)
            for module in self._root.modules()
            for kind in (PARAMETERS, BUFFERS)
            for name, held in getattr(module, kind).items()
            if held is tensor
        )


def _assigned(whole: OpaqueCode, run: _Run, state: Sequence[torch.Tensor]) -> tuple[int, ...]:
    if whole.outputs is not None:  # it did not run: any buffer may be replaced
        return tuple(i for i, t in enumerate(state) if not isinstance(t, nn.Parameter))
    return tuple(i for i, t in enumerate(state) if id(t) in run.observer.assigned)


def _modules_seen(function: Callable[..., Any], arguments: Arguments) -> tuple[nn.Module, ...]:
    """Modules that a call is given, or that its function refers to."""
    seen = [v for v in (*arguments.leaves, *reachable_values(function)) if isinstance(v, nn.Module)]
    return tuple(dict.fromkeys(seen))


def _is_of_torch(module: nn.Module) -> bool:
    """Whether code of a library's layer may run in a module."""
    kinds = set(type(module).__mro__) - {nn.Module, object}
    return any(is_of_library(kind.__module__) for kind in kinds)


def _gradient(operand: Any) -> tuple[Any, int]:
    """A parameter's gradient, which its owner alone has, and how often it was written to."""
    with DisableTorchFunction():  # capture's own modes refuse such questions
        is_leaf = isinstance(operand, torch.Tensor) and operand.is_leaf
        gradient = operand.grad if is_leaf else None
        return gradient, 0 if gradient is None else writes_of(gradient)


def _is_in(tensor: torch.Tensor, tensors: Sequence[Any]) -> bool:
    return any(tensor is other for other in tensors)


def _proxy_of(operand: Any, tracer: Any) -> Any:
    if isinstance(operand, torch.Tensor):
        slot = get_proxy_slot(operand, tracer, None)
        return operand if slot is None else slot.proxy
    return get_proxy_slot(operand, tracer).force()


def _like_output(asks_grad: bool) -> Callable[[Any], Any]:
    """The fake tensor for one that the user gave as an example of an output."""

    def output(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_like(leaf, requires_grad=asks_grad and _is_differentiable(leaf))

    return output


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _check_marks(whole: OpaqueCode, run: _Run, are_changed: bool, source: str) -> None:
    if are_changed and (run.guessed or run.reached.has_changed_python()):
        raise CaptureError(
            f"{whole.label} is kept whole, and freezes or thaws parameters (requires_grad_) by "
            f"what is known only when it runs: values of tensors, or what it counts itself\n"
            f"  {source}\n"
            f"  Fix: call requires_grad_ in a forward that is not kept whole, or between two steps."
        )


def _check_arguments(whole: OpaqueCode, before: Arguments, after: Arguments, source: str) -> None:
    same = len(before.leaves) == len(after.leaves) and before.spec == after.spec
    if not same or any(a is not b for a, b in zip(before.leaves, after.leaves, strict=True)):
        raise CaptureError(
            f"{whole.label} is kept whole, but puts something into a list or dictionary that it "
            f"was given, which would be lost\n  {source}\n  Fix: return what it adds."
        )


def _check_placements(whole: OpaqueCode, observer: Observer, source: str) -> None:
    if observer.placements:
        raise CaptureError(
            f"{whole.label} is kept whole on one worker, but there is a gs.place inside it\n"
            f"  {observer.placements[0]}\n  {source}\n"
            f"  Fix: place the call itself, and nothing inside it."
        )


def _check_results(whole: OpaqueCode, found: Sequence[Any], source: str) -> None:
    for leaf in found:
        sizes = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
        if any(_depends_on_values(size) for size in sizes):
            raise CaptureError(
                f"{whole.label} is kept whole, but returns a "
                f"{'tensor whose shape' if isinstance(leaf, torch.Tensor) else 'number that'} "
                f"depends on the values of tensors\n  {source}\n"
                f"  Fix: return tensors of a fixed shape, for example padded, or with a mask."
            )


def _depends_on_values(size: Any) -> bool:
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def _apart(
    whole: OpaqueCode, found: Sequence[Any], operands: Sequence[Any], written: set[int]
) -> list[Any]:
    """The results, each a tensor of its own, for the next run may return something else.

    An operand that was written to is still itself: what reads it later must run after the call.
    """
    unchanged = [o for o in operands if isinstance(o, torch.Tensor)]
    unchanged = [o for o in unchanged if storage_of(o) not in written]
    results: list[Any] = []
    for index, leaf in enumerate(found):
        if not isinstance(leaf, torch.Tensor):
            results.append(leaf)
            continue
        known = [*unchanged, *(t for t in found[:index] if isinstance(t, torch.Tensor))]
        if whole.in_parts and storage_of(leaf) in map(storage_of, known):
            results.append(like(leaf))
        else:
            results.append(alias_of(leaf) if _is_in(leaf, known) else leaf)
    return results


def _ask_gradients(found: Sequence[Any], operands: Sequence[Any]) -> None:
    """Expect gradients of all results: in a branch that was not taken one may flow."""
    for leaf in found:
        if _is_differentiable(leaf) and not _is_in(leaf, operands):
            leaf.requires_grad_(True)


def _asks(operands: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        t.requires_grad for t in operands if isinstance(t, torch.Tensor)
    )


def _traits(
    whole: OpaqueCode,
    run: _Run,
    operands: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    unseen: set[int],
) -> Traits:
    tensors = {i: o for i, o in enumerate(operands) if isinstance(o, torch.Tensor)}
    written = {i for i, o in tensors.items() if storage_of(o) in run.observer.written} | unseen
    storages = {storage_of(o) for o in outputs}
    is_random = run.observer.is_random or run.guessed
    is_random = is_random if whole.is_random is None else whole.is_random
    may_draw = run.reached.may_draw_from_process() and whole.is_random is not False
    draws = may_draw or run.reached.drew_from_process()
    return Traits(
        in_parts=whole.in_parts,
        is_random=is_random or draws,
        draws_from_process=draws,
        written=tuple(sorted(written)),
        aliased=tuple(i for i, o in tensors.items() if storage_of(o) in storages),
        sharing=_sharing(operands, outputs),
        carries_grad=tuple(o.requires_grad for o in outputs),
        repeated=tuple(i for i, o in tensors.items() if o.requires_grad) if whole.in_parts else (),
        outputs=tuple((o.dtype, tuple(map(_size, o.shape))) for o in outputs),
        strides=tuple(tuple(map(_size, _strides(o))) for o in outputs),
    )


def _strides(tensor: torch.Tensor) -> Sequence[Any]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def _size(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _same(
    operands: Sequence[Any], returned: Sequence[Any], outputs: Sequence[Any]
) -> frozenset[Pair]:
    """Which results were operands or earlier results, and are now tensors of their own."""
    tensors, first = [*operands, *returned], len(operands)
    return frozenset(
        (i, first + index)
        for index, (leaf, output) in enumerate(zip(returned, outputs, strict=True))
        if leaf is not output
        for i in range(first + index)
        if tensors[i] is leaf
    )


def _sharing(operands: Sequence[Any], outputs: Sequence[torch.Tensor]) -> frozenset[Pair]:
    tensors = [*operands, *outputs]
    memories = [storage_of(t) if isinstance(t, torch.Tensor) else None for t in tensors]
    return frozenset(
        (i, j)
        for j in range(len(operands), len(tensors))
        for i in range(j)
        if memories[i] == memories[j]
    )
