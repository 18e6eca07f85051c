"""Calls with arguments of a wrong kind: the error names the argument, and says what to pass."""

from __future__ import annotations

import errno
import inspect
import os
import re
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
    "launcher workers": (
        lambda: untyped(gs.launcher)(workers="2"),
        r"gs.launcher\(..., workers='2'",
    ),
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
    "launcher timeout_s": (lambda: untyped(gs.launcher)(timeout_s="x"), "gs.launcher: timeout_s="),
    "launcher restarts": (lambda: untyped(gs.launcher)(restarts="x"), "restarts='x'"),
    "launcher log_dir": (lambda: untyped(gs.launcher)(log_dir=5), "gs.launcher: log_dir=5"),
    "ignored nothing": (lambda: gs.ignore(nn.Linear(2, 2)), "gs.ignore: name=None"),
    "ignored number": (lambda: gs.ignore(nn.Linear(2, 2), 5), "gs.ignore: name=5"),
    "ignored entry": (lambda: gs.ignore([1], "x"), "gs.ignore: name='x'"),
    "ignored text": (
        lambda: gs.ignore("x", "y"),
        "gs.ignore: a str has no .* 'y' to ignore\n  Fix: pass what holds",
    ),
    "assign": (lambda: untyped(model().load_state_dict)({}, assign=None), "assign=None"),
    "gather of Checkpoint": (
        lambda: untyped(gs.callbacks.Checkpoint)("x", gather="x"),
        "Checkpoint: gather='x'",
    ),
    "extra of Checkpoint": (
        lambda: untyped(gs.callbacks.Checkpoint)("x", extra=5),
        "Checkpoint: extra=5",
    ),
    "nothing to load": (
        lambda: model().load(untyped(gs.latest_checkpoint("nowhere"))),
        "path is None; .*\n  Fix: gs.latest_checkpoint gives None",
    ),
    "distributed Model": (lambda: gs.distribute(untyped(model())), "not a gs.Model or"),
    "no target": (
        lambda: MODEL(nn.Linear(2, 2), nn.MSELoss()).explain(torch.ones(1, 2)),
        "tuple of 1; .*\n  Fix: pass what loss_fn compares with",
    ),
    "seed": (
        lambda: untyped(gs.microbatch_rng_state)("x", 1, 2),
        "gs.microbatch_rng_state: seed='x'",
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


def public_calls() -> dict[str, Callable[..., Any]]:
    """All public calls that take certain arguments, by the name that users write."""
    own = {f"gs.{name}": getattr(gs, name) for name in dir(gs)}
    own |= {f"model.{name}": getattr(model(), name) for name in dir(gs.Model)}
    own |= {"net.place": untyped(nn.Linear(2, 2)).place, "gs.op(...).place": gs.op(torch.add).place}
    own |= {"gs.clip.Value": gs.clip.Value, "gs.clip.GlobalNorm": gs.clip.GlobalNorm}
    own |= {
        one.__name__: one
        for one in vars(gs.callbacks).values()
        if isinstance(one, type)
        and "__init__" in vars(one)
        and issubclass(one, gs.callbacks.Callback)
    }
    found = {}
    for name, call in own.items():
        if not callable(call) or name.partition(".")[2].startswith("_"):
            continue
        kinds = {one.kind for one in inspect.signature(call).parameters.values()}
        if not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            found[name] = call
    return found


PUBLIC = public_calls()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_call_tells_what_it_takes(name: str) -> None:
    fix = rf"\n  Fix: {re.escape(name)}\("
    with pytest.raises(TypeError, match=rf"^{re.escape(name)}\(\) takes .*without a name{fix}"):
        PUBLIC[name](*range(30))
    with pytest.raises(TypeError, match=rf"^{re.escape(name)}\(\) .*'qqq'{fix}"):
        PUBLIC[name](qqq=1)


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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("optimzer", "did you mean 'optimizer'"),
        ("loss_func", "did you mean 'loss_fn'"),
        ("criterion", "did you mean 'loss_fn'"),
        ("microbatches", r"it is an argument of a new one: gs.Model\(..., microbatches="),
    ],
)
def test_an_attribute_that_would_change_nothing_is_told(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=f"'Model' object has no attribute '{name}' .*{hint}"):
        setattr(model(), name, None)


def test_a_model_has_attributes_of_the_scripts() -> None:
    class Own(gs.Model):
        optimzer: Any = None  # the class says that it means it

    one, other = untyped(model()), untyped(Own(nn.Linear(2, 2)))
    one.best, one.loss, one.loss_fn = 0.5, 0.25, nn.MSELoss()
    other.optimzer = other.microbatches = other._optimzer = 3
    assert (one.best, one.loss) == (0.5, 0.25) and isinstance(one.network, nn.Linear)
    assert isinstance(one.loss_fn, nn.MSELoss) and other.optimzer == other.microbatches == 3


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
