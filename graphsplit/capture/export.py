"""Capture a network, with its loss, as one graph by ``torch.export``.

``torch.export`` (non-strict) runs the network once on fake tensors and records every operation
with its module path and the user's source line, without decomposing anything that autograd treats
as one operation. So the recorded graph, run operation by operation, gives the bits of eager mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from graphsplit.capture.failures import too_late
from graphsplit.capture.graph import CapturedGraph, ErrorAtEnd, Mode
from graphsplit.capture.lines import keeping_lines_of, keeping_lines_of_forward
from graphsplit.capture.nodes import NodeBuilder, check_dense
from graphsplit.capture.normalize.casts import keep_casts
from graphsplit.capture.normalize.detached import forget_unread_gradients
from graphsplit.capture.normalize.identities import remove_identities
from graphsplit.capture.normalize.inplace import make_in_place_explicit
from graphsplit.capture.numbers.known_values import answers_known_values, is_all_ones
from graphsplit.capture.numbers.pinned import check_pinned_sizes
from graphsplit.capture.numbers.recipes import Question
from graphsplit.capture.numbers.sizes import DynamicSizes, dynamic_shapes
from graphsplit.capture.opaque.handed_out import note_written_later
from graphsplit.capture.operations.regions import (
    blocks_as_in_eager_mode,
    blocks_kept_flat,
    mark_regions,
)
from graphsplit.capture.own_errors import OwnError, own_error
from graphsplit.capture.python.answers import Answers
from graphsplit.capture.python.guards import StateWatch
from graphsplit.capture.python.outside_reads import OutsideReads
from graphsplit.capture.python.trained_marks import marked_as_left
from graphsplit.capture.record_program import Export, Recorded, record_program
from graphsplit.capture.state.assigned_buffers import AssignedBuffers
from graphsplit.capture.state.old_values import keep_old_values
from graphsplit.capture.structure import Structure, take_apart
from graphsplit.errors import CaptureError, RaisedInEagerError
from graphsplit.guards.places import Place
from graphsplit.torch_ext.attributes import named_tensors
from graphsplit.torch_ext.data_attribute import DataIsDetached
from graphsplit.torch_ext.eager_mode import as_in_eager_mode, modules_in_two_places
from graphsplit.torch_ext.fake_caches import forget_fake_tensors
from graphsplit.torch_ext.meta_functions import as_kernels_accept
from graphsplit.torch_ext.private import pytree


class _LossFunction(nn.Module):
    """A loss that is no module, as one: what is kept whole is a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with keeping_lines_of(self._function):
            return self._function(*args, **kwargs)


_Found = tuple[list[Question], Structure]  # what was asked of known values, and the outputs' form


class _Step(nn.Module):
    """The code to capture: the network, and its loss where one is asked for."""

    def __init__(
        self, request: CaptureRequest, note: Callable[[_Found], None], watch: StateWatch
    ) -> None:
        super().__init__()
        loss_fn: Any = request.loss_fn
        self.network = request.network
        is_function = loss_fn is not None and not isinstance(loss_fn, nn.Module)
        self.loss_fn = _LossFunction(loss_fn) if is_function else loss_fn
        self._run = request.run
        self._watch = watch
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self._note = note  # a list in an attribute would be copied
        given = flatten_inputs(request.args, request.kwargs)
        self._is_ones = [is_all_ones(leaf) for leaf in given]
        self.training = request.network.training

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        blocks = blocks_as_in_eager_mode(keeps_casts=self._keeps_casts)
        inputs = zip(flatten_inputs(args, kwargs), self._is_ones, strict=True)
        answering = answers_known_values([value for value, is_ones in inputs if is_ones])
        with (
            AssignedBuffers(self) as buffers,
            as_in_eager_mode(),
            blocks,
            DataIsDetached(self),
            self._watch.asking as asking,
            answering as questions,
            self._watch.watching(buffers),
            OutsideReads(),
        ):
            run = partial(self._run, self.network, self.loss_fn)
            found = asking.run(lambda: run(*args, **kwargs))
        leaves, structure = take_apart(self._watch.with_handed(found))
        self._note((questions, structure))
        return buffers.copy_in(leaves)


