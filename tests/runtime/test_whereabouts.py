"""The error of a step in which an operation has raised."""

from __future__ import annotations

import torch

from graphsplit.root_cause import NOWHERE
from graphsplit.runtime.whereabouts import step_failed


def test_only_an_error_that_values_decide_names_the_way_to_catch_it() -> None:
    try:
        torch.linalg.cholesky(-torch.eye(2))
    except RuntimeError as error:
        told = str(step_failed(error, "here", NOWHERE, (), None))
    assert told.endswith("keep that code whole with gs.opaque.")
    assert "gs.opaque" not in str(step_failed(IndexError("x"), "here", NOWHERE, (), None))
