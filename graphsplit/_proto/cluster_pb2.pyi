from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MeetingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEETING_UNSPECIFIED: _ClassVar[MeetingKind]
    MEETING_BARRIER: _ClassVar[MeetingKind]
    MEETING_AGREEMENT: _ClassVar[MeetingKind]
    MEETING_FINISH: _ClassVar[MeetingKind]
MEETING_UNSPECIFIED: MeetingKind
MEETING_BARRIER: MeetingKind
MEETING_AGREEMENT: MeetingKind
MEETING_FINISH: MeetingKind

class WorkerMessage(_message.Message):
    __slots__ = ("register", "heartbeat", "arrive", "text", "failed", "leave", "ready", "rejoin", "fence")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ARRIVE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REJOIN_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    register: Register
    heartbeat: Heartbeat
    arrive: Arrive
    text: Text
    failed: Cause
    leave: Leave
    ready: Ready
    rejoin: Rejoin
    fence: Fence
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., arrive: _Optional[_Union[Arrive, _Mapping]] = ..., text: _Optional[_Union[Text, _Mapping]] = ..., failed: _Optional[_Union[Cause, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., rejoin: _Optional[_Union[Rejoin, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("accepted", "refused", "formed", "progress", "departed", "text_wanted", "failure_noted", "abort", "started", "recovering", "stop_soon", "fence")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_WANTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_NOTED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    STOP_SOON_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    refused: Refused
    formed: Formed
    progress: Progress
    departed: Departed
    text_wanted: TextWanted
    failure_noted: FailureNoted
    abort: Cause
    started: Started
    recovering: Recovering
    stop_soon: StopSoon
    fence: Fence
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., formed: _Optional[_Union[Formed, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., departed: _Optional[_Union[Departed, _Mapping]] = ..., text_wanted: _Optional[_Union[TextWanted, _Mapping]] = ..., failure_noted: _Optional[_Union[FailureNoted, _Mapping]] = ..., abort: _Optional[_Union[Cause, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., recovering: _Optional[_Union[Recovering, _Mapping]] = ..., stop_soon: _Optional[_Union[StopSoon, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("job", "generation", "incarnation", "number")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    incarnation: str
    number: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("job", "generation", "rank", "num_departed")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_DEPARTED_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    rank: int
    num_departed: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., num_departed: _Optional[int] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("node_id", "incarnation", "role", "num_workers", "wished_rank", "host", "pid", "endpoints", "versions", "script_digest", "num_threads", "cpu_capability", "seed", "recovery", "resume", "attempt")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WISHED_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SCRIPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    CPU_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    role: str
    num_workers: int
    wished_rank: int
    host: str
    pid: int
    endpoints: _containers.ScalarMap[str, str]
    versions: _containers.ScalarMap[str, str]
    script_digest: str
    num_threads: int
    cpu_capability: str
    seed: int
    recovery: str
    resume: Resume
    attempt: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., num_workers: _Optional[int] = ..., wished_rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., endpoints: _Optional[_Mapping[str, str]] = ..., versions: _Optional[_Mapping[str, str]] = ..., script_digest: _Optional[str] = ..., num_threads: _Optional[int] = ..., cpu_capability: _Optional[str] = ..., seed: _Optional[int] = ..., recovery: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("progress", "position", "watched", "location", "wants_stop", "calls", "training")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WATCHED_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    WANTS_STOP_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    progress: int
    position: str
    watched: _containers.RepeatedScalarFieldContainer[int]
    location: Location
    wants_stop: bool
    calls: CallsMade
    training: str
    def __init__(self, progress: _Optional[int] = ..., position: _Optional[str] = ..., watched: _Optional[_Iterable[int]] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., wants_stop: _Optional[bool] = ..., calls: _Optional[_Union[CallsMade, _Mapping]] = ..., training: _Optional[str] = ...) -> None: ...

class CallMade(_message.Message):
    __slots__ = ("name", "source", "milestones")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MILESTONES_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    milestones: int
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., milestones: _Optional[int] = ...) -> None: ...

class CallsMade(_message.Message):
    __slots__ = ("num", "milestones", "latest", "within")
    NUM_FIELD_NUMBER: _ClassVar[int]
    MILESTONES_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    WITHIN_FIELD_NUMBER: _ClassVar[int]
    num: int
    milestones: int
    latest: _containers.RepeatedCompositeFieldContainer[CallMade]
    within: CallMade
    def __init__(self, num: _Optional[int] = ..., milestones: _Optional[int] = ..., latest: _Optional[_Iterable[_Union[CallMade, _Mapping]]] = ..., within: _Optional[_Union[CallMade, _Mapping]] = ...) -> None: ...

class Arrive(_message.Message):
    __slots__ = ("kind", "name", "digest", "number")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    kind: MeetingKind
    name: str
    digest: str
    number: int
    def __init__(self, kind: _Optional[_Union[MeetingKind, str]] = ..., name: _Optional[str] = ..., digest: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class Rejoin(_message.Message):
    __slots__ = ("generation", "endpoints")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    endpoints: _containers.ScalarMap[str, str]
    def __init__(self, generation: _Optional[int] = ..., endpoints: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("name", "chunk", "last")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    name: str
    chunk: bytes
    last: bool
    def __init__(self, name: _Optional[str] = ..., chunk: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("job", "recovery", "keeps_journal")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    KEEPS_JOURNAL_FIELD_NUMBER: _ClassVar[int]
    job: str
    recovery: str
    keeps_journal: bool
    def __init__(self, job: _Optional[str] = ..., recovery: _Optional[str] = ..., keeps_journal: _Optional[bool] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("rank", "node_id", "incarnation", "host", "pid", "endpoints")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node_id: str
    incarnation: str
    host: str
    pid: int
    endpoints: _containers.ScalarMap[str, str]
    def __init__(self, rank: _Optional[int] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., endpoints: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Formed(_message.Message):
    __slots__ = ("rank", "job", "generation", "seed", "peers", "warnings")
    RANK_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    job: str
    generation: int
    seed: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., seed: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class StopSoon(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Recovering(_message.Message):
    __slots__ = ("generation", "cause")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    cause: Cause
    def __init__(self, generation: _Optional[int] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[int, int]
    def __init__(self, values: _Optional[_Mapping[int, int]] = ...) -> None: ...

class Departed(_message.Message):
    __slots__ = ("kind", "name", "number")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    kind: MeetingKind
    name: str
    number: int
    def __init__(self, kind: _Optional[_Union[MeetingKind, str]] = ..., name: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class TextWanted(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class FailureNoted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cause(_message.Message):
    __slots__ = ("kind", "message", "rank", "host", "pid", "position", "traceback", "location")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    rank: int
    host: str
    pid: int
    position: str
    traceback: str
    location: Location
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., position: _Optional[str] = ..., traceback: _Optional[str] = ..., location: _Optional[_Union[Location, _Mapping]] = ...) -> None: ...

class Location(_message.Message):
    __slots__ = ("step", "microbatch", "instruction", "operation", "module", "source", "edge", "waits_for", "waits_what")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EDGE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITS_WHAT_FIELD_NUMBER: _ClassVar[int]
    step: int
    microbatch: int
    instruction: str
    operation: str
    module: str
    source: str
    edge: int
    waits_for: int
    waits_what: str
    def __init__(self, step: _Optional[int] = ..., microbatch: _Optional[int] = ..., instruction: _Optional[str] = ..., operation: _Optional[str] = ..., module: _Optional[str] = ..., source: _Optional[str] = ..., edge: _Optional[int] = ..., waits_for: _Optional[int] = ..., waits_what: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "phase", "generation", "num_workers", "seconds", "workers", "cause", "num_refused", "num_recoveries", "recovery")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    job: str
    phase: str
    generation: int
    num_workers: int
    seconds: float
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    cause: Cause
    num_refused: int
    num_recoveries: int
    recovery: str
    def __init__(self, job: _Optional[str] = ..., phase: _Optional[str] = ..., generation: _Optional[int] = ..., num_workers: _Optional[int] = ..., seconds: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., cause: _Optional[_Union[Cause, _Mapping]] = ..., num_refused: _Optional[int] = ..., num_recoveries: _Optional[int] = ..., recovery: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("rank", "node_id", "host", "pid", "state", "progress", "position", "location", "meets_at", "heard_s", "still_s", "training")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    MEETS_AT_FIELD_NUMBER: _ClassVar[int]
    HEARD_S_FIELD_NUMBER: _ClassVar[int]
    STILL_S_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node_id: str
    host: str
    pid: int
    state: str
    progress: int
    position: str
    location: Location
    meets_at: str
    heard_s: float
    still_s: float
    training: str
    def __init__(self, rank: _Optional[int] = ..., node_id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., progress: _Optional[int] = ..., position: _Optional[str] = ..., location: _Optional[_Union[Location, _Mapping]] = ..., meets_at: _Optional[str] = ..., heard_s: _Optional[float] = ..., still_s: _Optional[float] = ..., training: _Optional[str] = ...) -> None: ...
