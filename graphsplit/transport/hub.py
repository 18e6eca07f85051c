"""A worker's door to the data plane.

It is opened before the worker joins, and connected once all members are known::

hub = Hub(bind_host="127.0.0.1", mode="auto")
... register hub.endpoints with the scheduler, learn rank, job, generation and peers ...
transport = hub.connect(rank=0, job="3f…", generation=1, peers=peers, policy=policy)
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from graphsplit.errors import ConfigurationError, TransportError
from graphsplit.security.grpc_ports import ANY_PORT
from graphsplit.security.names import read_name, why_not_worker
from graphsplit.security.protection import UNPROTECTED, Protection, require_encryption
from graphsplit.settings import MAX_WORKERS, NODE_TIMEOUT_S
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.endpoints import (
    MODES,
    TORCH_MODES,
    Mode,
    choose,
    encrypts,
    host_identity,
    shm_endpoint,
    shm_socket_name,
    torch_versions,
)
from graphsplit.transport.metered import MeteredTraffic
from graphsplit.transport.session import Session
from graphsplit.transport.staged import StagedReceiver, StagedSender, staged
from graphsplit.transport.wait import WaitPolicy

if TYPE_CHECKING:
    from graphsplit.transport.grpc.listener import GrpcListener
    from graphsplit.transport.grpc.transport import GrpcTransport

_WILDCARDS = {"", "0.0.0.0", "::", "*"}


def _numeric(host: str) -> str:
    """The address of a name: peers dial no names of somebody else's choice.

    Raises:
        ConfigurationError: The name is not known here.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(
            f"MS_WORKER_IP={host!r} is not known here: {error}\n"
            f"  Fix: set MS_WORKER_IP to an address of this machine"
        ) from None


class Router(Transport):
    """Hands each channel to the transport that reaches its peer.

    Args:
        rank: This worker.
        transports: The transports, by name.
        route: Gives the transport's name between two workers, and why it was chosen.
        num_workers: How many workers there are.
        traffic: Counts what goes through; None: nobody counts.

    Attributes:
        routes: For each rank, the transport's name and why it was chosen.
        route: The same for any two workers.
    """

    name = "router"

    def __init__(
        self,
        rank: int,
        transports: Mapping[str, Transport],
        *,
        route: Callable[[int, int], tuple[str, str]],
        num_workers: int,
        traffic: MeteredTraffic | None = None,
    ) -> None:
        self._traffic = traffic
        self.routes = tuple(route(rank, peer) for peer in range(num_workers))
        self.route = route
        self._rank = rank
        self._transports = transports

    def open_sender(self, spec: ChannelSpec) -> Sender:
        """See ``Transport.open_sender``."""
        transport, sent = self._way(spec, spec.source, spec.destination)
        sender = transport.open_sender(sent)
        if sent is not spec:
            sender = StagedSender(sender)
        return sender if self._traffic is None else self._traffic.sender(sender, spec)

    def open_receiver(self, spec: ChannelSpec) -> Receiver:
        """See ``Transport.open_receiver``."""
        transport, sent = self._way(spec, spec.destination, spec.source)
        receiver = transport.open_receiver(sent)
        if sent is not spec:
            receiver = StagedReceiver(receiver, spec.device)
        return receiver if self._traffic is None else self._traffic.receiver(receiver, spec)

    def _way(self, spec: ChannelSpec, mine: int, peer: int) -> tuple[Transport, ChannelSpec]:
        """The transport of a channel, and the channel as it has it: devices are NCCL's alone."""
        if mine != self._rank or not 0 <= peer < len(self.routes):
            raise TransportError(
                f"expected a channel between worker {self._rank} and one of the "
                f"{len(self.routes)} workers, got one between {mine} and {peer}"
            )
        name = self.routes[peer][0]
        return self._transports[name], spec if name == "nccl" else staged(spec)

    def close_plan(self, plan: int) -> None:
        """See ``Transport.close_plan``."""
        for transport in self._transports.values():
            transport.close_plan(plan)

    def close(self) -> None:
        """See ``Transport.close``. Those that met over another one are closed before it."""
        for transport in reversed(list(self._transports.values())):
            transport.close()


