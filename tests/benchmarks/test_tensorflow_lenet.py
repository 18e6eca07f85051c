"""A task of TensorFlow's that cannot start is reported, with what it wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "tensorflow_lenet.py"
_spec = importlib.util.spec_from_file_location("benchmarks_tensorflow_lenet", SCRIPT)
assert _spec is not None and _spec.loader is not None
peer: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(peer)


def test_a_task_that_ends_is_an_error_that_quotes_it(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow for this test')")
    batches = [(np.zeros((2, 1, 32, 32), np.float32), np.zeros(2, np.int64))]
    with pytest.raises(RuntimeError, match=r"(?s)has ended.*no TensorFlow for this test"):
        peer.Cluster([1], {"conv1": 0}, {}, batches, {"PYTHONPATH": str(tmp_path)})
