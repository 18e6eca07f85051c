"""Have ``torch.export`` record a network's step, and look after what it would lose.

If a module cannot be taken apart because its code asks for the values of tensors, it is kept whole
and the network recorded again. So one placed module more is one operation, on its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from graphsplit.capture.checkpoints import check_checkpoints, checkpoints_noted
from graphsplit.capture.failures import (
    explain,
    failing_module,
    holds_symbols,
    is_of_packing,
    quiet_export,
    running_module,
)
from graphsplit.capture.numbers.lifted import NotLiftedError
from graphsplit.capture.numbers.sizes import check_known
from graphsplit.capture.observe import values_as_they_were
from graphsplit.capture.opaque.automatic import kept_whole_unasked
from graphsplit.capture.opaque.functions import custom_functions_whole
from graphsplit.capture.opaque.marks import marked_ones_whole, refuse_placements_inside
from graphsplit.capture.opaque.padded_layers import padded_layers_whole
from graphsplit.capture.opaque.record import OpaqueRecorder
from graphsplit.capture.operations.averaged_statistics import averages_in_parts
from graphsplit.capture.operations.opaque_call import (
    OpaqueCall,
    changes_what_is_read,
    put_in_place,
)
from graphsplit.capture.own_errors import OwnError
from graphsplit.capture.python.guards import PythonState, StateWatch
from graphsplit.capture.python.iterators import MovedOnError
from graphsplit.capture.python.outside_reads import DrawsError
from graphsplit.capture.python.swallowed import Signals
from graphsplit.capture.reach.holders import NUMPYS, PYTHONS
from graphsplit.capture.reach.reach import holders
from graphsplit.capture.state.kept_tensors import KeepsTensorsError, keep
from graphsplit.capture.state.owned_tensors import (
    Key,
    constants_of,
    make_buffers,
    written_attributes,
)
from graphsplit.capture.unrecordable_effects import (
    check_drawn_nothing,
    drawing_from_own,
    own_generator,
    unrecordable_effects_refused,
)
from graphsplit.errors import CaptureError, GraphsplitError
from graphsplit.frames import users_line_of_node
from graphsplit.guards.values import differences, freeze
from graphsplit.guards.visitor import Noted
from graphsplit.torch_ext.attributes import schema_of


@dataclass(frozen=True)
class Export:
    """How to record a step.

    Attributes:
        record: Calls ``torch.export``.
        own_error: The same error in plain PyTorch; None: it does not come there.
        watch: Watches the Python code of the step.
    """

    record: Callable[[], ExportedProgram]
    own_error: Callable[[Exception], OwnError | None]
    watch: StateWatch


@dataclass(frozen=True)
class Recorded:
    """A recorded step.

    Attributes:
        program: What ``torch.export`` made of it.
        state: The Python values that it depends on, and what it leaves of them.
        buffers: Attributes whose tensors forward changes; they have become buffers.
        num_answered: Where it ends in a question, how many were answered before; else None.
    """

    program: ExportedProgram
    state: PythonState
    buffers: tuple[Key, ...] = ()
    num_answered: int | None = None


def record_program(root: nn.Module, network: nn.Module, export: Export) -> Recorded:
    """Record a step.

    Args:
        root: What is exported: holds the network and the loss.
        network: The user's network.
        export: How to record it.

    Raises:
        CaptureError: The network cannot be captured; names the user's line and the ways out.
    """
    try:
        return _record_whole(root, network, export)
    except MovedOnError as refused:
        raise CaptureError(*refused.args) from None
    except CaptureError as refused:
        if isinstance(refused, NotLiftedError):
            raise
        if _finds_steering(root, export):
            try:
                return _record_whole(root, network, export)
            except CaptureError as error:
                raise refused from error
        if not export.watch.may_ask or export.watch.has_unfollowed:
            raise
        asking = export.watch.answers.asking
        num_asking = len(asking)
        try:
            return _record_whole(root, network, export, lets_ask=True)
        except CaptureError as error:
            raise (error if len(asking) > num_asking else refused) from None


def _finds_steering(root: nn.Module, export: Export) -> bool:
    """Whether code asks for the values of buffers of one element; they steer it from now on."""
    while export.watch.follow_all():
        with suppress(GraphsplitError, _ChangesTensorsError, _CannotBeTakenApartError):
            # What fails asks for other values besides.
            copy_context().run(_record, root, export, ())
    return export.watch.let_steer()


def _record_whole(
    root: nn.Module, network: nn.Module, export: Export, *, lets_ask: bool = False
) -> Recorded:
    """Record a step, with the modules kept whole that cannot be taken apart.

    Args:
        root: What is exported.
        network: The user's network.
        export: How to record it.
        lets_ask: Whether code that cannot be kept whole may ask tensors for their values.
    """
    asking = export.watch.answers.asking
    whole: list[nn.Module] = []
    buffers: list[Key] = []
    kept: frozenset[Any] = frozenset()
    refused: CaptureError | None = None
    while True:
        try:
            recorded = copy_context().run(_record, root, export, whole)
            return replace(recorded, buffers=tuple(buffers))
        except _ChangesTensorsError as found:
            make_buffers(dict(root.named_children()), found.keys)
            buffers += found.keys
        except KeepsTensorsError as found:
            if found.subjects <= kept:
                raise found.refusal() from None
            kept |= found.subjects
            keep(root, found)
        except _CannotBeTakenApartError as found:
            module = found.module
            is_new = lets_ask and not found.draws and module not in (root, *asking)
            if module is not None and is_new and _is_in_parts(module, network):
                asking.add(module)
                continue
            refused = refused or found.refusal
            if found.module is None or found.module in (root, *_never_whole(network), *whole):
                raise refused from None
            whole.append(found.module)
        except CaptureError as error:
            if refused is None:
                raise
            raise CaptureError(
                f"{refused}\n  (The module was then kept whole, which did not help: {error})"
            ) from None


def _never_whole(network: nn.Module) -> tuple[nn.Module, ...]:
    """The network itself, which nothing could be placed in then, if its code can be mended.

    That of torch's own classes cannot: an encoder may be all of a network.
    """
    return () if type(network).__module__.startswith("torch.nn.") else (network,)


def _is_in_parts(module: nn.Module, network: nn.Module) -> bool:
    """Whether a module cannot be one operation: there are others to place in it."""
    try:
        refuse_placements_inside("", module, "")
    except CaptureError:
        return True
    return module in _never_whole(network)


class _CannotBeTakenApartError(Exception):
    """A module has to be kept whole, if that is possible."""

    def __init__(
        self, refusal: CaptureError, module: nn.Module | None, *, draws: bool = False
    ) -> None:
        super().__init__()
        self.refusal = refusal
        self.module = module
        self.draws = draws  # no value is asked for


class _ChangesTensorsError(Exception):
    """Tensors in attributes have to become buffers."""

    def __init__(self, keys: Collection[Key]) -> None:
        super().__init__()
        self.keys = keys


def _record(root: nn.Module, export: Export, whole: Collection[nn.Module]) -> Recorded:
    recorder = OpaqueRecorder(root, export.watch.note_call)
    export.watch.begin(root, lambda: recorder.is_inside)
    network = getattr(root, "network", root)
    try:
        with _recording(recorder, root, whole), Signals(recorder) as signals:
            program = _exported(export, network, signals)
    except NotLiftedError as error:  # what is left is made of values: only code that runs leaves it
        if error.asked is None:
            raise
        refusal = CaptureError(
            f"network or loss keeps a number that comes from the values of a tensor (item, float) "
            f"in Python state; the captured graph would not ({error})\n"
            f"  {users_line_of_node(error.asked)}\n"
            f"  Fix: keep it in a buffer, or keep the module around it whole with gs.opaque."
        )
        module, loss_fn = _module_of(root, error.asked), getattr(root, "loss_fn", None)
        if isinstance(loss_fn, nn.Module) and module in loss_fn.modules():
            module = loss_fn
        raise _CannotBeTakenApartError(refusal, module) from None
    finally:
        export.watch.put_back()
    _remove_failed(program.graph_module)
    _check(program, root)
    put_in_place(program.graph_module, recorder.calls)
    refuse_reads_of_changed(recorder.calls, export.watch.noted())
    keys = export.watch.replaced or written_attributes(program, root, export.watch.noted())
    if keys:
        raise _ChangesTensorsError(keys)
    for call in recorder.calls:
        call.reached.note_constants(constants_of(program).values())
    if torch.is_grad_enabled():
        check_checkpoints(program.graph_module, _parameters(program, root))
    asks, answers = export.watch.asking.unanswered is not None, export.watch.answers
    state = export.watch.state(recorder.modules.values())
    return Recorded(program, state, num_answered=len(answers) if asks else None)


def _remove_failed(graph_module: GraphModule) -> None:
    """Remove operations that raised an error, which the code around them has caught."""
    for node in reversed(list(graph_module.graph.nodes)):
        has_failed = node.op == "call_function" and node.meta.get("val") is None
        schema = schema_of(node.target) if has_failed else None
        if schema is not None and schema.returns:
            graph_module.graph.erase_node(node)


def _exported(export: Export, network: nn.Module, signals: Signals) -> ExportedProgram:
    try:
        program = export.record()
    except Exception as error:
        _check_nothing_swallowed(signals, network)
        if isinstance(error, DrawsError):
            refusal = CaptureError(str(error))
            raise _CannotBeTakenApartError(refusal, running_module(error), draws=True) from None
        if isinstance(error, GraphsplitError):
            raise
        module = failing_module(error)
        needs_values = module is not None or is_of_packing(error)
        own = None if needs_values else export.own_error(error)
        if own is None and not needs_values and holds_symbols(error):
            module = running_module(error)
        # torch's own frames, a hundred of them, would hide the user's line.
        raise _CannotBeTakenApartError(explain(network, error, own), module) from None
    _check_nothing_swallowed(signals, network)
    return program


def _check_nothing_swallowed(signals: Signals, network: nn.Module) -> None:
    """Take an error that the user's code has caught as if it had not."""
    found = signals.swallowed()
    if found is None:
        return
    if isinstance(found.error, CaptureError):
        raise found.error
    raise _CannotBeTakenApartError(explain(network, found.error), found.module) from None


