"""Python state that calls kept whole change: as often as in eager mode, and one for all of them."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.errors import CaptureError, GraphsplitError, PlacementError, StepFailedError


class Kept:
    """Holds every kind of state."""

    of_class = 0

    def __init__(self) -> None:
        self.attribute = 0
        self.entries = {"calls": 0}
        self.items: list[int] = []
        self.queue: collections.deque[int] = collections.deque()
        self.array = np.zeros(1)
        self.members: set[int] = set()

    def change(self) -> None:
        """Change all of it."""
        self.attribute += 1
        Kept.of_class += 1
        self.entries["calls"] += 1
        self.items.append(1)
        self.queue.append(1)
        self.array[0] += 1
        self.members.add(len(self.members))

    def counts(self) -> list[int]:
        """How often each kind has changed."""
        sized = (self.items, self.queue, self.members)
        return [
            self.attribute,
            Kept.of_class,
            self.entries["calls"],
            int(self.array[0]),
            *map(len, sized),
        ]


kept = Kept()
calls = 0
shared = {"calls": 0}
own = torch.zeros(1)
own_random = random.Random(1)
own_generator = torch.Generator().manual_seed(1)


def count(h: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    kept.change()
    count.__dict__["calls"] = count.__dict__.get("calls", 0) + 1
    return h * 2 if h.sum() > 0 else h * 3


class Counting(torch.autograd.Function):
    """Counts in its class."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Counting.backwards += 1
        return gradients[0] * 2


