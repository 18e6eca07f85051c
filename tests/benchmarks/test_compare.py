"""Two files of benchmarks are compared by their ratios, and chance is not taken for a change."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "compare.py"
_spec = importlib.util.spec_from_file_location("benchmarks_compare", SCRIPT)
assert _spec is not None and _spec.loader is not None
comparing: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(comparing)


def row(ratio: float, *, width: float = 0.01, at_most: bool = True, **more: Any) -> dict[str, Any]:
    spread = [ratio - width, ratio + width]
    named = {"work": "a step", "against": "torch", "figure": "time"}
    return {**named, "ratio": ratio, "spread": spread, "at_most": at_most, **more}


def compared(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], bool]:
    lines, any_worse = comparing.compare({"rows": [before]}, {"rows": [after]}, 0.05)
    return lines, any_worse


def test_a_ratio_that_moved_to_the_wrong_side_is_worse() -> None:
    assert compared(row(0.9), row(1.1))[1]
    assert compared(row(1.9, at_most=False), row(1.5, at_most=False))[1]


def test_a_ratio_that_moved_to_the_right_side_is_not() -> None:
    assert not compared(row(1.1), row(0.9))[1]
    assert not compared(row(1.5, at_most=False), row(1.9, at_most=False))[1]


def test_rounds_that_overlap_are_chance() -> None:
    assert not compared(row(0.9, width=0.2), row(1.1, width=0.2))[1]


def test_rows_of_one_file_only_and_other_machines_are_told() -> None:
    before = {"rows": [row(0.9)], "hardware": {"cores": 2}}
    after = {"rows": [], "hardware": {"cores": 8}}
    lines, any_worse = comparing.compare(before, after, 0.05)
    assert lines == [
        "not the same: hardware: cores 2 and 8",
        "only in the first: a step, against torch",
    ]
    assert not any_worse


def test_bits_that_differ_are_told() -> None:
    lines, _ = compared(row(0.9, bits="equal"), row(0.9, bits="fc1.weight differs"))
    assert "BITS: fc1.weight differs" in lines[0]
