"""Which transport is chosen, and what a worker offers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from graphsplit.errors import ConfigurationError
from graphsplit.security.protection import Protection
from graphsplit.transport.endpoints import choose
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import WaitPolicy

HERE = {"shm": "boot.1.0/one", "grpc": "127.0.0.1:1"}
BESIDE = {"shm": "boot.1.0/two", "grpc": "127.0.0.1:2"}


@pytest.mark.parametrize(
    ("peer", "mode", "chosen"),
    [
        (BESIDE, "auto", ("shm", "both run as one user on one host")),
        (BESIDE, "shm", ("shm", "both run as one user on one host")),
        (BESIDE, "grpc", ("grpc", "GS_TRANSPORT=grpc")),
        (
            {**BESIDE, "shm": "else.1.0/x"},
            "auto",
            ("grpc", "not on one machine: host boot and else"),
        ),
        (
            {**BESIDE, "shm": "boot.2.0/x"},
            "auto",
            ("grpc", "not in one network namespace: 1 and 2"),
        ),
        ({**BESIDE, "shm": "boot.1.7/x"}, "auto", ("grpc", "not of one user: user 0 and 7")),
        ({"grpc": "h:1"}, "auto", ("grpc", "shared memory is not offered by both workers")),
    ],
)
def test_shared_memory_is_chosen_where_it_can_be(
    peer: dict[str, str], mode: str, chosen: tuple[str, str]
) -> None:
    assert choose(HERE, peer, mode) == chosen  # type: ignore[arg-type]


ELSEWHERE = {"shm": "else.1.0/x", "grpc": "10.0.0.2:1", "gloo": "2.13"}


@pytest.mark.parametrize(
    ("mine", "peer", "mode", "encrypted", "chosen"),
    [
        ({"gloo": "2.13"}, ELSEWHERE, "auto", False, ("gloo", "not on one machine: host boot and")),
        ({"gloo": "2.13"}, BESIDE | {"gloo": "2.13"}, "auto", False, ("shm", "both run as one")),
        ({"gloo": "2.13"}, ELSEWHERE, "auto", True, ("grpc", "not on one machine: host boot and")),
        ({"gloo": "2.12"}, ELSEWHERE, "auto", False, ("grpc", "not on one machine: host boot and")),
        ({}, ELSEWHERE, "auto", False, ("grpc", "not on one machine: host boot and")),
        ({"gloo": "2.13"}, ELSEWHERE, "gloo", False, ("gloo", "GS_TRANSPORT=gloo")),
        (
            {"gloo": "2.13", "nccl": "2.27"},
            ELSEWHERE | {"nccl": "2.27"},
            "nccl",
            False,
            ("nccl", "GS_TRANSPORT=nccl"),
        ),
    ],
)
def test_between_hosts_gloo_is_chosen_where_it_may_be(
    mine: dict[str, str], peer: dict[str, str], mode: str, encrypted: bool, chosen: tuple[str, str]
) -> None:
    name, why = choose({**HERE, **mine}, peer, mode, encrypted=encrypted)  # type: ignore[arg-type]
    assert name == chosen[0] and why.startswith(chosen[1])


@pytest.mark.parametrize(
    ("mode", "peer", "reason"),
    [
        ("gloo", {"grpc": "h:1"}, "GS_TRANSPORT=gloo is impossible: gloo is not offered by both"),
        ("gloo", ELSEWHERE | {"gloo": "2.12"}, "impossible: gloo of versions 2.13 and 2.12"),
        ("nccl", ELSEWHERE, "GS_TRANSPORT=nccl is impossible: nccl is not offered by both"),
    ],
)
def test_a_torch_transport_that_is_impossible_says_why(
    mode: str, peer: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        choose({**HERE, "gloo": "2.13"}, peer, mode)  # type: ignore[arg-type]


def test_a_forced_transport_that_is_impossible_names_the_peer() -> None:
    hub = Hub(bind_host="127.0.0.1", mode="shm")
    peers = [hub.endpoints, hub.endpoints, {"grpc": "10.0.0.1:1"}]
    with pytest.raises(ConfigurationError, match="worker 0 to worker 2: GS_TRANSPORT=shm is imp"):
        hub.connect(rank=0, job="job", generation=1, peers=peers, policy=WaitPolicy())
    hub.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "::", ""])
def test_an_address_that_nobody_can_reach_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="MS_WORKER_IP"):
        Hub(bind_host=address, mode="grpc")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on '192\.0\.2\.1'"):
        Hub(bind_host="192.0.2.1", mode="grpc", protection=Protection(trusts_network=True))


def test_the_name_of_a_host_is_registered_as_its_address() -> None:
    hub = Hub(bind_host="localhost", mode="grpc")
    assert hub.endpoints["grpc"].rpartition(":")[0] in ("127.0.0.1", "[::1]")
    hub.close()
    with pytest.raises(ConfigurationError, match=r"MS_WORKER_IP='nowhere\.invalid' is not known"):
        Hub(bind_host="nowhere.invalid", mode="grpc", protection=Protection(trusts_network=True))


def test_an_address_that_others_reach_needs_a_protection() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Hub(bind_host="192.0.2.1", mode="grpc")
    assert "this worker would listen on 192.0.2.1, which other machines can reach, and nothing" in (
        str(caught.value)
    )
    assert "GS_TLS_CERT" in str(caught.value) and "GS_JOB_TOKEN_FILE" in str(caught.value)
    assert "GS_INSECURE=I_TRUST_THIS_NETWORK" in str(caught.value)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="GS_TRANSPORT: expected one of"):
        Hub(bind_host="127.0.0.1", mode="mpi")  # type: ignore[arg-type]


def test_only_what_is_needed_is_offered() -> None:
    of_gpus = {"nccl"} if torch.cuda.is_available() else set()
    everything = {"shm", "grpc", "gloo"} | of_gpus
    for mode, keys in (("shm", {"shm"}), ("grpc", {"grpc"}), ("auto", everything)):
        hub = Hub(bind_host="127.0.0.1", mode=mode)  # type: ignore[arg-type]
        assert set(hub.endpoints) == keys | {"token"}
        assert hub.endpoints.get("grpc", "127.0.0.1:").startswith("127.0.0.1:")
        hub.close()
        hub.close()


def test_grpc_is_not_imported_unless_it_is_used() -> None:
    script = (
        "import sys; from graphsplit.transport.hub import Hub; "
        "from graphsplit.transport.wait import WaitPolicy\n"
        "hub = Hub(bind_host='127.0.0.1', mode='shm'); peers = [hub.endpoints]\n"
        "hub.connect(rank=0, job='j', generation=1, peers=peers, policy=WaitPolicy()).close()\n"
        "sys.exit('grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
