"""Buffers and parameters that the script has set to values of its loop.

``bn.running_mean = torch.zeros_like(bn.running_mean)`` puts a value that lives on one worker into
the network. At the next call it is a buffer again: a tensor that every worker has, as one that the
script itself has made. A parameter (``nn.Parameter(net.fc.weight * 0.5)``) is one at once: an
optimizer may get it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from graphsplit.distribute.values import LoopValue
from graphsplit.distribute.workers.loop import Loop
from graphsplit.torch_ext.attributes import BUFFERS


@functools.cache
def watch_tables() -> None:
    """Take note of buffers and parameters that are set to values, from now on."""
    register_module_buffer_registration_hook(_note)
    register_module_parameter_registration_hook(_parameter_of)


def _note(module: nn.Module, name: str, value: Any) -> None:
    if type(value) is LoopValue:
        value.loop.given[id(module), name] = weakref.ref(module)


def _parameter_of(module: nn.Module, name: str, value: Any) -> Any:  # PyTorch says None
    if type(value) is not LoopValue:
        return None  # it is registered itself
    return nn.Parameter(_everywhere(value), value.requires_grad)


def _everywhere(value: LoopValue) -> torch.Tensor:
    made = torch.empty(value.shape, dtype=value.dtype)
    made.data = value.as_data_of(made)
    return made


def take_over_given(network: nn.Module, loop: Loop) -> None:
    """Collective: let values in the place of a network's buffers be tensors of all workers.

    Raises:
        ConfigurationError: Something else has the memory of one.
    """
    if not loop.given:
        return
    own = {id(module) for module in network.modules()}
    for (number, name), held in list(loop.given.items()):
        module = held()
        if module is not None and number not in own:
            continue  # of the script, which may keep values in it
        del loop.given[number, name]
        value = None if module is None else vars(module)[BUFFERS].get(name)
        if isinstance(value, LoopValue):
            vars(module)[BUFFERS][name] = _everywhere(value)
