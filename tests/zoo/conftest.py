"""Keeps the whole zoo out of an ordinary run, and says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "distribute"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded: a mistake must be an error
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Imported on first use: of two threads, the second one could find the package of that name.
assert callable(gs.distribute)

_left_out = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    global _left_out
    if "zoo" in config.option.markexpr or os.environ.get("GRAPHSPLIT_ZOO"):
        return
    whole = [item for item in items if item.get_closest_marker("zoo")]
    if whole:
        _left_out = len(whole)
        config.hook.pytest_deselected(items=whole)
        items[:] = [item for item in items if item not in set(whole)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.write_line(
            f"{_left_out} tests of the model zoo are left out: run them all with `make test-zoo`, "
            f"or pytest -m zoo"
        )
