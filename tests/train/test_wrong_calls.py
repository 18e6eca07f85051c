"""Calls with arguments of a wrong kind: the error names the argument, and says what to pass."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.checkpoint import save

LOADER = [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))]


def model() -> gs.Model:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return gs.Model(net, nn.CrossEntropyLoss(), optimizer)


def untyped(function: Any) -> Any:
    """A function that may be called wrongly."""
    return function


LOOP, MODEL = untyped(gs.loop), untyped(gs.Model)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "loop": (lambda: LOOP(5), "gs.loop: source=5"),
    "loop over a text": (lambda: LOOP("x"), "gs.loop: source='x'"),
    "keep": (lambda: LOOP(LOADER, keep=5), "gs.loop: keep=5"),
    "numbered": (lambda: LOOP(LOADER, numbered=2), "gs.loop: numbered=2"),
    "swapped rules": (
        lambda: untyped(gs.apply_placement)({}, nn.Linear(2, 2)),
        r"gs.apply_placement: network=a dict\n  Fix: pass the network first",
    ),
    "rules of nothing": (lambda: untyped(gs.apply_placement)(None, {}), "network=None"),
    "op": (lambda: untyped(gs.op)(5), "gs.op: function=5"),
    "swapped loss": (lambda: MODEL(nn.CrossEntropyLoss(), nn.Linear(2, 2)), "did you mean Model"),
    "set_to_none": (lambda: MODEL(nn.Linear(2, 2), set_to_none="x"), "set_to_none='x'"),
    "resume": (lambda: untyped(model().train)(1, LOADER, resume=5), "resume=5; expected True or"),
    "a text as loader": (lambda: untyped(model().train)(1, "x"), "loader is a str"),
    "gather": (lambda: untyped(model().save)("x", gather="x"), "save: gather='x'"),
    "extra": (lambda: untyped(model().save)("x", extra=[]), r"save: extra is \[\]"),
    "links": (lambda: untyped(model().explain)(*LOADER[0], links=5), "explain: links=5"),
    "no state": (lambda: model().load_optimizer_state_dict({}), "load_optimizer_state_dict: state"),
    "unplaced": (lambda: untyped(gs.distribute)(nn.Linear(2, 2), unplaced=5), "unplaced=5"),
    "dynamic_dims": (
        lambda: untyped(gs.distribute)(nn.Linear(2, 2), dynamic_dims=5),
        "dynamic_dims is an int",
    ),
    "dst": (lambda: untyped(gs.reduce)(1.0, "x"), "reduce: a rank='x'"),
    "negative": (lambda: gs.reduce(1.0, -1), "reduce: a rank=-1"),
    "src": (lambda: untyped(gs.broadcast)(1.0, src="x"), "broadcast: a rank='x'"),
    "ranks": (lambda: untyped(gs.all_reduce)(1.0, ranks=5), "all_reduce: ranks=5"),
    "a rank of several": (lambda: untyped(gs.gather)(1.0, ranks=["x"]), "gather: a rank='x'"),
    "no ranks": (lambda: gs.all_gather(1.0, ranks=[]), "all_gather: ranks=a list"),
    "reduction": (lambda: untyped(gs.all_reduce)(1.0, []), r"op=\[\]; expected one of sum"),
    "sender": (lambda: untyped(gs.send)(1.0, "x"), "send: a rank='x'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_argument_of_a_wrong_kind_is_named(kind: str) -> None:
    call, expected = WRONG[kind]
    with pytest.raises(gs.errors.ConfigurationError, match=expected) as caught:
        call()
    told = str(caught.value)
    assert "Fix: pass" in told or "expected" in told or "did you mean" in told


def test_a_full_disk_under_one_file_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save, "TensorFileWriter", full)
    with pytest.raises(gs.errors.CheckpointError, match="space left on device\n  Fix: free"):
        model().state_dict(to=tmp_path / "weights.safetensors")
