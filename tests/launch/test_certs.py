"""``graphsplit certs``, and what ``graphsplit run`` gives its processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from graphsplit.cli.commands import main
from graphsplit.cli.launch.environment import job_children
from graphsplit.security.names import SCHEDULER, WORKER
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import load_protection


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["certs", *arguments])
    return result.exit_code, result.output


def options(folder: Path, name: str) -> SecurityOptions:
    return SecurityOptions(*(str(folder / f) for f in ("ca.pem", f"{name}.pem", f"{name}.key")))


def test_the_folder_holds_what_every_process_needs(tmp_path: Path) -> None:
    status, output = run("--out", str(tmp_path), "-n", "2", "--hosts", "alpha.example,10.0.0.7")
    assert status == 0 and "ca.pem, ca.key, scheduler.pem" in output
    for rank in range(2):
        load_protection(options(tmp_path, f"worker-{rank}"), role=WORKER, rank=rank)
    load_protection(options(tmp_path, "scheduler"), role=SCHEDULER)
    made = x509.load_pem_x509_certificate((tmp_path / "worker-1.pem").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "worker-1.graphsplit.internal",
        "alpha.example",
    ]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]


def test_more_workers_are_added_and_nothing_is_replaced(tmp_path: Path) -> None:
    run("--out", str(tmp_path), "-n", "1")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run("--out", str(tmp_path), "-n", "1")[1].endswith("holds everything already\n")
    assert run("--out", str(tmp_path), "-n", "2")[1].endswith("worker-1.pem, worker-1.key\n")
    assert before.items() <= {p.name: p.read_bytes() for p in tmp_path.iterdir()}.items()
    load_protection(options(tmp_path, "worker-1"), role=WORKER, rank=1)


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("worker-0.graphsplit.internal", "names of graphsplit.internal say who holds a certif"),
        ("grüße", "is no host name and no address"),
    ],
)
def test_a_host_that_is_none_is_refused(tmp_path: Path, hosts: str, problem: str) -> None:
    status, output = run("--out", str(tmp_path), "-n", "1", "--hosts", hosts)
    assert status == 1 and problem in output


def test_half_a_pair_and_a_broken_authority_are_named(tmp_path: Path) -> None:
    run("--out", str(tmp_path), "-n", "1")
    (tmp_path / "worker-0.key").unlink()
    status, output = run("--out", str(tmp_path), "-n", "1")
    assert status == 1 and "worker-0.pem is there, but not the other one of the pair" in output
    (tmp_path / "ca.key").write_text("noise")
    status, output = run("--out", str(tmp_path), "-n", "3")
    assert status == 1 and "holds no authority that can sign" in output


def test_every_job_gets_a_token_of_its_own_unless_there_is_one() -> None:
    def tokens(**base: str) -> set[str | None]:
        children = job_children(base, num_workers=2, host="h", port=1)
        return {child.variables.get("GS_JOB_TOKEN") for child in children}

    first, second = tokens(), tokens()
    assert len(first) == len(second) == 1 and first != second
    assert len(first.pop() or "") >= 40
    assert tokens(GS_JOB_TOKEN="mine") == {"mine"}
    assert tokens(GS_JOB_TOKEN_FILE="file") == {None}


def test_a_token_is_not_in_the_words_for_a_process() -> None:
    child = job_children({"GS_JOB_TOKEN": "a secret"}, num_workers=1, host="h", port=1)[0]
    assert "a secret" not in repr(child)


def test_each_process_gets_its_own_certificate(tmp_path: Path) -> None:
    scheduler, worker = job_children(
        {}, num_workers=1, host="h", port=1, certificates=tmp_path / "certs"
    )
    folder = tmp_path / "certs"
    assert scheduler.variables["GS_TLS_KEY"] == str(folder / "scheduler.key")
    assert worker.variables["GS_TLS_CERT"] == str(folder / "worker-0.pem")
    assert worker.variables["GS_TLS_CA"] == str(folder / "ca.pem")
