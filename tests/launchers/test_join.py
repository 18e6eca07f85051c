"""What rank 0 and the others find out before they join; no scheduler is started."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphsplit.errors import ConfigurationError
from graphsplit.launchers.environment import Found, find_launcher
from graphsplit.launchers.join import join_launcher
from graphsplit.launchers.rendezvous import OwnFile, SharedFolder, Whereabouts, wait_for

JOB = Found("slurm", 0, 2, "n03", job="77.0.")
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "localhost,other",
}
SAID = Whereabouts(8200, "a token that only this job knows")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"graphsplit-{os.getuid()}"


@pytest.fixture
def own_file() -> Iterator[OwnFile]:
    place = OwnFile(JOB)
    yield place
    place.close()


def test_rank_0_tells_the_others_of_its_host_and_takes_it_away(
    folder: Path, own_file: OwnFile
) -> None:
    assert OwnFile(JOB).look() is None
    own_file.tell(SAID)
    assert OwnFile(JOB).look() == SAID
    assert OwnFile(Found("slurm", 1, 2, "n03", job="77.1.")).look() is None
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    own_file.close()
    assert OwnFile(JOB).look() is None and not folder.exists()


def test_two_jobs_by_the_same_address_and_other_ports_are_two(folder: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    jobs = [find_launcher({**environ, "MASTER_PORT": port}) for port in ("29500", "29501")]
    first, second = (OwnFile(job) for job in jobs if job is not None)
    first.tell(SAID)
    assert second.look() is None and first.look() == SAID
    first.close()


def test_what_a_killed_rank_0_left_is_nobodys(folder: Path, own_file: OwnFile) -> None:
    own_file.tell(SAID)
    (path,) = folder.iterdir()
    left = path.read_bytes()
    own_file.close()
    folder.mkdir(mode=0o700)
    path.write_bytes(left)
    path.chmod(0o600)
    assert OwnFile(JOB).look() is None
    own_file.tell(Whereabouts(8300))
    assert OwnFile(JOB).look() == Whereabouts(8300)


def test_no_secret_is_left_in_a_folder_of_somebody_else(folder: Path, own_file: OwnFile) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="is not this user's own"):
        own_file.tell(SAID)
    (folder / "planted").touch()
    assert OwnFile(JOB).look() is None


def test_a_folder_that_all_hosts_see_tells_the_port(tmp_path: Path) -> None:
    place = SharedFolder(JOB, str(tmp_path))
    assert place.look() is None
    place.tell(Whereabouts(8200))
    assert SharedFolder(JOB, str(tmp_path)).look() == Whereabouts(8200)
    place.close()
    assert place.look() is None
    with pytest.raises(ConfigurationError, match="GS_RENDEZVOUS_DIR='/proc/none' takes no file"):
        SharedFolder(JOB, "/proc/none").tell(Whereabouts(8200))


def test_a_rank_0_that_says_nothing_is_named_with_the_fix(tmp_path: Path) -> None:
    times = iter(range(100))
    with pytest.raises(ConfigurationError) as error:
        wait_for(
            SharedFolder(JOB, str(tmp_path)),
            JOB,
            limit_s=5.0,
            clock=lambda: next(times),
            sleep=lambda _: None,
        )
    assert "rank 0 of a Slurm step did not say where its" in str(error.value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_hosts_without_a_secret_are_told_the_two_lines(rank: str) -> None:
    environ = {**STEP, "SLURM_PROCID": rank, "SLURM_STEP_NODELIST": "n03,n04"}
    before = dict(environ)
    with pytest.raises(ConfigurationError) as error:
        join_launcher(environ)
    assert "2 workers of a Slurm step on several hosts have no secret" in str(error.value)
    assert "> job-token)\n    export GS_JOB_TOKEN_FILE=$PWD/job-token" in str(error.value)
    assert environ == before


def test_mpirun_is_asked_where_rank_0_runs() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    with pytest.raises(ConfigurationError, match="Fix: set MS_SCHED_HOST to an address of that"):
        join_launcher(environ)


def test_other_mistakes_are_told_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="MS_NODE_TIMEOUT='soon'"):
        join_launcher({**STEP, "SLURM_PROCID": "0", "MS_NODE_TIMEOUT": "soon"})


def test_who_holds_the_port_is_named_where_no_other_one_can_be_told() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        environ = {
            **STEP,
            "SLURM_PROCID": "0",
            "MS_SCHED_HOST": "0.0.0.0",
            "MS_SCHED_PORT": str(taken.getsockname()[1]),
            "MS_WORKER_IP": "127.0.0.1",
            "GS_JOB_TOKEN": "a token that only this job knows",
        }
        with pytest.raises(ConfigurationError) as error:
            join_launcher(environ)
    assert f"(MS_SCHED_PORT) is taken by process {os.getpid()} (" in str(error.value)
    assert "GS_RENDEZVOUS_DIR to a folder that all hosts see" in str(error.value)


def test_a_name_that_is_loopback_at_home_is_no_place_for_others() -> None:
    environ = {**STEP, "SLURM_PROCID": "0", "GS_INSECURE": "I_TRUST_THIS_NETWORK"}
    environ["SLURM_STEP_NODELIST"] = "127.0.0.2,other"
    with pytest.raises(ConfigurationError, match="it is this host's loopback, which others cannot"):
        join_launcher(environ)


def test_others_take_the_port_that_was_told(tmp_path: Path) -> None:
    SharedFolder(Found("slurm", 1, 2, "127.0.0.3", job="77.0."), str(tmp_path)).tell(
        Whereabouts(8201)
    )
    environ = {
        **STEP,
        "SLURM_STEP_NODELIST": "127.0.0.3,other",
        "GS_RENDEZVOUS_DIR": str(tmp_path),
        "GS_JOB_TOKEN": "a token that only this job knows",
        "LOCAL_RANK": "0",
    }
    joined = join_launcher(environ)
    assert joined is not None and joined.scheduler is None and not joined.line
    own = {name: value for name, value in environ.items() if name.startswith("MS_")}
    assert own == {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": "2",
        "MS_NODE_ID": "1",
        "MS_SCHED_HOST": "127.0.0.3",
        "MS_SCHED_PORT": "8201",
        "MS_WORKER_IP": "127.0.0.1",
    }
    assert not {"SLURM_PROCID", "SLURM_NTASKS", "LOCAL_RANK"} & set(environ)
    assert environ["SLURM_JOB_ID"] == "77"
