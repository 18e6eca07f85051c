"""Values between workers of different hosts, over gRPC streams.

A source opens one stream to each of its destinations. Channels share it without delaying each
other, because nothing is written that the receiver has no room for::

    source                                          destination
    Hello (metadata)                             ->  refused unless it is a member of the job
                                                <-  Credit: depth, when a channel is opened
    Chunk header and first piece, Chunk ...      ->  checked, then written into the new value
                                                <-  Credit: 1, when the value was taken

Nothing here is a surprise to the receiver: a channel without credit, an unknown channel, or a
header that differs from the plan breaks the stream before any memory is taken.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import grpc

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError, TransportError
from graphsplit.transport._grpc_inbound import GrpcReceiver, Inbound
from graphsplit.transport._grpc_listener import HELLO_KEY, GrpcListener
from graphsplit.transport._grpc_outbound import GrpcSender, Outbound
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.session import AbortWatch, Hello, Session
from graphsplit.transport.wait import WaitPolicy


def _hello_of(context: Any) -> Hello | None:
    """The hello in a stream's metadata, or None if there is none."""
    raw = dict(context.invocation_metadata()).get(HELLO_KEY, b"")
    try:
        message = pb.Hello.FromString(raw)
    except Exception:
        # protobuf's DecodeError; whatever it is, a stranger sent it.
        return None
    return Hello(
        message.job, message.generation, message.source, message.destination, message.token
    )


class GrpcTransport(Transport):
    """Moves values over gRPC.

    Args:
        listener: The bound port, whose address the peers know. Belongs to the transport now.
        session: The job and this worker's place in it.
        targets: The address of each worker, by rank; None for those reached in another way.
        policy: The rule for every wait.
    """

    name = "grpc"

    def __init__(
        self,
        listener: GrpcListener,
        *,
        session: Session,
        targets: tuple[str | None, ...],
        policy: WaitPolicy,
    ) -> None:
        self._session = session
        self._targets = targets
        self._watch = AbortWatch(policy)
        self._lock = threading.Lock()
        self._closed = False
        self._inbound = [Inbound(source) for source in range(len(targets))]
        self._outbound: dict[int, Outbound] = {}
        self._readers: list[threading.Thread] = []
        self._listener = listener
        mine = weakref.ref(self)

        def wake() -> None:
            alive = mine()
            if alive is not None:
                alive._wake()

        policy.abort.add_waker(wake)
        listener.serve(self._carry)

    def open_sender(self, spec: ChannelSpec) -> Sender:
        """See ``Transport.open_sender``."""
        with self._lock:
            outbound = self._outbound.get(spec.destination)
            if outbound is None:
                target = self._targets[spec.destination]
                assert target is not None, "the hub routes only reachable peers here"
                outbound = Outbound(spec.destination, target, self._session)
                self._outbound[spec.destination] = outbound
        sender = GrpcSender(spec, outbound, self._watch, self._session.generation)
        outbound.add(sender)
        return sender

    def open_receiver(self, spec: ChannelSpec) -> Receiver:
        """See ``Transport.open_receiver``. Does not wait: the source waits for credit."""
        inbound = self._inbound[spec.source]
        receiver = GrpcReceiver(spec, inbound, self._watch, self._session.generation)
        inbound.add(receiver)
        return receiver

    def close_plan(self, plan: int) -> None:
        """See ``Transport.close_plan``."""
        for inbound in self._inbound:
            inbound.remove_plan(plan)
        for outbound in self._outbound.values():
            outbound.remove_plan(plan)

    def close(self) -> None:
        """See ``Transport.close``. What was sent still arrives, unless the job was aborted."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        flush = not self._watch.aborted.is_set()
        for outbound in self._outbound.values():
            outbound.close(flush=flush)
        for inbound in self._inbound:
            inbound.remove_plan(None)
            inbound.end(TransportError("the transport was closed"))
        self._listener.close()
        for reader in self._readers:
            reader.join()

    def _wake(self) -> None:
        for inbound in self._inbound:
            inbound.notify()
        for outbound in list(self._outbound.values()):
            outbound.notify()

    def _carry(self, chunks: Iterator[pb.Chunk], context: Any) -> Iterator[pb.Credit]:
        """Serve the stream of one source; runs on a thread of the server."""
        hello = _hello_of(context)
        reason = "no hello" if hello is None else self._session.refusal_of(hello)
        if hello is None or reason is not None:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        assert hello is not None
        inbound = self._inbound[hello.source]
        if not inbound.connect():
            reason = f"worker {hello.source} is connected already"
            context.abort(grpc.StatusCode.ALREADY_EXISTS, reason)
        name = f"graphsplit-grpc-read-{hello.source}"
        reader = threading.Thread(target=inbound.read, args=(chunks,), name=name, daemon=True)
        self._readers.append(reader)
        reader.start()
        yield from inbound.credits()
        if isinstance(inbound.broken, FrameError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(inbound.broken))
