"""Unix sockets between workers of one host: who is there, their bells, their channels' memory.

One connection per (source, destination), made by the source; packets keep their bounds::

    source                                      destination
    HELLO job, generation, ranks, token, bell ->
                                              <- WELCOME bell        (or REFUSED reason)
    CHANNEL plan, edge, memory ->

Values never pass here. The names are abstract, so no file remains; a connection that closes says
that its process ended, however it ended.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from graphsplit.errors import TransportError
from graphsplit.transport.session import LAST_WORDS_S, TICK_S, AbortWatch, Hello, Session
from graphsplit.transport.shm.doorbell import Doorbell, adopt_bell, create_bell
from graphsplit.transport.wait import Wait

_HELLO = struct.Struct("<4sqii32s")
_CHANNEL = struct.Struct("<4sqq")
_HELLO_MAGIC, _WELCOME, _REFUSED, _CHANNEL_MAGIC = b"GSH1", b"GSW1", b"GSR1", b"GSC1"
_PACKET_BYTES = 4096
_BACKLOG = 4096


def listen(name: str) -> socket.socket:
    """Listen under an abstract name, which lasts as long as the socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iii", credentials)[1])


def encode_hello(hello: Hello) -> bytes:
    """A hello as it travels; the token is 32 characters."""
    fixed = (hello.generation, hello.source, hello.destination, hello.token.encode())
    return _HELLO.pack(_HELLO_MAGIC, *fixed) + hello.job.encode()


def decode_hello(packet: bytes) -> Hello | None:
    """The hello in a packet, or None if it is none."""
    if len(packet) < _HELLO.size or packet[:4] != _HELLO_MAGIC:
        return None
    _, generation, source, destination, token = _HELLO.unpack_from(packet)
    job = packet[_HELLO.size :].decode(errors="replace")
    return Hello(job, generation, source, destination, token.decode(errors="replace"))


class Link:
    """One connection, in either direction.

    Attributes:
        connection: The socket.
        peer: Rank of the other end; -1 until it is known.
        broken: Why nothing more will come, or None.
        bell: The other end's bell, once ``ready`` is set.
        memories: Memory of channels announced by the peer and not opened yet, by (plan, edge).
    """

    def __init__(self, connection: socket.socket, *, peer: int) -> None:
        self.connection = connection
        self.peer = peer
        self.broken: str | None = None
        self.bell: Doorbell | None = None
        self.ready = threading.Event()
        self._is_ring_wanted = False
        self.memories: dict[tuple[int, int], int] = {}

    def ring(self) -> None:
        """Ring the peer's bell, or have it rung as soon as it is known."""
        self._is_ring_wanted = True
        if self.bell is not None:
            self.bell.ring()

    def set_bell(self, bell: Doorbell) -> None:
        """Remember the peer's bell. Rings it if that was wanted before: nothing is lost."""
        self.bell = bell
        self.ready.set()
        if self._is_ring_wanted:
            bell.ring()

    def release(self) -> None:
        """Close the connection and the memory that nobody opened."""
        for fd in self.memories.values():
            os.close(fd)
        self.memories.clear()
        self.connection.close()


