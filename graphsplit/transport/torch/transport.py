"""Values between workers over ``torch.distributed``: Gloo for host memory, NCCL for devices.

Each pair of workers that exchanges values gets a process group of its own, of two. It is made from
the low-level constructors, so nothing that a script does with ``torch.distributed`` itself, the
default group included, is touched or needed. The two meet over gRPC, see ``meeting``; what
they send each other then is described in ``link``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from graphsplit.errors import TransportError
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.credit import CreditedReceiver, CreditedSender
from graphsplit.transport.frame import Frame, describe, header_bytes
from graphsplit.transport.layout import pack
from graphsplit.transport.pool import MemoryPool
from graphsplit.transport.session import AbortWatch, Session
from graphsplit.transport.torch.device import DeviceWire
from graphsplit.transport.torch.link import PairGroup, TorchLink
from graphsplit.transport.torch.rendezvous import MEETING_PLAN, Rendezvous
from graphsplit.transport.torch.wire import (
    INLINE_BYTES,
    MAX_HEADER_BYTES,
    RecordKind,
    WireRecord,
    octets,
)
from graphsplit.transport.wait import WaitPolicy


class TorchTransport(Transport):
    """Moves values over ``torch.distributed``.

    Args:
        meetings: Reaches the same peers, and lets only members of the job in. Not closed here.
        bind_host: The address to listen on, and to be reached at.
        session: The job and this worker's place in it.
        num_workers: How many workers the job has.
        policy: The rule for every wait.
        has_device: Whether values on devices travel too, by NCCL.
    """

    name = "gloo"

    def __init__(
        self,
        meetings: Transport,
        *,
        bind_host: str,
        session: Session,
        num_workers: int,
        policy: WaitPolicy,
        has_device: bool = False,
    ) -> None:
        self._meetings = meetings
        self._bind_host = bind_host
        self._session = session
        self._num_workers = num_workers
        self._watch = AbortWatch(policy)
        self._has_device = has_device
        self._lock = threading.Lock()
        self._links: dict[int, TorchLink] = {}
        self._device: Any = None  # Gloo's: the socket it listens on, and the thread that serves it
        self._closed = False
        self._watch.call(self._abort)

    def open_sender(self, spec: ChannelSpec) -> Sender:
        """See ``Transport.open_sender``."""
        link = self._link(spec.destination)
        sender = TorchSender(spec, link, self._watch, self._session.generation)
        link.outgoing.add(sender)
        return sender

    def open_receiver(self, spec: ChannelSpec) -> Receiver:
        """See ``Transport.open_receiver``. Does not wait: the source waits for credit."""
        link = self._link(spec.source)
        receiver = CreditedReceiver(spec, link.incoming, self._watch, self._session.generation)
        link.incoming.add(receiver)
        return receiver

    def close_plan(self, plan: int) -> None:
        """See ``Transport.close_plan``."""
        for link in list(self._links.values()):
            link.remove_plan(plan)

    def close(self) -> None:
        """See ``Transport.close``. What was sent still arrives, unless the job was aborted."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        flush = not self._watch.aborted.is_set()
        links = list(self._links.values())
        if flush:
            for link in links:
                link.say_goodbye()
        # Ends the waits of links that have not met yet.
        self._meetings.close_plan(MEETING_PLAN)
        for link in links:
            link.close(flush=flush)
        self._links.clear()
        self._device = None

    def abandon(self, peer: int, why: str) -> None:
        """Abandon a peer that is out of reach, as the stream of their meeting has noticed."""
        link = self._links.get(peer)
        if link is not None:
            link.abandon(why)

    def _abort(self) -> None:
        for link in list(self._links.values()):
            link.notify()
            link.abort()

    def _link(self, peer: int) -> TorchLink:
        with self._lock:
            if self._closed:
                raise TransportError("the transport was closed")
            link = self._links.get(peer)
            if link is None:
                if self._device is None:
                    create = dist.ProcessGroupGloo.create_device
                    self._device = create(hostname=self._bind_host)
                link = self._links[peer] = TorchLink(peer, partial(self._connect, peer))
                link.start()
            return link

    def _connect(self, peer: int, meet: Callable[[], None]) -> PairGroup:
        """Meet the peer, and make the groups of two; on the link's thread."""
        mine = self._session.rank
        meeting = Rendezvous(
            self._meetings, session=self._session, peer=peer, num_workers=self._num_workers
        )
        if self._closed:  # else ``close`` ends the waits that follow
            raise TransportError("the transport was closed")
        meeting.swap_nonces()
        meet()
        out, into = meeting.gloo_groups(self._device)
        device = None
        if self._has_device:
            device = DeviceWire(meeting, torch.device("cuda", torch.cuda.current_device()))
        return PairGroup(
            out=out,
            into=into,
            device=device,
            peer=1 - meeting.rank,
            mine=meeting.proof(mine, peer),
            theirs=meeting.proof(peer, mine),
            store=meeting.store,
        )


class TorchSender(CreditedSender):
    """The sending end of a channel on a link over ``torch.distributed``."""

    def __init__(
        self, spec: ChannelSpec, link: TorchLink, watch: AbortWatch, generation: int
    ) -> None:
        super().__init__(spec, link.outgoing, watch, generation)
        if header_bytes(spec) > MAX_HEADER_BYTES:
            raise TransportError(f"{describe(spec)}: too many dimensions for this transport")
        self._link = link
        # Large payloads that the peer has not taken yet; None for each small one.
        self._under_way: deque[tuple[torch.Tensor, Any] | None] = deque()
        self._pool = MemoryPool()

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """See ``Sender.send``."""
        hold, self._holds = self._holds, False
        frame = self._encoder.frame_of(value)
        header = self._next_header(frame, step, microbatch)
        memory = None if value is None else value.detach()
        kind = RecordKind.SMALL if frame.payload_bytes <= INLINE_BYTES else RecordKind.LARGE
        if self.spec.device != "cpu" and frame.payload_bytes:
            kind = RecordKind.DEVICE
        record = WireRecord(kind, self.spec.plan, self.spec.edge, 0, header, frame.payload_bytes)
        try:
            self._link.put_owed()
            if kind is RecordKind.SMALL:
                self._send_small(record, frame, memory, hold)
            elif memory is not None:
                self._send_large(record, frame, memory)
        except TransportError as error:
            self._watch.raise_broken(f"{describe(self.spec)}: worker {self._link.peer}: {error}")

    def _send_small(
        self, record: WireRecord, frame: Frame, memory: torch.Tensor | None, hold: bool
    ) -> None:
        if memory is not None and not frame.is_payload(memory):
            memory, _ = pack(memory)
        self._under_way.append(None)
        address = 0 if memory is None else memory.data_ptr()
        self._link.writer.put(record, address=address, hold=hold)

    def _send_large(self, record: WireRecord, frame: Frame, memory: torch.Tensor) -> None:
        is_payload = frame.is_payload(memory)
        if record.kind is RecordKind.DEVICE:
            payload = octets(memory, frame.payload_bytes).clone() if is_payload else pack(memory)[0]
            self._under_way.append(None)
            self._link.put_device(record, payload)
            return
        source = octets(memory, frame.payload_bytes) if is_payload else pack(memory)[0]
        is_copied = is_payload and not self.spec.keeps
        payload = self._pool.take(frame.payload_bytes) if is_copied else source
        sends = self._link.writer.put_large(record, payload, source if is_copied else None)
        self._under_way.append((payload, sends))

    def credited(self, messages: int) -> None:
        """See ``CreditedSender.credited``."""
        for _ in range(min(messages, len(self._under_way))):
            self._under_way.popleft()
