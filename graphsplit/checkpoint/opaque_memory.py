"""The memory of modules that are kept whole, in their own attributes.

The code of such a module runs at every step, on one worker, and may keep what it likes between
steps. So every worker saves its own copy of the attributes, with which of them it has changed alone
since all had the same: those are the ones of the worker that runs the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphsplit.capture.opaque.marks import marked_ones
from graphsplit.checkpoint.generators import is_same
from graphsplit.encoding.values import encode
from graphsplit.errors import StateError
from graphsplit.guards.values import MISSING, freeze, put_into, thaw, with_leaves
from graphsplit.torch_ext.attributes import is_of_user

WHOLE = "whole "  # and a rank: the section of what modules kept whole remember there
_MISSING = object()
Memory = Mapping[str, Mapping[str, Any]]  # by module


class OpaqueMemory:
    """The attributes of the modules that ``gs.opaque`` has marked.

    Args:
        roots: Gives the modules that hold them, by name: the network; the loss, which may be
            another one later.
    """

    def __init__(self, roots: Callable[[], Mapping[str, Any]]) -> None:
        self._roots = roots
        self._first: dict[nn.Module, dict[str, Any]] = {}
        self._agreed: dict[nn.Module, dict[str, Any]] = {}  # as all workers had them last
        self.begin()

    def begin(self) -> None:
        """The run begins, with the same attributes on all workers."""
        self._agreed.clear()
        self._modules()

    def _modules(self) -> dict[str, nn.Module]:
        found = {
            f"{top}.{path}": module
            for top, root in self._roots().items()
            if isinstance(root, nn.Module)
            for path, module in _inside_marked(root)
        }
        for module in found.values():
            for known in (self._first, self._agreed):
                if module not in known:
                    known[module] = _copied(_attributes(module))
        return found

    def kept(self) -> dict[str, dict[str, Any]]:
        """The attributes of each module that are not what they were first."""
        found = {}
        for path, module in self._modules().items():
            now, first, agreed = _attributes(module), self._first[module], self._agreed[module]
            here = {n: v for n, v in now.items() if not is_same(v, agreed.get(n, _MISSING))}
            rest = {n: v for n, v in now.items() if n not in here}
            alike = {n: v for n, v in rest.items() if not is_same(v, first.get(n, _MISSING))}
            left_out: list[str] = []
            found[path] = {
                "alike": _written(alike, left_out),
                "here": _written(here, left_out),
                "gone": [name for name in {**first, **agreed} if name not in now],
                "left out": left_out,
            }
        return found

    def put_back(self, kept: Memory) -> None:
        """Let the attributes be as when ``kept`` was called.

        Args:
            kept: What ``together`` made of what it gave on all workers.
        """
        for path, module in self._modules().items():
            if path not in kept:  # a save of an earlier version
                continue
            here = kept[path]["here"]
            agreed = {**self._first[module], **kept[path]["alike"]}
            others = (*kept[path]["gone"], *kept[path]["left out"])
            values = {n: v for n, v in {**agreed, **here}.items() if n not in others}
            held = vars(module)
            for name in _attributes(module).keys() - {*values, *kept[path]["left out"]}:
                del held[name]
            for name, value in values.items():
                there = held.get(name, MISSING)
                if not is_same(there, value):  # into the containers that are there: plans hold them
                    held[name] = put_into(freeze(_copied(value)), there)
            self._agreed[module] = _copied({**agreed, **values})


def together(kept: Sequence[Memory]) -> dict[str, dict[str, Any]]:
    """The memory of one process, from that of all workers.

    Raises:
        StateError: Several workers have changed one attribute, each otherwise; names it.
    """
    found: dict[str, dict[str, Any]] = {}
    for memory in kept:
        for path, own in memory.items():
            known = found.setdefault(path, {"alike": {}, "here": {}, "gone": [], "left out": []})
            known["alike"].update(own["alike"])
            for names in ("gone", "left out"):
                known[names] += own[names]
            for name, value in own["here"].items():
                if not is_same(known["here"].setdefault(name, value), value):
                    raise StateError(
                        f"the module {path.partition('.')[2]!r} is kept whole, and its attribute "
                        f"{name!r} was saved with other values on several workers: the script has "
                        f"set it, and its code has changed it on the worker that runs it\n"
                        f"  Fix: let one of the two change it; or keep it in a buffer."
                    )
    return found


def _inside_marked(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = dict.fromkeys(inner for marked in marked_ones(root) for inner in marked.modules())
    paths = {module: path for path, module in root.named_modules()} if inside else {}
    return ((paths[module], module) for module in inside)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if is_of_user(name) and not name.startswith("_graphsplit")
    }


def _written(changed: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Those that can be written; the names of others go to a list."""
    found = {}
    for name, value in changed.items():
        try:
            encode(value, {}, path=name)
            found[name] = value
        except StateError:
            left_out.append(name)
    return found


def _copied(value: Any) -> Any:
    return thaw(with_leaves(freeze(value), _own))


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
