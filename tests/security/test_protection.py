"""What protects a process: read from files, and refused with the reason and the fix."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from security_helpers import SCHEDULER_NAME, authority, expired, protection, worker_name

from graphsplit.errors import ConfigurationError
from graphsplit.security.names import SCHEDULER, WORKER
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import (
    UNPROTECTED,
    Protection,
    is_loopback,
    load_protection,
    require_encryption,
    require_protection,
)
from graphsplit.settings import ClusterSettings

BASE = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "3", "MS_SCHED_PORT": "8118"}
TOKEN = "0123456789abcdef-token"


def settings(**variables: str) -> ClusterSettings:
    found = ClusterSettings.from_environ({**BASE, **variables})
    assert found is not None
    return found


def options(folder: Path, name: str, **changes: str) -> SecurityOptions:
    files = {
        "tls_ca": str(folder / "ca.pem"),
        "tls_cert": str(folder / f"{name}.pem"),
        "tls_key": str(folder / f"{name}.key"),
    }
    return SecurityOptions(**{**files, **changes})


def test_variables_become_options() -> None:
    found = settings(
        GS_TLS_CA="a", GS_TLS_CERT="b", GS_TLS_KEY="c", GS_ALLOW_UNENCRYPTED="gloo, nccl"
    ).security
    assert found == SecurityOptions("a", "b", "c", unencrypted=("gloo", "nccl"))
    assert settings().security == SecurityOptions()
    found = settings(GS_WORKER_NETWORKS="10.1.0.0/16, 192.168.7.3,fd00::/8").security
    assert found.networks == ("10.1.0.0/16", "192.168.7.3/32", "fd00::/8")
    assert load_protection(found, role=SCHEDULER).networks == found.networks
    assert settings(GS_INSECURE="I_TRUST_THIS_NETWORK").security.trusts_network


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"GS_TLS_CA": "a"}, "GS_TLS_CERT is not set\n    expected: a file, as GS_TLS_CA and"),
        ({"GS_INSECURE": "1"}, "GS_INSECURE='1'\n    expected: I_TRUST_THIS_NETWORK, or unset"),
        ({"GS_ALLOW_UNENCRYPTED": "all of them"}, "expected: names of transports, with commas"),
        ({"GS_WORKER_NETWORKS": "10.0.0.1/8"}, "expected: IP addresses or networks, with commas"),
        ({"GS_JOB_TOKEN": "hunter2"}, "GS_JOB_TOKEN=(not shown)\n    expected: 16 to 1024"),
        (
            {"GS_JOB_TOKEN": TOKEN, "GS_JOB_TOKEN_FILE": "f"},
            "GS_JOB_TOKEN_FILE='f'\n    expected: unset, as GS_JOB_TOKEN is set",
        ),
    ],
)
def test_a_malformed_variable_is_named_and_a_secret_never_shown(
    variables: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings(**variables)
    assert problem in str(caught.value)
    assert "hunter2" not in str(caught.value) and TOKEN not in str(caught.value)


def test_secrets_are_not_in_the_words_for_settings_and_protection(folder: Path) -> None:
    found = settings(GS_JOB_TOKEN=TOKEN)
    loaded = load_protection(found.security, role=WORKER)
    assert loaded.token == TOKEN.encode()
    with_tls = load_protection(options(folder, "worker-1"), role=WORKER, rank=1)
    for shown in (repr(found), repr(loaded), repr(with_tls)):
        assert TOKEN not in shown and "PRIVATE KEY" not in shown


@pytest.mark.parametrize(("rank", "name"), [(1, "worker-1"), (None, "worker-1")])
def test_a_worker_is_who_its_certificate_says(folder: Path, rank: int | None, name: str) -> None:
    loaded = load_protection(options(folder, name), role=WORKER, rank=rank)
    assert loaded.tls is not None and loaded.tls.name == worker_name(1)


Change = Callable[[Path, Path], dict[str, str]]


def _write(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def _readable_key(folder: Path, tmp: Path) -> dict[str, str]:
    return {"tls_key": _write(tmp / "k", (folder / "worker-1.key").read_bytes(), 0o644)}


def _of_another_authority(folder: Path, tmp: Path) -> dict[str, str]:
    return {"tls_ca": _write(tmp / "ca", authority("other").pem)}


def _expired(folder: Path, tmp: Path) -> dict[str, str]:
    old = expired(worker_name(1)).tls
    assert old is not None
    files = {"tls_cert": _write(tmp / "c", old.chain), "tls_key": _write(tmp / "k", old.key)}
    return {**files, "tls_ca": _write(tmp / "ca", old.authority)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda f, t: {"tls_key": str(t / "none")}, "none' cannot be read: No such file or direct"),
        (lambda f, t: {"tls_cert": str(f / "worker-1.key")}, "key' holds no certificate\n"),
        (lambda f, t: {"tls_key": _write(t / "k", b"noise")}, "holds no private key that can be"),
        (lambda f, t: {"tls_key": str(f / "worker-2.key")}, "is not the key of the certificate"),
        (
            lambda f, t: {"tls_cert": str(f / "ca.pem"), "tls_key": str(f / "ca.key")},
            "names are no",
        ),
        (_readable_key, "its mode is 0644\n    expected: 0600\n    Fix: chmod 600 "),
        (_of_another_authority, "was signed by CN=graphsplit test authority, which is not in"),
        (_expired, "; now it is "),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    folder: Path, tmp_path: Path, change: Change, problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_protection(
            options(folder, "worker-1", **change(folder, tmp_path)), role=WORKER, rank=1
        )
    assert problem in str(caught.value) and "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "role", "rank", "problem"),
    [
        (
            "worker-2",
            WORKER,
            1,
            "is for worker 2 (worker-2.graphsplit.internal), and this",
        ),
        ("scheduler", WORKER, 1, "is for the scheduler (scheduler.graphsplit.internal), and this"),
        ("worker-2", SCHEDULER, None, "this process is the scheduler (MS_ROLE)"),
    ],
)
def test_the_certificate_of_another_process_is_refused_naming_both(
    folder: Path, name: str, role: str, rank: int | None, problem: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_protection(options(folder, name), role=role, rank=rank)
    assert problem in str(caught.value)


def test_a_token_is_read_from_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    found = SecurityOptions(job_token_file=_write(path, f"{TOKEN}\n".encode()))
    assert load_protection(found, role=WORKER).token == TOKEN.encode()
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"GS_JOB_TOKEN_FILE=.* mode is 0644"):
        load_protection(found, role=WORKER)
    path.unlink()
    with pytest.raises(
        ConfigurationError, match=r"cannot be read: .*\n.*\n.* a token is made by: "
    ):
        load_protection(found, role=WORKER)
    _write(path, b"short")
    with pytest.raises(ConfigurationError, match=r"holds no token \(what it holds is not shown\)"):
        load_protection(found, role=WORKER)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost", "::1%lo"])
def test_loopback_needs_no_protection(host: str) -> None:
    assert is_loopback(host)
    require_protection(host, UNPROTECTED, what="x")


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "192.0.2.1", "no-such.invalid"])
def test_elsewhere_something_must_protect_or_be_waived_in_words(host: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        require_protection(host, UNPROTECTED, what="the scheduler")
    assert f"the scheduler would listen on {host}, which other machines" in str(caught.value)
    assert "set GS_INSECURE=I_TRUST_THIS_NETWORK" in str(caught.value)
    for enough in (
        Protection(token=b"x"),
        Protection(trusts_network=True),
        protection(SCHEDULER_NAME),
    ):
        require_protection(host, enough, what="the scheduler")


def test_a_transport_that_cannot_encrypt_is_refused_under_tls_unless_allowed_by_name() -> None:
    tls = protection(worker_name(0))
    require_encryption("grpc", encrypts=True, protection=tls)
    require_encryption("gloo", encrypts=False, protection=UNPROTECTED)
    with pytest.raises(ConfigurationError, match="set GS_ALLOW_UNENCRYPTED=gloo"):
        require_encryption("gloo", encrypts=False, protection=tls)
    allowed = Protection(tls.tls, unencrypted=frozenset({"gloo"}))
    require_encryption("gloo", encrypts=False, protection=allowed)
    with pytest.raises(ConfigurationError, match="the transport 'nccl' cannot encrypt"):
        require_encryption("nccl", encrypts=False, protection=allowed)


def test_without_tls_nothing_of_cryptography_is_imported() -> None:
    code = (
        "import sys; sys.argv[0] = 'graphsplit'; from graphsplit.cli import commands; "
        "from graphsplit.security import protection, grpc_ports; "
        "print([m for m in ('cryptography', 'torch', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_keys_are_written_for_their_owner_alone(folder: Path) -> None:
    for path in folder.glob("*.key"):
        assert os.stat(path).st_mode & 0o777 == 0o600
