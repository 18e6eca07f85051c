"""``graphsplit check`` on real jobs: the same bits, or where they begin to differ."""

from __future__ import annotations

import re

import pytest

from system.helpers import JOBS, run_command

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]


def run_check(what: str, *, steps: int = 4, of: str = "checked.py") -> tuple[int, str]:
    script = str(JOBS / of)
    done = run_command(["check", "-n", "2", "--steps", str(steps), script, what], timeout_s=230)
    return done.status, done.output


@pytest.mark.parametrize("what", ["same", "unseeded"])
def test_a_job_is_found_to_have_the_bits_of_the_plain_loop(what: str) -> None:
    status, output = run_check(what)
    assert status == 0, output
    assert "the same bits. Compared 4 training steps, 3 calls of eval and predict" in output
    assert "not reached" not in output
    assert ("not compared: the generator state of NumPy and Python's random" in output) == (
        what == "unseeded"
    )


def test_another_computation_is_named_by_step_module_operation_and_line() -> None:
    status, output = run_check("scale", steps=2)
    assert status == 1
    assert "first at training step 1 of Model 1" in output, output
    place = rf"checked\.py:{_line_with('hidden * self.scale')}"
    assert re.search(rf"operation  aten\.mul\.Tensor on worker \d, \S*{place}", output), output
    assert re.search(r"value      loss: float32\[\] [\d.]+ in the plain loop", output)


def test_a_gradient_of_its_own_is_named_with_its_operation() -> None:
    status, output = run_check("gradient", steps=1)
    assert status == 1
    assert "first at training step 1 of Model 1" in output, output
    assert "module     last" in output
    place = rf"checked\.py:{_line_with('hidden * self.scale')}"
    assert re.search(
        rf"operation  backward of aten\.linear\.default on worker 1, \S*{place}", output
    )
    assert "value      gradient of last.weight" in output
    assert "48 of 48 elements" in output


def test_a_loop_of_its_own_is_found_to_have_the_bits_of_the_plain_loop() -> None:
    status, output = run_check("same", steps=6, of="checked_loop.py")
    assert status == 0, output
    assert re.search(r"same bits\. Compared 6 training steps, \d{3,} values on 2 workers", output)
    assert "not reached" not in output


def test_what_differs_in_a_loop_of_its_own_is_named() -> None:
    status, output = run_check("decay", steps=9, of="checked_loop.py")
    assert status == 1
    assert "not the same: first at step 5 of an optimizer of network 2" in output, output
    assert re.search(r"group 0\['weight_decay'\]: float 0\.01 in the plain loop", output), output
    assert re.search(r"float 0\.02 on worker \d", output)
    assert "the same before that: 4 training steps" in output


def test_steps_of_other_optimizers_are_other_ways() -> None:
    status, output = run_check("steps", steps=6, of="checked_loop.py")
    assert status == 1
    assert "the plain loop was at step 4 of an optimizer of network 1" in output, output
    assert re.search(r"worker \d was at step 4 of an optimizer of network 2", output), output


def test_all_that_a_job_refuses_is_told_in_one_go() -> None:
    status, output = run_check("refused")
    assert status == 1
    assert "a job refuses 3 things that this script does" in output, output
    for number, mode in enumerate(("predict", "eval", "train"), start=1):
        assert f"  {number}. {mode}, " in output
    assert output.count("a tensor leaves PyTorch") >= 3


def _line_with(code: str) -> int:
    lines = (JOBS / "checked.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if code in line)
