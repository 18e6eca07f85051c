"""What benchmarks compare with by hand: values cross unchanged, and other bits are noticed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there it is measured")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_values_cross_a_bare_channel_unchanged() -> None:
    by_hand = loaded("by_hand")
    with by_hand.shared_file(2, 4096) as path:
        ends = [by_hand.BareChannel(path, 1, (3, 5), 4096) for _ in range(2)]
        for number in range(3):
            value = torch.randn(3, 5) * number
            ends[1].prepare()
            ends[0].send(value)
            assert torch.equal(ends[1].receive(), value)
    assert not os.path.exists(path)


def test_a_layer_with_other_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    bench = loaded("bench_lenet_step")
    reports = [
        {"bits": "equal", "plain": {"fc1": "a", "fc2": "b"}, "trained": ("fc1", ["a", "a"])},
        {"bits": "equal", "plain": {}, "trained": ("fc2", ["b", "b"])},
    ]
    assert bench.bits_of(reports) == "equal"
    reports[1]["trained"] = ("fc2", ["b", "a"])
    assert bench.bits_of(reports) == "fc2 differs"


def test_a_thread_is_bound_to_a_core_and_let_go_again() -> None:
    by_hand = loaded("by_hand")
    allowed = os.sched_getaffinity(0)
    with by_hand.on_core(1):
        assert os.sched_getaffinity(0) == {sorted(allowed)[1 % len(allowed)]}
    assert os.sched_getaffinity(0) == allowed
