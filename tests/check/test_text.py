"""What people read of a check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from check_records import GRADIENT_B, WEIGHT_A, operation, start, step

from graphsplit.check.compare import RunComparison, RunDifference, compare
from graphsplit.check.pinpoint import Pinpoint
from graphsplit.check.record import NotedValue, NoteKind, Notes, What
from graphsplit.check.text import difference_text, failed, findings, unstable

SAME = compare([step(1), step(2)], [[step(1), step(2)], [step(1), step(2)]])


def differing(plain: Notes, cut: Notes) -> tuple[RunComparison, RunDifference]:
    comparison = compare([plain], [[cut]])
    assert isinstance(comparison.difference, RunDifference)
    return comparison, comparison.difference


def test_the_same_bits_are_said_to_be_with_what_was_compared() -> None:
    found = findings(SAME, asked=2)
    assert found.status == 0
    assert found.text == (
        "graphsplit check: the same bits. Compared 2 training steps, 8 values on 2 workers."
    )


def test_what_was_not_compared_is_said() -> None:
    found = findings(replace(SAME, unseeded=("random",)), asked=2)
    assert "not compared: the generator state of Python's random" in found.text


def test_too_few_steps_are_not_a_success() -> None:
    found = findings(SAME, asked=5)
    assert found.status == 1
    assert "ended after 2 training steps, 5 were to be compared" in found.text
    assert "--steps 2" in found.text


@pytest.mark.parametrize(
    ("records", "said"),
    [([], "built no gs.Model"), ([Notes(What.PREDICT, 1, 1)], "no gs.Model was trained")],
)
def test_a_script_that_trains_nothing_is_not_a_success(records: list[Notes], said: str) -> None:
    found = findings(compare(records, [records]), asked=5)
    assert found.status == 1
    assert said in found.text
    assert "Fix: " in found.text


def test_other_ways_are_told_with_both_places() -> None:
    found = findings(compare([step(1)], [[Notes(What.EVAL, 1, 3)]]), asked=1)
    assert found.status == 1
    assert "the plain loop was at training step 1 of Model 1" in found.text
    assert "worker 0 was at call 3 of eval of Model 1" in found.text


def test_a_difference_names_step_module_operation_line_and_both_values() -> None:
    plain = NotedValue(NoteKind.LOSS, "", "float32[]", "p", ("0.5",))
    cut = replace(plain, digest="c", elements=("0.25",))
    comparison, difference = differing(
        step(3, plain, WEIGHT_A), step(3, cut, replace(WEIGHT_A, digest="o"))
    )
    where = Pinpoint(
        operation("aten.addmm.default", target="aten.linear.default", source="net.py:6"),
        1,
        operation("aten.mul.Tensor", source="net.py:5, in forward"),
    )
    lines = difference_text(comparison, difference, where).splitlines()
    assert lines[:7] == [
        "graphsplit check: not the same: first at training step 3 of Model 1",
        "  module     block.1",
        "  operation  aten.linear.default on worker 1, net.py:6",
        "  plain loop aten.mul.Tensor is the first that no worker has, net.py:5, in forward",
        "  value      loss: float32[] 0.5 in the plain loop",
        "             float32[] 0.25 on worker 0",
        "  also different: 1 parameter (a.weight)",
    ]
    assert lines[-1].startswith("  Fix: ")


def test_elements_that_differ_are_shown_with_their_positions() -> None:
    plain = replace(WEIGHT_A, digest="p", elements=("1.0", "2.0"))
    cut = replace(WEIGHT_A, digest="c", elements=("1.0", "2.5"))
    text = difference_text(*differing(step(1, plain), step(1, cut)), Pinpoint())
    assert "1 of 2 elements: [1] 2.0 against 2.5" in text
    assert "module     a" in text


def test_nans_of_other_bits_are_not_shown_as_if_they_were_equal() -> None:
    plain = replace(WEIGHT_A, digest="p", elements=("nan", "1.0"))
    text = difference_text(
        *differing(step(1, plain), step(1, replace(plain, digest="c"))), Pinpoint()
    )
    assert "NaNs of different bits" in text


def test_a_difference_that_forward_has_not_made_is_told_as_such() -> None:
    buffer = NotedValue(NoteKind.BUFFER, "bn.mean", "float32[2]", "p")
    differing_step = differing(step(1, buffer), step(1, replace(buffer, digest="c")))
    text = difference_text(*differing_step, Pinpoint(is_forward_same=True))
    assert "  module     bn\n  operation  none: all of forward is the same." in text


def test_a_difference_of_a_gradient_alone_names_the_backward_of_its_operation() -> None:
    cut = replace(GRADIENT_B, digest="other")
    where = Pinpoint(operation("x", target="aten.linear.default"), 1, by_gradient=True)
    text = difference_text(*differing(step(1, GRADIENT_B), step(1, cut)), where)
    assert "operation  backward of aten.linear.default on worker 1" in text


def test_a_difference_before_the_first_step_is_one_of_seeds() -> None:
    plain, cut = start(WEIGHT_A), start(replace(WEIGHT_A, digest="other"))
    step_1 = step(1, WEIGHT_A)
    comparison = compare([plain, step_1], [[cut, step_1]])
    assert isinstance(comparison.difference, RunDifference)
    text = difference_text(comparison, comparison.difference, Pinpoint())
    assert "at the start, before the first training step of Model 1" in text
    assert "Fix: set the seeds" in text


def test_another_number_of_threads_is_told_with_its_own_way_out() -> None:
    plain = NotedValue(NoteKind.THREADS, "", "int", "one", ("1",))
    cut = replace(plain, digest="two", elements=("2",))
    text = difference_text(*differing(start(plain), start(cut)), Pinpoint())
    assert "threads: int 1 in the plain loop" in text
    assert "OMP_NUM_THREADS" in text


def test_a_plain_loop_that_is_never_the_same_is_told_as_such() -> None:
    comparison, difference = differing(step(1, WEIGHT_A), step(1, replace(WEIGHT_A, digest="o")))
    text = unstable(comparison, difference)
    assert "the plain loop gives other bits each time it runs" in text
    assert "parameter of a.weight" in text


def test_a_script_that_fails_by_itself_is_not_blamed_on_the_cluster() -> None:
    found = failed(comparison=SAME, job_status=1, plain_status=3)
    assert found.status == 1
    assert "the script fails by itself, without a cluster (exit status 3" in found.text


def test_all_refusals_are_listed() -> None:
    found = failed(
        comparison=compare([], [[]]), job_status=1, plain_status=0, refusals=("one\nmore", "two")
    )
    assert "a cluster does not run this script to its end (exit status 1" in found.text
    assert "  1. one\n  more\n  2. two" in found.text


def test_a_job_that_fails_over_a_generator_without_a_seed_gets_a_hint() -> None:
    found = failed(comparison=replace(SAME, unseeded=("numpy",)), job_status=1, plain_status=0)
    assert "not compared: the generator state of NumPy, which the script does not seed" in (
        found.text
    )


def test_what_differed_before_a_job_failed_is_told() -> None:
    comparison, _ = differing(step(1, WEIGHT_A), step(1, replace(WEIGHT_A, digest="o")))
    found = failed(comparison=comparison, job_status=1, plain_status=0)
    assert "before that, at training step 1 of Model 1" in found.text
