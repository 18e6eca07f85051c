"""The link of two workers over ``torch.distributed``: one ordered stream in each direction.

Whatever worker A sends to worker B, values of all channels and credits alike, goes through one
stream of messages with one tag. B posts the receives of that tag ahead, and whoever of B's threads
reads files what arrives by channel::

    A's program   send(x) ── copy ──► message ══ Gloo, tag 0 ══► B's reader ──► channel ► receive
    A's reader    ◄── credit ◄══════════════ Gloo, tag 0 ◄══════════════════════ B's program

The reader is a program that waits, or else the link's own thread; see ``turns.py``.

Each direction has a group, and so a connection, of its own. Gloo sends what is larger once it has
heard that the receive is posted: on a connection for both directions it would hear that behind
all that goes back, and two that send to each other would take turns on the cable.

So the order in which B's program receives need not be the order in which A's sends, and both may
be any order at all: nothing is matched by the order of posting, which is what deadlocks programs
that call ``send`` and ``recv`` themselves. Credits bound what is filed; see ``credit.py``.

[Note: ends of a link] A Gloo receive cannot be cancelled, and a wait that runs out of time breaks
the link. So the reader waits without limit, ``abort`` breaks the link on purpose by a wait of one
millisecond, and deadlines are kept by those who do not read. A link that closes in peace
says so and waits for the answer, because closing a Gloo pair drops what is still under way.
"""

from __future__ import annotations

import hmac
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from graphsplit.errors import FrameError, GraphsplitError, TransportError
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.credit import (
    Arrived,
    CreditedReceiver,
    CreditedSender,
    IncomingChannels,
    OutgoingChannels,
)
from graphsplit.transport.frame import MESSAGE, Frame
from graphsplit.transport.layout import copy_bytes
from graphsplit.transport.torch.device import DeviceWire
from graphsplit.transport.torch.payloads import Payloads
from graphsplit.transport.torch.turns import Turns
from graphsplit.transport.torch.wire import (
    ABORT_TAG,
    FOREVER,
    MESSAGE_TAG,
    PAYLOAD_TAG,
    PIECE_BYTES,
    MessageBuffer,
    RecordKind,
    WireRecord,
    octets,
)
from graphsplit.transport.torch.writer import Writer

FLUSH_S = 5.0
"""The time that ``close`` gives a healthy peer to take what was sent already."""

_NUM_POSTED = 4  # receives of messages, so that a sender need not wait for one
_ABORT_AFTER = timedelta(milliseconds=1)


@dataclass(frozen=True)
class PairGroup:
    """The process groups of two, and what each of them says first.

    Attributes:
        out: Moves host memory to the peer.
        into: Moves host memory from the peer.
        device: Moves device memory; None where there is none.
        peer: The other one's rank in the groups.
        mine: What this worker says first.
        theirs: What the other one must say first.
        store: Must live as long as the groups.
    """

    out: Any
    into: Any
    device: DeviceWire | None
    peer: int
    mine: bytes
    theirs: bytes
    store: object


class _Outgoing(OutgoingChannels[CreditedSender]):
    """The channels to the peer."""

    def __init__(self, peer: int, writer: Writer, turns: Turns) -> None:
        super().__init__(peer, turns.read_until)
        self._writer = writer

    def want(self, spec: ChannelSpec) -> None:
        """See ``OutgoingChannels.want``. That the link broke is told by ``broken``."""
        with suppress(TransportError):
            self._writer.put(WireRecord(RecordKind.WANT, spec.plan, spec.edge))

    def flush(self) -> None:
        """See ``OutgoingChannels.flush``. That the link broke is told by ``broken``."""
        with suppress(TransportError):
            self._writer.flush()


