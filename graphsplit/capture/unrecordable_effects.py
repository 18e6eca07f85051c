"""Refuse, or keep, what export would leave out of the graph without a word.

Each of these does its work beside the operations that export records: a hook waits in autograd, a
seed goes to the generator, a gradient is put into ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from graphsplit.capture.observe import is_tracked, reachable_values
from graphsplit.capture.opaque.record import OpaqueCode, OpaqueRecorder
from graphsplit.capture.reach.holders import Holder
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now, users_line_of_node
from graphsplit.torch_ext.private import CHECKPOINT_HOOK
from graphsplit.torch_ext.replaced import (
    BACKWARD,
    GRAD,
    REGISTER_ACCUMULATED_HOOK,
    REGISTER_HOOK,
    REGISTER_MULTI_GRAD_HOOK,
    SAVED_TENSORS_HOOKS,
    SEEDS,
    Patch,
)

_OPAQUE = "keep the module or function that does it whole, with gs.opaque"
# (what of torch, what it does that would be lost, the way out)
_REFUSED: tuple[tuple[Sequence[Patch], str, str], ...] = (
    (
        BACKWARD,
        "runs backward inside forward, which would add to .grad only while it is captured",
        "leave backward to the training loop",
    ),
    (
        (REGISTER_ACCUMULATED_HOOK,),
        "registers a hook on a gradient inside forward, which would be lost",
        "register it on the parameter, outside of forward",
    ),
    (
        (REGISTER_MULTI_GRAD_HOOK,),
        "registers a hook on several gradients inside forward, which would be lost",
        _OPAQUE,
    ),
    (SEEDS, "sets the random generator inside forward, which would be lost", _OPAQUE),
)


@contextmanager
def unrecordable_effects_refused(recorder: OpaqueRecorder) -> Iterator[None]:
    """Let the network's code stumble where it would do something that is not recorded."""
    with ExitStack() as stack:
        for patches, what, way_out in _REFUSED:
            for patch in patches:
                stack.enter_context(recorder.instead(patch, _refusing(what, way_out)))
        for patch, call in (
            (GRAD, _differentiate),
            (SAVED_TENSORS_HOOKS, _enter),
            (REGISTER_HOOK, _register_hook),
        ):
            stack.enter_context(recorder.instead(patch, partial(call, recorder)))
        yield


def _refusing(what: str, way_out: str) -> Callable[..., Any]:
    def refuse(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(f"forward {what}\n  {users_line_now()}\n  Fix: {way_out}.")

    return refuse


def _differentiate(
    recorder: OpaqueRecorder, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Record backward like the rest; refuse it where that cannot be done."""
    known = recorder.num_constants()
    found = original(*args, **kwargs)
    lost = any(isinstance(t, torch.Tensor) and not is_tracked(t) for t in found)
    if lost or recorder.num_constants() > known:
        raise CaptureError(
            f"forward calls torch.autograd.grad, and what it computes cannot be recorded\n"
            f"  {users_line_now()}\n  Fix: {_OPAQUE}."
        )
    return found


def _enter(recorder: OpaqueRecorder, original: Callable[..., Any], hooks: Any) -> Any:
    """Tensors saved for backward are not changed by checkpoints, nor by moving them to the CPU."""
    if not isinstance(hooks, (torch.autograd.graph.save_on_cpu, CHECKPOINT_HOOK)):
        raise CaptureError(
            f"forward uses torch.autograd.graph.saved_tensors_hooks, which would be lost\n"
            f"  {users_line_now()}\n  Fix: {_OPAQUE}."
        )
    return original(hooks)


def _register_hook(
    recorder: OpaqueRecorder, original: Callable[..., Any], tensor: torch.Tensor, hook: Any
) -> Any:
    """Record a hook on a value as an alias that carries it; later uses are the alias's."""
    if not is_tracked(tensor):
        return original(tensor, hook)
    with recorder.not_recording():  # torch calls this very function again, once per mode
        handle = original(tensor, hook)
    _check_hook(tensor, hook)

    def with_hook(value: torch.Tensor) -> torch.Tensor:
        hooked = value.view_as(value)
        if hooked.requires_grad:
            original(hooked, hook)
        return hooked

    recorder.hooks.append(hook)
    label = f"register_hook({getattr(hook, '__qualname__', type(hook).__name__)})"
    whole = OpaqueCode(with_hook, label, in_parts=False, forward=(), backward=(hook,))
    recorder.replace(tensor, whole)
    return handle


def _check_hook(tensor: torch.Tensor, hook: Any) -> None:
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    node = get_proxy_slot(tensor, tracer).proxy.node
    reason = ""
    if node.op == "placeholder":
        reason = "is registered on a parameter or input at every step"
    elif node.users:
        reason = "is registered after the value was used"
    elif any(isinstance(v, torch.Tensor) and is_tracked(v) for v in reachable_values(hook)):
        reason = "reads a tensor of forward, which has no value when the hook runs"
    if reason:
        raise CaptureError(
            f"a hook on the gradient of a value {reason}; it cannot be captured\n"
            f"  {users_line_now()}\n  Fix: register it right after the value is made, or "
            f"{_OPAQUE}."
        )


def drawing_from_own(program: ExportedProgram) -> Iterator[Node]:
    """Operations that draw from a generator other than the default one.

    Each worker has a copy of such a generator; only one worker's would advance.
    """
    for module in program.graph_module.modules():
        nodes = module.graph.nodes if isinstance(module, GraphModule) else ()
        for node in nodes:
            values: Sequence[Any] = (*node.args, *node.kwargs.values())
            if any(isinstance(value, torch.Generator) for value in values):
                yield node
    # One that is held somewhere comes in as an input.
    generators = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if isinstance(program.constants.get(str(spec.target)), torch.Generator)
    }
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in generators and node.users:
            yield next(iter(node.users))


def own_generator(node: Node) -> CaptureError:
    """The refusal of such an operation."""
    return CaptureError(
        f"{node.target} draws from a generator of its own, of which every worker has a copy\n"
        f"  {users_line_of_node(node)}\n"
        f"  Fix: leave generator= out, or {_OPAQUE}."
    )


def check_drawn_nothing(generator: torch.Tensor, of_process: Sequence[Holder]) -> None:
    """Refuse code that has drawn, or set a generator, in some way that was not recorded.

    Args:
        generator: State of the default generator before.
        of_process: Python's and NumPy's generators as they were before; put back.
    """
    is_set = not torch.equal(torch.default_generator.get_state(), generator)
    whose = "sets torch's random generator" if is_set else ""
    for holder in of_process:
        if holder.has_changed():
            whose = f"draws from {holder.name}"
            holder.put_back()
    if whose:
        raise CaptureError(
            f"forward {whose}; the captured graph would not\n  Fix: draw with torch from the "
            f"default generator, or {_OPAQUE}."
        )
