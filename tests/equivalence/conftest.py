"""Lets the tests of this folder import its helpers, and captures steps again now and then."""

import sys
from pathlib import Path

import pytest

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "distribute"))
# Imported on first use: of two threads, the second one could find the package of that name.
assert callable(gs.distribute)


@pytest.fixture(autouse=True)
def _steps_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a test in which a step would give another graph than the one that runs."""
    monkeypatch.setenv("GS_RECAPTURE_EVERY", "3")
