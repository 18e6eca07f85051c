"""What two runs are found to have in common, and where they part."""

from __future__ import annotations

from dataclasses import replace

import pytest
from check_records import (
    GRADIENT_A,
    GRADIENT_B,
    WEIGHT_A,
    WEIGHT_B,
    generator,
    operation,
    start,
    step,
    value,
)

from graphsplit.check.compare import Diverged, RunDifference, compare
from graphsplit.check.record import (
    UNTOUCHED,
    NotedValue,
    NoteKind,
    Notes,
    Operation,
    What,
    read_lines,
)
from graphsplit.encoding.records import to_text

PLAIN = step(1, WEIGHT_A, WEIGHT_B, GRADIENT_A, GRADIENT_B)
CUT = (step(1, WEIGHT_A, GRADIENT_A), step(1, WEIGHT_B, GRADIENT_B))


def other(found: NotedValue) -> NotedValue:
    return replace(found, digest="other")


def difference_of(plain: list[Notes], *workers: list[Notes]) -> RunDifference:
    found = compare(plain, workers).difference
    assert isinstance(found, RunDifference)
    return found


def test_each_part_of_a_model_is_compared_on_the_worker_that_has_it() -> None:
    found = compare([PLAIN, step(2)], [[one, step(2)] for one in CUT])
    assert found.difference is None
    assert (found.num_steps, found.num_workers, found.num_models) == (2, 2, 1)
    assert found.num_values == 2 * 4 + 2 * 2


def test_what_no_worker_has_is_a_difference() -> None:
    found = difference_of([PLAIN], [CUT[0]], [step(1, WEIGHT_B)])
    assert found.first.plain == GRADIENT_B
    assert (found.first.found, found.first.worker) == (None, None)


def test_what_only_a_worker_has_is_a_difference() -> None:
    found = difference_of([step(1)], [step(1, WEIGHT_A)])
    assert (found.first.plain, found.first.found, found.first.worker) == (None, WEIGHT_A, 0)


def test_every_worker_must_have_the_loss() -> None:
    without = replace(CUT[1], values=CUT[1].values[1:])
    found = difference_of([PLAIN], [CUT[0]], [without])
    assert (found.first.value.kind, found.first.worker) == (NoteKind.LOSS, 1)


def test_none_is_only_equal_to_none() -> None:
    none = NotedValue(NoteKind.GRADIENT, "a.weight", "None", "")
    assert compare([step(1, none)], [[step(1, none)]]).difference is None
    assert difference_of([step(1, none)], [step(1, GRADIENT_A)]).first.plain == none


def test_another_dtype_is_a_difference_even_of_the_same_bytes() -> None:
    wide = value(NoteKind.PARAMETER, "a.weight", form="int32[2]")
    assert difference_of([step(1, WEIGHT_A)], [step(1, wide)]).first.found == wide


def test_the_first_step_that_differs_is_told() -> None:
    plain = [step(1, WEIGHT_A), step(2, WEIGHT_A), step(3, WEIGHT_A)]
    cut = [plain[0], step(2, other(WEIGHT_A)), step(3, other(WEIGHT_A))]
    found = compare(plain, [cut])
    assert isinstance(found.difference, RunDifference)
    assert found.difference.record.number == 2
    assert (found.num_steps, found.num_values) == (1, 3)


def test_the_gradient_that_backward_computes_first_is_told_before_what_follows_from_it() -> None:
    changed = step(1, *map(other, (WEIGHT_A, WEIGHT_B, GRADIENT_A, GRADIENT_B)))
    found = difference_of([PLAIN], [changed])
    assert [str(one.value) for one in found.unequal] == [
        "gradient of b.weight",
        "gradient of a.weight",
        "parameter of a.weight",
        "parameter of b.weight",
    ]


