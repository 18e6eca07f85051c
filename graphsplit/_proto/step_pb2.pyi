from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StepTicket(_message.Message):
    __slots__ = ("step", "end", "signature_digest", "signature_text", "fingerprint", "previous_fingerprint", "generator")
    STEP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_TEXT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_FIELD_NUMBER: _ClassVar[int]
    step: int
    end: bool
    signature_digest: str
    signature_text: str
    fingerprint: int
    previous_fingerprint: int
    generator: bytes
    def __init__(self, step: _Optional[int] = ..., end: _Optional[bool] = ..., signature_digest: _Optional[str] = ..., signature_text: _Optional[str] = ..., fingerprint: _Optional[int] = ..., previous_fingerprint: _Optional[int] = ..., generator: _Optional[bytes] = ...) -> None: ...
