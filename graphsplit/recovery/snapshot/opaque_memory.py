"""The memory of modules that are kept whole, in their own attributes.

The code of such a module runs at every step, on one worker, and may keep what it likes between
steps. That worker's copy of the attributes is put into snapshots; the others' never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from graphsplit.capture.opaque.marks import marked_ones
from graphsplit.checkpoint.generators import is_same
from graphsplit.encoding.values import encode
from graphsplit.errors import StateError
from graphsplit.torch_ext.attributes import is_of_user

_MISSING = object()


class WholeModules:
    """The attributes of the modules that ``gs.opaque`` has marked.

    Args:
        network: The network.
        loss_fn: The loss, which may be a module too.
    """

    def __init__(self, network: nn.Module, loss_fn: Any) -> None:
        tops = {"network": network, "loss": loss_fn}
        self._modules = {
            f"{top}.{path}": module
            for top, root in tops.items()
            if isinstance(root, nn.Module)
            for path, module in _inside_marked(root)
        }
        self._first = {path: _copied(_attributes(m)) for path, m in self._modules.items()}

    def kept(self) -> dict[str, dict[str, Any]]:
        """By module, the attributes that are not what they were when the Model was built.

        Raises:
            StateError: One of them cannot be written; names it.
        """
        found = {}
        for path, module in self._modules.items():
            now, first = _attributes(module), self._first[path]
            changed = {
                name: value
                for name, value in now.items()
                if not is_same(value, first.get(name, _MISSING))
            }
            if changed:
                found[path] = _checked(path, changed)
        return found

    def put_back(self, kept: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        """Let the attributes be as when ``kept`` was called, on whichever workers."""
        for path, module in self._modules.items():
            changed: dict[str, Any] = {}
            for of_one in kept:
                changed.update(of_one.get(path, {}))
            held, first = vars(module), self._first[path]
            for name in [n for n in _attributes(module) if n not in first and n not in changed]:
                del held[name]
            for name, value in first.items():
                if name not in changed and not is_same(held.get(name, _MISSING), value):
                    held[name] = _copied(value)
            for name, value in changed.items():
                held[name] = _copied(value)


def _inside_marked(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    paths = {module: path for path, module in root.named_modules()}
    inside = dict.fromkeys(inner for marked in marked_ones(root) for inner in marked.modules())
    return ((paths[module], module) for module in inside)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if is_of_user(name) and not name.startswith("_graphsplit")
    }


def _checked(path: str, changed: dict[str, Any]) -> dict[str, Any]:
    for name, value in changed.items():
        try:
            encode(value, {}, path=name)
        except StateError as error:
            raise StateError(
                f"the module {path.partition('.')[2]!r} is kept whole, and its code "
                f"changes its attribute {name!r}, which no snapshot can hold: {error}\n"
                f"  Fix: keep it in a buffer, or in plain values; or start the job with fail_fast."
            ) from None
    return changed


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copied(item) for item in value)
    return value
