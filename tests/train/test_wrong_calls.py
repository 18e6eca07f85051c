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


EARLY = untyped(gs.callbacks.EarlyStopping)
LOOP, MODEL = untyped(gs.loop), untyped(gs.Model)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "loop": (lambda: LOOP(5), "gs.loop: source=5"),
    "loop over a text": (lambda: LOOP("x"), "gs.loop: source='x'"),
    "keep": (lambda: LOOP(LOADER, keep=5), "gs.loop: keep=5"),
    "numbered": (lambda: LOOP(LOADER, numbered=2), "gs.loop: numbered=2"),
    "swapped rules": (
        lambda: untyped(gs.apply_placement)({}, nn.Linear(2, 2)),
        r"gs.apply_placement: network=\{\}\n  Fix: pass the network first",
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
    "dst": (lambda: untyped(gs.reduce)(1.0, "x"), "reduce: dst='x'"),
    "negative": (lambda: gs.reduce(1.0, -1), "reduce: dst=-1"),
    "src": (lambda: untyped(gs.broadcast)(1.0, src="x"), "broadcast: src='x'"),
    "ranks": (lambda: untyped(gs.all_reduce)(1.0, ranks=5), "all_reduce: ranks=5"),
    "a rank of several": (
        lambda: untyped(gs.gather)(1.0, ranks=["x"]),
        r"gather: ranks=\[...\]: one='x'",
    ),
    "no ranks": (lambda: gs.all_gather(1.0, ranks=[]), r"all_gather: ranks=\[\]"),
    "reduction": (lambda: untyped(gs.all_reduce)(1.0, []), r"op=\[\]; expected one of sum"),
    "launch args": (lambda: untyped(gs.launch)(print, 2, 3), "gs.launch: args=3"),
    "a text as args": (lambda: gs.launch(print, 2, "ab"), "gs.launch: args='ab'"),
    "launch kwargs": (lambda: untyped(gs.launch)(print, 2, kwargs=[1]), "gs.launch: kwargs=a list"),
    "timeout_s": (lambda: untyped(gs.launch)(print, timeout_s="x"), "gs.launch: timeout_s='x'"),
    "log_dir": (lambda: untyped(gs.launch)(print, log_dir=5), "gs.launch: log_dir=5"),
    "launcher": (lambda: untyped(gs.launcher)(2), "gs.launcher: fn=2"),
    "launcher workers": (lambda: untyped(gs.launcher)(workers="2"), "gs.launcher: workers='2'"),
    "min_delta": (lambda: gs.callbacks.EarlyStopping("Loss", min_delta=-1), "min_delta=-1"),
    "part": (lambda: untyped(gs.metrics.Loss)(5), "gs.metrics.Loss: part=5"),
    "error_if_nonfinite": (
        lambda: untyped(gs.clip.GlobalNorm)(1.0, error_if_nonfinite="x"),
        "GlobalNorm: error_if_nonfinite='x'",
    ),
    "a class as clip": (
        lambda: MODEL(nn.Linear(2, 2), clip=gs.clip.GlobalNorm),
        r"clip is the class GlobalNorm; did you mean GlobalNorm\(...\)",
    ),
    "name of a metric": (
        lambda: MODEL(nn.Linear(2, 2), metrics={1: gs.metrics.Accuracy()}),
        "metrics has the name 1",
    ),
    "outputs": (lambda: untyped(gs.opaque)(nn.Linear(2, 2), outputs=5), "gs.opaque: outputs=5"),
    "strict": (lambda: untyped(model().load_state_dict)({}, strict="no"), "strict='no'"),
    "path": (
        lambda: untyped(model().save_placement)(*LOADER[0]),
        "save_placement: path is a Tensor; expected a path",
    ),
    "swapped train": (
        lambda: untyped(model().train)(LOADER, 4),
        r"did you mean train\(4, loader\)",
    ),
    "what is watched": (
        lambda: untyped(model().train)(1, LOADER, [EARLY(lambda context: None)]),
        r"EarlyStopping: metric\(context\)=None",
    ),
    "sender": (lambda: untyped(gs.send)(1.0, "x"), "send: dst='x'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_argument_of_a_wrong_kind_is_named(kind: str) -> None:
    call, expected = WRONG[kind]
    with pytest.raises(gs.errors.ConfigurationError, match=expected) as caught:
        call()
    told = str(caught.value)
    assert "Fix: pass" in told or "expected" in told or "did you mean" in told


def network_of(**kwargs: Any) -> Any:
    return MODEL(nn.Linear(2, 2), **kwargs)


UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "launch": (
        lambda: untyped(gs.launch)(print, num_workers=2),
        r"gs.launch\(\) got an unexpected keyword argument 'num_workers'; "
        r"did you mean 'workers'\?\n"
        r"  Fix: gs.launch\(fn, workers=None, args=\(\)",
    ),
    "a typo": (lambda: untyped(model().train)(epoch=1, loader=LOADER), "did you mean 'epochs'"),
    "nothing": (
        lambda: untyped(model().train)(),
        r"model.train\(\) missing 2 required positional arguments: 'epochs' and 'loader'\n"
        r"  Fix: model.train\(epochs, loader, callbacks=\(\), \*, steps=None",
    ),
    "twice": (
        lambda: untyped(model().train)(LOADER, epochs=4),
        "multiple values for argument 'epochs'; it is number 1 of those without a name",
    ),
    "loss": (lambda: network_of(criterion=nn.MSELoss()), "did you mean 'loss_fn'"),
    "optimizer": (lambda: network_of(optim=None), "did you mean 'optimizer'"),
    "monitor": (lambda: EARLY(monitor="Loss"), r"EarlyStopping\(\) got .* did you mean 'metric'"),
    "best": (lambda: untyped(gs.callbacks.KeepBest)("Loss"), r"Fix: KeepBest\(path, metric, "),
    "distribute": (
        lambda: untyped(gs.distribute)(nn.Linear(2, 2), 5),
        r"Fix: gs.distribute\(net, ",
    ),
    "dynamic_dims": (
        lambda: untyped(gs.distribute)(nn.Linear(2, 2), dynamic_dim={}),
        "did you mean 'dynamic_dims'",
    ),
    "collective": (lambda: untyped(gs.all_reduce)(1.0, dst=0), r"Fix: gs.all_reduce\(value, op="),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_arguments_that_a_call_does_not_take_are_told_with_those_it_takes(kind: str) -> None:
    call, expected = UNFIT[kind]
    with pytest.raises(TypeError, match=expected):
        call()


def test_a_type_error_from_inside_a_call_stays_as_it_is() -> None:
    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.sum()

    net = nn.Linear(4, 2)
    wrong = gs.Model(net, loss, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"loss.. takes 1 positional argument but 2 were given$"):
        wrong.train(1, LOADER)


def test_place_without_a_module_is_told() -> None:
    with pytest.raises(gs.errors.ConfigurationError, match=r"a module, as in net.layer.place"):
        untyped(nn.Linear).place(0)


def test_a_full_disk_under_one_file_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save, "TensorFileWriter", full)
    with pytest.raises(gs.errors.CheckpointError, match="space left on device\n  Fix: free"):
        model().state_dict(to=tmp_path / "weights.safetensors")
