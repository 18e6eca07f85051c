from __future__ import annotations

import socket
from pathlib import Path

import pytest

from graphsplit.cli.launch.environment import job_children
from graphsplit.launchers import ports
from graphsplit.launchers.ports import find_free_port


def test_a_scheduler_and_ranked_workers_share_the_address() -> None:
    scheduler, *workers = job_children({"HOME": "/h"}, num_workers=2, host="127.0.0.1", port=77)
    assert [child.name for child in workers] == ["worker 0", "worker 1"]
    assert [child.variables["MS_NODE_ID"] for child in workers] == ["0", "1"]
    assert scheduler.variables["MS_ROLE"] == "MS_SCHED"
    assert workers[1].file_stem == "worker_1"
    for child in (scheduler, *workers):
        assert child.variables["MS_WORKER_NUM"] == "2"
        assert child.variables["MS_SCHED_HOST"] == "127.0.0.1"
        assert child.variables["MS_SCHED_PORT"] == "77"
        assert child.variables["HOME"] == "/h"
        assert child.variables["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_is_kept_but_not_a_rank_for_everybody() -> None:
    base = {"OMP_NUM_THREADS": "2", "MALLOC_TRIM_THRESHOLD_": "5", "MS_NODE_ID": "4"}
    scheduler, worker = job_children(base, num_workers=1, host="h", port=1)
    assert worker.variables["OMP_NUM_THREADS"] == "2"
    assert worker.variables["MALLOC_TRIM_THRESHOLD_"] == "5"
    assert worker.variables["MS_NODE_ID"] == "0"
    assert "MS_NODE_ID" not in scheduler.variables


def test_a_free_port_can_be_bound_and_is_given_to_nobody_else() -> None:
    port = find_free_port("127.0.0.1")
    with socket.socket() as taken, socket.socket() as any_port:
        taken.bind(("127.0.0.1", port))
        any_port.bind(("127.0.0.1", 0))
        low, high = ports._given_ports()
        assert low <= any_port.getsockname()[1] <= high
        assert not low <= port <= high


def test_any_port_is_taken_where_all_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", find_free_port("127.0.0.1")))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_FIRST_PORT", port)
        monkeypatch.setattr(ports, "_given_ports", lambda: (port + 1, 65_535))
        assert find_free_port("127.0.0.1") not in (0, port)
    monkeypatch.setattr(ports, "_given_ports", lambda: (1, 65_535))
    assert find_free_port("127.0.0.1") > 0


@pytest.mark.parametrize("text", [None, "", "32768", "a b"])
def test_a_system_that_does_not_tell_its_ports(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "range"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(ports, "_GIVEN_PORTS", path)
    assert ports._given_ports() == (32_768, 65_535)


def test_a_host_that_is_not_this_one_is_said() -> None:
    with pytest.raises(OSError):
        find_free_port("192.0.2.1")
