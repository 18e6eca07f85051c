"""What a job by SSH is before anything is started: hosts, ranks, variables, commands, refusals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from graphsplit.cli.commands import main
from graphsplit.cli.launch.environment import ChildSpec
from graphsplit.cli.launch.request import JobOptions
from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.client import HostError
from graphsplit.cli.ssh.command import agent_command, why_not
from graphsplit.cli.ssh.connection import HostConnection, RemoteChild
from graphsplit.cli.ssh.facts import cpu_capability, own_facts, problems_of, remarks_on
from graphsplit.cli.ssh.frames import MOST_BYTES, Cutter, Facts, Signal, Wrote
from graphsplit.cli.ssh.hosts import JobHost, give_ranks, read_hosts
from graphsplit.cli.ssh.options import RemoteJob, travelling
from graphsplit.cli.ssh.places import Places
from graphsplit.cli.ssh.preparation import scheduler_address, setups
from graphsplit.encoding.fields import MessageError
from graphsplit.reports import VARIABLE as REPORT_FILE
from graphsplit.version import __version__

FACTS = Facts(__version__, "2.13.0", "3.11.7", "10.0.0.1", "AVX2", 8, 1 << 30, 1e9)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:3", [("a", 2), ("b", 3)]),
        ("a", [("a", 1)]),
        ("me@node-1.example.org:4", [("me@node-1.example.org", 4)]),
        ("[fe80::1]:2,10.0.0.1:1", [("fe80::1", 2), ("10.0.0.1", 1)]),
        ("# those with much memory\na:2\n\nb slots=3  # the other\n", [("a", 2), ("b", 3)]),
    ],
)
def test_hosts_and_slots(text: str, hosts: list[tuple[str, int]]) -> None:
    assert read_hosts(text, "-H") == hosts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no host is named"),
        ("a:2,a:3", "a comes twice"),
        ("a:0", "a has no slot"),
        ("-oProxyCommand=x", "is no host"),
        ("a;reboot", "is no host"),
        ("a b", "is no host"),
        ("a:x", "is no host"),
    ],
)
def test_what_is_no_host(text: str, problem: str) -> None:
    with pytest.raises(click.BadParameter, match=problem):
        read_hosts(text, "-H")


def test_ranks_follow_the_order_of_hosts() -> None:
    hosts = [("b", 2), ("a", 3), ("c", 1)]
    assert give_ranks(hosts, None) == (
        JobHost("b", range(2)),
        JobHost("a", range(2, 5)),
        JobHost("c", range(5, 6)),
    )
    assert give_ranks(hosts, 3) == (JobHost("b", range(2)), JobHost("a", range(2, 3)))
    with pytest.raises(click.BadParameter, match="7 workers, but the hosts have 6 slots"):
        give_ranks(hosts, 7)


def test_variables_travel_by_a_list_of_those_that_are_allowed() -> None:
    environ = {
        "HOME": "/home/me",
        "AWS_SECRET_ACCESS_KEY": "x",
        "OMP_NUM_THREADS": "2",
        "GS_RECOVERY": "restart",
        "MS_NODE_TIMEOUT": "9",
        "MS_ROLE": "MS_WORKER",
        "GS_JOB_TOKEN_FILE": "token",
        "GS_JOB_TOKEN": "secret",
        "DATA_PATH": "/data",
    }
    always = {"OMP_NUM_THREADS": "2", "GS_RECOVERY": "restart", "MS_NODE_TIMEOUT": "9"}
    assert travelling(environ, ()) == always
    assert travelling(environ, ("DATA_PATH", "TZ=UTC")) == {
        **always,
        "DATA_PATH": "/data",
        "TZ": "UTC",
    }
    with pytest.raises(click.BadParameter, match="NOT_THERE is not set here"):
        travelling(environ, ("NOT_THERE",))


def test_a_hosts_shell_is_given_a_quoted_interpreter_and_ssh_no_name_for_an_option() -> None:
    command = agent_command(("ssh", "-F", "my config"), "a", "/opt/my python/bin/python")
    assert command[:3] == ["ssh", "-F", "my config"] and "BatchMode=yes" in command
    assert command[-3:-1] == ["--", "a"]
    assert command[-1] == "exec '/opt/my python/bin/python' -m graphsplit.cli.ssh.agent"
    shown = subprocess.run(["sh", "-c", f"set -- {command[-1][5:]}; echo $#"], capture_output=True)
    assert shown.stdout == b"3\n"


@pytest.mark.parametrize(
    ("status", "said", "what"),
    [
        (255, ["Host key verification failed."], "its host key is not known here"),
        (255, ["@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @",
               "Host key verification failed."], "its host key is another one than it was"),
        (255, ["me@a: Permission denied (publickey)."], "does not let this user in"),
        (255, ["ssh: Could not resolve hostname a: Name or service not known"], "not known here"),
        (255, ["ssh: connect to host a port 22: No route to host"], "SSH cannot reach it"),
        (127, ["bash: line 1: exec: /py: not found"], "it has no /py that can be run"),
        (126, ["bash: line 1: /py: Permission denied"], "it has no /py that can be run"),
        (1, ["/py: No module named graphsplit"], "its /py has no graphsplit"),
        (1, ["/py: No module named graphsplit.cli.ssh"], "has an older graphsplit"),
        (1, ["Traceback", "MemoryError"], "its agent did not start (MemoryError)"),
        (1, [], "its agent did not start (status 1)"),
    ],
)  # fmt: skip
def test_an_agent_that_did_not_start_is_explained(status: int, said: list[str], what: str) -> None:
    told = why_not("a", status, said, "/py")
    assert told.startswith("host a: ") and what in told and "\n  Fix: " in told


def test_frames_are_what_was_written_and_nothing_else_is_one() -> None:
    sent = [
        ChildSpec("worker 1", {"A": "ä\n"}),
        Signal("worker 1", 15),
        Wrote("worker 1", "stdout", bytes(range(256)).decode("latin-1")),
        replace(FACTS, remarks=("one",)),
    ]
    cutter = Cutter()
    data = b"Welcome to host b\n" + b"".join(map(frames.written, sent))
    lines = [line for at in range(0, len(data), 7) for line in cutter.feed(data[at : at + 7])]
    assert [frames.read(line) for line in lines] == [None, *sent]
    for line in (b"{}", b"[]", b'{"kind": "ChildSpec"}', b'{"kind": "Reboot"}', b"\xff", b"7"):
        assert frames.read(line) is None
    with pytest.raises(MessageError):
        cutter.feed(bytes(MOST_BYTES + 1))


def test_the_instruction_set_is_the_one_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert cpu_capability({}) == torch.backends.cpu.get_cpu_capability()
    assert cpu_capability({"ATEN_CPU_CAPABILITY": "avx2"}) == "AVX2"
    assert cpu_capability({}, Path("/no/such/file"))


def test_this_machine_can_take_part() -> None:
    facts = own_facts({"SSH_CONNECTION": "10.0.0.9 4711 10.0.0.2 22"})
    assert (facts.graphsplit, facts.torch) == (__version__, torch.__version__)
    assert facts.address == "10.0.0.2" and own_facts({}).address == ""
    assert problems_of({"a": facts, "b": facts}) == []


def test_what_hosts_must_share_and_what_may_differ() -> None:
    other = replace(FACTS, torch="2.12.0", python="3.12.1", graphsplit="9.9")
    assert [one.partition("\n")[0] for one in problems_of({"a": FACTS, "b": other})] == [
        f"host b has graphsplit 9.9, but host a has graphsplit {__version__}",
        "host b has torch 2.12.0, but host a has torch 2.13.0",
        "host b has python 3.12, but host a has python 3.11",
    ]
    (none,) = problems_of({"a": FACTS, "b": replace(FACTS, torch="")})
    assert none.startswith("host b: there is no torch for its Python\n  Fix: ")
    assert problems_of({}) == []
    patch = replace(FACTS, python="3.11.2", cpu="AVX512", remarks=("it is old\n  Fix: wait",))
    assert problems_of({"a": FACTS, "b": patch}) == []
    said = remarks_on({"a": FACTS, "b": patch}, late_s={"a": 0.2, "b": 3600.0})
    assert [one.partition("\n")[0].partition(": ")[2] for one in said] == [
        "it is old",
        "its clock is 3600 s behind this machine's: times in its log mislead, and certificates may "
        "not be valid there",
        "its CPU capability is AVX512, that of a is AVX2: results may not be those of one process "
        "bit for bit",
        "it has Python 3.11.2, host a 3.11.7, which does no harm",
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--python", "x", "-n", "1"], "--python is for other hosts"),
        (["--dry-run", "-n", "1"], "--dry-run is for other hosts"),
        (["-H", "a", "--scheduler", "a:1"], "for a launcher on each host, not -H"),
        (["-H", "a", "--hostfile", __file__], "give one of them"),
        (["-H", "a", "-n", "2"], "the hosts have 1 slots"),
        (["-H", "a", "--ssh", "ssh '"], "No closing quotation"),
        (["-H", "a", "--ssh", ""], "it is empty"),
        (["-H", "a", "--ssh", "/no/such/client"], "no SSH client can be started"),
        (["-H", "a", "--restarts", "1"], "a job that fails fast starts nothing again"),
        (["--spares", "b", "-n", "1"], "--spares is for other hosts"),
        (["-H", "a,b", "--spares", "b"], "b has workers already"),
        (["-H", "a", "--spares", "b c"], "'b c' is no host"),
        (["-H", "a", "--spares", "b"], "on another one only with --restarts"),
        (["--ray", "--spares", "b", "-n", "1"], "--spares are hosts for SSH"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(options: list[str], problem: str) -> None:
    result = CliRunner().invoke(main, ["run", *options, __file__])
    assert result.exit_code != 0 and problem in " ".join(result.output.split())


def test_a_dry_run_shows_all_but_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GS_JOB_TOKEN", "hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = [
        "-H",
        "a:2,b",
        "--python",
        "/py",
        "--workdir",
        "/job",
        "--env",
        "TZ=UTC",
        "--dry-run",
    ]
    result = CliRunner().invoke(main, ["run", *options, "train.py", "--epochs", "3"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[:4] == [
        "a: the scheduler and workers 0-1 of 3",
        "  ssh -T -o BatchMode=yes -o ConnectTimeout=8 -- a 'exec /py -m graphsplit.cli.ssh.agent'",
        "  there, in /job: /py train.py --epochs 3",
        "  over standard input: OMP_NUM_THREADS=1, TZ=UTC, GS_JOB_TOKEN (a secret)",
    ]
    assert "b: worker 2 of 3" in result.output and "hush" not in result.output


def test_the_guide_shows_the_dry_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MS_", "GS_", "OMP_", "ATEN_"))]:
        monkeypatch.delenv(name)
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "start-over-ssh.md").read_text()
    command = next(line for line in guide.splitlines() if "--dry-run train.py" in line)
    result = CliRunner().invoke(main, shlex.split(command)[2:])
    assert result.exit_code == 0 and f"{command}\n{result.output}" in guide


@dataclass
class Connected:
    """A connection to a host, as places see it."""

    name: str
    is_lost: bool = False


def test_workers_of_a_lost_host_move_to_a_spare_one_together() -> None:
    found = {name: Connected(name) for name in "abcd"}
    a, b, c, d = (JobHost(name, range(1)) for name in "abcd")
    places = Places((a, b), (c, d), found)  # type: ignore[arg-type]
    assert places.find(b) is found["b"] and places.has_place(b)  # type: ignore[comparison-overlap]
    found["b"].is_lost = found["c"].is_lost = True
    assert places.has_place(b)
    assert places.find(b) is places.find(b) is found["d"]  # type: ignore[comparison-overlap]
    assert places.find(a) is found["a"]  # type: ignore[comparison-overlap]
    found["d"].is_lost = True
    assert not places.has_place(b) and places.has_place(a)
    assert places.find(b) is found["d"]  # type: ignore[comparison-overlap]


def test_a_lost_host_is_reached_anew_where_that_can_be() -> None:
    found, made = {"a": Connected("a")}, []

    def renew(host: JobHost) -> Connected:
        made.append(Connected(host.name))
        return made[-1]

    a = JobHost("a", range(1))
    places = Places((a,), (), found, renew)  # type: ignore[arg-type]
    assert places.find(a) is found["a"] and not made  # type: ignore[comparison-overlap]
    found["a"].is_lost = True
    assert places.has_place(a) and not made
    assert places.find(a) is places.find(a) is made[0]  # type: ignore[comparison-overlap]
    made[0].is_lost = True
    assert places.find(a) is made[1]  # type: ignore[comparison-overlap]


class Piped:
    """A way to an agent that a test plays."""

    what = "actor"

    def __init__(self) -> None:
        (orders, to), (out, answers), (err, words) = (os.pipe() for _ in range(3))
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(to, "wb", 0), os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
        )  # fmt: skip
        self.orders, self.answers = os.fdopen(orders, "rb", 0), os.fdopen(answers, "wb", 0)
        os.close(words)

    def kill(self) -> None:
        if not self.answers.closed:
            self.answers.close()

    def wait(self, timeout: float | None = None) -> int:
        self.kill()
        return 0

    def why_not(self, status: int, said: Sequence[str]) -> str:
        return ""


SETUP = frames.Setup(
    JobOptions(1, Path("train.py"), host="10.0.0.1", port=1),
    "/job",
    ("worker-1",),
    30.0,
    False,
    (0, 0),
)


Begun = tuple[Piped, HostConnection, RemoteChild]


@contextmanager
def reached_anew(folder: Path, silence_s: float = 30.0) -> Iterator[Begun]:
    """A worker of a host that is reached anew, whose agent has not said a word."""
    client = Piped()
    with closing(HostConnection("b", client, silence_s)) as connection:
        connection.begin_anew(SETUP)
        spec = ChildSpec("worker 1", {REPORT_FILE: str(folder / "report")})
        child = connection.start(spec, ())
        assert child.stdout is not None and child.stderr is not None
        with child.stdout, child.stderr, client.orders:
            yield client, connection, child


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    with reached_anew(tmp_path) as found:
        yield found


def test_a_host_that_is_reached_anew_gets_its_orders_at_once_and_in_turn(begun: Begun) -> None:
    client, _, child = begun
    orders = [frames.read(line) for line in Cutter().feed(client.orders.read(1 << 16))]
    assert orders == [SETUP, ChildSpec("worker 1", {})]
    ready = frames.HostReady(1, "10.0.0.2", 2, "")
    for one in (FACTS, ready, frames.ProcessStarted("worker 1", 7)):
        client.answers.write(frames.written(one))
    client.answers.write(frames.written(frames.Exited("worker 1", -9, "")))
    assert child.wait() == -9 and child.pid == 7 and not child.lost


def test_a_host_that_is_reached_anew_and_cannot_take_part_is_lost_again(begun: Begun) -> None:
    client, connection, child = begun
    client.answers.write(frames.written(frames.Problem("there is no folder /job")))
    assert child.wait() == -signal.SIGHUP and connection.is_lost
    assert child.lost == "was lost with its host b: there is no folder /job"


def test_a_host_that_is_reached_anew_in_vain_is_lost_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("graphsplit.cli.ssh.connection.ANSWER_S", 0.1)
    with reached_anew(tmp_path, silence_s=0.3) as (_, _, child):
        assert child.wait() == -signal.SIGHUP
        assert child.lost == "was lost with its host b: nothing was heard from it for 0.1 s"


def test_a_worker_that_has_not_begun_on_a_host_that_is_reached_anew_ends_at_once(
    begun: Begun,
) -> None:
    _, _, child = begun
    child.signal_group(signal.SIGTERM)
    assert child.returncode == -signal.SIGTERM


def test_a_spare_host_has_the_certificates_of_all_who_may_come() -> None:
    remote = RemoteJob(
        (JobHost("a", range(1)), JobHost("b", range(1, 3))), "/py", ("ssh",), "/job",
        spares=(JobHost("c", range(0)),),
    )  # fmt: skip
    options = JobOptions(3, Path("train.py"), certificates=Path("/certs"))
    wanted = setups(options, remote, "10.0.0.1", 30.0, {"GS_WORKER_PORTS": "41000-41009"})
    assert {name: one.holders for name, one in wanted.items()} == {
        "a": ("scheduler", "worker-0"),
        "b": ("worker-1", "worker-2"),
        "c": ("worker-1", "worker-2"),
    }
    assert [one.has_scheduler for one in wanted.values()] == [True, False, False]
    assert {one.worker_ports for one in wanted.values()} == {(41000, 41009)}


def test_the_scheduler_listens_where_ssh_has_reached_the_first_host() -> None:
    here, there = replace(FACTS, address="127.0.0.1"), replace(FACTS, address="10.0.0.2")
    assert scheduler_address({"a": there, "b": FACTS}, "") == "10.0.0.2"
    assert (
        scheduler_address({"a": here, "b": replace(here, address="127.0.0.3")}, "") == "127.0.0.1"
    )
    assert scheduler_address({"a": here, "b": there}, "10.0.0.1") == "10.0.0.1"
    with pytest.raises(HostError, match=r"would listen on 127\.0\.0\.1, which host b"):
        scheduler_address({"a": here, "b": there}, "")
