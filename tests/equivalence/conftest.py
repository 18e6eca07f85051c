"""Lets the tests of this folder import its helpers, and captures steps again now and then."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _steps_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a test in which a step would give another graph than the one that runs."""
    monkeypatch.setenv("GS_RECAPTURE_EVERY", "3")