@contextmanager
def _recording(
    recorder: OpaqueRecorder, root: nn.Module, whole: Collection[nn.Module]
) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(quiet_export())
        stack.enter_context(values_as_they_were())
        stack.enter_context(custom_functions_whole(recorder))
        stack.enter_context(kept_whole_unasked(recorder))
        stack.enter_context(averages_in_parts(lambda: recorder.is_recording))
        stack.enter_context(marked_ones_whole(recorder, root, whole))
        stack.enter_context(padded_layers_whole(recorder, root))
        stack.enter_context(unrecordable_effects_refused(recorder))
        stack.enter_context(checkpoints_noted())
        stack.enter_context(_draws_checked())
        yield


@contextmanager
def _draws_checked() -> Iterator[None]:
    """Refuse forward code that draws outside of what is recorded."""
    before, (of_process, _) = torch.default_generator.get_state(), holders((PYTHONS, NUMPYS))
    try:
        yield
    except BaseException:  # the code may run again
        for holder in of_process:
            holder.put_back()
        raise
    check_drawn_nothing(before, of_process)


def _parameters(program: ExportedProgram, root: nn.Module) -> dict[str, str]:
    """The name of each placeholder's parameter, one for all names of a tied one."""
    tensors = dict(root.named_parameters(remove_duplicate=False))
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    inputs = program.graph_signature.inputs_to_parameters
    return {node: first[id(tensors[name])] for node, name in inputs.items()}


