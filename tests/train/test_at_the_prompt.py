"""What a user meets at the prompt: names, placements, and what monitors print."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recovery_features.parts import Last, adam, batches, plain_net
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError, PlacementError
from graphsplit.marks.annotations import module_annotation
from graphsplit.planning.progress import SizesSeen
from graphsplit.profiling.trial_run import tried_costs
from graphsplit.train.training import TrainingInWords

assert threads_as_workers


def test_what_is_public_is_shown_and_nothing_else():
    assert dir(gs) == sorted(gs.__all__)


@pytest.mark.parametrize(
    ("owner", "name", "meant"),
    [
        ("module 'graphsplit'", "Modle", "Model"),
        ("module 'graphsplit'", "init_process_group", "init"),
        ("module 'graphsplit.metrics'", "Acuracy", "Accuracy"),
        ("module 'graphsplit.callbacks'", "EarlyStoping", "EarlyStopping"),
        ("module 'graphsplit.callbacks'", "ModelCheckpoint", "Checkpoint"),
        ("'Model' object", "evaluate", "eval"),
        ("'Model' object", "fit", "train"),
        ("'Model' object", "train_setp", "train_step"),
    ],
)
def test_a_name_that_is_not_there_is_told_the_one_that_was_meant(owner: str, name: str, meant: str):
    modules = {"module 'graphsplit'": gs}
    modules |= {f"module 'graphsplit.{one}'": getattr(gs, one) for one in ("callbacks", "metrics")}
    found = modules[owner] if owner in modules else gs.Model(nn.Linear(2, 2))
    text = f"{owner} has no attribute {name!r}; did you mean {meant!r}?"
    with pytest.raises(AttributeError, match=re.escape(text) + "$"):
        getattr(found, name)
    assert not hasattr(found, "nothing_like_it")


@pytest.mark.parametrize(
    ("name", "known"),
    [("on_epoch_ends", "on_epoch_end"), ("on_train_batch_end", "on_step_end")],
)
def test_a_method_of_a_callback_that_nothing_calls_is_told(name: str, known: str):
    text = f"nothing calls Mine.{name}; did you mean {known!r}?"
    with pytest.warns(UserWarning, match=re.escape(text)):
        type("Mine", (gs.callbacks.Callback,), {name: lambda self, context: None})
    type("Mine", (gs.callbacks.Callback,), {"on_my_own_event": lambda self: None, known: print})


def test_the_role_may_be_left_out():
    short, by_name, long = (nn.Linear(2, 2) for _ in range(3))
    assert short.place(1) is short  # type: ignore[operator]
    by_name.place(rank=1)  # type: ignore[operator]
    long.place("MS_WORKER", 1)  # type: ignore[operator]
    ranks = [found.rank for found in map(module_annotation, (short, by_name, long)) if found]
    assert ranks == [1, 1, 1]
    for wrong in ((), ("MS_WORKER",), (True,), (-1,)):
        with pytest.raises(PlacementError):
            short.place(*wrong)  # type: ignore[operator]


def monitored() -> list[float]:
    net, last = plain_net(place=True), Last()
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    model.train(1, batches(), [last, gs.callbacks.LossMonitor(every=2)])
    return [float(loss) for loss in last.losses]


@pytest.mark.usefixtures("threads_as_workers")
def test_losses_are_printed_once_with_their_mean(capsys: pytest.CaptureFixture[str]):
    first, second, third = monitored()
    expected = (
        f"epoch: 1 step: 2, loss is {second}, mean {(first + second) / 2:.6g}\n"
        f"epoch: 1 step: 3, loss is {third}, mean {third:.6g}\n"
    )
    assert capsys.readouterr().out == expected
    ThreadCluster(lambda _: monitored(), 3).run()
    assert capsys.readouterr().out == expected


def test_a_progress_bar_ends_with_the_last_loss(capsys: pytest.CaptureFixture[str]):
    net, last = plain_net(place=False), Last()
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    model.train(1, batches(), [last, gs.callbacks.ProgressBar()])
    assert f"loss {float(torch.stack(last.losses)[-1]):.4f}" in capsys.readouterr().err


def test_a_model_shows_itself_in_four_lines():
    net = nn.Linear(40, 50)
    model = gs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    expected = (
        "Model(\n  network: Linear, 2,050 parameters\n  loss: CrossEntropyLoss, optimizer: SGD\n)"
    )
    assert repr(model) == expected
    assert model._repr_html_() == f"<pre>{expected}</pre>"
    assert "network's own" in repr(gs.Model(net))


def test_a_batch_is_no_loader():
    net = plain_net(place=False)
    metrics = {"A": gs.metrics.Accuracy()}
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), metrics)
    batch = batches().dataset[0]
    for loader in (batch, list(batch), batch[0], {"input": batch[0]}):
        with pytest.raises(ConfigurationError, match=r"train\(...\): .* did you pass a batch"):
            model.train(1, loader)
        with pytest.raises(ConfigurationError, match=r"eval\(...\): .* did you pass a batch"):
            model.eval(loader)
    with pytest.raises(ConfigurationError, match="TensorDataset; did you mean DataLoader"):
        model.train(1, batches().dataset)


def test_a_finished_run_says_that_nothing_is_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def script() -> int:
        net, last = plain_net(place=True), Last()
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        model.train(1, batches(), [gs.callbacks.Checkpoint(tmp_path / "run", keep=1)])
        model.load(tmp_path / "run")
        model.train(1, batches(), [last])
        model.train(0, batches(), [last])
        return len(last.losses)

    assert script() == 0
    assert "nothing is trained: train was asked for 0 epochs" in caplog.text
    assert "nothing is trained: the loaded run has done all of 1 epoch(s)" in caplog.text


def test_how_training_goes_is_told_in_words():
    net, last = plain_net(place=False), Last()
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    context = gs.callbacks.RunContext(model, 0, 2, None)
    clock = iter([0.0, 1.0, 5.0, 6.0])
    words = TrainingInWords(context, lambda: next(clock))
    assert words() == "epoch 0 of 2, step 0"
    model.train(1, batches(), [last])
    context.epoch, context.step, context.num_steps = 1, 3, 9
    context.loss = torch.tensor(0.25)
    rate = model.position.num_steps / 5.0
    assert words() == f"epoch 1 of 2, step 3 of 9, loss 0.25, {rate:.3g} steps/s"
    assert words() == f"epoch 1 of 2, step 3 of 9, loss 0.25, {rate:.3g} steps/s"


def test_the_fifth_size_of_batches_tells_of_dynamic_dims():
    seen, told = SizesSeen({}), SizesSeen({0: 9})
    sizes = [Signature.of(((torch.zeros(n, 3), torch.zeros(2)), {})) for n in range(1, 8)]
    for signature in (*sizes[:4], *sizes[:4]):
        seen.note(Mode.PREDICT, signature)
    with pytest.warns(
        UserWarning, match=r"5 plans for predict (.|\n)*gs.Model\(..., dynamic_dims=\{0: 10\}"
    ):
        seen.note(Mode.PREDICT, sizes[4])
    for signature in sizes[:4]:
        seen.note(Mode.CALL, signature)
    with pytest.warns(UserWarning, match=r"Fix: gs.distribute\(net, dynamic_dims=\{0: 10\}\)"):
        seen.note(Mode.CALL, sizes[4])
    for signature in sizes:  # told once; and what was said to change is no news
        seen.note(Mode.PREDICT, signature)
    for signature in sizes[1:]:
        told.note(Mode.PREDICT, signature)


def test_many_plans_for_sizes_of_one_are_told_that_they_are_planned_apart():
    """Boxes of a detector, as a list: each of them may be one."""
    counts = [(1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2)]
    batches = [[torch.zeros(n, 4) for n in of_images] for of_images in counts]
    signatures = [Signature.of((batch, {})) for batch in batches]
    new, told = SizesSeen({}), SizesSeen({0: 9})
    with pytest.warns(UserWarning, match=r"\{0: 4\}\), .* makes one plan for all but those with a"):
        for signature in signatures:
            new.note(Mode.TRAIN, signature)
    with pytest.warns(UserWarning, match=r"Fix: dynamic_dims leaves out sizes of 1, .*; pad the"):
        for signature in signatures:
            told.note(Mode.TRAIN, signature)


def test_explain_gives_seconds_and_the_worker_that_bounds_the_step():
    net = plain_net(place=True, width=64)
    before = [tensor.clone() for tensor in net.state_dict().values()]
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=2)
    batch = torch.randn(64, 4), torch.zeros(64, dtype=torch.long)
    state = torch.get_rng_state()
    text = model.explain(*batch)
    assert "not counted" not in text
    assert re.search(
        r"Compute, per step\n  worker +forward +backward +both +share\n +0 +[\d.]+ ms", text
    )
    assert re.search(r"Step time\n  predicted [\d.]+ ms; computing measured on this batch", text)
    assert re.search(r"worker \d bounds it: it is busy for [\d.]+ ms, \d+% of the step", text)
    assert all(map(torch.equal, before, net.state_dict().values()))
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert repr(text) == text == f"{text}"  # a prompt shows its lines


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("method", ["explain", "placement"])
def test_a_plan_that_values_decide_needs_a_step_first(method: str) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.first.place("MS_WORKER", 0)
            self.second.place("MS_WORKER", 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return self.second(h) if h.sum() < 1e9 else h  # asked here

    model = gs.Model(Asks())
    with pytest.raises(ConfigurationError) as caught:
        getattr(model, method)(torch.randn(8, 4))
    (line,) = re.findall(r"test_at_the_prompt.py:(\d+)", str(caught.value))
    assert "asked here" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert f"model.{method} without a batch" in str(caught.value)
    assert "torch.where" not in str(caught.value)

    def after_a_step(_: int) -> str:
        model = gs.Model(Asks())
        model.predict(torch.full((8, 4), 2.0))
        return str(getattr(model, method)())

    texts = ThreadCluster(after_a_step, 2).run()
    assert all("second" in text for text in texts)


def test_explain_counts_optimizers_of_torch_and_names_another_one():
    class Own(torch.optim.SGD):
        """Not known to leave nothing behind."""

    net = plain_net(place=True)
    batch = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    model = gs.Model(net, nn.CrossEntropyLoss(), Own(net.parameters(), lr=0.1))
    assert "messages estimated, Own not counted\n" in model.explain(*batch)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    plan, state = model._explainer._plan(batch, {}, method="explain"), dict(net.named_parameters())
    costs = tried_costs(plan, state, batch, [adam(net)])
    assert sorted(costs.optimizer) == [0, 1, 2] and min(costs.optimizer.values()) > 0
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize(("batches", "epoch"), [(1, 2), (0, 1)])
def test_an_epoch_without_batches_is_said_once(
    batches: int, epoch: int, caplog: pytest.LogCaptureFixture
):
    net = nn.Linear(2, 1)
    model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    model.train(3, iter([(torch.ones(1, 2), torch.ones(1, 1))] * batches))
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        f"epoch {epoch} trained nothing: the loader gave no batch"
    ]


class MayDouble(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.doubles = nn.Linear(2, 1), False

    def forward(self, x):
        return self.inner(x) * 2 if self.doubles else self.inner(x)


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.filterwarnings("ignore:5 plans for predict")
def test_another_plan_says_what_it_is_for(caplog: pytest.LogCaptureFixture):
    def script(_: int) -> None:
        net = MayDouble()
        model = gs.Model(net)
        model.predict(torch.ones(1, 2))
        model.predict(torch.ones(3, 2))
        net.doubles = True
        for rows in range(3, 10):
            model.predict(torch.ones(rows, 2))

    with caplog.at_level("INFO", logger="graphsplit"):
        ThreadCluster(script, 2).run()
    told = [record.getMessage() for record in caplog.records]
    assert [text for text in told if "step of MayDouble" in text] == [
        "capturing the predict step of MayDouble",
        "planning the predict step of MayDouble",
        "planned the predict step of MayDouble: 1 segment, 1 worker",
        "capturing the predict step of MayDouble again: the batch has other shapes or dtypes",
        "capturing the predict step of MayDouble again: net.doubles was False, is True",
        *("capturing the predict step of MayDouble again: the batch has other shapes or dtypes",)
        * 3,
        "capturing the predict step of MayDouble again: the batch has other shapes or dtypes; "
        "this is not told any more",
    ]


@pytest.mark.usefixtures("threads_as_workers")
def test_that_segments_are_compiled_is_told(caplog: pytest.LogCaptureFixture):
    def script(_: int) -> None:
        gs.Model(nn.Linear(2, 2), compile={"backend": "eager"}).predict(torch.ones(1, 2))

    with caplog.at_level("INFO", logger="graphsplit"):
        ThreadCluster(script, 2).run()
    text = "planned the predict step of Linear: 1 segment, 1 worker; compiling each segment as it "
    assert f"{text}first runs" in [record.getMessage() for record in caplog.records]


def warned_by(caplog: pytest.LogCaptureFixture, script: Callable[[int], None]) -> list[str]:
    with caplog.at_level("INFO", logger="graphsplit"):
        ThreadCluster(script, 2, is_recoverable=False).run()
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("is_own_loop", [False, True])
def test_a_network_of_which_nothing_is_placed_is_named_once(
    is_own_loop: bool, caplog: pytest.LogCaptureFixture
):
    def script(_: int) -> None:
        net: nn.Module = two_layers()
        run = gs.distribute(net) if is_own_loop else gs.Model(net).predict
        for size in (1, 3):
            run(torch.ones(size, 2))

    assert warned_by(caplog, script) == [
        "nothing of Sequential is placed: worker 0 runs all of it, and the others have nothing to "
        "do\n  Fix: say before the first step where its parts live, as by net[1].place(1)."
    ]


@pytest.mark.usefixtures("threads_as_workers")
def test_a_target_of_another_dtype_is_told_as_plain_pytorch_tells_it():
    def script(_: int) -> None:
        net = two_layers()
        net[1].place("MS_WORKER", 1)
        model = gs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        told = "expected target dtype to be Long or Byte, but got Float"
        with pytest.raises(RuntimeError, match=f"^{told}"):
            model.train_step(torch.ones(4, 2), torch.zeros(4))

    ThreadCluster(script, 2, is_recoverable=False).run()


def by_module(net: nn.Sequential) -> None:
    net.place("MS_WORKER", 0)


def by_rule(net: nn.Sequential) -> None:
    gs.apply_placement(net, {"operations": {"1": {"linear": 0}}})


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("place", [by_module, by_rule])
def test_a_network_that_is_placed_on_one_worker_is_as_it_was_meant(
    place: Callable[[nn.Sequential], None], caplog: pytest.LogCaptureFixture
):
    def script(_: int) -> None:
        net = two_layers()
        place(net)
        gs.Model(net).predict(torch.ones(1, 2))

    assert warned_by(caplog, script) == []


class Annealed(nn.Module):
    """Counts its calls, and changes a number at each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.beta = nn.Linear(2, 2), 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.beta = self.beta * 0.99
        self.mean = x.mean(0)  # torch looks into its tables for it
        made: torch.Tensor = self.layer(x) * self.beta + self.calls
        return made


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.filterwarnings("ignore:network or loss reads")
def test_what_a_step_leaves_is_told_by_the_names_that_users_know() -> None:
    def script(_: int) -> str:
        net = Annealed()
        net.layer.place("MS_WORKER", 0)
        model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(6):
            model.train_step(torch.ones(2, 2), torch.ones(2, 2))
        return model.explain(detail="state")

    for text in ThreadCluster(script, 2, is_recoverable=False).run():
        left = text[text.index("Left by network and loss") :].splitlines()[1:]
        assert "  net.calls to add(net.calls, 1)" in left
        assert "  net.beta to mul(net.beta, 0.99)" in left
        assert not re.search(r"\b(s|zf)\d+\b|lifted \d|_non_persistent|kept net", text)


