"""Have ``torch.export`` record a network's step, and look after what it would lose.

If a module cannot be taken apart because its code asks for the values of tensors, it is kept whole
and the network recorded again. So one placed module more is one operation, on its worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from graphsplit.capture.attributes import (
    Attributes,
    Change,
    Key,
    changing_attributes,
    is_same,
    kept_tensors,
    set_value,
    state_after,
    value_at,
)
from graphsplit.capture.checkpoints import check_checkpoints, checkpoints_noted
from graphsplit.capture.failures import explain, failing_module, quiet_export
from graphsplit.capture.opaque import put_in_place
from graphsplit.capture.opaque_automatic import kept_whole_unasked
from graphsplit.capture.opaque_functions import custom_functions_whole
from graphsplit.capture.opaque_marks import marked_ones, marked_ones_whole
from graphsplit.capture.opaque_record import Recorder
from graphsplit.capture.silent_losses import (
    check_drawn_nothing,
    refuse_own_generators,
    silent_losses_refused,
)
from graphsplit.capture.sizes import check_known
from graphsplit.errors import CaptureError, GraphsplitError

# How many values attributes may take in turn, from one call of forward to the next.
_MAX_STATES = 4


@dataclass(frozen=True)
class Export:
    """How to record a step.

    Attributes:
        record: Calls ``torch.export``.
        raises_by_itself: Whether an error comes in plain PyTorch too.
    """

    record: Callable[[], ExportedProgram]
    raises_by_itself: Callable[[Exception], bool]


@dataclass(frozen=True)
class Recorded:
    """A recorded step.

    Attributes:
        program: What ``torch.export`` made of it.
        changes: What forward leaves in attributes of the network.
        is_other_after: Whether another program would be recorded once that is made.
    """

    program: ExportedProgram
    changes: tuple[Change, ...] = ()
    is_other_after: bool = False


def record_program(root: nn.Module, network: nn.Module, export: Export) -> Recorded:
    """Record a step.

    Args:
        root: What is exported: holds the network and the loss.
        network: The user's network.
        export: How to record it.

    Raises:
        CaptureError: The network cannot be captured; names the user's line and the ways out.
    """
    whole: list[nn.Module] = []
    refused: CaptureError | None = None
    while True:
        try:
            return _settled(root, export, whole)
        except _CannotBeTakenApartError as found:
            refused = refused or found.refusal
            if found.module is None or found.module in (root, network, *whole):
                raise refused from None
            whole.append(found.module)
        except CaptureError as error:
            if refused is None:
                raise
            raise CaptureError(
                f"{refused}\n  (The module was then kept whole, which did not help: {error})"
            ) from None


class _CannotBeTakenApartError(Exception):
    """A module has to be kept whole, if that is possible."""

    def __init__(self, refusal: CaptureError, module: nn.Module | None) -> None:
        super().__init__()
        self.refusal = refusal
        self.module = module


def _settled(root: nn.Module, export: Export, whole: Collection[nn.Module]) -> Recorded:
    """Record, and find out what comes of the attributes that forward changes.

    Raises:
        CaptureError: They are others after every call.
    """
    program, changes, tensors = _record(root, export, whole)
    if tensors:
        _check_not_read(root, export, whole, program, tensors)
    if not changes:
        return Recorded(program)
    start = {change.key: value_at(root, change.key) for change in changes}
    state, following, states = dict(start), changes, [dict(start)]
    differs = False
    try:
        while following:
            state = state_after(state, following)
            for key, value in state.items():
                start.setdefault(key, value_at(root, key))
                set_value(root, key, value)
            if any(_is_same_state(state, known, start) for known in states):
                break
            if len(states) == _MAX_STATES:
                moving = {change.key for change in following}
                first = [change for change in changes if change.key in moving]
                raise changing_attributes(first or following)
            states.append(state)
            again, following, _ = _record(root, export, whole)
            differs |= _text(again) != _text(program)
    finally:
        for key, value in start.items():
            set_value(root, key, value)
    return Recorded(program, tuple(changes), differs or bool(following) or len(states) > 2)


def _check_not_read(
    root: nn.Module,
    export: Export,
    whole: Collection[nn.Module],
    program: ExportedProgram,
    tensors: Mapping[Key, Any],
) -> None:
    """Record again with what was left, and see that it makes no difference."""
    start = {key: value_at(root, key) for key in tensors}
    try:
        for key, value in tensors.items():
            set_value(root, key, value)
        again, _, _ = _record(root, export, whole)
    except (CaptureError, _CannotBeTakenApartError):
        raise kept_tensors(tensors) from None
    finally:
        for key, value in start.items():
            set_value(root, key, value)
    if _text(again) != _text(program):
        raise kept_tensors(tensors)


def _is_same_state(
    one: Mapping[Key, Any], other: Mapping[Key, Any], start: Mapping[Key, Any]
) -> bool:
    return all(is_same(one.get(key, old), other.get(key, old)) for key, old in start.items())


def _text(program: ExportedProgram) -> str:
    """All of a program in which another one may differ."""
    modules = program.graph_module.modules()
    code = [module.code for module in modules if isinstance(module, GraphModule)]
    constants = [
        f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value!r}"
        for name, value in program.constants.items()
    ]
    return "\n".join([*code, *constants])


def _record(
    root: nn.Module, export: Export, whole: Collection[nn.Module]
) -> tuple[ExportedProgram, list[Change], dict[Key, Any]]:
    attributes = Attributes(root, [*marked_ones(root), *whole])
    recorder = Recorder(root)
    network = getattr(root, "network", root)
    try:
        with _recording(recorder, root, whole), attributes.noted():
            program = _exported(export, network)
    finally:
        attributes.put_back()
    _check(program, root)
    put_in_place(program.graph_module, recorder.calls)
    if torch.is_grad_enabled():
        check_checkpoints(program.graph_module, _parameters(program, root))
    changed = attributes.changed(program.constants.values())
    return program, changed, attributes.left_tensors()


def _exported(export: Export, network: nn.Module) -> ExportedProgram:
    try:
        return export.record()
    except GraphsplitError:
        raise
    except Exception as error:
        module = failing_module(error)
        is_own = module is None and export.raises_by_itself(error)
        # torch's own frames, a hundred of them, would hide the user's line.
        raise _CannotBeTakenApartError(explain(network, error, is_own=is_own), module) from None


@contextmanager
def _recording(recorder: Recorder, root: nn.Module, whole: Collection[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(quiet_export())
        stack.enter_context(custom_functions_whole(recorder))
        stack.enter_context(kept_whole_unasked(recorder))
        stack.enter_context(marked_ones_whole(recorder, root, whole))
        stack.enter_context(silent_losses_refused(recorder))
        stack.enter_context(checkpoints_noted())
        stack.enter_context(_draws_checked())
        yield


@contextmanager
def _draws_checked() -> Iterator[None]:
    """Refuse forward code that draws outside of what is recorded."""
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    yield
    check_drawn_nothing(*before)


def _parameters(program: ExportedProgram, root: nn.Module) -> dict[str, str]:
    """The name of each placeholder's parameter, one for all names of a tied one."""
    tensors = dict(root.named_parameters(remove_duplicate=False))
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    inputs = program.graph_signature.inputs_to_parameters
    return {node: first[id(tensors[name])] for node, name in inputs.items()}


def _check(program: ExportedProgram, root: nn.Module) -> None:
    refuse_own_generators(program)
    for node in program.graph.nodes:
        try:
            check_known(node)
        except CaptureError as error:
            stack = node.meta.get("nn_module_stack") or {}
            path = str([*stack.values()][-1][0]) if stack else ""
            raise _CannotBeTakenApartError(error, root.get_submodule(path)) from None
