"""A destination asks the source for all values, and one thread polls for them and takes them.

Over the stream that the source has opened, grpc hands each message from the thread that polls to
the thread that reads: one wake-up more for every value, and a thread that wants the interpreter
when the program does. An answer to a single request is polled for by the thread that reads it, if
the channel asks for that. See docs/design/0028-a-destination-pulls.md.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import grpc
from grpc.experimental import ChannelOptions

from graphsplit.errors import FrameError, TransportError
from graphsplit.security.grpc_ports import keepalive, open_channel
from graphsplit.security.handshake import PROOF_KEY, Recall
from graphsplit.security.protection import UNPROTECTED, Protection
from graphsplit.transport.credit import IncomingChannels
from graphsplit.transport.grpc.calls import DIAL_OPTIONS, PULL
from graphsplit.transport.grpc.chunk import MAX_MESSAGE_BYTES, read_chunk
from graphsplit.transport.grpc.stream_end import BROKEN, StreamEnd, end_of

PULL_S = 2.0
"""The time that a source has to answer; after it values come by the stream that it has opened."""
_SINGLE_THREADED = (ChannelOptions.SingleThreadedUnaryStream, 1)
_LARGEST = ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)


class Puller:
    """All values of one source, pulled over a connection of its own.

    Args:
        target: The source's address.
        hello: Metadata that names the stream of which this is a part.
        recall: How both ends prove themselves.
        inbound: The channels from there, which end with the connection.
        take: Takes a message for them.
        protection: What protects the connection.
        expected: Under TLS, the name in the source's certificate.
        silence_s: How long nothing may come back from the source.
        on_end: Told why the connection ended, unless all had come.
    """

    def __init__(
        self,
        target: str,
        hello: tuple[str, bytes],
        recall: Recall,
        inbound: IncomingChannels[Any],
        *,
        take: Callable[[bytes], bytes],
        protection: Protection = UNPROTECTED,
        expected: str,
        silence_s: float,
        on_end: Callable[[int, StreamEnd], None],
    ) -> None:
        self._expected = recall.dialer
        self._inbound, self._take_message = inbound, take
        self._silence_s = silence_s
        self._on_end = on_end
        self._is_proved = False
        self._is_stopped = False
        self._answered: SimpleQueue[bool] = SimpleQueue()
        options = (*DIAL_OPTIONS, *keepalive(silence_s), _SINGLE_THREADED, _LARGEST)
        self._channel = open_channel(target, protection, expected=expected, options=options)
        pull = self._channel.unary_stream(PULL, response_deserializer=self._take)
        self._call: Any = pull(b"", metadata=(hello, (PROOF_KEY, recall.listener)))
        name = f"graphsplit-grpc-pull-{inbound.source}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_answered(self) -> bool:
        """Wait until the source has proved itself; False if it does not, or not in time."""
        try:
            return self._answered.get(timeout=PULL_S)
        except Empty:
            return False

    def wait(self) -> None:
        """Wait until all has come that will come."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop(self) -> None:
        """Have nothing more come. The thread itself looks after every message."""
        self._is_stopped = True
        if threading.current_thread() is not self._thread:
            self._call.cancel()

    # Everything below runs on the thread.

    def _take(self, data: bytes) -> bytes:
        if self._is_proved:
            return self._take_message(data)
        with suppress(FrameError):
            self._is_proved = hmac.compare_digest(read_chunk(data).proof, self._expected)
        return b"proof"

    def _run(self) -> None:
        try:
            next(self._call, None)
            self._answered.put(self._is_proved)
            for _ in self._call if self._is_proved else ():
                if self._inbound.broken is not None:
                    break
            self._call.cancel()
        except grpc.RpcError as error:
            if self._is_proved and not self._is_stopped:
                self._tell(error)
        finally:
            self._answered.put(False)
            self._channel.close()

    def _tell(self, error: Any) -> None:
        end = end_of(error.code().name, error.details() or "", self._silence_s)
        if end.is_silence:
            self._on_end(self._inbound.source, end)
        self._inbound.end(TransportError(end.reason if end.is_silence else BROKEN.reason))
