"""Workers named by their host or by a label, in place of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError, PlacementError
from graphsplit.job.joined import _names
from graphsplit.marks import workers
from graphsplit.marks.annotations import annotations_of
from graphsplit.settings import ClusterSettings, is_label


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    """Three hosts: one worker on a, two on b.example, one on c; two have a label."""
    hosts = [("a", ["gpu"]), ("b.example", []), ("b.example", ["gpu", "user@10.0.0.2"]), ("c", [])]
    previous = workers._Names.found
    workers.set_names(workers.names_of(hosts))
    yield
    workers._Names.found = previous


def placed(*arguments: Any) -> Any:
    module: Any = nn.Linear(1, 1)
    return annotations_of(module.place(*arguments))[""].where


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        ("a", 0),
        ("c", 3),
        ("c:0", 3),
        ("b:1", 2),
        ("b.example:0", 1),
        ("user@10.0.0.2", 2),
        ("gpu:0", 0),
        ("gpu:*", [0, 2]),
        ("c:*", 3),
        (["c", "a"], [3, 0]),
        (["b:*", 0], [1, 2, 0]),
    ],
)
def test_a_name_is_the_worker_that_has_it(rank: Any, where: Any) -> None:
    assert placed("MS_WORKER", rank) == placed(rank) == where


@pytest.mark.parametrize(
    ("rank", "problem", "fix"),
    [
        ("b", "'b' names 2 workers: 1, 2", "'b:0' is the first of them, 'b:*' are all"),
        ("b:2", "'b:2': 'b' names 2 alone", "'b:0' is the first of them"),
        ("d", "no worker is called 'd'; there are a, b, b.example, c, gpu", "GS_WORKER_LABELS"),
        ("gpus", "no worker is called 'gpus'", "did you mean 'gpu'?"),
        ("1", "rank '1' is a str; expected an int, or the name of a host", "pass the worker's"),
        ("b: 1", "rank 'b: 1' is a str", "pass the worker's number"),
        (["a", "gpu:*"], "[0, 0, 2] names a worker twice", "name each worker"),
    ],
)
def test_a_name_of_nobody_or_of_several_is_refused_with_the_users_line(
    rank: Any, problem: str, fix: str
) -> None:
    with pytest.raises(PlacementError) as error:
        placed("MS_WORKER", rank)
    assert problem in str(error.value) and fix in str(error.value)
    assert "test_named_workers.py:" in str(error.value)


def test_names_stand_in_rules_and_blocks_too(tmp_path: Path) -> None:
    path = tmp_path / "placement.yaml"
    path.write_text(
        "'0': b:1\n'1': [MS_WORKER, c]\n'2': {rank: a}\n'3': [a, c]\n"
        "'4': {ranks: ['gpu:*', c], rows: [2, 1, 1]}\n"
    )
    network = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    gs.apply_placement(network, path)
    found = annotations_of(network)
    assert [found[str(n)].where for n in range(5)] == [2, 3, 0, [0, 3], [0, 2, 3]]
    assert found["4"].rows == (2, 1, 1)
    with gs.place("b:1"):
        pass
    assert gs.op(torch.add).place("c")(torch.ones(1), 1.0).tolist() == [2.0]
    path.write_text("'0': b\n'1': d\n'2': [a, 3]\n")
    with pytest.raises(PlacementError) as error:
        gs.apply_placement(nn.Sequential(*(nn.Linear(1, 1) for _ in range(3))), path)
    for problem in ("'0': 'b' names 2 workers", "'1': no worker is called 'd'", "role 'a' is not"):
        assert problem in str(error.value)
    assert f"{path}:1" in str(error.value) and f"{path}:2" in str(error.value)


WAYS: list[Callable[[], object]] = [
    lambda: placed("b"),
    lambda: gs.place("MS_WORKER", "b"),
    lambda: gs.apply_placement(nn.Linear(1, 1), {"": "b"}),
]


@pytest.mark.parametrize("way", WAYS, ids=["module", "block", "rule"])
def test_names_are_not_known_before_the_job_is_joined(way: Callable[[], object]) -> None:
    workers._Names.found = None
    with pytest.raises(PlacementError, match=r"names are not known before gs.init\(\)"):
        way()


def test_in_one_process_every_name_is_that_one() -> None:
    workers.set_names({})
    assert [placed(name) for name in ("a", "b:7", "gpu:*", ["a", "b"])] == [0] * 4


class Peer:
    def __init__(self, rank: int, host: str, labels: str) -> None:
        self.rank, self.host = rank, host
        self.endpoints = {"labels": labels} if labels else {}


def test_names_are_those_that_workers_have_registered() -> None:
    peers = [Peer(1, "b", "gpu,big"), Peer(0, "a.example", "")]
    job: Any = SimpleNamespace(member=SimpleNamespace(peers=peers))
    assert _names(job) == {"a.example": [0], "a": [0], "b": [1], "gpu": [1], "big": [1]}


def test_what_cannot_be_a_label_is_none() -> None:
    """Names of hosts and resources become labels by themselves, where they can."""
    assert all(map(is_label, ("a", "user@10.0.0.2", "big_disk", "GPU", "3d")))
    assert not any(map(is_label, ("fd00::1", "3", "accelerator_type:A100", "", "a b")))


def test_labels_are_read_from_the_environment() -> None:
    base = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_PORT": "8118"}
    found = ClusterSettings.from_environ({**base, "GS_WORKER_LABELS": " gpu, big-disk,,gpu"})
    assert found is not None and found.labels == ("gpu", "big-disk")
    for text in ("a b", "3", "x" * 501, "a:1"):
        with pytest.raises(ConfigurationError, match=r"GS_WORKER_LABELS=[^\n]*\n\s+expected: nam"):
            ClusterSettings.from_environ({**base, "GS_WORKER_LABELS": text})