class Hub:
    """Listens where peers will come, and says where that is.

    Nothing is served before ``connect``: who belongs to the job is not known earlier.

    Args:
        bind_host: The address to listen on, and to be reached at.
        mode: ``"auto"`` prefers shared memory, then Gloo, then gRPC; others allow only that one.
        protection: What protects connections that leave this user's processes.
        num_workers: How many workers the job has: bounds how many may connect.
        silence_s: How long nothing may come back from a peer on another host.
        ports: The first and the last port that may be taken; 0: any.

    Attributes:
        endpoints: What to register, for the peers. Holds a secret: only members may see it.
    """

    def __init__(
        self,
        *,
        bind_host: str,
        mode: Mode = "auto",
        protection: Protection = UNPROTECTED,
        num_workers: int = MAX_WORKERS,
        silence_s: float = NODE_TIMEOUT_S,
        ports: tuple[int, int] = ANY_PORT,
    ) -> None:
        if mode not in MODES:
            raise ConfigurationError(f"GS_TRANSPORT: expected one of {MODES}, got {mode!r}")
        self._mode = mode
        self._protection = protection
        self._num_workers = num_workers
        self._silence_s = silence_s
        self._shm: socket.socket | None = None
        self._grpc: GrpcListener | None = None
        self._bind_host, self._ports = bind_host, ports
        self.endpoints: dict[str, str] = {"token": secrets.token_hex(16)}
        try:
            if mode in ("auto", "shm"):
                self._listen_shm()
            if mode != "shm":
                self._listen_grpc(bind_host)
            if mode in ("auto", *TORCH_MODES):
                # Nothing listens for these yet; their peers meet over gRPC.
                self.endpoints.update(torch_versions())
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
        from graphsplit.transport.shm import links

        name = f"graphsplit-{secrets.token_hex(16)}"
        self._shm = links.listen(name)
        self.endpoints["shm"] = shm_endpoint(identity, name)

    def _listen_grpc(self, bind_host: str) -> None:
        if bind_host in _WILDCARDS:
            raise ConfigurationError(
                f"expected an address that other workers can reach, got {bind_host!r}\n"
                f"  Fix: set MS_WORKER_IP to this worker's own address"
            )
        from graphsplit.transport.grpc.listener import GrpcListener

        self._grpc = GrpcListener(
            _numeric(bind_host),
            protection=self._protection,
            num_workers=self._num_workers,
            silence_s=self._silence_s,
            ports=self._ports,
        )
        self.endpoints["grpc"] = self._grpc.address
        if self._protection.tls is not None:
            self.endpoints["certificate"] = self._protection.tls.name.dns

    def connect(
        self,
        *,
        rank: int,
        job: str,
        generation: int,
        peers: Sequence[Mapping[str, str]],
        policy: WaitPolicy,
        traffic: MeteredTraffic | None = None,
        seats: Sequence[int] | None = None,
    ) -> Transport:
        """Become the transport of one worker. What is not needed is closed; call it once.

        Args:
            rank: This worker.
            job: Id of the job.
            generation: Generation of the job's membership.
            peers: What each worker registered, by rank, this one included.
            policy: The rule for every wait.
            traffic: Counts what goes through; None: nobody counts.
            seats: The rank that each worker's certificate is for; None: its rank here.

        Raises:
            ConfigurationError: The transport that was asked for cannot reach some peer.
        """
        routes = [self._route(peers, rank, peer) for peer in range(len(peers))]
        session = Session(job, generation, rank, tuple(peer.get("token", "") for peer in peers))
        names = {name for name, _ in routes}
        for name in sorted(names):
            require_encryption(name, encrypts=encrypts(name), protection=self._protection)
        transports: dict[str, Transport] = {}
        if "shm" in names and self._shm is not None:
            from graphsplit.transport.shm.transport import SharedMemoryTransport

            sockets = tuple(shm_socket_name(peer) for peer in peers)
            transports["shm"] = SharedMemoryTransport(
                self._shm, session=session, names=sockets, policy=policy
            )
            self._shm = None
        torch_names = names.intersection(TORCH_MODES)
        if ("grpc" in names or torch_names) and self._grpc is not None:
            names_of = self._certified_names(peers, seats or range(len(peers)))
            streams = self._over_grpc(self._grpc, session, peers, policy, names_of)
            transports["grpc"] = streams
            self._grpc = None
        for name in torch_names:
            transports[name] = self._over_torch(name, streams, session, policy)
        self.close()
        route = partial(self._route, peers)
        return Router(rank, transports, route=route, num_workers=len(peers), traffic=traffic)

    def _over_grpc(
        self,
        listener: GrpcListener,
        session: Session,
        peers: Sequence[Mapping[str, str]],
        policy: WaitPolicy,
        names: tuple[str, ...],
    ) -> GrpcTransport:
        from graphsplit.transport.grpc.transport import GrpcTransport

        return GrpcTransport(
            listener,
            session=session,
            targets=tuple(peer.get("grpc") for peer in peers),
            policy=policy,
            names=names,
        )

    def _over_torch(
        self, name: str, streams: GrpcTransport, session: Session, policy: WaitPolicy
    ) -> Transport:
        """Gloo or NCCL, whose ends meet over streams, and are lost together with them."""
        from graphsplit.transport.torch.transport import TorchTransport

        found = TorchTransport(
            streams,
            bind_host=self._bind_host,
            session=session,
            num_workers=len(session.tokens),
            policy=policy,
            has_device=name == "nccl",
        )
        streams.on_silence.append(found.abandon)
        return found

    def _certified_names(
        self, peers: Sequence[Mapping[str, str]], seats: Sequence[int]
    ) -> tuple[str, ...]:
        """The name that each worker's certificate must have; empty without TLS.

        A worker says it itself, but only a name that allows its rank is believed.
        """
        if self._protection.tls is None:
            return ()
        names = tuple(peer.get("certificate", "") for peer in peers)
        for rank, name in zip(seats, names, strict=True):
            reason = why_not_worker(read_name(name), rank)
            if reason is not None:
                raise ConfigurationError(f"worker {rank} cannot be reached under TLS: {reason}")
        return names

    def _route(self, peers: Sequence[Mapping[str, str]], rank: int, peer: int) -> tuple[str, str]:
        try:
            encrypted = self._protection.tls is not None
            encrypted = encrypted and "gloo" not in self._protection.unencrypted
            return choose(peers[rank], peers[peer], self._mode, encrypted=encrypted)
        except ConfigurationError as error:
            who = f"worker {rank}" if rank == peer else f"worker {rank} to worker {peer}"
            raise ConfigurationError(f"{who}: {error}") from error

    def close(self) -> None:
        """Stop listening. Safe to call twice; a transport made by ``connect`` is not affected."""
        if self._shm is not None:
            self._shm.close()
            self._shm = None
        if self._grpc is not None:
            self._grpc.close()
            self._grpc = None
