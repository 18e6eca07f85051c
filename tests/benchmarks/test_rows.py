"""A row's figure compares what ran in the same round."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "common.py"
_spec = importlib.util.spec_from_file_location("benchmarks_common", SCRIPT)
assert _spec is not None and _spec.loader is not None
common: Any = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = common  # dataclasses look their module up
_spec.loader.exec_module(common)

# Two launches at different paces, where ours takes 0.9 and 0.95 times as long.
OURS = (0.9, 0.9, 0.9, 1.9, 1.9, 1.9)
THEIRS = (1.0, 1.0, 1.0, 2.0, 2.0, 2.0)


def row(*, inverse: bool, reach: float) -> Any:
    sides = ("ours", common.Samples(list(OURS))), ("theirs", common.Samples(list(THEIRS)))
    return common.compared("a step", *sides, reach=reach, inverse=inverse)


@pytest.mark.parametrize(("inverse", "ratio"), [(False, 0.925), (True, (1 / 0.9 + 1 / 0.95) / 2)])
def test_a_figure_lies_between_those_of_its_launches(inverse: bool, ratio: float) -> None:
    found = row(inverse=inverse, reach=1.0)
    assert found.ratio == pytest.approx(ratio)
    low, high = sorted((1 / 0.9, 1 / 0.95) if inverse else (0.9, 0.95))
    assert found.spread == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("inverse", "reach", "verdict"),
    [
        (False, 0.93, "reached (≤ 0.93)"),
        (False, 0.92, "MISSED (≤ 0.92)"),
        (True, 1.08, "reached (≥ 1.08)"),
        (True, 1.09, "MISSED (≥ 1.09)"),
    ],
)
def test_a_bound_is_judged_by_the_figure(inverse: bool, reach: float, verdict: str) -> None:
    assert row(inverse=inverse, reach=reach).verdict == verdict


def test_every_benchmark_has_its_command_in_the_documents_and_no_other_has() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        name for page in pages for name in re.findall(r"benchmarks/(\w+\.py)", page.read_text())
    }
    scripts = {path.name for path in SCRIPT.parent.glob("*.py")}
    assert named <= scripts
    assert {name for name in scripts if name.startswith("bench_")} <= named


def test_options_reach_the_workers_as_they_were_given() -> None:
    given = {"rounds": 3, "only": ["a", "b c"], "by_hand": None, "is_quick": True, "is_slow": False}
    assert common.words_of(given) == ["--rounds", "3", "--only", "a", "b c", "--is-quick"]
