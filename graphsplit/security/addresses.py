"""The address at which a worker may have itself dialed: the one that it came from, or a known one.

Members dial what a worker has registered. Whoever holds the job's token could name any address
there, and have all workers connect to it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_ENDPOINT = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})(?:%[\w.-]+)?\]|([0-9.]{7,15})):[0-9]{1,5}")


def read_address(text: str) -> Address | None:
    """An IP address, without its zone, IPv4 as such; None if it is none."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if address.version == 6 else None
    return mapped or address


def peer_host(peer: str) -> str:
    """The host of gRPC's name of a peer: ``ipv4:10.0.0.7:50012`` is ``10.0.0.7``."""
    host = peer.partition(":")[2].rpartition(":")[0].replace("%5B", "[").replace("%5D", "]")
    return host.removeprefix("[").removesuffix("]").partition("%")[0]


def read_peer(peer: str) -> tuple[Address, int] | None:
    """Address and port of gRPC's name of a peer; None if it has none."""
    address, port = read_address(peer_host(peer)), peer.rpartition(":")[2]
    return (address, int(port)) if address is not None and port.isdecimal() else None


def machine_of(peer: str) -> str:
    """The machine that gRPC's name of a peer stands for: ``ipv4:10.0.0.7:50012`` is ``10.0.0.7``.

    Of IPv6 only the network counts: one machine has as many addresses there as it likes.
    """
    address = read_address(peer_host(peer))
    return peer[:64] if address is None else machine(address)


def machine(address: Address) -> str:
    """The machine of an address: see ``machine_of``."""
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def is_of_this_machine(address: Address) -> bool:
    """Whether an address is one of this machine's, loopback included. Nothing is sent."""
    if address.is_unspecified or address.is_multicast:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def why_not_reached(endpoint: str, within_s: float) -> str:
    """Why no connection to an endpoint can be made from here; empty if one can."""
    host, _, port = endpoint.rpartition(":")
    address = host.removeprefix("[").removesuffix("]"), int(port)
    try:
        socket.create_connection(address, within_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def why_not_dialed(
    endpoint: str,
    peer: str,
    networks: Sequence[str],
    *,
    is_here: Callable[[Address], bool] = is_of_this_machine,
) -> str | None:
    """Why workers are not to dial what a worker registers; None if they may.

    Args:
        endpoint: What it registers: ``10.0.0.7:41233`` or ``[fd00::7]:41233``.
        peer: gRPC's name of the peer, as the scheduler sees it.
        networks: Networks in which workers may listen as well: ``10.1.0.0/16``.
        is_here: Whether an address is of the scheduler's machine: from there a worker may name
            any of them.
    """
    found = _ENDPOINT.fullmatch(endpoint)
    address = None if found is None else read_address(found[1] or found[2])
    if address is None:
        return f"it would be dialed at {endpoint[:80]!r}; expected an IP address and a port"
    seen = read_address(peer_host(peer))
    if address == seen or any(address in ipaddress.ip_network(one) for one in networks):
        return None
    if seen is not None and is_here(seen) and is_here(address):
        return None
    return (
        f"it would be dialed at {address}, and came from {seen or peer[:64]}\n"
        f"  Fix: set MS_WORKER_IP to the address from which it reaches the scheduler; or, if "
        f"{address} is its address in another network, GS_WORKER_NETWORKS={address} for the "
        f"scheduler"
    )
