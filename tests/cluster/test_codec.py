from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from graphsplit.cluster.member.identity import bounded
from graphsplit.cluster.status.job_status import JobStatus
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.codec import (
    encode_fence,
    encode_plan,
    encode_scheduler,
    encode_worker,
    open_scheduler,
    open_worker,
)
from graphsplit.cluster.wire.messages import (
    Abort,
    Accepted,
    Arrive,
    Departed,
    Failed,
    FailureNoted,
    Fence,
    Formed,
    Heartbeat,
    Leave,
    MeetingKind,
    Peer,
    Progress,
    Ready,
    Recovering,
    Refused,
    Rejoin,
    Resume,
    SchedulerMessage,
    Started,
    Text,
    TextWanted,
    WorkerMessage,
)
from graphsplit.encoding.fields import AtMost, MessageError
from graphsplit.failure import FailureCause
from graphsplit.root_cause import JOINED

CAUSE = FailureCause("exception", "no\nreally", 3, "host", 12, "step 1", "Traceback\n  x")


def decode_worker(data):
    return open_worker(data)[1]


def decode_scheduler(data):
    return open_scheduler(data)[1]


def told(_kind, **message):
    return json.dumps({"kind": _kind, "message": message}).encode() + b"\n"


PEERS = tuple(Peer(rank, str(rank), "life", "host", 7, {"grpc": "h:1"}) for rank in range(2))


def test_every_message_of_a_worker_survives_the_wire(registration):
    messages = [
        registration("3", seed=0),
        registration("a", endpoints={}),
        Heartbeat(2**64 - 1, "step 1\nhere"),
        Arrive(MeetingKind.BARRIER, "x"),
        Arrive(MeetingKind.AGREEMENT, "x", "f" * 64),
        Arrive(MeetingKind.FINISH),
        Text("x", b"\xff\x00"),
        Failed(CAUSE),
        Heartbeat(3, "here", watched=(0, 1023)),
        Ready(2),
        Rejoin(3, {"grpc": "h:1"}),
        registration("3", recovery="restart", resume=Resume("job", 2, 3, 17)),
        Leave(),
    ]
    for message in messages:
        assert decode_worker(encode_worker(message)) == message


def test_every_message_of_the_scheduler_survives_the_wire():
    messages = [
        Accepted("ab" * 16, "wait_rejoin", keeps_journal=True),
        Refused("because\n  Fix: x"),
        Formed(1, "ab" * 16, 1, 2**63 - 1, PEERS, ("careful",)),
        Started(3),
        Recovering(4, CAUSE),
        Recovering(5, FailureCause(JOINED, "worker '1' has come")),
        Formed(1, "ab" * 16, 2, 7, (PEERS[0], replace(PEERS[1], rank=5)), ()),
        Progress({0: 1, 2: 3}),
        Departed(MeetingKind.FINISH),
        TextWanted("x"),
        FailureNoted(),
        Abort(CAUSE),
    ]
    for message in messages:
        assert decode_scheduler(encode_scheduler(message)) == message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node_id": ""}, "node_id is missing"),
        ({"node_id": "x" * 129}, "node_id has 129 characters, more than 128"),
        ({"node_id": "a\nb"}, "node_id has characters that cannot be printed"),
        ({"incarnation": ""}, "incarnation is missing"),
        ({"role": ""}, "role is missing"),
        ({"num_workers": 0}, "num_workers is 0, not 1 to 1024"),
        ({"host": ""}, "host is missing"),
        ({"host": "h" * 256}, "host has 256 characters"),
        ({"pid": 0}, "pid is 0"),
        ({"endpoints": {str(n): "x" for n in range(17)}}, "endpoints has 17 entries"),
        ({"endpoints": {"grpc": "x" * 513}}, "endpoints\\['grpc'\\] has 513 characters"),
        ({"versions": {"k" * 129: "1"}}, "versions: a key has 129 characters"),
        ({"script_digest": "d" * 129}, "script_digest has 129 characters"),
    ],
)
def test_a_registration_that_lacks_a_field_or_breaks_a_bound_is_refused(
    registration, changes, reason
):
    with pytest.raises(MessageError, match=reason):
        decode_worker(encode_worker(registration("0", **changes)))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Heartbeat(1, "x" * 2001), "position has 2001 characters"),
        (Arrive(MeetingKind.BARRIER, ""), "name is missing"),
        (Arrive(MeetingKind.BARRIER, "x" * 129), "name has 129 characters"),
        (Arrive(MeetingKind.AGREEMENT, "x", "f"), "SHA-256"),
        (Text("x", bytes(limits.MAX_TEXT_BYTES + 1)), "text has 1048577 bytes"),
        (Failed(FailureCause("whim", "x")), "the kind of failure 'whim' is not known"),
        (Failed(FailureCause("lost", "x", rank=5000)), "rank is 5000, not -1 to 1023"),
        (Failed(FailureCause("lost", "x", traceback="x" * 64_001)), "traceback has 64001"),
    ],
)
def test_other_messages_keep_their_bounds_too(message, reason):
    with pytest.raises(MessageError, match=reason):
        decode_worker(encode_worker(message))


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x7f", b"GET / HTTP/1.1\r\n\r\n"])
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(MessageError):
        decode_worker(data)
    with pytest.raises(MessageError):
        decode_scheduler(data)