def test_before_there_is_a_plan_only_what_a_worker_will_own_counts() -> None:
    plain = [start(WEIGHT_A, WEIGHT_B), PLAIN]
    cut = [
        [start(WEIGHT_A, other(WEIGHT_B)), CUT[0]],
        [start(other(WEIGHT_A), WEIGHT_B), CUT[1]],
    ]
    assert compare(plain, cut).difference is None
    cut[1][0] = start(WEIGHT_A, other(WEIGHT_B))
    found = difference_of(plain, *cut)
    assert (found.record.what, found.first.worker) == (What.START, 1)
    assert found.first.plain == WEIGHT_B


def test_the_start_of_a_model_that_was_never_trained_says_nothing_of_its_state() -> None:
    assert compare([start(WEIGHT_A)], [[start(other(WEIGHT_A))]]).difference is None


@pytest.mark.parametrize(
    ("plain", "cut", "expected"),
    [
        ([step(1), step(2)], [step(1)], (step(2), None)),
        ([step(1)], [step(1), step(2)], (None, step(2))),
        ([step(1)], [Notes(What.EVAL, 1, 1)], (step(1), Notes(What.EVAL, 1, 1))),
        ([step(1)], [step(1, model=2)], (step(1), step(1, model=2))),
    ],
)
def test_scripts_that_take_different_ways_are_told_apart(
    plain: list[Notes], cut: list[Notes], expected: tuple[Notes | None, Notes | None]
) -> None:
    found = compare(plain, [cut]).difference
    assert isinstance(found, Diverged)
    assert (found.plain, found.found) == expected


def test_the_state_of_torchs_generator_always_counts() -> None:
    found = difference_of([step(1)], [step(1, torch="other")])
    assert str(found.first.value) == "generator of torch"


def test_a_generator_that_nobody_seeds_is_left_out_and_named() -> None:
    plain = [start(random="a"), step(1, generator("random", "b")), step(2)]
    cut = [start(random="c"), step(1, generator("random", "d")), step(2)]
    found = compare(plain, [cut])
    assert (found.difference, found.unseeded) == (None, ("random",))


@pytest.mark.parametrize("drawing", ["plain", "worker", "both"])
def test_a_generator_that_was_seeded_counts_even_if_nobody_draws_but_one(drawing: str) -> None:
    kept = replace(generator("random", "r"), form=UNTOUCHED)
    plain = [start(), step(1, generator("random", "a") if drawing != "worker" else kept)]
    cut = [start(), step(1, generator("random", "b") if drawing != "plain" else kept)]
    assert str(difference_of(plain, cut).first.value) == "generator of random"


def test_a_generator_that_nobody_has_used_is_no_difference() -> None:
    found = compare([start(random="a")], [[start(random="b")]])
    assert (found.difference, found.unseeded) == (None, ())
    found = compare([start(random="a")], [[start(random="b", is_used=True)]])
    assert (found.difference, found.unseeded) == (None, ("random",))


def test_nothing_at_all_is_compared_to_nothing() -> None:
    assert compare([], [[], []]).num_values == 0


def test_a_record_is_read_as_it_was_written() -> None:
    record = step(1, replace(WEIGHT_A, elements=("1.0", "nan")))
    text = f"{to_text(record)}\n{to_text(PLAIN)}\n"
    assert read_lines(Notes, text.splitlines(keepends=True)) == (record, PLAIN)


def test_a_line_that_was_cut_off_with_its_process_is_left_out() -> None:
    text = f"{to_text(PLAIN)}\n{to_text(PLAIN)}"
    assert read_lines(Notes, text.splitlines(keepends=True)) == (PLAIN,)


def test_an_operation_is_read_as_it_was_written() -> None:
    found = operation("aten.mm.default", "d", order=(0, 1, 2), target="aten.linear.default")
    assert read_lines(Operation, [f"{to_text(found)}\n"]) == (found,)


def test_steps_of_own_loops_count_and_each_part_must_be_on_a_worker() -> None:
    one, other = (replace(step(n, WEIGHT_A, model=n), what=What.LOOP_STEP) for n in (1, 2))
    found = compare([one, other], [[one, other], [one, other]])
    assert (found.difference, found.num_steps, found.num_models) == (None, 2, 1)
    without = replace(one, values=())
    assert difference_of([one], [without]).first.plain in one.values