def _check(program: ExportedProgram, root: nn.Module) -> None:
    for node in drawing_from_own(program):
        module = _module_of(root, node)
        raise _CannotBeTakenApartError(own_generator(node), module, draws=True)
    for node in program.graph.nodes:
        try:
            check_known(node)
        except CaptureError as error:
            raise _CannotBeTakenApartError(error, _module_of(root, node)) from None


def _module_of(root: nn.Module, node: Node) -> nn.Module:
    """The innermost module whose code made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    top, _, inner = path.partition(".")
    # While export records, its own root comes first.
    return root.get_submodule(path if hasattr(root, top) else inner)


# State that calls kept whole change, and the code around them reads.
#
# A call kept whole leaves no trace while a step is recorded. So what is read after it, outside of
# it, is not what eager mode would find there.


def refuse_reads_of_changed(calls: Iterable[OpaqueCall], noted: Iterable[Noted]) -> None:
    """Refuse forward that reads what a call kept whole changes when it is called.

    What is changed only in backward is what eager's forward finds at the next step, too; but not
    at the next microbatch. There it counts as if the call read it.

    Args:
        calls: The calls.
        noted: The places that were read outside of them.

    Raises:
        CaptureError: Names both lines.
    """
    read = (one for one in noted if one.is_read or one.is_read_behind)
    places = [one for one in read if one.is_whole]  # else its entries are
    for call in calls:
        for one in _touched(call, call.reached.left, places):
            place = one[0].place
            raise CaptureError(changes_what_is_read(call, place.label, place.source))
        late = frozenset(key for _, key in _touched(call, call.reached.left_late, places))
        call.reached.in_forward |= late
        call.reached.note_read_outside(one.place for one in places)


def _touched(
    call: OpaqueCall, left: Mapping[Any, Any], places: Iterable[Noted]
) -> Iterator[tuple[Noted, Any]]:
    """The places that hold something else after a change, each with the key of what changed."""
    for key, state in left.items():
        holder = call.reached.holders[key]
        if not holder.decides or holder.is_tensor or holder.is_generator:
            continue
        before = [(one, freeze(one.place.read())) for one in places]
        with call.reached.as_left(key, state):
            found = [one for one, was in before if any(differences(was, one.place.read()))]
        yield from ((one, key) for one in found)
