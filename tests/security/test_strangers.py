"""What somebody can do who writes into a job's folders or reaches its ports, and is no member."""

from __future__ import annotations

import os
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.cli.tokens import find_token, kept_token, local_jobs
from graphsplit.errors import PlacementError
from graphsplit.metrics_port import metric, serve_metrics
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import UNPROTECTED
from graphsplit.settings import Watching

DEADLINE_S = 60.0


def laughs(levels: int, opening: str, closing: str, name: str = "") -> str:
    """Each line stands for ten times the one before it."""
    lines = [f"a0: &a0 {opening}{name}0{closing}"]
    for level in range(1, levels):
        names = ", ".join(
            f"{chr(97 + n)}: *a{level - 1}" if name else f"*a{level - 1}" for n in range(10)
        )
        lines.append(f"a{level}: &a{level} {opening}{names}{closing}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (laughs(40, "{", "}", "x: "), "stands for more than 100,000 keys and values"),
        (laughs(40, "[", "]"), "stands for more than 100,000 keys and values"),
        ("a: &a {b: *a}\n", "holds an alias of what it stands in"),
        ("a: &a [*a]\n", "holds an alias of what it stands in"),
        ("a: " + "[" * 5_000 + "]" * 5_000, "is nested too deeply"),
    ],
    ids=["mappings", "lists", "mapping in itself", "list in itself", "deep"],
)
def test_a_placement_that_stands_for_too_much_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "placement.yaml"
    path.write_text(text)
    with pytest.raises(PlacementError) as error:
        gs.apply_placement(nn.Linear(2, 2), path)
    assert f"{path} {problem}" in str(error.value)
    assert "test_strangers.py:" in str(error.value)


def test_an_alias_of_one_rule_is_what_it_stands_for(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = tmp_path / "placement.yaml"
    path.write_text("'0': &there {rank: 0}\n'1': *there\n")
    gs.apply_placement(network, path)


def trained() -> gs.Model:
    network = nn.Linear(2, 2)
    model = gs.Model(
        network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    )
    model.train_step(torch.ones(1, 2), torch.ones(1, 2))
    return model


def test_a_save_writes_through_no_link_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    model, folder, prey = trained(), tmp_path / "save", tmp_path / "prey"
    model.save(folder)
    model.save(folder)  # into the names of the second slot
    names = [path.name for path in folder.iterdir()]
    model.save(folder)  # and back
    prey.write_text("mine")
    planted = [folder / f"{name}.part" for name in [*names, *os.listdir(folder)]]
    for link in set(planted):
        link.symlink_to(prey)
    previous = os.umask(0)
    try:
        model.save(folder)
        model.save(folder)
        model.state_dict(to=tmp_path / "whole.safetensors")
    finally:
        os.umask(previous)
    assert prey.read_text() == "mine"
    assert len(set(planted)) == 5 and not any(link.is_symlink() for link in planted)
    files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    for path in [*files, tmp_path / "whole.safetensors"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    model.load(folder)


def test_tokens_of_killed_launchers_go_when_anybody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"graphsplit-{os.getuid()}"
    token = {"GS_JOB_TOKEN": "a token that only this job knows"}

    def leave(port: int) -> Path:
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"127.0.0.1_{port}.token"
        path.write_text("of a launcher that was killed")
        path.chmod(0o600)
        return path

    with kept_token(token, "127.0.0.1", 9000):
        left = leave(8118)
        assert local_jobs() == [("127.0.0.1", 9000)] and not left.exists()
        left = leave(8118)
        assert find_token("127.0.0.1", 9000) == token["GS_JOB_TOKEN"] and not left.exists()
        left = leave(8118)
        with kept_token(token, "127.0.0.1", 9001):
            assert not left.exists()
        assert find_token("127.0.0.1", 9000) == token["GS_JOB_TOKEN"]
    assert not folder.exists()


@pytest.fixture
def metrics() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    close = serve_metrics(
        lambda: [metric("answer", "The answer.", 42.0)],
        Watching(metrics_port=port),
        SecurityOptions(),
        UNPROTECTED,
        offset=0,
        what="the metrics of a test",
    )
    yield port
    close()


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("127.0.0.1:{port}", True),
        ("localhost", True),
        ("LOCALHOST:{port}", True),
        ("[::1]:{port}", True),
        ("evil.example", False),
        ("evil.example:{port}", False),
        ("127.0.0.1.evil.example:{port}", False),
        ("[evil.example]", False),
    ],
)
def test_metrics_are_not_told_to_a_page_whose_name_leads_here(
    metrics: int, host: str, is_answered: bool
) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{metrics}/metrics", headers={"Host": host.format(port=metrics)}
    )
    if is_answered:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            assert b"graphsplit_answer 42.0" in answer.read()
        return
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=DEADLINE_S)
    assert error.value.code == 403
    assert b"graphsplit" not in error.value.read()
    error.value.close()
