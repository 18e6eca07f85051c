"""Tensors that a network holds under several names are one value of its graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import Node


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
