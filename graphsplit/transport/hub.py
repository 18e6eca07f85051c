"""A worker's door to the data plane.

It is opened before the worker joins, and connected once all members are known::

hub = Hub(bind_host="127.0.0.1", mode="auto")
... register hub.endpoints with the scheduler, learn rank, job, generation and peers ...
transport = hub.connect(rank=0, job="3f…", generation=1, peers=peers, policy=policy)
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graphsplit.errors import ConfigurationError, TransportError
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.endpoints import (
    MODES,
    Mode,
    choose,
    host_identity,
    shm_endpoint,
    shm_socket_name,
)
from graphsplit.transport.session import Session
from graphsplit.transport.wait import WaitPolicy

if TYPE_CHECKING:
    from graphsplit.transport._grpc_listener import GrpcListener

_WILDCARDS = {"", "0.0.0.0", "::", "*"}


class Router(Transport):
    """Hands each channel to the transport that reaches its peer.

    Attributes:
        routes: For each rank, the transport's name and why it was chosen.
    """

    name = "router"

    def __init__(
        self, rank: int, routes: Sequence[tuple[str, str]], transports: Mapping[str, Transport]
    ) -> None:
        self.routes = tuple(routes)
        self._rank = rank
        self._transports = transports

    def open_sender(self, spec: ChannelSpec) -> Sender:
        """See ``Transport.open_sender``."""
        return self._to(spec.source, spec.destination).open_sender(spec)

    def open_receiver(self, spec: ChannelSpec) -> Receiver:
        """See ``Transport.open_receiver``."""
        return self._to(spec.destination, spec.source).open_receiver(spec)

    def _to(self, mine: int, peer: int) -> Transport:
        if mine != self._rank or not 0 <= peer < len(self.routes):
            raise TransportError(
                f"expected a channel between worker {self._rank} and one of the "
                f"{len(self.routes)} workers, got one between {mine} and {peer}"
            )
        return self._transports[self.routes[peer][0]]

    def close_plan(self, plan: int) -> None:
        """See ``Transport.close_plan``."""
        for transport in self._transports.values():
            transport.close_plan(plan)

    def close(self) -> None:
        """See ``Transport.close``."""
        for transport in self._transports.values():
            transport.close()


class Hub:
    """Listens where peers will come, and says where that is.

    Nothing is served before ``connect``: who belongs to the job is not known earlier.

    Args:
        bind_host: The address to listen on, and to be reached at.
        mode: ``"auto"`` prefers shared memory; ``"shm"`` and ``"grpc"`` allow only that.

    Attributes:
        endpoints: What to register, for the peers. Holds a secret: only members may see it.
    """

    def __init__(self, *, bind_host: str, mode: Mode = "auto") -> None:
        if mode not in MODES:
            raise ConfigurationError(f"GS_TRANSPORT: expected one of {MODES}, got {mode!r}")
        self._mode = mode
        self._shm: socket.socket | None = None
        self._grpc: GrpcListener | None = None
        self.endpoints: dict[str, str] = {"token": secrets.token_hex(16)}
        try:
            if mode != "grpc":
                self._listen_shm()
            if mode != "shm":
                self._listen_grpc(bind_host)
        except BaseException:
            self.close()
            raise

    def _listen_shm(self) -> None:
        identity = host_identity()
        if identity is None:
            if self._mode == "shm":
                raise ConfigurationError(
                    "GS_TRANSPORT=shm: workers cannot share memory on this system\n"
                    "  Fix: use Linux on x86_64 or aarch64, or set GS_TRANSPORT=grpc"
                )
            return
        from graphsplit.transport import _shm_links

        name = f"graphsplit-{secrets.token_hex(16)}"
        self._shm = _shm_links.listen(name)
        self.endpoints["shm"] = shm_endpoint(identity, name)

    def _listen_grpc(self, bind_host: str) -> None:
        if bind_host in _WILDCARDS:
            raise ConfigurationError(
                f"expected an address that other workers can reach, got {bind_host!r}\n"
                f"  Fix: set MS_WORKER_IP to this worker's own address"
            )
        from graphsplit.transport._grpc_listener import GrpcListener

        self._grpc = GrpcListener(bind_host)
        self.endpoints["grpc"] = self._grpc.address

    def connect(
        self,
        *,
        rank: int,
        job: str,
        generation: int,
        peers: Sequence[Mapping[str, str]],
        policy: WaitPolicy,
    ) -> Transport:
        """Become the transport of one worker. What is not needed is closed; call it once.

        Args:
            rank: This worker.
            job: Id of the job.
            generation: Generation of the job's membership.
            peers: What each worker registered, by rank, this one included.
            policy: The rule for every wait.

        Raises:
            ConfigurationError: The transport that was asked for cannot reach some peer.
        """
        routes = [self._route(rank, peer, peers) for peer in range(len(peers))]
        session = Session(job, generation, rank, tuple(peer.get("token", "") for peer in peers))
        names = {name for name, _ in routes}
        transports: dict[str, Transport] = {}
        if "shm" in names and self._shm is not None:
            from graphsplit.transport.shared_memory import SharedMemoryTransport

            sockets = tuple(shm_socket_name(peer) for peer in peers)
            transports["shm"] = SharedMemoryTransport(
                self._shm, session=session, names=sockets, policy=policy
            )
            self._shm = None
        if "grpc" in names and self._grpc is not None:
            from graphsplit.transport.grpc_stream import GrpcTransport

            targets = tuple(peer.get("grpc") for peer in peers)
            transports["grpc"] = GrpcTransport(
                self._grpc, session=session, targets=targets, policy=policy
            )
            self._grpc = None
        self.close()
        return Router(rank, routes, transports)

    def _route(self, rank: int, peer: int, peers: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        try:
            return choose(peers[rank], peers[peer], self._mode)
        except ConfigurationError as error:
            raise ConfigurationError(f"worker {rank} to worker {peer}: {error}") from error

    def close(self) -> None:
        """Stop listening. Safe to call twice; a transport made by ``connect`` is not affected."""
        if self._shm is not None:
            self._shm.close()
            self._shm = None
        if self._grpc is not None:
            self._grpc.close()
            self._grpc = None