class _Incoming(IncomingChannels[CreditedReceiver]):
    """The channels from the peer."""

    def __init__(self, source: int, writer: Writer, turns: Turns) -> None:
        super().__init__(source, turns.read_until)
        self._writer, self._turns = writer, turns
        self._largest = 0

    def notify(self) -> None:
        """See ``IncomingChannels.notify``."""
        super().notify()
        self._turns.nudge()

    def add(self, receiver: CreditedReceiver) -> None:
        """See ``IncomingChannels.add``."""
        self._largest = max(self._largest, receiver.spec.max_bytes)
        super().add(receiver)

    def grant(self, spec: ChannelSpec, messages: int) -> None:
        """See ``IncomingChannels.grant``. On a broken link nobody needs credit any more."""
        with suppress(TransportError):
            self._writer.put(WireRecord(RecordKind.CREDIT, spec.plan, spec.edge, messages))

    def scratch(self, size_bytes: int) -> torch.Tensor:
        """Memory for what was under way when its plan was closed, within what plans allow."""
        if size_bytes > self._largest:
            raise FrameError(f"a payload of {size_bytes} bytes; at most {self._largest} are open")
        return torch.empty(size_bytes, dtype=torch.uint8)


class TorchLink:
    """Both directions between this worker and a peer. Thread-safe.

    Args:
        peer: The other worker.
        connect: Makes the process group; runs on the link's thread, and may wait for the peer.
            It calls what it is given as soon as the peer is there, which raises if this end left.

    Attributes:
        peer: The other worker.
        outgoing: The channels to it.
        incoming: The channels from it.
        writer: Writes to it.
    """

    def __init__(self, peer: int, connect: Callable[[Callable[[], None]], PairGroup]) -> None:
        self.peer = peer
        self.writer = Writer()
        name = f"graphsplit-torch-{peer}"
        self._payloads = Payloads(f"{name}-payloads", self._end)
        self._turns = Turns(self._read, self.abort, self._ping, self._payloads.are_under_way)
        self.outgoing = _Outgoing(peer, self.writer, self._turns)
        self.incoming = _Incoming(peer, self.writer, self._turns)
        self._connect = connect
        self._group: PairGroup | None = None
        self._posted: deque[MessageBuffer] = deque()
        self._lock = threading.Lock()  # of the two below
        self._is_leaving = self._has_met = False
        self._is_made = threading.Event()  # or never will be
        self._is_closing = False
        self._peer_left = False
        self._is_pinged = False
        self._peer_has_read = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to connect; what is granted and sent meanwhile waits for that."""
        self._thread.start()

    def notify(self) -> None:
        """Make every thread that waits for the peer look around."""
        self.outgoing.notify()
        self.incoming.notify()

    def remove_plan(self, plan: int | None) -> None:
        """Close the channels of a plan; of all plans for None."""
        self.incoming.remove_plan(plan)
        self.outgoing.remove_plan(plan)
        self._turns.nudge()

    def put_owed(self) -> None:
        """Have credits that are owed ride along with what is written next."""
        for plan, edge, messages in self.incoming.owed():
            self.writer.put(WireRecord(RecordKind.CREDIT, plan, edge, messages), hold=True)

    def put_device(self, record: WireRecord, payload: torch.Tensor) -> None:
        """Write a record, and send its payload from device to device."""
        group = self._group
        if group is None or group.device is None:
            raise TransportError("a value on a device, and no link between devices")
        with group.device.lock:
            self.writer.put(record)
            group.device.send(payload)

    def say_goodbye(self) -> None:
        """Tell the peer that nothing more will come; it answers when it has read everything.

        Two that have begun to make their group end that first: Gloo cannot be told to stop, and
        would wait for the one that left.
        """
        with self._lock:
            self._is_leaving = True
        if self._has_met:
            self._is_made.wait(FLUSH_S)
        if self._group is None or self.outgoing.broken is not None:
            self._peer_has_read.set()
            return
        try:
            self.writer.put(WireRecord(RecordKind.BYE))
        except TransportError:
            self._peer_has_read.set()

    def close(self, *, flush: bool) -> None:
        """End the link; with ``flush``, after the answer to ``say_goodbye``."""
        if flush:
            self._peer_has_read.wait(FLUSH_S)
        self._is_closing = True
        self._turns.end()
        self.remove_plan(None)
        self.abort()
        self._thread.join(FLUSH_S)
        self._payloads.stop(FLUSH_S)
        self.writer.stop()
        self._group = None

    def abort(self) -> None:
        """Break the link, whoever waits for it."""
        group = self._group
        if group is None:
            return
        nothing = torch.empty(1, dtype=torch.uint8)
        for stream in (group.into, group.out):
            with suppress(RuntimeError):
                stream.recv([nothing], group.peer, ABORT_TAG).wait(_ABORT_AFTER)
        if group.device is not None:
            group.device.abort()

    def abandon(self, why: str) -> None:
        """Abandon the peer: Gloo would wait for ever for one that is out of reach."""
        self.incoming.end(TransportError(why))
        self.outgoing.fail(why)
        self.abort()

    def _ping(self) -> None:
        """Have the peer say something, unless it has been asked to already."""
        if not self._is_pinged:
            self._is_pinged = True
            with suppress(TransportError):
                self.writer.put(WireRecord(RecordKind.PING))

    # Everything below runs on the thread, or on that of a program that reads.

    def _meet(self) -> None:
        """The peer is there: from here on the group is made, whoever leaves."""
        with self._lock:
            if self._is_leaving:
                raise TransportError("the transport was closed")
            self._has_met = True

    def _run(self) -> None:
        try:
            group = self._connect(self._meet)
            for _ in range(_NUM_POSTED):
                self._post(group, MessageBuffer())
            self._group = group
            self.writer.start(
                group.out, group.peer, WireRecord(RecordKind.PROOF, header=group.mine)
            )
            self._is_made.set()
            if self._is_closing:
                raise TransportError("closed its end")
            self._check_proof(group)
            del group
        except Exception as raised:
            self._end(raised)
        self._turns.stand_by()
        self._posted.clear()

    def _post(self, group: PairGroup, message: MessageBuffer) -> None:
        message.work = group.into.recv([message.memory], group.peer, MESSAGE_TAG)
        self._posted.append(message)

    def _next(self) -> MessageBuffer:
        message = self._posted.popleft()
        message.work.wait(FOREVER)
        return message

    def _check_proof(self, group: PairGroup) -> None:
        """Both groups lead to the peer: nothing is read before that is known, and no value sent."""
        mine = torch.frombuffer(bytearray(group.mine), dtype=torch.uint8)
        theirs = torch.empty_like(mine)
        heard = group.out.recv([theirs], group.peer, MESSAGE_TAG)
        told = group.into.send([mine], group.peer, MESSAGE_TAG)
        message = self._next()
        record = message.read()[0][0]
        proof = record.header if record.kind is RecordKind.PROOF else b""
        is_peer = hmac.compare_digest(proof, group.theirs)
        if is_peer:
            heard.wait(FOREVER)
            is_peer = hmac.compare_digest(theirs.numpy().tobytes(), group.theirs)
        if not is_peer:
            raise FrameError(f"worker {self.peer}: a stranger answered in its place")
        told.wait(FOREVER)
        self._post(group, message)

    def _read(self) -> None:
        """Read one message. Whoever is interrupted here has lost it, and so ends the link."""
        group = self._group
        try:
            if group is None:
                raise TransportError("closed its end")
            message = self._next()
            if torch.is_inference_mode_enabled():  # what comes may be another thread's
                with torch.inference_mode(False):
                    self._take_all(group, message)
            else:
                self._take_all(group, message)
            self._post(group, message)
        except (GraphsplitError, RuntimeError) as raised:
            self._end(raised)
        except BaseException:  # by the handler of a signal
            self._end(TransportError("reading it was interrupted"))
            raise

    def _take_all(self, group: PairGroup, message: MessageBuffer) -> None:
        for record, address in message.read():
            self._take(group, record, address)

    def _take(self, group: PairGroup, record: WireRecord, address: int) -> None:
        if record.kind is RecordKind.SMALL:
            self._take_value(group, record, address)
        elif record.kind is RecordKind.CREDIT:
            self.outgoing.granted(record.plan, record.edge, record.number)
        elif record.kind is RecordKind.WANT:
            self.incoming.wanted(record.plan, record.edge)
        elif record.kind is RecordKind.BYE:
            self._payloads.after((), self._post_piece, self._answer_goodbye)
        elif record.kind is RecordKind.READ:
            self._peer_has_read.set()
        elif record.kind is RecordKind.PING:
            self.writer.put(WireRecord(RecordKind.PONG))
        elif record.kind is RecordKind.PONG:
            self._is_pinged = False
        elif record.kind is RecordKind.PROOF:
            raise FrameError(f"worker {self.peer} said twice who it is")
        else:
            self._take_value(group, record, address)

    def _answer_goodbye(self) -> None:
        self._peer_left = True
        self.writer.put(WireRecord(RecordKind.READ))

    def _take_value(self, group: PairGroup, record: WireRecord, address: int) -> None:
        receiver = self.incoming.find(record.plan, record.edge)
        if receiver is None:
            self._drop(group, record)
            return
        frame = receiver.begin(record.header)
        if frame.payload_bytes != record.payload_bytes:
            raise FrameError(
                f"worker {self.peer} announced {record.payload_bytes} bytes of payload; "
                f"expected {frame.payload_bytes}"
            )
        message, pieces = self._message(group, receiver, frame, record, address)
        self._payloads.after(pieces, self._post_piece, partial(receiver.file, message))

    def _drop(self, group: PairGroup, record: WireRecord) -> None:
        """Receive what was under way when its plan was closed, and forget it."""
        if record.kind is RecordKind.SMALL:
            return
        scratch = self.incoming.scratch(record.payload_bytes)
        if record.kind is RecordKind.LARGE:
            self._payloads.after(_pieces(scratch), self._post_piece, scratch.numel)  # and hold it
        elif group.device is not None:
            group.device.drop(scratch)

    def _message(
        self,
        group: PairGroup,
        receiver: CreditedReceiver,
        frame: Frame,
        record: WireRecord,
        address: int,
    ) -> tuple[Arrived, Sequence[torch.Tensor]]:
        """The message of a checked header, and the memory that is still to be received."""
        is_on_device = frame.device != "cpu" and frame.payload_bytes > 0
        if is_on_device != (record.kind is RecordKind.DEVICE):
            raise FrameError(f"worker {self.peer} sent to host memory what is on a device")
        if group.device is not None and is_on_device:
            return group.device.receive(record.header, frame), ()
        memory = self.incoming.memory_for(receiver, frame)
        message = Arrived(MESSAGE.unpack_from(record.header), frame, memory)
        if memory is None or record.kind is RecordKind.LARGE:
            return message, () if memory is None else _pieces(octets(memory, frame.payload_bytes))
        copy_bytes(memory.data_ptr(), address, frame.payload_bytes)
        return message, ()

    def _post_piece(self, piece: torch.Tensor) -> Any:
        group = self._group
        if group is None:
            raise TransportError("closed its end")
        return group.into.recv([piece], group.peer, PAYLOAD_TAG)

    def _end(self, raised: Exception) -> None:
        if self._peer_left or self._is_closing:
            error: Exception = TransportError("closed its end")
        elif isinstance(raised, GraphsplitError):
            error = raised
        else:
            # Whatever torch raises here (it has no base class for it): the link ended.
            error = TransportError(_reason(raised))
        # Its frames hold the group, and the group holds sockets.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self._turns.end()
        self._is_made.set()
        self._peer_has_read.set()
        self.incoming.end(error)
        self.outgoing.fail(str(error))
        self.abort()


def _reason(error: Exception) -> str:
    """Gloo's words, without the path of its sources."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"the link broke: {first.rpartition('] ')[2] or first}"


def _pieces(memory: torch.Tensor) -> list[torch.Tensor]:
    return [memory[at : at + PIECE_BYTES] for at in range(0, memory.numel(), PIECE_BYTES)]
