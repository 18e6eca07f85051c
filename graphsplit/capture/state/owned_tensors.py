"""Tensors in plain attributes that forward changes: they become buffers, which have one owner.

A tensor that is neither parameter nor buffer is a constant of the graph, and every worker has a
copy of it. So one that forward changes::

    self.h = h.detach()           a hidden state, assigned anew
    self.mean.mul_(0.9)           modified in place

is registered as a buffer that is not persistent: ``state_dict()`` stays as it was. What is in no
attribute of a module (a global, an item of a list) becomes one of the network's:
``capture.state.kept_tensors``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.fx import Node

from graphsplit.capture.operations.effects import alias_roots, written_operands
from graphsplit.capture.operations.opaque_call import OpaqueCall, changes_what_is_read
from graphsplit.capture.state.kept_tensors import KeepsTensorsError, kept_in, put_kept_last
from graphsplit.capture.state.kept_value import shares_memory
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_of_node
from graphsplit.guards.visitor import Noted
from graphsplit.torch_ext.attributes import MADE_BUFFERS, buffers_of, parameters_of, storage_of
from graphsplit.torch_ext.private import has_storage

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Key = tuple[str, str]  # (path of a module, name of its attribute)


def make_buffers(modules: Mapping[str, nn.Module], keys: Collection[Key]) -> None:
    """Register tensors in attributes as buffers; those that are buffers stay as they are.

    A graph that was captured before may read such a tensor as a constant.

    Args:
        modules: The network and the loss, by the names that begin the paths of keys.
        keys: The attributes.
    """
    for path, name in keys:
        top, _, inner = path.partition(".")
        module = modules[top].get_submodule(inner)
        tensor = vars(module).pop(name, None)
        if tensor is not None:
            module.register_buffer(name, tensor, persistent=False)
            vars(module).setdefault(MADE_BUFFERS, set()).add(name)
            put_kept_last(module)


def written_attributes(
    program: ExportedProgram, root: nn.Module, noted: Collection[Noted]
) -> list[Key]:
    """The attributes of modules in whose tensors a graph writes, though they are no state.

    Args:
        program: A freshly exported program.
        root: What was exported.
        noted: The places that code has read or written.

    Raises:
        KeepsTensorsError: A tensor that is written to is kept in another place.
        CaptureError: It is kept nowhere, or in several places.
    """
    found: list[Key] = []
    for write, constant in _writes_to_constants(program):
        holders = _holders(root, constant)
        wanted = {} if holders else kept_in(noted, constant)
        if wanted and isinstance(write.target, OpaqueCall):  # it would not be an operand
            place = next(iter(wanted.values())).place
            raise CaptureError(changes_what_is_read(write.target, place.label, place.source))
        if wanted:
            raise KeepsTensorsError(wanted)
        if len(holders) != 1:
            raise _refusal(write, constant, holders)
        found += holders
    return list(dict.fromkeys(found))


def constants_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The tensors that a graph reads and that are neither parameters nor buffers, by node."""
    from torch.export.graph_signature import InputKind

    found = {
        spec.arg.name: program.constants[str(spec.target)]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    return {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}


def _writes_to_constants(program: ExportedProgram) -> Iterator[tuple[Node, torch.Tensor]]:
    constants = constants_of(program)
    if not constants:
        return
    roots = alias_roots(program.graph)
    for node in program.graph.nodes:
        for root in {root for operand in written_operands(node) for root in roots[operand]}:
            if root.name in constants:
                yield node, constants[root.name]
        if isinstance(node.target, OpaqueCall):
            changed = set(map(storage_of, node.target.reached.changed_tensors()))
            dense = filter(has_storage, constants.values())
            yield from ((node, constant) for constant in dense if storage_of(constant) in changed)


def _holders(root: nn.Module, tensor: torch.Tensor) -> list[Key]:
    """The attributes, parameters and buffers that share a tensor's memory."""
    storage = storage_of(tensor)
    return [
        (path, name)
        for path, module in root.named_modules()
        for held_by in (vars(module), parameters_of(module), buffers_of(module))
        for name, held in list(held_by.items())
        if shares_memory(held, storage)
    ]


def _refusal(write: Node, tensor: torch.Tensor, holders: Collection[Key]) -> CaptureError:
    where = "in no attribute of the network or of a loss that is a module"
    if holders:
        where = f"in several places ({', '.join(name for _, name in holders)})"
    return CaptureError(
        f"forward modifies a {list(tensor.shape)} tensor that is neither parameter nor buffer, and "
        f"is {where}: every worker would modify a copy of its own ({write.target})\n"
        f"  {users_line_of_node(write)}\n"
        f"  Fix: register it once with register_buffer, in the network or in a loss that is a "
        f"module."
    )
