"""``tensor.data``: while a network is captured, and where a script writes by it.

``torch.export`` does not see it, and makes a constant of what was a parameter. To a graph it is
``tensor.detach()``: the same memory, apart from autograd. To set it to what was just computed is to
copy that, as long as nobody looks at the memory of before, or by another name at the new one.
``tensor.grad`` has no place in a graph: each microbatch would see the sum over those before it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from graphsplit.errors import CaptureError
from graphsplit.frames import OWN, is_own, is_users, users_line_now
from graphsplit.torch_ext.attributes import WRITES, storage_of, writes_of
from graphsplit.torch_ext.function_modes import TorchCalls
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, leaves_of
from graphsplit.torch_ext.stand_ins import GET_GRADIENT, StandIn

_ATTRIBUTE: Any = torch.Tensor.data


_GRADIENT: Any = torch.Tensor.grad
_HISTORY: Any = torch.Tensor.grad_fn
_IS_LEAF: Any = torch.Tensor.is_leaf
_VERSION: Any = getattr(torch.Tensor, WRITES)


class DataIsDetached(TorchCalls):
    """Reads ``.data`` as ``.detach()``; refuses gradients, versions, hooks on nodes.

    Args:
        step: What is captured: no other parameter or buffer may share memory that is set.
    """

    def __init__(self, step: torch.nn.Module) -> None:
        super().__init__()
        self._state = step
        self._last: tuple[Any, Any] = (None, None)  # what the last call was given, and gave
        self._set: dict[int, tuple[str, set[int]]] = {}  # by memory: the line, who may use it
        self._kept: list[Any] = []  # so that these identities are those of nobody else
        self._values: list[tuple[str, Callable[[], Any]]] = []

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of torch, or read or set ``.data``."""
        if function == _ATTRIBUTE.__set__:
            return self._give(*args)
        if self._set:
            self._check(leaves_of(torch.Tensor, (args, kwargs)))
        found = self._found(function, args, kwargs)
        self._last = (args, kwargs), found
        if self._set:
            self._note(leaves_of(torch.Tensor, found))
        return found

    def _found(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if function == _ATTRIBUTE.__get__:
            return args[0].detach()
        if function == _GRADIENT.__get__ and args[0].is_leaf and _is_asked_by_user():
            raise CaptureError(
                f"forward or loss reads the gradient of a parameter or an input\n"
                f"  {users_line_now()}\n"
                f"  Fix: read it between steps, or in a callback, and keep what counts in an "
                f"attribute."
            )
        if function == _VERSION.__get__ and args[0].is_leaf and _is_asked_by_user():
            raise CaptureError(
                f"forward or loss asks how often a tensor was written to ({WRITES}), which is "
                f"another number at every step; the captured graph would keep the first\n"
                f"  {users_line_now()}\n"
                f"  Fix: compute anew what depends on the tensor, or count in an attribute."
            )
        found = function(*args, **kwargs)
        if function == _HISTORY.__get__ and found is not None and _is_asked_by_user():
            return _Node(found)
        return found

    def _give(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a value that the call before has made, and whose memory is nobody else's."""
        (given, made), self._last = self._last, (None, None)
        line, memory = users_line_now(), storage_of(value)
        if tensor.is_leaf and _is_all_of(tensor, value):
            return  # ``w.data = w.data.to(dtype)``, where it is of that dtype already
        is_new = made is value and all(
            storage_of(one) != memory for one in leaves_of(torch.Tensor, given)
        )
        state = (*self._state.parameters(), *self._state.buffers())
        is_own = all(one is tensor or storage_of(one) != storage_of(tensor) for one in state)
        if not (is_new and is_own and tensor.is_leaf and _form(tensor) == _form(value)):
            raise _other_memory(line)
        tensor.detach().copy_(value.detach())
        self._kept.append(tensor)
        self._set[storage_of(tensor)] = line, {id(tensor)}
        self._values.append((line, weakref.ref(value)))

    def _check(self, used: list[torch.Tensor]) -> None:
        for tensor in used:
            line, users = self._set.get(storage_of(tensor), ("", {id(tensor)}))
            for at, value in self._values:
                line = at if value() is tensor else line
            if id(tensor) not in users or any(value() is tensor for _, value in self._values):
                raise _other_memory(line)

    def _note(self, made: list[torch.Tensor]) -> None:
        """Views that were taken after the memory was given are views of it."""
        for tensor in made:
            if storage_of(tensor) in self._set:
                self._kept.append(tensor)
                self._set[storage_of(tensor)][1].add(id(tensor))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._last = (None, None)
        for line, value in self._values:
            if error is None and value() is not None:
                raise _other_memory(line)


def _is_all_of(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    is_there = storage_of(tensor) == storage_of(value)
    is_there &= tensor.storage_offset() == value.storage_offset()
    return is_there and _form(tensor) == _form(value)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    size_bytes = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, size_bytes


def _other_memory(line: str) -> CaptureError:
    return CaptureError(
        f"forward gives a tensor other memory by setting its .data\n"
        f"  {line}\n"
        f"  Fix: copy into it, as in tensor.data.copy_(new)."
    )


class _Node:
    """A node of autograd's graph, as code that is captured sees it: hooks on it would be lost."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise CaptureError(
                f"forward or loss registers a hook on a node of autograd's graph (grad_fn), which "
                f"would be lost\n"
                f"  {users_line_now()}\n"
                f"  Fix: register one on the value, by its register_hook, or keep the module or "
                f"function that does it whole, with gs.opaque."
            )
        found = getattr(self._node, name)
        if name == "next_functions":
            return tuple((node and _Node(node), number) for node, number in found)
        return found


class OfOperands(TorchCalls):
    """Refuses what code kept whole asks of tensors that it is given, which come as they are.

    A value that another worker has made is a leaf without history, written to never before.

    Args:
        operands: The tensors.

    Attributes:
        reads_gradients: Whether it reads the gradient of a parameter.
    """

    def __init__(self, operands: Iterable[Any]) -> None:
        super().__init__()
        self._operands = set(map(id, operands))
        self.reads_gradients = False

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of torch, or refuse to."""
        found = function(*args, **kwargs)
        if function == _GRADIENT.__get__:
            self.reads_gradients |= args[0].is_leaf and _is_asked_by_user()
        is_lost = (function == _HISTORY.__get__ and found is not None) or (
            function == _IS_LEAF.__get__ and not found
        )
        is_asked = is_lost or function == _VERSION.__get__
        if is_asked and id(args[0]) in self._operands and _is_asked_by_user():
            raise CaptureError(
                f"code that is kept whole asks how a value that it is given was made (grad_fn, "
                f"is_leaf) or how often it was written to ({WRITES}); it may come from another "
                f"worker\n"
                f"  {users_line_now()}\n"
                f"  Fix: ask for requires_grad, or hand in what counts as an argument."
            )
        return found


def _is_asked_by_user() -> bool:
    """Whether the code is the user's that called the function of torch: all modes are ours."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(OWN) and frame.f_back is not None:
        if frame.f_code is writes_of.__code__:
            return False
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


# Outside of captures: ``.data`` is a tensor over the same memory, and counts writes by itself. So
# those that it gave of a Model's state are kept until workers have compared what was written.

LENT: dict[int, list[_Lent]] = {}
"""Tensors that ``.data`` gave, by the identity of the tensor that it was asked of."""
_lending: dict[int, Callable[[], Any]] = {}  # tensors whose data is noted, by identity


class _Lent:
    """One of them; held until workers have compared, and then as long as somebody else does."""

    def __init__(self, made: torch.Tensor) -> None:
        self._held: torch.Tensor | None = made
        self._reference = weakref.ref(made)
        self._writes = writes_of(made)

    def is_written_to(self) -> bool:
        made = self._reference()
        return made is not None and writes_of(made) != self._writes

    def settle(self) -> bool:
        """Note that workers have compared; says whether anybody holds it still."""
        made = self._reference()
        if made is not None:
            self._writes = writes_of(made)
        self._held = made = None
        return self._reference() is not None


class _Data:
    """The attribute, of which is noted what it gives. Of the class it is torch's own."""

    def __get__(self, tensor: torch.Tensor | None, kind: Any = None) -> Any:
        if tensor is None:
            return _ATTRIBUTE
        made = _ATTRIBUTE.__get__(tensor)
        reference = _lending.get(id(tensor))
        if reference is not None and reference() is tensor:
            LENT.setdefault(id(tensor), []).append(_Lent(made))
        return made

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        give = getattr(type(value), "as_data_of", None)  # torch asks the tensor alone
        if give is not None:
            value = give(value, tensor)
        _ATTRIBUTE.__set__(tensor, value)
        is_script = not is_own(sys._getframe(1).f_code.co_filename)
        if is_script and is_lending(tensor) and not isinstance(tensor, StandIn):
            increment_version(tensor)  # torch does not count it as a write

    def __delete__(self, tensor: torch.Tensor) -> None:
        _ATTRIBUTE.__delete__(tensor)


def watch_data() -> None:
    """Let values say from now on which tensors they may be the data of, and as what."""
    kind: Any = torch.Tensor
    if "data" not in vars(kind):
        kind.data = _Data()


def lend_data(tensor: torch.Tensor) -> None:
    """Note from now on what ``.data`` gives of a tensor."""
    watch_data()
    number = id(tensor)

    def forget(reference: Any) -> None:
        _lending.pop(number, None)
        LENT.pop(number, None)

    _lending[number] = weakref.ref(tensor, forget)


def is_lending(tensor: torch.Tensor) -> bool:
    """Whether what ``.data`` gives of a tensor is noted: it is of a Model that has run."""
    reference = _lending.get(id(tensor))
    return reference is not None and reference() is tensor


def is_of_model(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a Model that has run, or the gradient of one that is here."""
    if is_lending(tensor):
        return True
    held = [reference() for reference in [*_lending.values()]]
    here = [t for t in held if t is not None and not isinstance(t, StandIn)]
    with DisableTorchFunctionSubclass():  # a loop's own parameters would ask all workers
        return any(t.is_leaf and GET_GRADIENT(t) is tensor for t in here)


def is_lent_written_to(tensor: torch.Tensor) -> bool:
    """Whether what ``.data`` gave of a tensor was written to since workers compared."""
    return any(lent.is_written_to() for lent in LENT.get(id(tensor), ()))


def settle_lent(tensors: Iterable[torch.Tensor]) -> None:
    """Note that workers have compared what was written to some tensors."""
    for tensor in tensors:
        held = [lent for lent in LENT.pop(id(tensor), ()) if lent.settle()]
        if held:
            LENT[id(tensor)] = held
