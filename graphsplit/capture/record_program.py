"""Have ``torch.export`` record a network's step, and look after what it would lose.

If a module cannot be taken apart because its code asks for the values of tensors, it is kept whole
and the network recorded again. So one placed module more is one operation, on its worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from graphsplit.capture.attributes import Attributes, Change, changing_attributes
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

Export = Callable[[], ExportedProgram]


def record_program(root: nn.Module, network: nn.Module, export: Export) -> ExportedProgram:
    """Record a step.

    Args:
        root: What is exported: holds the network and the loss.
        network: The user's network.
        export: Calls ``torch.export``.

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


def _settled(root: nn.Module, export: Export, whole: Collection[nn.Module]) -> ExportedProgram:
    """Record until no attribute of the network changes; more than twice is too often."""
    program, changes = _record(root, export, whole)
    if not changes:
        return program
    for change in changes:
        change.make()
    again, changes_again = _record(root, export, whole)
    if changes_again or program.graph_module.code != again.graph_module.code:
        raise changing_attributes(changes)
    return again


def _record(
    root: nn.Module, export: Export, whole: Collection[nn.Module]
) -> tuple[ExportedProgram, list[Change]]:
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
    return program, attributes.changed(program.constants.values())


def _exported(export: Export, network: nn.Module) -> ExportedProgram:
    try:
        return export()
    except GraphsplitError:
        raise
    except Exception as error:
        # torch's own frames, a hundred of them, would hide the user's line.
        raise _CannotBeTakenApartError(explain(network, error), failing_module(error)) from None


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
    refuse_own_generators(program.graph_module)
    for node in program.graph.nodes:
        try:
            check_known(node)
        except CaptureError as error:
            stack = node.meta.get("nn_module_stack") or {}
            path = str([*stack.values()][-1][0]) if stack else ""
            raise _CannotBeTakenApartError(error, root.get_submodule(path)) from None
