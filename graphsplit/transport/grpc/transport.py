"""Values between workers of different hosts, over gRPC streams.

A source opens one stream to each of its destinations. Channels share it without delaying each
other, because nothing is written that the receiver has no room for::

    source                                          destination
    Hello, nonce, first proof (metadata)         ->  refused unless its place is right
                                                <-  nonce, proof (metadata)
    Chunk proof                                  ->  refused unless it is a member of the job
    refused unless it is this destination       <-  Pull: Hello, proof (metadata)
    Chunk proof                                  ->
                                                <-  Credit: pulls
                                                <-  Credit: depth, when a channel is opened
    Chunk header and first piece, Chunk ...      ->  checked, then written into the new value
                                                <-  Credit: 1, when the value was taken

Chunks of values go as the answer to ``Pull``; see ``Puller``. Where the destination cannot call the
source back, they go by the stream itself.

Nothing here is a surprise to the receiver: a channel without credit, an unknown channel, or a
header that differs from the plan breaks the stream before any memory is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from graphsplit.errors import FrameError, TransportError
from graphsplit.security.grpc_ports import caller_of
from graphsplit.security.handshake import PROOF_KEY, Listener, Recall, entry_of
from graphsplit.security.names import why_not_worker
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.grpc.calls import HELLO_KEY, hello_of, write_hello
from graphsplit.transport.grpc.chunk import PULLS, ChunkPart, read_chunk
from graphsplit.transport.grpc.inbound import GrpcReceiver, Inbound
from graphsplit.transport.grpc.listener import PROVE_S, GrpcListener
from graphsplit.transport.grpc.outbound import GrpcSender, Outbound
from graphsplit.transport.grpc.pull import Puller
from graphsplit.transport.grpc.stream_end import StreamEnd
from graphsplit.transport.session import AbortWatch, Hello, Session
from graphsplit.transport.wait import WaitPolicy

_GONE_S = 0.02
_NO_MEMBER = "no hello of a member of this worker's job"


class _Stream:
    """One stream of some source, as the listener serves it.

    Attributes:
        inbound: Takes its messages, once the source has proved who it is.
        decided: Set once it is known whether values are pulled, or come by the stream.
    """

    def __init__(self) -> None:
        self.inbound: Inbound | None = None
        self.decided = threading.Event()

    def take(self, data: bytes) -> object:
        """A message, on grpc's polling thread; what ``_carry`` then gets of it."""
        if self.inbound is not None:
            return self.inbound.take(data)
        try:
            return read_chunk(data)
        except FrameError:
            return ChunkPart()