def test_an_empty_message_and_an_unknown_place_are_refused():
    with pytest.raises(MessageError, match="the message is empty"):
        decode_worker(b"")
    for kind in ("PICNIC", 0, None, []):
        with pytest.raises(MessageError, match=r"the MeetingKind .* is not known"):
            decode_worker(told("Arrive", kind=kind, name="x", digest="", number=1))


def test_a_field_of_another_version_is_refused_wherever_it_is(registration):
    with pytest.raises(MessageError, match="the message: colour is not expected"):
        decode_worker(encode_worker(registration("0")) + b'{"colour": 1}\n')
    with pytest.raises(MessageError, match="Ready: colour is not expected"):
        decode_worker(told("Ready", generation=1, colour=1))
    with pytest.raises(MessageError, match="Ready: peers is not expected"):
        decode_worker(encode_worker(Ready(1)) + encode_plan(PEERS))
    beat = json.loads(encode_worker(Heartbeat(1)))["message"]
    beat["location"]["colour"] = 1
    with pytest.raises(MessageError, match="Heartbeat: location: colour is not expected"):
        decode_worker(told("Heartbeat", **beat))


def test_a_formation_that_contradicts_itself_is_refused():
    for formed in (Formed(2, "j", 1, 1, PEERS), Formed(0, "j", 1, 1, PEERS[::-1])):
        with pytest.raises(MessageError):
            decode_scheduler(encode_scheduler(formed))


def test_what_a_worker_reports_is_cut_to_the_bounds_first():
    cause = FailureCause("lost", "m\ud800" * 20_000, 1, "h" * 300, 1, "p" * 3000, "t" * 70_000)
    sent = Failed(bounded(cause))
    assert decode_worker(encode_worker(sent)) == sent
    assert sent.cause.traceback.startswith("ttt")


def test_the_longest_text_to_agree_on_fits_into_one_message():
    sent = Text("x", bytes(limits.MAX_TEXT_BYTES))
    assert len(encode_worker(sent)) < limits.MAX_WORKER_MESSAGE_BYTES
    assert decode_worker(encode_worker(sent)) == sent


def test_the_fence_travels_behind_the_message():
    fence = Fence("job", 3, "life", 9)
    data = encode_worker(Ready(3)) + encode_fence(fence)
    assert open_worker(data) == (fence, Ready(3))
    data = encode_scheduler(Started(3)) + encode_fence(fence)
    assert open_scheduler(data) == (fence, Started(3))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode_worker(Ready(0)), "generation is 0, not 1 to"),
        (told("Ready"), "Ready: generation is missing"),
        (told("Ready", generation="1"), "generation is '1', no int"),
        (told("Ready", generation=True), "generation is True, no int"),
        (told("Departed", kind="BARRIER", name="x", number=1), "kind of message .* is not known"),
        (encode_worker(Heartbeat(-1)), "progress is -1, not 0 to"),
        (encode_worker(Heartbeat(1, watched=(0,) * 65)), "watched has 65 entries"),
        (encode_worker(Heartbeat(1, watched=(1024,))), "watched: an entry is 1024"),
        (encode_worker(Arrive(MeetingKind.FINISH, number=0)), "number is 0, not 1 to"),
        (encode_fence(Fence("x")), "the kind of message None is not known"),
        (encode_worker(Ready(1)) + encode_fence(Fence("x" * 129)), "fence: job has 129"),
        (encode_worker(Ready(1)) + b'{"fence": null}\n', "fence is None, no object"),
        (told("Text", name="x", text="0x"), "text is '0x', no hexadecimal number"),
        (told("Failed", cause=None, calls={}), "cause is None, no object"),
        (encode_worker(Failed(replace(CAUSE, message="\ud800"))), "halves of characters"),
        (b'{"kind": ' + b"[" * 100_000 + b"\n", "the message is no JSON"),
        (b'{"kind": ' + b"9" * 5000 + b"}\n", "the message is no JSON"),
        (b"{}\n" * 4, "not a message of this protocol"),
        (b"{}\n{}", "not a message of this protocol"),
        (b"[]\n", "not a message of this protocol"),
        (b"\xff\n", "the message is no JSON"),
    ],
)
def test_what_the_protocol_added_is_bounded_too(data, reason):
    with pytest.raises(MessageError, match=reason):
        decode_worker(data)


def test_a_plan_may_be_encoded_in_two_parts():
    formed = Formed(1, "ab" * 16, 2, 7, PEERS, ("careful",))
    parts = encode_scheduler(replace(formed, peers=())) + encode_plan(PEERS)
    assert decode_scheduler(parts) == formed


def without_bound(hint: Any) -> list[Any]:
    """The hints in a type of message that no bound stands beside."""
    if get_origin(hint) is Annotated:
        base, kind = get_args(hint)
        inside = get_args(base) if hasattr(kind, "most") else ()
        return [found for one in inside for found in without_bound(one)]
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return [found for one in fields(hint) for found in without_bound(hints[one.name])]
    if get_origin(hint) is not None and type(None) not in get_args(hint):
        return [hint]
    parts = [found for one in get_args(hint) for found in without_bound(one)]
    return [hint] if hint in (str, int, float, bytes) else parts


@pytest.mark.parametrize(
    "kind", [*get_args(WorkerMessage), *get_args(SchedulerMessage), Fence, JobStatus]
)
def test_every_field_of_every_message_has_a_bound(kind):
    assert without_bound(kind) == []


def test_a_field_without_a_bound_would_be_found():
    assert without_bound(tuple[str, ...]) and without_bound(str | None)
    assert without_bound(Annotated[tuple[str, ...], AtMost(3)]) == [str]
