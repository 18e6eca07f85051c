"""Values between workers over ``torch.distributed``: Gloo for host memory, NCCL for devices.

Each pair of workers that exchanges values gets a process group of its own, of two. It is made from
the low-level constructors, so nothing that a script does with ``torch.distributed`` itself, the
default group included, is touched or needed. The two meet over gRPC, see ``meeting``; what
they send each other then is described in ``link``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from graphsplit.errors import TransportError
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.credit import CreditedReceiver
from graphsplit.transport.session import AbortWatch, Session
from graphsplit.transport.torch.device import DeviceWire
from graphsplit.transport.torch.link import PairGroup, TorchLink
from graphsplit.transport.torch.rendezvous import MEETING_PLAN, Rendezvous
from graphsplit.transport.torch.sender import TorchSender
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