@dataclass(frozen=True)
class CaptureRequest:
    """A request to capture a network.

    Attributes:
        network: The user's network, in the right train or eval mode already.
        loss_fn: The loss, or None.
        run: ``run(network, loss_fn, *args, **kwargs)``: what one step computes.
        mode: Which graph this is; gradients are recorded in train mode only.
        loss: Position of the loss among the flattened outputs, or None.
        args: Example positional inputs; only their structure, dtypes, shapes and strides
            count, and whether a mask is nothing but ones.
        kwargs: Example keyword inputs.
        dynamic_dims: Dimensions of the inputs that may change, with the largest size of each.
        lift: Places whose numbers are operands of the graph, not constants in it.
        answers: What tensors were found to hold, for code that asks them; None: it may not.
    """

    network: nn.Module
    loss_fn: Callable[..., Any] | None
    run: Callable[..., Any]
    mode: Mode
    loss: int | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_dims: Mapping[int, int] = field(default_factory=dict)
    lift: tuple[Place, ...] = ()
    answers: Answers | None = None


@as_kernels_accept()
def capture(request: CaptureRequest) -> CapturedGraph:
    """Capture one step of a network as a graph.

    Draws nothing from the default generator, and changes neither parameters, buffers nor other
    attributes; but tensors in attributes that forward changes become buffers.

    Raises:
        CaptureError: The network cannot be captured; names the user's line and the ways out.
    """
    for name, tensor in named_tensors(request.network).items():
        check_dense(name, tensor)
    found: list[_Found] = []
    hands_out = request.mode.keeps_outputs_home
    watch = StateWatch(request.lift, request.answers, hands_out=hands_out)
    step = _Step(request, found.append, watch)
    how, ending = _how_to_export(step, request, watch), None
    with _only_recording(request):
        try:
            recorded = record_program(step, request.network, how)
        except RaisedInEagerError as raised:
            if raised.is_first and not request.answers:
                raise
            if request.answers is None:
                raise too_late(str(raised)) from None
            recorded = _up_to(raised, step, request.network, how)
            ending = ErrorAtEnd(raised, recorded.state.changes, raised.error.__traceback__)
    if watch.asking.unanswered is not None:
        request, recorded = _ending_in_a_question(request, recorded)
    with marked_as_left(recorded.state.changes):
        return replace(_graph_of(request, recorded, step, *found[-1]), ending=ending)


def _up_to(raised: RaisedInEagerError, step: _Step, network: nn.Module, how: Export) -> Recorded:
    """Record all that plain PyTorch runs before an error: it changes, writes to or draws something.

    Raises:
        CaptureError: It cannot be captured.
    """
    how.watch.ends_in = type(raised.error)
    raised.is_first = True
    try:
        recorded = record_program(step, network, how)
    except CaptureError:
        raise too_late(str(raised)) from None
    if recorded.state.handed:  # a loop of the script's own would not get it
        raise too_late(str(raised))
    return recorded


def _ending_in_a_question(
    request: CaptureRequest, recorded: Recorded
) -> tuple[CaptureRequest, Recorded]:
    """A recording as a call that leaves nothing behind: its output is the value asked for."""
    mode = Mode.CALL if request.mode.records_gradients else Mode.LOOK
    state = replace(recorded.state, changes=(), handed=())
    return replace(request, mode=mode, loss=None), replace(recorded, state=state)


def _graph_of(
    request: CaptureRequest,
    recorded: Recorded,
    step: _Step,
    questions: Sequence[Question],
    output_spec: Structure,
) -> CapturedGraph:
    """The graph of a recorded step."""
    state = named_tensors(step)
    program = recorded.program
    graph_module = program.graph_module
    _name_modules_inside(graph_module, step)
    check_pinned_sizes(graph_module.graph)
    sizes = DynamicSizes.of(program, questions, recorded.state.lifted)
    mark_regions(graph_module.graph, grad_enabled=request.mode.records_gradients)
    remove_identities(graph_module.graph)
    unite_tied(program, state)
    if request.mode.records_gradients:
        keep_old_values(graph_module.graph, loss=request.loss)
        forget_unread_gradients(graph_module.graph)
    make_in_place_explicit(graph_module.graph, state=state_placeholders(program).keys())
    note_written_later(graph_module.graph)
    if request.mode.records_gradients:
        keep_casts(graph_module.graph, _parameters(program, state))
    graph_module.graph.lint()
    with_gradients, inputs_with_grad = request.mode.records_gradients, _inputs_with_grad(request)
    built = NodeBuilder(program, state, with_gradients, inputs_with_grad).built()
    if sizes is not None:
        sizes = sizes.and_numbers(built.sizes)
    return CapturedGraph(
        mode=request.mode,
        nodes=tuple(built.nodes),
        fx_graph=graph_module.graph,
        fx_owner=graph_module,
        constants=built.constants,
        outputs=built.outputs,
        output_spec=output_spec,
        loss=request.loss,
        state_names=built.state_names,
        sizes=sizes,
        state=recorded.state,
        buffers=recorded.buffers,
        num_answered=recorded.num_answered,
    )


