from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepTicket(_message.Message):
    __slots__ = ("step", "end", "signature_digest", "signature_text", "fingerprint", "previous_fingerprint", "microbatches", "loss_weights", "generator", "last", "python_generator", "numpy_generator", "loader_changed", "recording", "lifted", "changed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_TEXT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    LOSS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PYTHON_GENERATOR_FIELD_NUMBER: _ClassVar[int]
    NUMPY_GENERATOR_FIELD_NUMBER: _ClassVar[int]
    LOADER_CHANGED_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    LIFTED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    step: int
    end: bool
    signature_digest: str
    signature_text: str
    fingerprint: int
    previous_fingerprint: int
    microbatches: _containers.RepeatedCompositeFieldContainer[MicrobatchRun]
    loss_weights: _containers.RepeatedScalarFieldContainer[float]
    generator: bytes
    last: bool
    python_generator: bytes
    numpy_generator: bytes
    loader_changed: bool
    recording: int
    lifted: _containers.RepeatedScalarFieldContainer[float]
    changed: _containers.RepeatedCompositeFieldContainer[ChangedPlace]
    def __init__(self, step: _Optional[int] = ..., end: _Optional[bool] = ..., signature_digest: _Optional[str] = ..., signature_text: _Optional[str] = ..., fingerprint: _Optional[int] = ..., previous_fingerprint: _Optional[int] = ..., microbatches: _Optional[_Iterable[_Union[MicrobatchRun, _Mapping]]] = ..., loss_weights: _Optional[_Iterable[float]] = ..., generator: _Optional[bytes] = ..., last: _Optional[bool] = ..., python_generator: _Optional[bytes] = ..., numpy_generator: _Optional[bytes] = ..., loader_changed: _Optional[bool] = ..., recording: _Optional[int] = ..., lifted: _Optional[_Iterable[float]] = ..., changed: _Optional[_Iterable[_Union[ChangedPlace, _Mapping]]] = ...) -> None: ...

class ChangedPlace(_message.Message):
    __slots__ = ("place", "value")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    place: str
    value: str
    def __init__(self, place: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class MicrobatchRun(_message.Message):
    __slots__ = ("signature_digest", "signature_text", "count")
    SIGNATURE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_TEXT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    signature_digest: str
    signature_text: str
    count: int
    def __init__(self, signature_digest: _Optional[str] = ..., signature_text: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
