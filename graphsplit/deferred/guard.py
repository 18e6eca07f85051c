"""Keeps deferred tensors from being read as if they held something.

Between the end of `deferred_init` and `materialize` a deferred tensor is of one of the two
classes below, by assignment to ``__class__``: the object stays the same. Asking for its shape,
registering a hook or handing it to an optimizer passes. Anything that needs its value fills it
first, and the tensor becomes an ordinary one again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from graphsplit.deferred.recording import Recording, plain_torch
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, TensorBase, pytree

_ATTRIBUTE = "_graphsplit_recording"
_VALUE_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "_cdata"})
_SETTABLE = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks", "data")
_HARMLESS_METHODS = (
    "size stride dim ndimension numel nelement element_size storage_offset is_contiguous "
    "is_floating_point is_complex is_signed __hash__ __len__ requires_grad_ "
    "register_hook register_post_accumulate_grad_hook retain_grad get_device"
)


def _harmless() -> frozenset[Any]:
    base = TensorBase
    allowed = {getattr(torch.Tensor, name) for name in _HARMLESS_METHODS.split()}
    for name in dir(torch.Tensor):
        attribute: Any = getattr(torch.Tensor, name, None)
        if type(attribute).__name__ == "getset_descriptor" and name not in _VALUE_PROPERTIES:
            allowed.add(attribute.__get__)
    allowed |= {getattr(base, name).__set__ for name in _SETTABLE}
    allowed |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}
    return frozenset(allowed)


_HARMLESS = _harmless()


def _torch_function(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    kwargs = kwargs or {}
    if func not in _HARMLESS:
        guarded = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_guarded(leaf)]
        with plain_torch():
            for tensor in guarded:
                fill([tensor], because=f"{getattr(func, '__name__', func)} needs a value")
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
    fill([self], because="deepcopy needs a value")
    return type(self).__deepcopy__(self, memo)


def _reduce_ex(self: torch.Tensor, protocol: Any) -> Any:
    fill([self], because="pickling needs a value")
    return type(self).__reduce_ex__(self, protocol)


class DeferredParameter(torch.nn.Parameter):
    """A parameter whose memory and value do not exist yet."""

    __torch_function__: ClassVar[Any] = classmethod(_torch_function)
    __deepcopy__ = _deepcopy  # These two ask for the class before they ask for a value.
    __reduce_ex__ = _reduce_ex


class DeferredTensor(torch.Tensor):
    """A buffer, or another tensor on deferred memory, whose value does not exist yet."""

    __torch_function__: ClassVar[Any] = classmethod(_torch_function)
    __deepcopy__ = _deepcopy  # These two ask for the class before they ask for a value.
    __reduce_ex__ = _reduce_ex


_GUARD_OF: dict[type, type] = {
    torch.nn.Parameter: DeferredParameter,
    torch.Tensor: DeferredTensor,
}
_PLAIN_OF = {guard: plain for plain, guard in _GUARD_OF.items()}


def can_guard(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor is of a class that has a guarded form."""
    return type(tensor) in _GUARD_OF


def is_guarded(value: object) -> bool:
    """Tells whether ``value`` is a deferred tensor."""
    return type(value) in _PLAIN_OF


def recording_of(tensor: torch.Tensor) -> Recording | None:
    """Returns the recording that a guarded tensor's value comes from, None if it is not guarded."""
    return tensor.__dict__.get(_ATTRIBUTE)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor still has no memory; a user may have set another ``.data``."""
    recording = recording_of(tensor)
    return recording is not None and recording.number_of(tensor) is not None


def fill(tensors: Iterable[torch.Tensor], *, because: str | None = None) -> None:
    """Gives guarded tensors their memory and values."""
    by_recording: dict[Recording, set[int]] = {}
    tensors = list(tensors)
    with plain_torch():
        for tensor in tensors:
            recording = recording_of(tensor)
            number = None if recording is None else recording.number_of(tensor)
            if recording is not None and number is not None:
                by_recording.setdefault(recording, set()).add(number)
        for recording, numbers in by_recording.items():
            recording.fill(numbers, because=because)
        for tensor in tensors:
            unguard(tensor)


def guard(tensor: torch.Tensor, recording: Recording) -> None:
    """Turns a tensor into its guarded form."""
    tensor.__class__ = _GUARD_OF[type(tensor)]
    setattr(tensor, _ATTRIBUTE, recording)


def unguard(tensor: torch.Tensor) -> None:
    """Turns a guarded tensor into an ordinary one, whatever memory it lies on."""
    if is_guarded(tensor):
        tensor.__class__ = _PLAIN_OF[type(tensor)]
        tensor.__dict__.pop(_ATTRIBUTE, None)


class GuardedTensors:
    """The guarded tensors of one recording; each is let go when its storage was filled."""

    def __init__(self, recording: Recording) -> None:
        self._by_storage: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._recording = weakref.ref(recording)
        recording.on_filled = self._release

    def add(self, tensor: torch.Tensor, number: int) -> None:
        """Guards a tensor that lies on the hollow storage of this number."""
        recording = self._recording()
        assert recording is not None
        guard(tensor, recording)
        self._by_storage.setdefault(number, []).append(weakref.ref(tensor))

    def _release(self, numbers: set[int]) -> None:
        recording = self._recording()
        for number in numbers:
            for reference in self._by_storage.pop(number, ()):
                tensor = reference()
                if tensor is not None and recording_of(tensor) is recording:
                    unguard(tensor)
