"""Which code of the user's takes part when a state is saved or loaded.

PyTorch lets modules and optimizers change what is saved and loaded: by hooks, by overriding a
method, by extra state. What PyTorch itself brings of the kind looks at nothing but the dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphsplit.errors import StateError
from graphsplit.optimizers.own_step import STATE_HOOKS
from graphsplit.torch_ext.attributes import (
    LOAD,
    LOADING_HOOKS,
    OPTIMIZER_STATE_HOOKS,
    SAVE,
    SAVING_HOOKS,
)

_SAVING = ("state_dict", SAVE)
_GET_EXTRA, _SET_EXTRA = "get_extra_state", "set_extra_state"
_LOADING = ("load_state_dict", LOAD)
_OPTIMIZERS = ("state_dict", "load_state_dict")


def own_saving(network: nn.Module, *, with_extra: bool) -> list[str]:
    """The user's code that runs when the network's state is saved, in words.

    Args:
        network: The network.
        with_extra: Whether extra state counts, which is an entry of its own.
    """
    extra = (_GET_EXTRA,) if with_extra else ()
    return _of_modules(network, (*_SAVING, *extra), SAVING_HOOKS)


def own_loading(network: nn.Module, *, with_extra: bool) -> list[str]:
    """The user's code that runs when a state is loaded into the network; see ``own_saving``."""
    extra = (_SET_EXTRA,) if with_extra else ()
    return _of_modules(network, (*_LOADING, *extra), LOADING_HOOKS)


def own_code_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The user's code that runs when an optimizer's state is saved or loaded, in words."""
    return list(_own(optimizer, "", _OPTIMIZERS, OPTIMIZER_STATE_HOOKS))


def refuse_own_code(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse to stream the state of an optimizer whose own code expects to see all of it.

    Raises:
        StateError: Names the code.
    """
    for optimizer in optimizers:
        code = own_code_of(optimizer)
        if code:
            raise StateError(
                f"the state of {type(optimizer).__name__} cannot be saved piece by piece: "
                f"{code[0]} would see a part of it only\n"
                f"  Fix: call model.optimizer_state_dict(), which gives it all of the state, and "
                f"torch.save what it returns on worker 0."
            )


def _of_modules(network: nn.Module, methods: Iterable[str], hooks: Iterable[str]) -> list[str]:
    return [
        found
        for path, module in network.named_modules()
        for found in _own(module, path, methods, hooks)
    ]


def _own(owner: Any, path: str, methods: Iterable[str], hooks: Iterable[str]) -> Iterator[str]:
    at = f" of {path}" if path else ""
    for name in methods:
        if not _is_torchs(getattr(owner, name)):
            yield f"{type(owner).__qualname__}.{name}{at}"
    for registry in hooks:
        for hook in getattr(owner, registry).values():
            function = getattr(hook, "hook", hook)  # PyTorch wraps some
            if not _is_torchs(function) and function not in STATE_HOOKS:
                name = getattr(function, "__qualname__", type(function).__qualname__)
                yield f"the hook {name}{at}"


def _is_torchs(function: Any) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] == "torch"