def _how_to_export(step: _Step, request: CaptureRequest, watch: StateWatch) -> Export:
    return Export(
        lambda: _export(step, request), lambda error: _own_error(step, request, error), watch
    )


def _own_error(step: _Step, request: CaptureRequest, error: Exception) -> OwnError | None:
    """The same error in plain PyTorch; nothing that Python code changes there stays changed."""
    if request.lift:
        return None  # it is recorded once more, with the numbers that are there
    run = partial(request.run, request.network, request.loss_fn)
    watch = StateWatch()
    watch.begin(step, lambda: False)
    found, is_seen = None, False
    # What the code leaves may be refused too, but the error came before.
    with suppress(CaptureError):
        with watch.watching():
            found = own_error(step, run, (request.args, request.kwargs), error)
        is_seen = True
    watch.put_back()
    if found is not None and (watch.has_changes or not is_seen):
        return replace(found, is_first=False)
    return found


def _export(step: _Step, request: CaptureRequest) -> torch.export.ExportedProgram:
    from graphsplit.torch_ext.exporting import only_what_is_read

    arguments = (request.args, dict(request.kwargs))
    shapes = dynamic_shapes(arguments, request.dynamic_dims) if request.dynamic_dims else None
    with modules_in_two_places(), only_what_is_read():
        return torch.export.export(step, arguments, dynamic_shapes=shapes, strict=False)


def _parameters(
    program: torch.export.ExportedProgram, state: Mapping[str, torch.Tensor]
) -> dict[torch.fx.Node, torch.Tensor]:
    """The parameter behind each placeholder that stands for one."""
    names = program.graph_signature.inputs_to_parameters
    return {n: state[names[n.name]] for n in program.graph.nodes if n.name in names}


@contextmanager
def _only_recording(request: CaptureRequest) -> Iterator[None]:
    """Keep what capture does away from the user: generator, warnings, gradient mode."""
    generator_state = torch.default_generator.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(keeping_lines_of_forward())
        stack.enter_context(blocks_kept_flat())
        stack.enter_context(torch.set_grad_enabled(request.mode.records_gradients))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.default_generator.set_state(generator_state)
            forget_fake_tensors()


def _inputs_with_grad(request: CaptureRequest) -> tuple[int, ...]:
    """The inputs that gradients flow into."""
    if not request.mode.records_gradients:
        return ()
    inputs = flatten_inputs(request.args, request.kwargs)
    return tuple(i for i, one in enumerate(inputs) if getattr(one, "requires_grad", False))


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The inputs in the order of the graph's ``INPUT`` nodes."""
    leaves, _ = pytree.tree_flatten((args, dict(kwargs)))
    return leaves


def _name_modules_inside(graph_module: GraphModule, root: nn.Module) -> None:
    """Give the operations in branches and loops the module paths that others have.

    They were recorded by torch's compiler, which knows modules by how the code came to them.
    """
    paths = {str(id(module)): path for path, module in root.named_modules()}
    for module in graph_module.modules():
        if module is graph_module or not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            stack = node.meta.get("nn_module_stack") or {}
            keys = [str(key).partition("@")[0] for key in stack]
            known = {paths[key]: (paths[key], "") for key in keys if key in paths}
            node.meta["nn_module_stack"] = known


def state_placeholders(program: ExportedProgram) -> dict[str, str]:
    """Placeholders of parameters and buffers, each with the qualified name of its tensor."""
    signature = program.graph_signature
    return {**signature.inputs_to_parameters, **signature.inputs_to_buffers}


def unite_tied(program: ExportedProgram, state: Mapping[str, torch.Tensor]) -> None:
    """Let all uses of a tied tensor be uses of its first placeholder: it is one memory."""
    names = state_placeholders(program)
    first: dict[int, Node] = {}
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in names:
            continue
        known = first.setdefault(id(state[names[node.name]]), node)
        if known is not node:
            node.replace_all_uses_with(known)
