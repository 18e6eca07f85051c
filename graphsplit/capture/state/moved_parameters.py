"""A forward or loss that lets another module, or another parameter, stand where one stood.

A graph knows parameters and buffers by the names that they have when it is recorded, and a step
runs no Python that could give these names to others. So it is refused::

    self.first, self.second = self.second, self.first       inside forward
    self.head.weight = self.embedding.weight

A module may get one name more, which each step gives it again, and a new one that holds nothing may
take a place::

    self.active = self.heads[task]
    self.act = nn.ReLU()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now
from graphsplit.guards.changes import Change
from graphsplit.guards.places import entry
from graphsplit.guards.values import MISSING, freeze, same
from graphsplit.torch_ext.attributes import MODULES, buffers_of, modules_of, parameters_of, refill

_Modules = Mapping[str, nn.Module]
_Table = Mapping[str, nn.Module | None]
_Lines = Mapping[str, str]  # by the name that was given last, the user's line


class ModulesStay:
    """Sees which modules and parameters stand where while a step is recorded.

    Args:
        root: Holds what runs meanwhile.
        label_of: The name for people of the module at a path.
    """

    def __init__(self, root: nn.Module, label_of: Callable[[str], str]) -> None:
        self._root = root
        self._label_of = label_of
        self._changes: list[Change] = []

    @contextmanager
    def seen(self) -> Iterator[None]:
        """See them inside; the names that modules have got there are taken away again.

        Raises:
            CaptureError: Another module or parameter stands where one stood; names the place, and
                the line that was the last to put something there.
        """
        root, lines = self._root, dict[str, str]()
        before = dict(root.named_modules(remove_duplicate=False))
        parameters = [(path, one, dict(parameters_of(one))) for path, one in root.named_modules()]
        tables = [(path, one, dict(modules_of(one))) for path, one in root.named_modules()]

        def note(module: nn.Module, name: str, value: Any) -> None:
            lines[name] = users_line_now()

        hooks = (
            register_module_module_registration_hook(note),
            register_module_parameter_registration_hook(note),
        )
        try:
            yield
        except BaseException:
            _put_back(tables)
            raise
        finally:
            for hook in hooks:
                hook.remove()
        moved = [
            *_moved(before, dict(root.named_modules(remove_duplicate=False))),
            *(
                f"{path}.{name}"
                for path, one, was in parameters
                for now in [dict(parameters_of(one))]
                for name in {**was, **now}
                if was.get(name) is not now.get(name)
            ),
        ]
        if moved:
            _put_back(tables)
            raise _refusal(moved[0], lines)
        self._changes = list(self._renamed(set(map(id, before.values())), tables, lines))
        for change in self._changes:
            change.place.write(change.old)

    def changes(self) -> tuple[Change, ...]:
        """The names of modules that are not as they were before forward."""
        return tuple(self._changes)

    def _renamed(
        self, known: set[int], tables: Iterable[tuple[str, nn.Module, _Table]], lines: _Lines
    ) -> Iterator[Change]:
        for path, one, was in tables:
            now = dict(modules_of(one))  # a scripted module has another kind of table
            for name in {**was, **now}:
                old, new = was.get(name, MISSING), now.get(name, MISSING)
                is_known = not isinstance(new, nn.Module) or id(new) in known
                if new is not old and (is_known or not _are_alike(old, new)):
                    label = f"{self._label_of(path)}.{name}"
                    place = entry(modules_of(one), name, label, lines.get(name, ""))
                    yield Change(place, old, new, is_read=True)


def _refusal(moved: str, lines: _Lines) -> CaptureError:
    _, _, path = moved.partition(".")  # the network's or the loss's own name
    name = path.rpartition(".")[2]
    line = f"\n  {lines[name]}" if name in lines else ""
    return CaptureError(
        f"forward or the loss puts another module or parameter into {path}; the captured graph "
        f"would not{line}\n"
        f"  Fix: write new values into what is there (self.weight.data.copy_(value)); exchange "
        f"modules and parameters between two steps; or let forward choose, and "
        f"leave them where they are: first, second = (self.b, self.a) if self.is_turned else "
        f"(self.a, self.b)."
    )


def _put_back(tables: Iterable[tuple[str, nn.Module, _Table]]) -> None:
    for _, module, was in tables:
        if list(modules_of(module).items()) != list(was.items()):
            refill(modules_of(module), was)


def _moved(before: _Modules, after: _Modules) -> Iterator[str]:
    """The names at which others stand than before, of those that matter."""
    known = set(map(id, before.values()))
    stay = {id(one) for path, one in before.items() if after.get(path) is one}
    for path in {**before, **after}:
        was, now = before.get(path), after.get(path)
        if was is now:
            continue
        is_lost = was is not None and id(was) not in stay and _holds_tensors(was.modules())
        inside = () if now is None else now.modules()
        elsewhere = [one for one in inside if id(one) not in stay]
        if is_lost or any(id(one) in known or _holds_tensors([one]) for one in elsewhere):
            yield path


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two modules without tensors differ in nothing that code could see but the object."""
    if type(one) is not type(other):
        return False
    tables = modules_of(one), modules_of(other)
    if list(tables[0]) != list(tables[1]):
        return False
    held = ({k: v for k, v in vars(m).items() if k != MODULES} for m in (one, other))
    are_same = same(freeze(next(held)), next(held))
    return are_same and all(map(_are_alike, *(table.values() for table in tables)))


def _holds_tensors(modules: Iterable[nn.Module]) -> bool:
    tensors = (
        t for one in modules for t in (*parameters_of(one).values(), *buffers_of(one).values())
    )
    return any(tensor is not None for tensor in tensors)
