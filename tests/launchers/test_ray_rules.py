"""Jobs on a Ray cluster, without Ray: options, resources, and what is said before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import click
import pytest
from click.testing import CliRunner

from graphsplit.cli.commands import main
from graphsplit.cli.ray import run as run_module
from graphsplit.cli.ray.resources import read_resources
from graphsplit.cli.ray.run import RayActors

SCRIPT = str(Path(__file__).with_name("lenet_job.py"))


def test_each_worker_takes_what_the_file_says() -> None:
    text = "all: {CPU: 2, memory: 1.5 GiB}\n0: {big: 1}\n1-2: {GPU: 0.5, CPU: 0, memory: 64}\n"
    assert read_resources(text, 4, "r.yaml") == [
        {"CPU": 2.0, "memory": 1.5 * 2**30, "big": 1.0},
        {"memory": 64.0, "GPU": 0.5},
        {"memory": 64.0, "GPU": 0.5},
        {"CPU": 2.0, "memory": 1.5 * 2**30},
    ]
    assert read_resources("{}", 2, "r.yaml") == [{"CPU": 1.0}] * 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "r.yaml is no YAML: "),
        ("[" * 5_000, "r.yaml is no YAML: "),
        ("- 1", "r.yaml holds no mapping; expected ranks"),
        ("first: {CPU: 1}", "r.yaml has 'first'; expected ranks"),
        ("2: {CPU: 1}", "r.yaml has 2, but the job has workers 0 to 1"),
        ("1-0: {CPU: 1}", "r.yaml has '1-0', but the job has workers 0 to 1"),
        ("0: 3", "r.yaml 0: 3 is no mapping of resources, as in {CPU: 2}"),
        ("0: {CPU: many}", "r.yaml CPU: 'many' is no amount; expected a number, or 2 GiB"),
        ("0: {CPU: -1}", "r.yaml CPU: -1 is no amount"),
        ("0: {CPU: 0}", "r.yaml gives worker 0 nothing; expected some CPU, for example"),
    ],
)
def test_a_file_of_resources_that_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(click.BadParameter) as error:
        read_resources(text, 2, "r.yaml")
    assert problem in error.value.message


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ray", "-H", "a,b"], "--ray has nodes of its own: leave out -H, --python and --ssh"),
        (["--ray", "--python", "p", "-n", "2"], "--ray has nodes of its own"),
        (["-n", "2", "--ray"], "--ray {script}: no address of a cluster (HOST:PORT)"),
        (["--ray", "--dry-run"], "how many workers --ray has"),
        (["--ray", "-n", "2", "--bind"], "--bind is not for --ray: Ray counts cores"),
        (["--ray", "-n", "2", "--workers", "1"], "for a launcher on each host, not -H or --ray"),
        (["--resources", SCRIPT, "-n", "2"], "--resources is for a Ray cluster: --ray"),
        (["--ray", "-n", "2", "--restarts", "1"], "a job that fails fast starts nothing again"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(options: list[str], problem: str) -> None:
    result = CliRunner().invoke(main, ["run", *options, SCRIPT, SCRIPT])
    assert result.exit_code == 2, result.output
    words = " ".join(result.output.replace("│", " ").split())
    assert problem.format(script=SCRIPT) in words


def test_a_dry_run_shows_what_each_worker_takes(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("1: {GPU: 1}\n")
    given = ["run", "--ray", "-n", "2", "--resources", str(path), "--workdir", "/w", "--dry-run"]
    result = CliRunner().invoke(main, [*given, "train.py", "--epochs", "3"])
    assert result.output.splitlines() == [
        "Ray: the cluster that it finds, or a new one on this machine",
        "worker 0: CPU 1",
        "worker 1: CPU 1, GPU 1",
        "there, in /w: python train.py --epochs 3",
    ]


def test_without_ray_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(main, ["run", "--ray", "-n", "2", SCRIPT])
    assert result.exit_code == 1
    assert "Ray is not installed here\n  Fix: pip install 'graphsplit[ray]'" in result.output


class _RayOfALostNode:
    """Ray before it knows that a node is lost: the first actors that it starts die there."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self, dying: int) -> None:
        self.dying, self.killed = dying, list[object]()

    def get(self, _: object, timeout: float) -> None:
        assert timeout > 0
        self.dying -= 1
        if self.dying >= 0:
            raise self.exceptions.RayError("The actor died unexpectedly")

    def kill(self, handle: object) -> None:
        self.killed.append(handle)


@pytest.mark.parametrize("limit_s", [60.0, 0.0])
def test_an_actor_that_ray_starts_on_a_lost_node_is_started_again(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_TRY_AGAIN_S", 0.0)
    monkeypatch.setattr(run_module, "PLACE_WITHIN_S", limit_s)
    ray, made = _RayOfALostNode(2), list[SimpleNamespace]()

    def start(rank: int) -> SimpleNamespace:
        made.append(SimpleNamespace(__ray_ready__=MagicMock()))
        return made[-1]

    first = SimpleNamespace()
    actors = RayActors(ray, start, [SimpleNamespace(), first], ())
    if limit_s:
        assert actors._another(1) is made[2] is actors.handles[1]
        assert ray.killed == [first, *made[:2]]
    else:
        with pytest.raises(ray.exceptions.RayError, match="died unexpectedly"):
            actors._another(1)