class GrpcTransport(Transport):
    """Moves values over gRPC.

    Args:
        listener: The bound port, whose address the peers know. Belongs to the transport now.
        session: The job and this worker's place in it.
        targets: The address of each worker, by rank; None for those reached in another way.
        policy: The rule for every wait.
        names: Under TLS, the name in each worker's certificate, by rank.

    Attributes:
        on_silence: Told of a peer from which nothing comes back any more, and why.
    """

    name = "grpc"

    def __init__(
        self,
        listener: GrpcListener,
        *,
        session: Session,
        targets: tuple[str | None, ...],
        policy: WaitPolicy,
        names: tuple[str, ...] = (),
    ) -> None:
        self._session = session
        self._targets = targets
        self._protection = listener.protection
        self._names = names
        self._watch = AbortWatch(policy)
        self._lock = threading.Lock()
        self._closed = False
        self._inbound = [
            Inbound(source, self._credit_from(source)) for source in range(len(targets))
        ]
        self._outbound: dict[int, Outbound] = {}
        self.on_silence: list[Callable[[int, str], None]] = []
        self._readers: set[threading.Thread] = set()
        self._listener = listener
        self._watch.call(self._wake)
        listener.serve(self._accept, self._answer)

    def open_sender(self, spec: ChannelSpec) -> Sender:
        """See ``Transport.open_sender``."""
        with self._lock:
            outbound = self._outbound.get(spec.destination)
            if outbound is None:
                target = self._targets[spec.destination]
                if target is None:
                    raise TransportError(f"worker {spec.destination} registered no address")
                expected = self._names[spec.destination] if self._names else ""
                outbound = Outbound(
                    spec.destination,
                    target,
                    self._session,
                    owed=self._inbound[spec.destination].owed,
                    protection=self._protection,
                    expected=expected,
                    silence_s=self._listener.silence_s,
                    on_end=self._end_both,
                )
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
        for reader in list(self._readers):
            if reader.is_alive():  # else it is about to start, on a stream that was broken
                reader.join()
        for inbound in self._inbound:
            if inbound.puller is not None:
                inbound.puller.wait()

    def _end_both(self, peer: int, end: StreamEnd) -> None:
        """The stream to a peer has ended; if it is out of reach, nothing will come from it."""
        if not end.is_silence:
            return
        self._inbound[peer].end(TransportError(end.reason))
        for tell in list(self.on_silence):
            tell(peer, end.reason)

    def _credit_from(self, peer: int) -> Callable[[int, int, int], None]:
        def take(plan: int, edge: int, messages: int) -> None:
            outbound = self._outbound.get(peer)
            if outbound is None:
                raise FrameError(f"worker {peer} gives credit for channels that are not open")
            outbound.granted(plan, edge, messages)

        return take

    def _pull(self, source: int, recall: Recall) -> None:
        """Pull the values of a source that has proved itself; or let its stream carry them."""
        inbound, target = self._inbound[source], self._targets[source]
        if target is None:
            return
        hello = replace(self._session, rank=source).hello_to(self._session.rank)
        puller = inbound.puller = Puller(
            target,
            (HELLO_KEY, write_hello(hello)),
            recall,
            inbound,
            take=inbound.take,
            protection=self._protection,
            expected=self._names[source] if self._names else "",
            silence_s=self._listener.silence_s,
            on_end=self._end_both,
        )
        # The transport may have been closed before there was anything to stop.
        if inbound.broken is not None or not puller.is_answered():
            puller.stop()
            puller.wait()
            inbound.puller = None

    def _answer(self, request: bytes, context: Any) -> Iterator[bytes]:
        """Serve a destination that pulls; runs on a thread of the server."""
        hello = hello_of(context)
        values = None
        if hello is not None and self._is_ours(hello, context):
            outbound = self._outbound.get(hello.destination)
            proof = entry_of(context.invocation_metadata(), PROOF_KEY)
            values = None if outbound is None else outbound.pulled(proof)
        if values is None:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "no stream of yours")
        assert values is not None
        self._listener.prove(context)
        return values

    def _is_ours(self, hello: Hello, context: Any) -> bool:
        """Whether a stream that somebody names is one of this worker's, to who has called."""
        mine, tls = self._session, self._protection.tls
        if (hello.generation, hello.source) != (mine.generation, mine.rank):
            return False
        return tls is None or why_not_worker(caller_of(context), hello.destination) is None

    def _wake(self) -> None:
        for inbound in self._inbound:
            inbound.notify()
        for outbound in list(self._outbound.values()):
            outbound.notify()

    def _accept(self) -> Any:
        """The handler of a new stream, which has a thread of its own."""
        stream = _Stream()
        carry = partial(self._carry, stream)
        return grpc.stream_stream_rpc_method_handler(carry, request_deserializer=stream.take)

    def _carry(self, stream: _Stream, messages: Iterator[Any], context: Any) -> Iterator[bytes]:
        """Serve the stream of one source; runs on a thread of the server."""
        hello = hello_of(context)
        reason = self._why_not(hello, context)
        if reason is not None:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        assert hello is not None
        listener = self._session.listener_to(hello.source, context.invocation_metadata())
        if not listener.is_met:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, _NO_MEMBER)
        refusal = self._start_reader(stream, hello.source, listener, messages, context)
        if refusal is not None:
            context.abort(*refusal)
        inbound = self._inbound[hello.source]
        stream.decided.wait()
        if inbound.puller is not None:
            yield PULLS
        yield from inbound.credits()
        if isinstance(inbound.broken, FrameError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(inbound.broken))

    def _why_not(self, hello: Hello | None, context: Any) -> str | None:
        """The reason to refuse who says that it is a source, or None; its certificate comes first.

        Nothing has been proved yet, so nothing is told of this worker.
        """
        if hello is None:
            return _NO_MEMBER
        why = None
        if self._protection.tls is not None:
            why = why_not_worker(caller_of(context), hello.source)
        return why or (_NO_MEMBER if self._session.misplacement_of(hello) else None)

    def _start_reader(
        self,
        stream: _Stream,
        source: int,
        listener: Listener,
        messages: Iterator[Any],
        context: Any,
    ) -> tuple[grpc.StatusCode, str] | None:
        """Have a source prove who it is, and its values read from then on; or why it is refused.

        Its place is claimed only after the proof, so that a stranger can never hold it.
        """
        inbound = self._inbound[source]
        outcome: SimpleQueue[tuple[grpc.StatusCode, str] | None] = SimpleQueue()
        is_gone = threading.Event()
        if not context.add_callback(is_gone.set):
            is_gone.set()

        def examine() -> tuple[grpc.StatusCode, str] | None:
            first = next(messages, None)
            if first is None or not listener.accepts(first.proof):
                reason = f"source: this is not worker {source}, it does not know its secret"
                return grpc.StatusCode.PERMISSION_DENIED, reason
            if not inbound.connect():
                reason = f"worker {source} is connected already"
                return grpc.StatusCode.ALREADY_EXISTS, reason
            stream.inbound = inbound
            self._listener.prove(context)
            return None

        def read() -> None:
            try:
                refusal = examine()
            except Exception:  # grpc has no base class for a stream that ends while it is read
                refusal = grpc.StatusCode.CANCELLED, "the stream ended"
            outcome.put(refusal)
            if refusal is None:
                try:
                    self._pull(source, listener.recall())
                except Exception as error:  # no thread, or no socket, was to be had
                    inbound.end(TransportError(f"its values cannot be pulled: {error}"))
                stream.decided.set()
                # A source that closes its end waits for ours; a stream that breaks is over.
                inbound.read(messages, lambda: is_gone.wait(_GONE_S))
            self._readers.discard(threading.current_thread())

        name = f"graphsplit-grpc-read-{source}"
        reader = threading.Thread(target=read, name=name, daemon=True)
        self._readers.add(reader)
        context.send_initial_metadata(listener.metadata())
        reader.start()
        try:
            return outcome.get(timeout=PROVE_S)
        except Empty:
            reason = f"source: no proof within {PROVE_S:g} s"
            return grpc.StatusCode.DEADLINE_EXCEEDED, reason
