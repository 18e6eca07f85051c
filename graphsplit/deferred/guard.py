"""Keeps deferred tensors from being read as if they held something.

Between the end of `deferred_init` and `materialize` a deferred tensor is a stand-in
(``torch_ext/stand_ins.py``). Anything that needs its value fills it first, and the tensor becomes
an ordinary one again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from graphsplit.deferred.recording import InitRecording
from graphsplit.torch_ext.stand_ins import SET_DATA, StandIn, become, plain_torch, take_back

_ATTRIBUTE = "_graphsplit_recording"


class DeferredTensor(StandIn):
    """A buffer, or another tensor on deferred memory, whose value does not exist yet."""

    harmless = StandIn.harmless | {SET_DATA}

    def need_value(self, asked: str) -> None:
        """Fills the tensor, and makes it an ordinary one."""
        fill([self], because=f"{asked} needs a value")

    @classmethod
    def is_one_still(cls, tensor: torch.Tensor) -> bool:
        """Tells whether nothing has filled the tensor."""
        return is_hollow(tensor)


class DeferredParameter(DeferredTensor, torch.nn.Parameter):
    """A parameter whose memory and value do not exist yet."""


def is_guarded(value: object) -> bool:
    """Tells whether ``value`` is a deferred tensor."""
    return isinstance(value, DeferredTensor)


def recording_of(tensor: torch.Tensor) -> InitRecording | None:
    """Returns the recording that a guarded tensor's value comes from, None if it is not guarded."""
    return tensor.__dict__.get(_ATTRIBUTE)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor still has no memory; a user may have set another ``.data``."""
    recording = recording_of(tensor)
    return recording is not None and recording.number_of(tensor) is not None


def fill(tensors: Iterable[torch.Tensor], *, because: str | None = None) -> None:
    """Gives guarded tensors their memory and values."""
    by_recording: dict[InitRecording, set[int]] = {}
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


def guard(tensor: torch.Tensor, recording: InitRecording) -> None:
    """Turns a tensor into its guarded form."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    become(tensor, DeferredParameter if is_parameter else DeferredTensor)
    setattr(tensor, _ATTRIBUTE, recording)


def unguard(tensor: torch.Tensor) -> None:
    """Turns a guarded tensor into an ordinary one, whatever memory it lies on."""
    if is_guarded(tensor):
        take_back(tensor)
        tensor.__dict__.pop(_ATTRIBUTE, None)


class GuardedTensors:
    """The guarded tensors of one recording; each is let go when its storage was filled."""

    def __init__(self, recording: InitRecording) -> None:
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
