"""``Module.place``, ``gs.place`` and ``gs.op``: what they write down, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.errors import PlacementError
from graphsplit.job import joined
from graphsplit.marks import annotations, unused
from graphsplit.marks.annotations import mark_planned, module_annotation


def place_module(role: Any, rank: Any) -> None:
    nn.Linear(1, 1).place(role, rank)


def place_block(role: Any, rank: Any) -> None:
    with gs.place(role, rank):
        pass


def place_operation(role: Any, rank: Any) -> None:
    gs.op(torch.add).place(role, rank)


WAYS = [place_module, place_block, place_operation]


def line_in(function: Callable[..., None]) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("role", "rank", "problem"),
    [
        ("MS_SCHED", 0, "role 'MS_SCHED' is not known; expected 'MS_WORKER'"),
        (None, 0, "role None is not known; expected 'MS_WORKER'"),
        (1, "MS_WORKER", "role 1 is not known; expected 'MS_WORKER'"),
        ("MS_WORKER", True, "rank True is a bool; expected an int"),
        ("MS_WORKER", "1", "rank '1' is a str; expected an int"),
        ("MS_WORKER", 1.0, "rank 1.0 is a float; expected an int"),
        ("MS_WORKER", -1, "rank -1 is negative; ranks begin at 0"),
    ],
)
def test_bad_placements_are_refused_with_the_users_line(
    way: Callable[[Any, Any], None], role: Any, rank: Any, problem: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        way(role, rank)
    message = str(caught.value)
    assert problem in message
    assert line_in(way) in message
    assert "Fix: " in message


def test_place_returns_the_module_itself() -> None:
    module = nn.Linear(1, 1)
    assert module.place("MS_WORKER", 3) is module
    found = module_annotation(module)
    assert found is not None
    assert found.rank == 3
    assert found.source.startswith(f"{__file__}:")


def test_a_modules_placement_is_its_own() -> None:
    network = nn.Sequential(nn.Linear(1, 1))
    network.place("MS_WORKER", 1)
    assert module_annotation(network[0]) is None


def test_placing_leaves_the_state_dict_alone() -> None:
    module = nn.Linear(1, 1)
    keys = list(module.state_dict())
    assert list(module.place("MS_WORKER", 1).state_dict()) == keys


def test_placing_a_planned_module_is_refused() -> None:
    network = nn.Sequential(nn.Linear(1, 1))
    mark_planned(network)
    with pytest.raises(PlacementError, match="already planned") as caught:
        network[0].place("MS_WORKER", 1)
    assert f"{__file__}:" in str(caught.value)


def test_a_module_outlives_the_network_that_it_was_planned_with() -> None:
    shared = nn.ReLU()
    network = nn.Sequential(shared)
    mark_planned(network)
    with pytest.raises(PlacementError, match="already planned"):
        shared.place("MS_WORKER", 1)
    del network
    shared.place("MS_WORKER", 1)


def test_an_operation_that_is_not_placed_is_the_function_itself() -> None:
    assert torch.equal(gs.op(torch.add)(torch.ones(1), torch.ones(1)), torch.full((1,), 2.0))


def test_placing_an_operation_leaves_the_original_unplaced() -> None:
    add = gs.op(torch.add)
    assert add.place("MS_WORKER", 1) is not add
    assert add._annotation is None


def test_blocks_and_operations_change_nothing_outside_capture() -> None:
    with gs.place("MS_WORKER", 4):
        result = gs.op(torch.mul).place("MS_WORKER", 2)(torch.full((1,), 3.0), 2)
    assert torch.equal(result, torch.full((1,), 6.0))


def test_placements_that_nothing_was_planned_with_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unused, "_not_used", {})
    monkeypatch.setattr(unused, "_used", set())
    network = nn.Sequential(nn.Linear(2, 2))
    network[0].place("MS_WORKER", 1)
    (named,) = unused.never_used()
    assert named.startswith("Linear at ") and "test_annotations.py:" in named
    beside, part = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv2d(2, 2, 1)), nn.ModuleList([nn.ReLU()])
    gs.apply_placement(beside, {"0": 1})
    beside[1].place(0)
    part[0:1].place(1)
    beside[1].place(1)  # in the place of the line before
    annotations.mark_planned(copy.deepcopy(network))
    assert [one.partition(" ")[0] for one in unused.never_used()] == [
        "Conv1d",
        "ModuleList",
        "Conv2d",
    ]
    network[0].place("MS_WORKER", 1)
    annotations.mark_planned(nn.Sequential(network, beside, part[0]))
    assert unused.never_used() == []


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
def test_worker_0_tells_of_modules_that_no_model_was_given(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    times: int,
) -> None:
    monkeypatch.setattr(unused, "_not_used", {"train.py:12": "Linear"})
    monkeypatch.setattr(unused, "_used", set())
    joined._name_unused(SimpleNamespace(rank=rank))  # type: ignore[arg-type]
    told = "never given to a gs.Model or gs.distribute that ran: Linear at train.py:12\n  Fix: "
    assert caplog.text.count(told) == times


@pytest.mark.parametrize(
    ("ranks", "rows", "seats", "found"),
    [
        ([1, 2, 3], None, (0, 1, 3), ([1, 2], ())),
        ([1, 2, 3], (2, 1, 4), (0, 1, 3), ([1, 2], (2, 4))),
        ([3, 0], None, (1, 3), (1, ())),
        (2, None, (0, 2), (1, ())),
        (1, None, (0, 2), None),
        ([1, 2], None, (0, 3), None),
    ],
)
def test_a_placement_is_on_those_who_are_there(ranks, rows, seats, found):
    placed = annotations.annotation_of(ranks, rows, "here").among(seats)
    assert (None if placed is None else (placed.where, placed.rows)) == found
