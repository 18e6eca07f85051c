from __future__ import annotations

import ipaddress

import pytest

from graphsplit.security.addresses import (
    Address,
    is_of_this_machine,
    peer_host,
    read_address,
    why_not_dialed,
)

HERE = {"127.0.0.1", "::1", "10.0.0.1", "192.168.7.1"}


def is_here(address: Address) -> bool:
    return str(address) in HERE


@pytest.mark.parametrize(
    ("endpoint", "peer", "networks"),
    [
        ("10.0.0.7:41233", "ipv4:10.0.0.7:50012", ()),
        ("[fd00::7]:41233", "ipv6:%5Bfd00::7%5D:50012", ()),
        ("[fe80::7%eth0]:41233", "ipv6:%5Bfe80::7%25eth0%5D:50012", ()),
        ("10.0.0.7:41233", "ipv6:%5B::ffff:10.0.0.7%5D:50012", ()),
        ("10.1.0.7:41233", "ipv4:10.0.0.7:50012", ("10.1.0.0/16",)),
        ("[fd00::9]:41233", "ipv4:10.0.0.7:50012", ("192.168.7.3/32", "fd00::/8")),
        # From the scheduler's own machine: any address of it.
        ("127.0.0.1:41233", "ipv4:127.0.0.1:50012", ()),
        ("192.168.7.1:41233", "ipv4:127.0.0.1:50012", ()),
        ("127.0.0.1:41233", "ipv4:10.0.0.1:50012", ()),
    ],
)
def test_a_worker_is_dialed_where_it_came_from_or_in_a_network_that_is_configured(
    endpoint: str, peer: str, networks: tuple[str, ...]
) -> None:
    assert why_not_dialed(endpoint, peer, networks, is_here=is_here) is None


@pytest.mark.parametrize(
    ("endpoint", "peer", "networks"),
    [
        ("10.0.0.8:41233", "ipv4:10.0.0.7:50012", ()),
        ("127.0.0.1:22", "ipv4:10.0.0.7:50012", ()),
        ("10.0.0.1:22", "ipv4:10.0.0.7:50012", ()),
        ("10.0.0.8:41233", "ipv4:127.0.0.1:50012", ()),
        ("10.0.0.8:41233", "unix:whatever", ()),
        ("10.2.0.7:41233", "ipv4:10.0.0.7:50012", ("10.1.0.0/16",)),
        ("[fd00::8]:41233", "ipv6:%5Bfd00::7%5D:50012", ("10.0.0.0/8",)),
    ],
)
def test_every_other_address_is_refused_with_the_fix(
    endpoint: str, peer: str, networks: tuple[str, ...]
) -> None:
    reason = why_not_dialed(endpoint, peer, networks, is_here=is_here)
    assert reason is not None
    assert reason.startswith("it would be dialed at ") and ", and came from " in reason
    assert "Fix: set MS_WORKER_IP to " in reason and "GS_WORKER_NETWORKS=" in reason


@pytest.mark.parametrize(
    "endpoint",
    ["internal.example:80", "localhost:80", "10.0.0.7", "10.0.0.7:", "10.0.7:80", "", "unix:/run/x",
     "dns:///10.0.0.7:80", "10.0.0.7:80/path", "[10.0.0.7]x:80", "999.0.0.7:80"],
)  # fmt: skip
def test_what_is_no_address_is_not_dialed(endpoint: str) -> None:
    reason = why_not_dialed(endpoint, "ipv4:10.0.0.7:50012", ("0.0.0.0/0",), is_here=is_here)
    assert reason is not None and "expected an IP address and a port" in reason


def test_the_host_of_a_peer() -> None:
    assert peer_host("ipv4:10.0.0.7:50012") == "10.0.0.7"
    assert peer_host("ipv6:%5Bfe80::1%25eth0%5D:50012") == "fe80::1"
    assert read_address("::ffff:10.0.0.7") == ipaddress.ip_address("10.0.0.7")
    assert read_address("a-name") is None


def test_addresses_of_this_machine() -> None:
    assert is_of_this_machine(ipaddress.ip_address("127.0.0.1"))
    for other in ("192.0.2.1", "0.0.0.0", "::", "224.0.0.1"):
        assert not is_of_this_machine(ipaddress.ip_address(other))
