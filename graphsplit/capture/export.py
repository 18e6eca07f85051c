"""Capture a network, with its loss, as one graph by ``torch.export``.

``torch.export`` (non-strict) runs the network once on fake tensors and records every operation
with its module path and the user's source line, without decomposing anything that autograd treats
as one operation. So the recorded graph, run operation by operation, gives the bits of eager mode.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils import _pytree as pytree

from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.capture.identities import remove_identities
from graphsplit.capture.inplace import make_in_place_explicit
from graphsplit.capture.nodes import build_nodes
from graphsplit.capture.users_line import users_frame
from graphsplit.errors import CaptureError, GraphsplitError


class _Step(nn.Module):
    """What is captured: the network, and its loss where one is asked for."""

    def __init__(self, run: Callable[..., Any], network: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.network = network
        self.loss_fn = loss_fn
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _refuse_new_buffers():
            return self._run(self.network, self.loss_fn, *args, **kwargs)


@dataclass(frozen=True)
class CaptureRequest:
    """What to capture.

    Attributes:
        network: The user's network, in the right train or eval mode already.
        loss_fn: The loss, or None.
        run: ``run(network, loss_fn, *args, **kwargs)``: what one step computes.
        mode: Which graph this is; gradients are recorded in train mode only.
        loss: Position of the loss among the flattened outputs, or None.
        args: Example positional inputs; only their structure, dtypes, shapes and strides count.
        kwargs: Example keyword inputs.
    """

    network: nn.Module
    loss_fn: Callable[..., Any] | None
    run: Callable[..., Any]
    mode: Mode
    loss: int | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def capture(request: CaptureRequest) -> CapturedGraph:
    """Capture one step of a network as a graph.

    Draws nothing from the default generator and changes neither parameters nor buffers.

    Raises:
        CaptureError: The network cannot be captured; names the user's line and the ways out.
    """
    step = _Step(request.run, request.network, request.loss_fn)
    step.training = request.network.training
    state = _state_tensors(step)
    with _only_recording(request):
        try:
            program = torch.export.export(step, request.args, dict(request.kwargs), strict=False)
        except GraphsplitError:
            raise
        except Exception as error:
            # torch's own frames, a hundred of them, would hide the user's line.
            raise _explain(request.network, error) from None
    graph_module = program.graph_module
    remove_identities(graph_module.graph)
    make_in_place_explicit(graph_module.graph)
    nodes, outputs, constants, state_names = build_nodes(
        program, state=state, with_gradients=request.mode is Mode.TRAIN
    )
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    return CapturedGraph(
        mode=request.mode,
        nodes=nodes,
        fx_graph=graph_module.graph,
        fx_owner=graph_module,
        constants=constants,
        outputs=outputs,
        output_spec=out_spec,
        loss=request.loss,
        state_names=state_names,
    )


def _state_tensors(step: nn.Module) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = dict(step.named_parameters(remove_duplicate=False))
    named.update(step.named_buffers(remove_duplicate=False))
    return named


@contextmanager
def _only_recording(request: CaptureRequest) -> Iterator[None]:
    """Keep what capture does away from the user: generator, warnings, gradient mode."""
    generator_state = torch.default_generator.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(_refuse_custom_functions())
        stack.enter_context(torch.set_grad_enabled(request.mode is Mode.TRAIN))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.default_generator.set_state(generator_state)


@contextmanager
def _refuse_custom_functions() -> Iterator[None]:
    """Refuse ``torch.autograd.Function``: export traces through it and loses its backward."""
    function_class: Any = torch.autograd.Function
    original = function_class.__dict__["apply"]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"{cls.__module__}.{cls.__qualname__} is a custom torch.autograd.Function; capturing "
            f"it would lose its own backward and train with wrong gradients\n"
            f"  {_user_line(traceback.extract_stack()[:-1])}\n"
            f"  Fix: write it with ordinary operations, for example "
            f"x + (f(x) - x).detach() for a straight-through estimator."
        )

    function_class.apply = classmethod(refuse)
    try:
        yield
    finally:
        function_class.apply = original


@contextmanager
def _refuse_new_buffers() -> Iterator[None]:
    """Refuse ``self.buffer = new``: export drops the assignment, and the buffer never changes."""

    def refuse(module: nn.Module, name: str, value: Any) -> None:
        if value is module._buffers.get(name):  # self.buffer += 1 puts back what is there
            return
        raise CaptureError(
            f"{type(module).__name__} assigns a new tensor to its buffer {name!r} in forward; the "
            f"captured graph would lose the assignment\n"
            f"  {_user_line(traceback.extract_stack()[:-1])}\n"
            f"  Fix: change the buffer in place, as in self.{name}.copy_(new)."
        )

    handle = register_module_buffer_registration_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    frame = users_frame(frames)
    if frame is None:
        return "(no line of your own code is involved)"
    return f"{frame.filename}:{frame.lineno}  {frame.line}"


_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        r"GuardOnDataDependent|data-dependent|Could not guard|unbacked|\.item\(\)",
        "the code that runs depends on the values of a tensor",
        "replace the Python branch by torch.where, or compute the condition from shapes or "
        "arguments",
    ),
    (
        r"fake tensor|FakeTensor|non-fake|data_ptr|numpy",
        "a tensor leaves PyTorch (NumPy, a data pointer, or a tensor that is not part of the "
        "model)",
        "keep the computation in torch operations, and register extra tensors with register_buffer",
    ),
)


def _explain(network: nn.Module, error: BaseException) -> CaptureError:
    text = f"{type(error).__name__}: {error}"
    reason, fix = (
        "torch.export does not support something this code does",
        ("move the code named above out of forward, or write it with torch operations"),
    )
    for pattern, why, way_out in _REASONS:
        if re.search(pattern, text):
            reason, fix = why, way_out
            break
    frames = traceback.extract_tb(error.__traceback__)
    line = _user_line(frames)
    if frames and line.startswith(f"{frames[-1].filename}:{frames[-1].lineno}"):
        reason, fix = "its own code raised an error", "mend the line named above"
    first = text.strip().splitlines()[0][:300]
    return CaptureError(
        f"{type(network).__name__} cannot be captured as one graph: {reason}\n"
        f"  {line}\n  the error was: {first}\n  Fix: {fix}."
    )


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The inputs in the order of the graph's ``INPUT`` nodes."""
    leaves, _ = pytree.tree_flatten((args, dict(kwargs)))
    return leaves