WRONG_KINDS: dict[str, Callable[[gs.Model], object]] = {
    "save: path is 5": lambda model: model.save(5),  # type: ignore[arg-type]
    "save: extra is 5": lambda model: model.save("never", extra=5),  # type: ignore[arg-type]
    "load: path is None": lambda model: model.load(None),  # type: ignore[arg-type]
    "to is 5": lambda model: model.state_dict(to=5),  # type: ignore[call-overload]
    "load_state_dict: state is 5": lambda model: model.load_state_dict(5),  # type: ignore[arg-type]
    "load_optimizer_state_dict: state is 5": lambda model: model.load_optimizer_state_dict(5),
    "folder is 5": lambda _: gs.latest_checkpoint(5),  # type: ignore[arg-type]
    "path is 6": lambda _: gs.callbacks.Checkpoint(6),  # type: ignore[arg-type]
    "path is 7": lambda _: gs.callbacks.KeepBest(7, "loss"),  # type: ignore[arg-type]
    "every='x'": lambda _: gs.callbacks.LossMonitor("x"),  # type: ignore[arg-type]
    "every=-1": lambda _: gs.callbacks.LossMonitor(-1),
    "min_delta='x'": lambda _: gs.callbacks.EarlyStopping("a", min_delta="x"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("told", WRONG_KINDS)
def test_an_argument_of_a_wrong_kind_is_named(told: str) -> None:
    net = plain_net(place=False)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    with pytest.raises(ConfigurationError, match=rf"{re.escape(told)}; expected "):
        WRONG_KINDS[told](model)
