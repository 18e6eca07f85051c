"""A task of TensorFlow's that ends is reported with what it wrote, and not waited for."""

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


@pytest.mark.parametrize("task", [0, 1])
def test_a_task_that_ends_is_an_error_that_quotes_it(tmp_path: Path, task: int) -> None:
    (tmp_path / "tensorflow.py").write_text(
        f"import sys, time\nif sys.argv[2] == '{task}': raise ImportError('not for this test')\n"
        "time.sleep(60)"
    )
    batches = [(np.zeros((2, 1, 32, 32), np.float32), np.zeros(2, np.int64))]
    placement = {"conv1": 0, "conv2": 1}
    with pytest.raises(RuntimeError, match=rf"(?s)task {task} .* has ended.*not for this test"):
        peer.Cluster([1, 2], placement, {}, batches, {"PYTHONPATH": str(tmp_path)})
