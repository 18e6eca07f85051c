"""Parameters that forward itself freezes and unfreezes.

``torch.export`` does not see ``requires_grad_``. What autograd goes by is the mark at the time of
use, and once more the one at the end, when backward adds to ``.grad``. So a parameter is trained in
the graph if it is marked at the end, and what used it unmarked reads it apart from autograd::

    w.requires_grad_(False)
    y = linear(x, w)                    apart = detach(w);  y = linear(x, apart)
    w.requires_grad_(True)        =>    z = linear(y, w)
    z = linear(y, w)

The marks that forward leaves are changes of Python values, as a counter is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode

from graphsplit.frames import users_line_now
from graphsplit.guards.changes import Change
from graphsplit.guards.places import Place, PlaceKind
from graphsplit.torch_ext.fakes import copy_notes
from graphsplit.torch_ext.private import DisableTorchFunction
from graphsplit.torch_ext.replaced import MARK_TRAINED, replaced

_ATTRIBUTE: Any = torch.Tensor.requires_grad
_METHOD = torch.Tensor.requires_grad_


class TrainedMarks(TorchFunctionMode):
    """Sees which parameters are marked as trained while a step is recorded.

    Args:
        root: The module that holds the network and the loss, with what stands for its parameters.
        label_of: The name for people of the module at a path.
        is_paused: Whether what runs now is no part of the graph.
    """

    def __init__(
        self, root: nn.Module, label_of: Callable[[str], str], is_paused: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._root = root
        self._label_of = label_of
        self._is_paused = is_paused
        self._parameters = dict(root.named_parameters())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._before = self._marks()
        self._lines: dict[str, str] = {}
        self._uses_as_trained: dict[str, Collection[Node]] = {}

    @contextmanager
    def seen(self) -> Iterator[None]:
        """See them inside."""
        with replaced(*MARK_TRAINED, _mark), self:
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch; note it if it marks a parameter."""
        name = self._names.get(id(args[0])) if func in (_mark, _ATTRIBUTE.__set__) else None
        if name is None or self._is_paused():
            return func(*args, **(kwargs or {}))
        was_marked = args[0].requires_grad
        found = func(args[0], *map(bool, args[1:]))
        if was_marked != args[0].requires_grad:
            self._lines.setdefault(name, users_line_now())
            self._note(name, args[0])
        return found

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        node = get_proxy_slot(parameter, tracer).proxy.node
        if not parameter.requires_grad:
            self._uses_as_trained[name] = set(node.users)
            return
        trained = self._uses_as_trained.get(name, ())
        untrained = [user for user in node.users if user not in trained]
        if untrained:
            apart = get_proxy_slot(parameter.detach(), tracer).proxy.node
            _let_read(untrained, node, apart)
            self._uses_as_trained[name] = {*trained, apart}

    def _marks(self) -> dict[str, bool]:
        with DisableTorchFunction():  # what watches the user's calls need not see these
            return {name: p.requires_grad for name, p in self._parameters.items()}

    def changes(self) -> tuple[Change, ...]:
        """The marks that are not as they were before forward."""
        return tuple(
            Change(self._place(name), self._before[name], is_marked, is_read=True)
            for name, is_marked in self._marks().items()
            if is_marked is not self._before[name]
        )

    def _place(self, name: str) -> Place:
        path, _, own = name.rpartition(".")
        holder = vars(self._root.get_submodule(path))
        label = f"requires_grad of {self._label_of(path)}.{own}"
        return Place(PlaceKind.MARK, holder, own, label, self._lines.get(name, ""), path)


def _mark(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """``Tensor.requires_grad_``, which takes no symbol: a counter may decide."""
    made: torch.Tensor = _METHOD(tensor, bool(requires_grad))
    return made


def _let_read(users: Collection[Node], node: Node, apart: Node) -> None:
    """Let nodes that are in the graph already read another one, which was made after them."""
    first = next(one for one in node.graph.nodes if one in users)
    copy_notes(apart, first)
    first.prepend(apart)
    for user in users:
        user.replace_input_with(node, apart)


@contextmanager
def marked_as_left(changes: Collection[Change]) -> Iterator[None]:
    """Let parameters be marked as forward leaves them."""
    marks = [change for change in changes if change.place.kind is PlaceKind.MARK]
    try:
        for change in marks:
            change.place.write(change.new)
        yield
    finally:
        for change in marks:
            change.place.write(change.old)
