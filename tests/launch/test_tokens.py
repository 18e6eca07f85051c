"""``graphsplit status`` finds the token of a job that ``graphsplit run`` has started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graphsplit.cli.tokens import find_token, kept_token, local_jobs

TOKEN = {"GS_JOB_TOKEN": "a token that only this job knows"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"graphsplit-{os.getuid()}"


def test_a_token_is_found_while_the_job_runs_and_gone_afterwards(folder: Path) -> None:
    with kept_token(TOKEN, "127.0.0.1", 8118):
        assert find_token("127.0.0.1", 8118) == TOKEN["GS_JOB_TOKEN"]
        assert find_token("127.0.0.1", 8119) == ""
        (path,) = folder.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
    assert find_token("127.0.0.1", 8118) == ""
    assert not folder.exists()


def test_the_folder_stays_as_long_as_any_job_has_a_token(folder: Path) -> None:
    with kept_token(TOKEN, "127.0.0.1", 8118):
        with kept_token(TOKEN, "127.0.0.1", 8119):
            assert local_jobs() == [("127.0.0.1", 8118), ("127.0.0.1", 8119)]
        assert find_token("127.0.0.1", 8118) == TOKEN["GS_JOB_TOKEN"]
    assert not folder.exists()


def test_jobs_that_come_and_go_find_their_tokens(folder: Path) -> None:
    """Whoever is the last takes the folder away, perhaps when another has just looked at it."""

    def come_and_go(port: int) -> None:
        for _ in range(300):
            with kept_token(TOKEN, "127.0.0.1", port):
                assert find_token("127.0.0.1", port) == TOKEN["GS_JOB_TOKEN"]

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(come_and_go, port) for port in (8118, 8119, 8120)]:
            done.result()
    assert not folder.exists()


def test_what_a_killed_launcher_left_is_nobodys_and_is_replaced(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "127.0.0.1_8118.token").write_text("old")
    (folder / "127.0.0.1_8118.token").chmod(0o600)
    assert find_token("127.0.0.1", 8118) == ""
    with kept_token(TOKEN, "127.0.0.1", 8118):
        assert find_token("127.0.0.1", 8118) == TOKEN["GS_JOB_TOKEN"]


def test_a_launcher_that_is_killed_takes_its_token_with_it(folder: Path) -> None:
    text = (
        "import sys\nfrom graphsplit.cli.tokens import kept_token\n"
        f"with kept_token({TOKEN!r}, '127.0.0.1', 8118):\n"
        "    print('kept', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"kept\n"
        assert find_token("127.0.0.1", 8118) == TOKEN["GS_JOB_TOKEN"]
        launcher.kill()
        launcher.wait(60)
    assert [path.name for path in folder.iterdir()] == ["127.0.0.1_8118.token"]
    assert find_token("127.0.0.1", 8118) == ""


def test_a_job_that_ends_leaves_the_token_of_the_next_at_its_port(folder: Path) -> None:
    following = {"GS_JOB_TOKEN": "the token of the job after it"}
    with contextlib.ExitStack() as next_job:
        with kept_token(TOKEN, "127.0.0.1", 8118):
            next_job.enter_context(kept_token(following, "127.0.0.1", 8118))
        assert find_token("127.0.0.1", 8118) == following["GS_JOB_TOKEN"]
    assert not folder.exists()


def test_a_folder_that_others_can_read_is_not_used(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    with kept_token(TOKEN, "127.0.0.1", 8118):
        assert list(folder.iterdir()) == []
        assert find_token("127.0.0.1", 8118) == ""


def test_a_folder_in_somebody_elses_place_is_not_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with kept_token(TOKEN, "127.0.0.1", 8118):
        assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_job_without_a_token_leaves_nothing(folder: Path) -> None:
    with kept_token({}, "127.0.0.1", 8118):
        assert not folder.exists()
