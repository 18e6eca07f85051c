"""Which parameters are trained, and what a loss must be; the same in one process and many.

A loss that is a parameter, or a view of one, has no memory of its own: when the optimizer has
stepped, it holds another number on the worker that owns the parameter, and on that one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NoReturn

import torch

from graphsplit.capture.graph import CapturedGraph, Mode, NodeKind
from graphsplit.capture.operations.effects import shares_memory
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.attributes import base_of
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

_is_trained = attrgetter("requires_grad")


def check_graph(graph: CapturedGraph) -> None:
    """Check the loss of a captured training step; graphs of other modes have nothing to check.

    Raises:
        ConfigurationError: It depends on no parameter, or is one.
    """
    if graph.mode.keeps_outputs_home:
        for root in {output.node for output in graph.outputs if output.node is not None}:
            _refuse_state(graph, root)
    if graph.mode is not Mode.TRAIN:
        return
    if not graph.has_gradients:
        _refuse_untrained()
    assert graph.loss_node is not None
    loss = graph.fx_nodes[graph.nodes[graph.loss_node].name]
    for node in graph.nodes:
        if node.kind is NodeKind.PARAMETER and shares_memory(loss, graph.fx_nodes[node.name]):
            _refuse_parameter(node.target)


def _refuse_state(graph: CapturedGraph, root: int) -> None:
    found = graph.fx_nodes[graph.nodes[root].name]
    for node in graph.nodes:
        if node.is_state and shares_memory(found, graph.fx_nodes[node.name]):
            raise ConfigurationError(
                f"forward returns {node.target} itself, or a view of it: a later step changes "
                f"what it holds\n  Fix: return a value of its own, for example the same * 1."
            )


def check_value(loss: torch.Tensor) -> None:
    """Check a loss that was computed eagerly.

    Raises:
        ConfigurationError: As ``check_graph``.
    """
    if not loss.requires_grad:
        _refuse_untrained()
    if (base_of(loss)).is_leaf:
        _refuse_parameter("a parameter")


def _refuse_untrained() -> NoReturn:
    raise ConfigurationError(
        "the loss depends on no parameter that requires a gradient, so there is nothing to train\n"
        "  Fix: leave requires_grad on for some parameter, and do not detach the loss."
    )


def _refuse_parameter(name: str) -> NoReturn:
    raise ConfigurationError(
        f"the loss is {name} itself, or a view of it: the optimizer changes what it holds\n"
        f"  Fix: return a value of its own, for example the same * 1."
    )


def requires_grad_of(parameters: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Of every parameter, whether it is trained."""
    with DisableTorchFunctionSubclass():  # stand-ins would answer slowly
        return tuple(map(_is_trained, parameters))


def put_requires_grad(parameters: Sequence[torch.Tensor], flags: Sequence[bool]) -> None:
    """Let parameters be trained, or not, as they were."""
    with DisableTorchFunctionSubclass():
        for parameter, flag in zip(parameters, flags, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
