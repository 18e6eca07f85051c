"""Few combinations of a test's parameters run; together they show each value and each pair."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from combinations import Values, left_out, redundant


def named(every: list[Values]) -> list[tuple[str, Values]]:
    return [(str(values), values) for values in every]


def kept(every: list[Values]) -> list[Values]:
    out = redundant(named(every))
    return [values for index, values in enumerate(every) if index not in out]


def all_of(*sizes: int) -> list[Values]:
    names = "abcdef"[: len(sizes)]
    return [tuple(zip(names, values, strict=True)) for values in product(*map(range, sizes))]


def test_each_value_of_two_parameters_is_seen():
    every = all_of(8, 2)
    assert len(kept(every)) == 8
    assert {one for values in kept(every) for one in values} == {
        one for values in every for one in values
    }


@pytest.mark.parametrize("sizes", [(6, 3, 5), (2, 2, 2, 2), (3, 4, 1)], ids=str)
def test_each_pair_of_values_is_seen_where_there_are_more(sizes: tuple[int, ...]):
    every = all_of(*sizes)

    def pairs(some: list[Values]) -> set[Values]:
        return {pair for values in some for pair in combinations(values, 2)}

    assert pairs(kept(every)) == pairs(every)
    assert len(kept(every)) <= len(every) * 0.6 or 1 in sizes


def test_one_parameter_and_none_are_seen_whole():
    assert kept(all_of(7)) == all_of(7)
    assert kept([()]) == [()]


def test_all_run_where_they_are_asked_for(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ALL_COMBINATIONS", "1")
    assert left_out(request.session.items) == set()


def test_what_was_chosen_once_is_chosen_again(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """Every process of the run sees the same tests; what is left shows all, so all of it stays."""
    monkeypatch.delenv("ALL_COMBINATIONS", raising=False)
    assert left_out(request.session.items) == set()
