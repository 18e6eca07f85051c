"""A loop that asks for values is over once its rounds bring nothing new, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from graphsplit.capture.rounds import Rounds

Watched = list[Rounds]  # its contents are no plain values of the loops that are watched


def asked(rounds: Watched) -> bool:
    return rounds[0].go_on()


def until_converged(rounds: Watched) -> int:
    weight, h = torch.ones(4), torch.ones(4)
    while asked(rounds):
        made = h * weight
        rounds[0].note("mul", (h, weight), (made,))
        h = made
    return 0


def over_rows(rounds: Watched) -> int:
    rows = torch.ones(100, 4).unbind()
    rounds[0].note("unbind", (), rows)
    num_rows = 0
    for row in rows:
        rounds[0].note("sum", (row,), (row.sum(),))
        if not asked(rounds):
            return num_rows
    return len(rows)


def counting(rounds: Watched) -> int:
    h = torch.ones(4)
    for index in range(100):
        rounds[0].note("sum", (h,), (h.sum(),))
        if not asked(rounds):
            return index
    return 100


def rounds_of(loop: Callable[[Watched], int]) -> int:
    return loop([Rounds(sys._getframe().f_code)])


def test_a_loop_that_does_the_same_each_time_is_over() -> None:
    assert rounds_of(until_converged) == 0


def test_a_loop_over_rows_goes_on_to_its_end() -> None:
    assert rounds_of(over_rows) == 100


def test_a_loop_that_counts_goes_on_to_its_end() -> None:
    assert rounds_of(counting) == 100
