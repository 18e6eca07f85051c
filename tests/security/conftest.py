"""Files as ``graphsplit certs`` makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphsplit.security.issue import fill_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a scheduler and three workers."""
    path = tmp_path_factory.mktemp("certs")
    fill_folder(path, num_workers=3, hosts=["alpha.example", "10.0.0.7"], days=3)
    return path
