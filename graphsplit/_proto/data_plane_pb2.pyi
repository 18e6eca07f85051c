from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("generation", "source", "destination")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    source: int
    destination: int
    def __init__(self, generation: _Optional[int] = ..., source: _Optional[int] = ..., destination: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("plan", "edge", "header", "payload", "proof", "credits", "waits", "companions")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EDGE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    COMPANIONS_FIELD_NUMBER: _ClassVar[int]
    plan: int
    edge: int
    header: bytes
    payload: bytes
    proof: bytes
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    waits: bool
    companions: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, plan: _Optional[int] = ..., edge: _Optional[int] = ..., header: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ..., waits: _Optional[bool] = ..., companions: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("plan", "edge", "messages")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EDGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    plan: int
    edge: int
    messages: int
    def __init__(self, plan: _Optional[int] = ..., edge: _Optional[int] = ..., messages: _Optional[int] = ...) -> None: ...