class Links:
    """All connections of one worker, served by one thread.

    Attributes:
        session: The job and this worker's place in it.
        watch: Hears of the job's abort.
        bell: This worker's own.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        session: Session,
        names: tuple[str | None, ...],
        watch: AbortWatch,
    ) -> None:
        self._listener = listener
        self.session = session
        self._names = names
        self.watch = watch
        # Not from 0: that is what an unused bell shows, and rank 0 would ring in vain.
        self._tickets = itertools.count(1)
        self.bell, self._bell_fd = create_bell(session.rank, self._tickets)
        self._changed = threading.Condition()
        self._outbound: dict[int, Link] = {}
        self._inbound: dict[int, Link] = {}
        self._closed = False
        self._closed_plans: set[int] = set()
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._run_calls)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        name = f"graphsplit-shm-{session.rank}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def outbound(self, peer: int) -> Link:
        """The link on which this worker announces channels to a peer; connects if it is new."""
        with self._changed:
            link = self._outbound.get(peer)
            if link is None:
                link = self._outbound[peer] = self._connect(peer)
            return link

    def _connect(self, peer: int) -> Link:
        name = self._names[peer]
        if name is None:
            raise TransportError(f"worker {peer} registered no shared memory")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect("\0" + name)
            if _peer_uid(connection) != os.geteuid():
                raise TransportError(f"worker {peer}: its socket belongs to another user")
            hello = encode_hello(self.session.hello_to(peer))
            socket.send_fds(connection, [hello], [self._bell_fd])
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                message = f"worker {self.session.rank} cannot reach worker {peer}: {error}"
                self.watch.raise_broken(message)
            raise
        link = Link(connection, peer=peer)
        self._soon(lambda: self._register(link, self._read_reply))
        return link

    def announce(self, link: Link, plan: int, edge: int, fd: int) -> None:
        """Hand the memory of a channel to the destination, which may not be reading yet."""
        packet = _CHANNEL.pack(_CHANNEL_MAGIC, plan, edge)
        wait = Wait(self.watch.policy, peer=link.peer, what=f"opening edge {edge} of plan {plan}")
        poll = select.poll()
        poll.register(link.connection, select.POLLOUT)
        while link.broken is None:
            try:
                socket.send_fds(link.connection, [packet], [fd], socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                poll.poll(TICK_S * 1000)
                wait.check()
            except OSError as error:
                # The peer has closed; it may have said why, in a packet that is not read yet.
                with self._changed:
                    self._changed.wait_for(lambda: link.broken is not None, LAST_WORDS_S)
                reason = link.broken or f"worker {link.peer} cannot be reached: {error}"
                self.watch.raise_broken(reason)
        self.watch.raise_broken(link.broken)

    def wait_memory(self, source: int, plan: int, edge: int, what: str) -> tuple[int, Link]:
        """Wait until a source has announced a channel; its descriptor and link."""
        wait = Wait(self.watch.policy, peer=source, what=what)
        with self._changed:
            while True:
                link = self._inbound.get(source)
                if link is not None:
                    fd = link.memories.pop((plan, edge), None)
                    if fd is not None:
                        return fd, link
                    if link.broken is not None:
                        break
                if self._closed:
                    raise TransportError(f"{what}: the transport was closed")
                wait.check()
                self._changed.wait(TICK_S)
        self.watch.raise_broken(f"{what}: {link.broken}")

    def drop_plan(self, plan: int) -> None:
        """Give back the memory that was announced for a plan and never opened."""
        with self._changed:
            self._closed_plans.add(plan)
            for link in self._inbound.values():
                for key in [key for key in link.memories if key[0] == plan]:
                    os.close(link.memories.pop(key))

    def wake(self) -> None:
        """Make every waiting thread of this worker look around."""
        self.bell.ring()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and close every connection. Safe to call twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self.wake()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        for link in (*self._outbound.values(), *self._inbound.values()):
            link.broken = link.broken or "the transport was closed"
            link.release()
        os.close(self._wake_fd)
        os.close(self._bell_fd)

    # Everything below runs on the thread.

    def _soon(self, call: Callable[[], object]) -> None:
        self._calls.put(call)
        os.eventfd_write(self._wake_fd, 1)

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                key.data()

    def _run_calls(self) -> None:
        os.eventfd_read(self._wake_fd)
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            call()

    def _register(self, link: Link, read: Callable[[Link], None]) -> None:
        self._selector.register(link.connection, selectors.EVENT_READ, lambda: read(link))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if _peer_uid(connection) != os.geteuid():
            connection.close()
            return
        self._register(Link(connection, peer=-1), self._read_hello)

    def _packet(self, link: Link) -> tuple[bytes, list[int]]:
        """The next packet of a connection; empty when the peer closed it."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        receive = functools.partial(socket.recv_fds, link.connection, _PACKET_BYTES, 1, flags)
        try:
            try:
                packet, fds, result, _ = receive()
            except ConnectionResetError:
                # The peer closed without reading all of ours; what it said before is still there.
                packet, fds, result, _ = receive()
        except OSError:
            return b"", []
        if result & socket.MSG_CTRUNC:
            self._break(link, "no file descriptor was left (ulimit -n)")
        return packet, fds

    def _break(self, link: Link, reason: str) -> None:
        who = f"worker {link.peer}" if link.peer >= 0 else "a stranger"
        with self._changed:
            link.broken = link.broken or f"{who}: {reason}"
        link.ready.set()
        self._selector.unregister(link.connection)
        if link.peer < 0:
            link.release()
        self.wake()

    def _read_hello(self, link: Link) -> None:
        packet, fds = self._packet(link)
        hello = decode_hello(packet)
        reason = "no hello" if hello is None else self.session.refusal_of(hello)
        if hello is not None and reason is None and hello.source in self._inbound:
            reason = f"source: worker {hello.source} is connected already"
        if hello is None or reason is not None or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            if packet:
                self._reply(link, _REFUSED + f"{reason or 'no bell'}".encode(), [])
            if link.broken is None:
                self._break(link, "refused")
            return
        if problem := self._take_bell(link, fds[0], hello.source):
            self._reply(link, _REFUSED + problem.encode(), [])
            self._break(link, "refused")
            return
        link.peer = hello.source
        self._reply(link, _WELCOME, [self._bell_fd])
        self._selector.unregister(link.connection)
        self._register(link, self._read_channel)
        with self._changed:
            self._inbound[link.peer] = link
            self._changed.notify_all()

    def _take_bell(self, link: Link, fd: int, peer: int) -> str:
        """Know the bell of a peer from now on; why that cannot be, or nothing."""
        ringer, what = self.session.rank, f"the bell of worker {peer}"
        try:
            link.set_bell(adopt_bell(fd, ringer=ringer, tickets=self._tickets, what=what))
        except TransportError as error:
            return str(error)
        return ""

    def _reply(self, link: Link, packet: bytes, fds: list[int]) -> None:
        with contextlib.suppress(OSError):  # it closed meanwhile; the next read says so
            socket.send_fds(link.connection, [packet], fds, socket.MSG_DONTWAIT)

    def _read_channel(self, link: Link) -> None:
        packet, fds = self._packet(link)
        if link.broken is None and len(packet) == _CHANNEL.size and len(fds) == 1:
            magic, plan, edge = _CHANNEL.unpack(packet)
            with self._changed:
                if magic == _CHANNEL_MAGIC and plan in self._closed_plans:
                    os.close(fds.pop())
                    return
                if magic == _CHANNEL_MAGIC and (plan, edge) not in link.memories:
                    link.memories[plan, edge] = fds.pop()
                    self._changed.notify_all()
                    return
        for fd in fds:
            os.close(fd)
        if link.broken is None:
            self._break(link, "broke the protocol" if packet else "closed the connection")

    def _read_reply(self, link: Link) -> None:
        packet, fds = self._packet(link)
        if link.broken is None and packet == _WELCOME and len(fds) == 1 and link.bell is None:
            if problem := self._take_bell(link, fds.pop(), link.peer):
                self._break(link, problem)
            return
        for fd in fds:
            os.close(fd)
        if link.broken is None:
            refused = packet[:4] == _REFUSED
            reason = "refused this worker: " + packet[4:].decode(errors="replace")
            self._break(link, reason if refused else "closed the connection")