class Scripted(nn.Module):
    """Counts in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class Two(nn.Module):
    """Two calls on two workers, or one."""

    def __init__(self, one: Callable[..., Any], other: Callable[..., Any] | None, at: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.one, self.other, self.at = one, other, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 0):
            h = self.one(self.first(x))
            if self.other is not None and self.at == 0:
                return self.last(self.other(h))
        with gs.place("MS_WORKER", 1):
            h = self.last(torch.dropout(h, 0.2, self.training))
            return h if self.other is None else self.other(h)


def compare(
    one: Callable[..., Any], other: Callable[..., Any] | None = None, at: int = 1, **options: Any
) -> None:
    assert_same_bits(
        lambda: Two(one, other, at),
        batches_of(8, 4, num=3),
        num_workers=2,
        place=lambda net: net.first.place("MS_WORKER", 0),
        loss_fn=rows_against_target,
        **options,
    )


@pytest.mark.parametrize(("microbatches", "options"), [(1, {"recompute": True}), (4, {})])
def test_state_changes_as_often_as_in_eager_mode(
    microbatches: int, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PLACEMENTS", "1")  # each test predicts, too
    before = [calls, count.__dict__.get("calls", 0), *kept.counts()]
    compare(gs.opaque(count), microbatches=microbatches, **options)
    after = [calls, count.__dict__["calls"], *kept.counts()]
    runs = 2 * (3 * microbatches + 2)  # the loop's and the workers': training, eval and predict
    assert [b - a for a, b in zip(before, after, strict=True)] == [runs] * len(after)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_function_counts_from_its_first_call_on_in_an_attribute(microbatches: int) -> None:
    def make() -> nn.Module:
        def counts(h: torch.Tensor) -> torch.Tensor:
            counts.calls = getattr(counts, "calls", 0) + 1  # type: ignore[attr-defined]
            return h * counts.calls  # type: ignore[attr-defined, no-any-return]

        return Two(gs.opaque(counts), None, 1)

    assert_same_bits(
        make,
        batches_of(8, 4, num=3),
        num_workers=2,
        place=lambda net: net.first.place("MS_WORKER", 0),
        loss_fn=rows_against_target,
        microbatches=microbatches,
        plan_everywhere=True,
    )


def test_a_class_counts_every_backward_once() -> None:
    before = Counting.backwards
    compare(Counting.apply, microbatches=4)  # type: ignore[no-untyped-call]
    assert Counting.backwards - before == 2 * 3 * 4


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("mark", [gs.opaque, lambda module: module])
def test_attributes_of_a_scripted_module_are_those_of_eager_mode(mark: Any) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mark(torch.jit.script(Scripted()))  # type: ignore[no-untyped-call]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    assert_same_bits(
        Around, batches_of(8, 4, num=3), num_workers=2, loss_fn=rows_against_target, microbatches=4
    )


def draws(h: torch.Tensor) -> torch.Tensor:
    return h * (random.random() + float(np.random.rand()) + random.gauss(0, 1))


def draws_if_positive(h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0 and random.random() < 0.5:
        return h
    return h * float(np.random.randn())


def draws_normally(h: torch.Tensor) -> torch.Tensor:
    return h * float(np.random.randn())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("one", [draws, draws_normally])
@pytest.mark.parametrize("other", [draws_if_positive, draws_normally])
def test_generators_of_the_process_travel(one: Any, other: Any, seed: int) -> None:
    """NumPy keeps every second Gaussian, beside the memory of its generator."""
    random.seed(seed)
    np.random.seed(seed)
    compare(gs.opaque(one), gs.opaque(other))


def test_generators_of_the_process_run_on_through_microbatches() -> None:
    compare(gs.opaque(draws), microbatches=4)
    compare(gs.opaque(draws), gs.opaque(draws), at=0, microbatches=4)


def test_generators_of_the_process_travel_in_microbatches_too() -> None:
    compare(gs.opaque(draws), gs.opaque(draws), microbatches=4)


def test_they_are_refused_where_parts_of_gradients_are_added_in_pairs() -> None:
    with pytest.raises(
        PlacementError, match=r"(?s)share .*random, which changes .* several microbatches at once"
    ):
        compare(gs.opaque(draws), gs.opaque(draws), microbatches=4, gradient_order="pairs")


def draws_from_python(h: torch.Tensor) -> torch.Tensor:
    return h * random.random()


def draws_from_numpy(h: torch.Tensor) -> torch.Tensor:
    return h * float(np.random.rand())


def test_both_generators_of_the_process_count_as_one_in_microbatches() -> None:
    calls = gs.opaque(draws_from_python), gs.opaque(draws_from_numpy)
    for microbatches in (1, 4):
        compare(*calls, microbatches=microbatches)


late: list[int] = []


def draws_late(h: torch.Tensor) -> torch.Tensor:
    late.append(1)
    return h * float(np.random.rand()) if len(late) > 4 else h  # from the second step on


def test_the_other_generator_may_be_reached_until_it_is_drawn_from() -> None:
    late.clear()
    with pytest.raises(StepFailedError, match=r"draws_late changes numpy\.random"):
        compare(gs.opaque(draws_from_python), gs.opaque(draws_late), microbatches=2)
    assert len(late) > 6


def shares_entry(h: torch.Tensor) -> torch.Tensor:
    shared["calls"] += 1
    return h * shared["calls"]


def reads_entry(h: torch.Tensor) -> torch.Tensor:
    return h * (1 + shared["calls"])


def shares_tensor(h: torch.Tensor) -> torch.Tensor:
    own.add_(1)
    return h * own.item()


def shares_random(h: torch.Tensor) -> torch.Tensor:
    return h * own_random.random()


def shares_generator(h: torch.Tensor) -> torch.Tensor:
    return h * torch.rand(1, generator=own_generator)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (shares_entry, reads_entry, "shared"),
        (shares_tensor, shares_tensor, "own"),
        (shares_random, shares_random, "own_random"),
        (shares_generator, shares_generator, "own_generator"),
    ],
)
def test_shared_state_on_two_workers_is_refused(
    one: Any, other: Any, name: str, microbatches: int
) -> None:
    message = rf"(?s)share {name}, which changes .*test_opaque_state.py.*test_opaque_state.py.*Fix"
    with pytest.raises(PlacementError, match=message):
        compare(gs.opaque(one), gs.opaque(other), microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_state_that_is_only_read_may_be_shared(microbatches: int) -> None:
    compare(gs.opaque(reads_entry), gs.opaque(reads_entry), microbatches=microbatches)


times: list[int] = []


def changes_late(h: torch.Tensor) -> torch.Tensor:
    times.append(1)
    if len(times) == 4:  # in the second step, by a worker
        shared["calls"] += 1
    return h * 2


def test_shared_state_that_changes_later_is_refused_then() -> None:
    message = r"(?s)changes shared, which a call elsewhere can reach .*Fix: place both calls"
    with pytest.raises(StepFailedError, match=message):
        compare(gs.opaque(changes_late), gs.opaque(reads_entry))


class Counted(nn.Module):
    """Calls a function, and counts in a buffer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("count", torch.zeros(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        made: torch.Tensor = self.function(h)
        return made


class ReadBetween(nn.Module):
    """Reads what calls kept whole count in buffers, so that these run on copies of the buffers."""

    def __init__(self, one: Callable[..., Any], other: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.one, self.other = gs.opaque(Counted(one)), gs.opaque(Counted(other))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(self.first(x)) + self.one.count
        h = self.other(self.last(h))
        made: torch.Tensor = h + self.one.count * self.other.count
        return made


def compare_on_copies(
    one: Callable[..., Any], other: Callable[..., Any], microbatches: int
) -> None:
    def place(net: Any) -> None:
        for module, rank in ((net.first, 0), (net.one, 0), (net.last, 1), (net.other, 1)):
            module.place("MS_WORKER", rank)

    assert_same_bits(
        lambda: ReadBetween(one, other),
        batches_of(8, 4, num=3),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
    )


@pytest.mark.parametrize("microbatches", [1, 4])
def test_state_that_calls_on_copies_share_is_refused(microbatches: int) -> None:
    """Each worker counted for itself, without a word."""
    compare_on_copies(reads_entry, reads_entry, microbatches)
    with pytest.raises(PlacementError, match=r"(?s)share shared, which changes .*state.py.*Fix"):
        compare_on_copies(shares_entry, reads_entry, microbatches)


def test_state_that_calls_on_copies_share_and_change_later_is_refused_then() -> None:
    times.clear()
    with pytest.raises(StepFailedError, match=r"changes shared, which a call elsewhere can reach"):
        compare_on_copies(changes_late, reads_entry, 1)


USED_UP: dict[str, Callable[[], Iterator[Any]]] = {
    "a generator": lambda: (float(number) for number in range(100)),
    "an index": lambda: iter([1.0, 2.0, 3.0]),
    "pairs": lambda: (pairs := zip(map(abs, range(9)), itertools.cycle([1])), map(sum, pairs))[1],
    "a remainder": lambda: filter(None, iter({1: 2, 3: 4, 5: 6}.values())),
}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("kind", USED_UP)
def test_an_iterator_that_a_plan_would_use_up_is_refused(kind: str, is_whole: bool) -> None:
    numbers = USED_UP[kind]()

    def takes_numbers(h: torch.Tensor) -> torch.Tensor:
        return h * next(numbers)

    match = (
        r"takes items from an iterator, .*numbers.*\n.*Fix: " if is_whole else "an iterator that"
    )
    with pytest.raises(CaptureError, match=match):
        compare(gs.opaque(takes_numbers) if is_whole else takes_numbers)


class WithGenerator(nn.Module):
    """Draws in forward from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.rand(x.shape, generator=self.generator)


def test_a_generator_of_its_own_in_plain_forward_is_refused_with_its_line() -> None:
    message = r"(?s)draws from a generator of its own.*test_opaque_state.py:\d+.*Fix: leave"
    with pytest.raises(GraphsplitError, match=message):
        assert_same_bits(
            WithGenerator, batches_of(8, 4), num_workers=2, loss_fn=rows_against_target
        )


class CountsAndWrites(nn.Module):
    """Changes a buffer that another worker reads: planning looks at that operation once more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.ones(8, 4))
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        sums = self.get_buffer("sums")
        sums += h.detach().mean() * self.calls
        return sums[: h.shape[0]]


class ReadElsewhere(nn.Module):
    """Hands the buffer to the other worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = gs.opaque(CountsAndWrites())
        self.last = nn.Linear(4, 4).place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        sums = self.inner(h)
        return self.last(h) * sums


def test_looking_once_more_at_a_call_that_writes_leaves_no_trace() -> None:
    assert_same_bits(
        ReadElsewhere,
        batches_of(8, 4, num=3),
        num_workers=2,
        place=lambda net: net.first.place("MS_WORKER", 0),
        loss_fn=rows_against_target,
    )


class Counts:
    calls = 0


class HookReads(nn.Module):
    """A hook on a gradient reads what a call in forward counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.counts = Counts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = self.counts

        def count_it(h: torch.Tensor) -> torch.Tensor:
            counts.calls += 1
            return h * 2

        h = self.first(x).sin()
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * counts.calls)
        return gs.opaque(count_it)(h)


def compare_hook_reads(microbatches: int) -> None:
    assert_same_bits(
        HookReads,
        batches_of(8, 4, num=3),
        num_workers=2,
        loss_fn=rows_against_target,
        microbatches=microbatches,
    )


def test_what_backward_reads_of_forward_is_right() -> None:
    compare_hook_reads(1)
    compare_hook_reads(4)


sums: list[float] = []


class NotesSums(torch.autograd.Function):
    """Notes the sum of each gradient, which tensors without values do not show."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sums.append(gradients[0].sum().item())
        return gradients[0] * 2


def with_hook(h: torch.Tensor) -> torch.Tensor:
    h = h.sin()
    if h.requires_grad:
        h.register_hook(lambda gradient: sums.append(gradient.sum().item()))
    return h


@pytest.mark.parametrize("call", [NotesSums.apply, with_hook])
def test_what_backwards_on_two_workers_change_is_refused(call: Any) -> None:
    one_line = r"changes sums, which its next microbatch, or a call .*state.py.*Fix: change it"
    two_lines = r"share sums, which .*state.py.*state.py.*Fix: place both calls"
    with pytest.raises((PlacementError, StepFailedError), match=f"(?s){one_line}|{two_lines}"):
        compare(call, call)
    compare(call, call, at=0)


class ReadsInBackward(torch.autograd.Function):
    """Its backward reads what its forward counts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        ctx.counts = counts
        counts.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.counts.calls, None


def test_microbatches_of_a_function_that_counts_for_its_own_backward_take_turns() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.counts = nn.Linear(4, 4), Counts()

        def forward(self, x: torch.Tensor) -> Any:
            return ReadsInBackward.apply(self.first(x), self.counts)  # type: ignore[no-untyped-call]

    assert_same_bits(
        Counting,
        batches_of(8, 4, num=2),
        num_workers=2,
        loss_fn=rows_against_target,
        microbatches=4,
    )


class CountsBoth(torch.autograd.Function):
    """Counts whenever it runs, and computes with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        ctx.counts = counts
        counts.calls += 1
        return x * (1 + 0.01 * counts.calls)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.counts.calls += 1
        return gradients[0] * (1 + 0.01 * ctx.counts.calls), None


class ThereAndBack(nn.Module):
    """Two calls that share a counter, in two segments of one worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.counts = Counts()

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.dropout(self.first(x), 0.2, self.training)
        with gs.place("MS_WORKER", 0):
            h = CountsBoth.apply(h, self.counts)  # type: ignore[no-untyped-call]
        h = torch.dropout(self.middle(h), 0.2, self.training)
        with gs.place("MS_WORKER", 0):
            h = CountsBoth.apply(h, self.counts)  # type: ignore[no-untyped-call]
        return self.last(h)


@pytest.mark.parametrize("ragged", [8, 7])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"schedule": "gpipe"}])
def test_two_segments_of_a_worker_share_a_counter_in_microbatches(
    ragged: int, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(net: Any) -> None:
        for module, rank in ((net.first, 0), (net.middle, 1), (net.last, 0)):
            module.place("MS_WORKER", rank)

    assert_same_bits(
        ThereAndBack,
        batches_of(ragged, 4, num=4),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=4,
        **options,
    )


def test_what_a_call_kept_whole_changes_is_not_read_outside_of_it() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.counts = nn.Linear(4, 4), Counts()

        def forward(self, x: torch.Tensor) -> Any:
            h = ReadsInBackward.apply(self.first(x), self.counts)  # type: ignore[no-untyped-call]
            return h * self.counts.calls

    message = r"(?s)ReadsInBackward.apply changes .*calls, which is read outside .*state.py.*Fix: "
    with pytest.raises(CaptureError, match=message):
        assert_same_bits(
            Outside, batches_of(8, 4, num=2), num_workers=1, loss_fn=rows_against_target
        )


class Late:
    """Counts from when the script says so."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.in_forward = self.in_backward = False


class CountsLate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, late: Late) -> torch.Tensor:
        ctx.late = late
        if late.in_forward:
            late.forwards += 1
        return h * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.late.in_backward:
            ctx.late.backwards += 1
        return gradient * 2, None


@pytest.mark.parametrize(
    ("where", "microbatches"), [("in_forward", 1), ("in_forward", 4), ("in_backward", 4)]
)
def test_what_a_call_changes_later_is_not_read_outside_of_it(where: str, microbatches: int) -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.late = nn.Linear(4, 4), nn.Linear(4, 4), Late()

        def forward(self, x: torch.Tensor) -> Any:
            h = CountsLate.apply(self.first(x), self.late)  # type: ignore[no-untyped-call]
            return self.last(h * (1 + self.late.forwards + self.late.backwards))

    def change(step: int, net: Any, loss: Any) -> None:
        setattr(net.late, where, step > 0)

    message = r"(?s)CountsLate.apply changes .*state.py.*Fix: "
    with pytest.raises(StepFailedError, match=message):
        assert_same_bits(
            Outside,
            batches_of(8, 4, num=2),
            num_workers=2,
            place=lambda net: net.last.place("MS_WORKER", 1),
            loss_fn=rows_against_target,
            microbatches=microbatches,
            before_step=change,
        )


class CountsBackwards(CountsLate):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.late.backwards += 1
        return gradient * 2, None


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_a_backward_changes_is_not_read_by_the_microbatches_behind_it(
    microbatches: int, accumulate: int
) -> None:
    """They run one after the other, and have been recorded together."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.late = nn.Linear(4, 4), nn.Linear(4, 4), Late()

        def forward(self, x: torch.Tensor) -> Any:
            h = CountsBackwards.apply(self.first(x), self.late)  # type: ignore[no-untyped-call]
            return self.last(h * (1 + 0.1 * self.late.backwards))

    match = r"(?s)CountsBackwards.apply changes .*is read outside.*state.py.*Fix: "
    with nullcontext() if microbatches == 1 else pytest.raises(StepFailedError, match=match):
        assert_same_bits(
            Outside,
            batches_of(8, 4, num=4),
            num_workers=2,
            place=lambda net: net.last.place("MS_WORKER", 1),
            loss_fn=rows_against_target,
            microbatches=microbatches,
            accumulate=accumulate,
        )


class Averages:
    """Holds a tensor beside the network."""

    def __init__(self) -> None:
        self.mean, self.begins = torch.zeros(2), 0


class WritesBeside(nn.Module):
    """Code kept whole writes to a tensor, in an object or an attribute, that forward reads."""

    def __init__(self, in_object: bool, begins: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.averages: Any = Averages() if in_object else SimpleNamespace(mean=None)
        self.mean = torch.zeros(2)
        self.in_object, self.calls, self.begins = in_object, 0, begins
        self.part = gs.opaque(self._write)

    def _write(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > self.begins:
            (self.averages.mean if self.in_object else self.mean).add_(1)
        return h * 2

    def forward(self, x: torch.Tensor) -> Any:
        mean = self.averages.mean if self.in_object else self.mean
        h = self.first(x) * (1 + 0.1 * mean.sum())
        with gs.place("MS_WORKER", 1):
            return self.part(self.last(h))


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("in_object", "begins"), [(True, 0), (True, 5), (False, 0)])
def test_a_tensor_that_a_call_writes_to_is_no_constant_outside_of_it(
    in_object: bool, begins: int, microbatches: int
) -> None:
    """In an attribute of a module it is a buffer; elsewhere that is refused."""
    match = r"(?s)_write changes .* read outside of it .*state.py.*Fix: "
    refused = pytest.raises((CaptureError, StepFailedError), match=match)
    with refused if in_object else nullcontext():
        assert_same_bits(
            lambda: WritesBeside(in_object, begins),
            batches_of(8, 4, num=7),
            num_workers=2,
            place=lambda net: net.last.place("MS_WORKER", 1),
            loss_fn=rows_against_target,
            microbatches=microbatches,
        )


class WithSparse(nn.Module):
    """Code kept whole has a sparse tensor, and one that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.adjacency, self.scales = torch.eye(4).to_sparse(), torch.arange(4.0)
        self.part = gs.opaque(self._multiplied)

    def _multiplied(self, h: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.adjacency, (h * self.scales).t()).t().contiguous()

    def forward(self, x: torch.Tensor) -> Any:
        with gs.place("MS_WORKER", 1):
            return self.part(self.last(self.first(x) * self.scales))


def test_a_call_may_have_a_tensor_without_memory_of_its_own() -> None:
    assert_same_bits(
        WithSparse,
        batches_of(8, 4, num=2),
        num_workers=2,
        place=lambda net: net.last.place("MS_WORKER", 1),
        loss_fn=rows_against_target,
        microbatches=2,
    )


def test_a_call_may_change_an_entry_beside_one_that_is_read_outside_of_it() -> None:
    class CountsBeside(nn.Module):
        def __init__(self, entries: dict[str, float]) -> None:
            super().__init__()
            self.entries = entries

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            self.entries["calls"] += 1
            return h * self.entries["calls"]

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entries = {"factor": 0.5, "calls": 0}
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.counts = gs.opaque(CountsBeside(self.entries))

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.counts(self.first(x)) * self.entries["factor"])

    assert_same_bits(
        Outside,
        batches_of(8, 4, num=2),
        num_workers=2,
        place=lambda net: net.last.place("MS_WORKER", 1),
        loss_fn=rows_against_target,
    )


def test_explain_says_that_microbatches_take_turns() -> None:
    network = ThereAndBack()
    network.middle.place("MS_WORKER", 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = gs.Model(network, rows_against_target, optimizer, microbatches=4)
    inputs, target = batches_of(8, 4, num=1)[0]
    assert "its microbatches run one after the other" in str(model.explain(inputs, target))
