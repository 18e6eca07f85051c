"""Code kept whole finds in Python what it would find in eager mode, whatever is changed later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alone_helpers import assert_as_alone
from equivalence_helpers import batches_of, rows_against_target
from plain_model import PlainModel
from recovery_helpers import threads_as_workers
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.errors import StepFailedError

assert threads_as_workers

Code = Callable[[Any], object]


def _given() -> Any:
    def given(n: int = 1) -> int:
        return n

    return given


class Held:
    """What a part and the code around it share."""

    def __init__(self) -> None:
        self.n, self.rate, self.flag = 1, 0.5, False
        self.kept: Any = None
        self.seen, self.spare = [1.0], []
        self.counts = {"whole": 0, "around": 0}
        self.pair = (0, [1.0])
        self.table, self.given = {"seen": self.seen}, _given()


class Whole(nn.Module):
    """Kept whole, for it asks for a value; it multiplies by what a case reads."""

    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner, self.held, self.read = nn.Linear(8, 8), held, read

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.inner(values)
        values = torch.tanh(values) if values.sum() > 0 else values
        return values * (1 + 0.25 * self.read(self.held))


class Around(nn.Module):
    """Changes what the part reads, before it is called and afterwards."""

    def __init__(
        self, before: Code, after: Code, read: Callable[[Any], float], make: Callable[[], Any]
    ) -> None:
        super().__init__()
        self.held = make()
        self.first, self.whole = nn.Linear(8, 8), gs.opaque(Whole(self.held, read))
        self.last, self.before, self.after = nn.Linear(8, 8), before, after

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        self.before(self.held)
        hidden = self.whole(hidden)
        self.after(self.held)
        made: torch.Tensor = self.last(hidden)
        return made


def _nothing(held: Any) -> None:
    pass


def _counts(held: Any) -> None:
    held.n += 1


def _raises_flag(held: Any) -> None:
    held.flag = True


def _lowers_flag(held: Any) -> None:
    held.flag = False


def _turns_flag(held: Any) -> None:
    held.n += 1
    if held.n % 3 == 0:
        held.flag = not held.flag


def _halves(held: Any) -> None:
    held.rate *= 0.5


def _adds(held: Any) -> None:
    held.rate += 0.125


def _appends(held: Any) -> None:
    held.seen.append(0.5)


def _adds_inside(held: Any) -> None:
    held.pair[1][0] += 0.5


def _keeps_two(held: Any) -> None:
    held.seen = held.seen[-2:]


def _exchanges(held: Any) -> None:
    held.seen, held.spare = held.spare, held.seen
    held.spare.clear()
    held.seen.append(0.5)


def _sets_late(held: Any) -> None:
    held.late = 2


def _keeps_a_tensor(held: Any) -> None:
    held.n += 1
    held.kept = torch.ones(2) if held.n < 4 else None


def _adds_to_first(held: Any) -> None:
    held.seen[0] += 1


def _adds_what_it_looks_up(held: Any) -> None:
    held.seen[0] = held.table["seen"][0] + 2


def _raises_default(held: Any) -> None:
    held.given.__defaults__ = (held.given() + 1,)


def _counts_around(held: Any) -> None:
    held.counts["around"] = held.counts["around"] + 1


def _counts_inside(held: Any) -> float:
    held.counts["whole"] += 1
    count: int = held.counts["whole"]
    return count


def _lowers_n(held: Any) -> None:
    held.n = 0


def _raises_n(held: Any) -> None:
    held.n = 5


def _counts_n(held: Any) -> float:
    held.n += 1
    count: int = held.n
    return count


CASES: dict[str, tuple[Code, Code, Callable[[Any], float]]] = {
    "counted before": (_counts, _nothing, lambda held: held.n),
    "counted behind": (_nothing, _counts, lambda held: held.n),
    "counted twice": (_counts, _counts, lambda held: held.n),
    "a flag for a while": (_raises_flag, _lowers_flag, lambda held: 3 if held.flag else 1),
    "a flag of a later microbatch": (_nothing, _turns_flag, lambda held: 3 if held.flag else 1),
    "a number that comes back": (_halves, _adds, lambda held: held.rate),
    "a list that grows behind": (_nothing, _appends, lambda held: sum(held.seen)),
    "a list in a tuple": (_adds_inside, _adds_inside, lambda held: held.pair[1][0]),
    "another list behind": (_appends, _keeps_two, lambda held: sum(held.seen)),
    "lists exchanged behind": (_nothing, _exchanges, lambda held: len(held.spare) + len(held.seen)),
    "whether a tensor is there": (
        *(_nothing, _keeps_a_tensor),
        lambda held: 1 if held.kept is None else 2,
    ),
    "one list in two places": (
        *(_adds_to_first, _adds_what_it_looks_up),
        lambda held: held.table["seen"][0],
    ),
    "a default": (_raises_default, _raises_default, lambda held: held.given()),
    "set by the first call": (_nothing, _sets_late, lambda held: getattr(held, "late", 1)),
}


CHANGING = {
    "two entries of a dictionary": (_nothing, _counts_around, _counts_inside),
    "set anew before each call": (_lowers_n, _nothing, _counts_n),
    "set anew behind each call": (_nothing, _raises_n, _counts_n),
    "set before and behind": (_lowers_n, _raises_n, _counts_n),
    "set alike before and behind": (_lowers_n, _lowers_n, _counts_n),
}


def _place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.whole.place("MS_WORKER", 1)
    net.last.place("MS_WORKER", 0)


def _space() -> Any:
    return SimpleNamespace(**vars(Held()))


class OwnSpace(SimpleNamespace):
    """What is read of it is seen through its class."""


def _own_space() -> Any:
    return OwnSpace(**vars(Held()))


def _follows(
    before: Code,
    after: Code,
    read: Callable[[Any], float],
    microbatches: int,
    make: Callable[[], Any] = Held,
) -> None:
    assert_same_bits(
        lambda: Around(before, after, read, make),
        batches_of(8, 8),
        steps=4,
        num_workers=2,
        place=_place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
        plan_everywhere=True,
    )


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("make", [Held, _space])
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_was_there_when_it_was_called(case: str, make: Any, microbatches: int) -> None:
    _follows(*CASES[case], microbatches, make)


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("case", CHANGING)
def test_a_call_that_changes_what_nobody_reads_around_it(case: str, microbatches: int) -> None:
    _follows(*CHANGING[case], microbatches)


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.filterwarnings("ignore:network or loss reads")
def test_a_hook_on_a_parameter_finds_what_its_microbatch_has_left() -> None:
    def losses(make: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        net = Around(_counts, _nothing, lambda held: 1, Held)
        net.whole = nn.Linear(8, 8)  # no call: the hook alone reads it
        _place(net)
        net.last.weight.register_hook(lambda gradient: gradient * net.held.n)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = make(net, rows_against_target, optimizer, microbatches=4)
        return [float(model.train_step(*batch)) for batch in batches_of(8, 8, num=4)]

    assert_as_alone(lambda: losses(PlainModel), lambda: losses(gs.Model))


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("case", ["counted before", "set by the first call"])
def test_a_namespace_of_a_class_of_his_own_is_looked_at_without_being_read(case: str) -> None:
    _follows(*CASES[case], 1, _own_space)


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("after", [_nothing, _lowers_n, _raises_n])
def test_what_is_left_is_what_was_set_last(after: Code, microbatches: int) -> None:
    """By the call, or by the code behind it, though that leaves what stood there before."""

    def left(make: Callable[..., Any]) -> list[int]:
        torch.manual_seed(0)
        net = Around(_lowers_n, after, _counts_n, Held)
        _place(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = make(net, rows_against_target, optimizer, microbatches=microbatches)
        found = []
        for batch in batches_of(8, 8, num=3):
            model.train_step(*batch)
            found.append(net.held.n)
        return found

    assert_as_alone(lambda: left(PlainModel), lambda: left(gs.Model))


@pytest.mark.filterwarnings("ignore:network or loss reads")
def test_what_is_read_behind_a_call_that_changes_it_is_refused() -> None:
    """Also where it is set before the call, and so not read of what the step before has left."""
    with pytest.raises(StepFailedError, match="which is read outside of it as well"):
        _follows(_lowers_n, _keeps_n, _counts_n, 1)


def _keeps_n(held: Any) -> None:
    held.rate = held.n / 4


def test_that_both_put_another_list_there_is_refused() -> None:
    """Also where it holds the same: what stands in it would be that of another one."""
    with pytest.raises(StepFailedError, match="which the code around it changes as well"):
        _follows(_nothing, _puts_a_copy, _copies, 1)


def _puts_a_copy(held: Any) -> None:
    held.seen = list(held.seen)


def _copies(held: Any) -> int:
    held.seen = copy.deepcopy(held.seen)
    return 1 + len(held.seen)
