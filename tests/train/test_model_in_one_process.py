"""Without a cluster a Model is a plain loop, and says what it does not accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError
from graphsplit.train.arguments import recomputed_paths

BATCHES = [(torch.ones(4, 3) * i, torch.tensor([0, 1, 0, 1])) for i in range(1, 4)]


def make(**options: Any) -> tuple[nn.Module, gs.Model]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    metrics = {"Accuracy": gs.metrics.Accuracy(), "Loss": gs.metrics.Loss()}
    return net, gs.Model(net, nn.CrossEntropyLoss(), optimizer, metrics, **options)


def plain_epochs(num_epochs: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(num_epochs):
        for inputs, target in BATCHES:
            optimizer.zero_grad()
            loss_fn(net(inputs), target).backward()
            optimizer.step()
    return net.state_dict()


def assert_same(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert list(mine) == list(reference)
    assert all(torch.equal(mine[key], reference[key]) for key in reference)


def test_training_gives_the_bits_of_a_plain_loop():
    _, model = make()
    model.train(2, BATCHES)
    assert_same(model.state_dict(), plain_epochs(2))


def test_an_eval_in_a_callback_leaves_the_rest_of_the_epoch_in_train_mode():
    class Evaluate(gs.callbacks.Callback):
        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            context.model.eval(BATCHES)

    _, model = make()
    model.train(1, BATCHES, [Evaluate()])
    assert_same(model.state_dict(), plain_epochs(1))


def test_train_step_after_eval_trains_in_train_mode():
    _, model = make()
    model.eval(BATCHES)
    for inputs, target in BATCHES:
        model.train_step(inputs, target)
    assert_same(model.state_dict(), plain_epochs(1))


def test_metrics_are_those_of_the_whole_loader():
    net, model = make()
    found = model.eval(BATCHES)
    net.eval()
    with torch.no_grad():
        outputs = torch.cat([net(inputs) for inputs, _ in BATCHES])
        target = torch.cat([target for _, target in BATCHES])
        losses = [float(nn.functional.cross_entropy(net(i), t)) for i, t in BATCHES]
    assert found["Accuracy"] == float((outputs.argmax(1) == target).sum()) / len(target)
    assert found["Loss"] == sum(loss * 4 for loss in losses) / 12


def test_predict_runs_in_eval_mode_without_gradients():
    net, model = make()
    outputs = model.predict(BATCHES[0][0])
    assert not outputs.requires_grad
    assert torch.equal(outputs, model.predict(BATCHES[0][0])), "dropout is off"
    assert net.training, "modes are the user's"


def test_callbacks_see_every_step_with_its_loss():
    seen: list[tuple[int, int, bool]] = []

    class Note(gs.callbacks.Callback):
        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            seen.append((context.epoch, context.step, context.loss.dim() == 0))

    _, model = make()
    model.train(2, BATCHES, [Note()])
    assert seen == [(epoch, step, True) for epoch in (1, 2) for step in (1, 2, 3)]


def test_a_failure_is_told_to_callbacks_and_raised():
    told: list[int] = []

    class Note(gs.callbacks.Callback):
        def on_failure(self, context: gs.callbacks.RunContext) -> None:
            told.append(context.step)

    _, model = make()
    bad = [BATCHES[0], (torch.ones(4, 5), BATCHES[0][1])]
    with pytest.raises(RuntimeError, match="shapes"):
        model.train(1, bad, [Note()])
    assert told == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "expected an int of 1 or more"),
        ({"schedule": "fastest"}, "expected one of gpipe, 1f1b"),
        ({"capture": "magic"}, "expected 'auto'"),
        ({"unplaced": "nowhere"}, "'affinity' or 'worker0'"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": "mse"}, "loss_fn is a str; expected a function or a module"),
        ({"loss_fn": nn.MSELoss}, r"the class MSELoss; did you mean MSELoss\(...\)\?"),
        ({"metrics": [gs.metrics.Accuracy()]}, "metrics is a list; expected a dictionary"),
        ({"metrics": {"A": gs.metrics.Accuracy}}, r"did you mean Accuracy\(...\)\?"),
        ({"optimizer": torch.optim.SGD}, "optimizer is the class SGD"),
        ({"dynamic_dims": [0, 1]}, "dynamic_dims is a list; expected a dictionary"),
        ({"dynamic_dims": {0: 1}}, "dynamic_dims has 0: 1; expected a dimension"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        gs.Model(nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BATCHES, 1), "epochs is a list; expected an int"),
        ((1, None), "loader is a NoneType; expected something that yields batches"),
        ((1, BATCHES, gs.callbacks.LossMonitor()), "callbacks is a LossMonitor; expected a list"),
        ((1, BATCHES, [gs.callbacks.LossMonitor]), r"did you mean LossMonitor\(...\)\?"),
    ],
)
def test_arguments_of_train_of_a_wrong_kind_are_refused(arguments, message):
    _, model = make()
    with pytest.raises(ConfigurationError, match=message):
        model.train(*arguments)


def test_every_schedule_and_a_policy_of_ones_own_are_accepted():
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "auto"):
        make(schedule=schedule)
        make(schedule=schedule, microbatches=4)
    make(schedule=lambda plan, microbatches: [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "2f2b"}, "schedule is '2f2b'; expected one of gpipe, 1f1b, .*, or a funct"),
        ({"schedule": 3}, "schedule is an int; expected one of"),
        ({"schedule": lambda plan: []}, r"schedule cannot be called as schedule\(plan, microba"),
        ({"schedule": lambda a, b, c: []}, "schedule cannot be called as .*: missing a required"),
        ({"recompute": "0"}, "recompute='0'; expected True, False, or a list of modules or patt"),
        ({"recompute": ["layers.*"]}, r"recompute has 'layers.\*': the network has no module"),
        ({"recompute": ["["]}, r"recompute has '\['"),
        ({"recompute": [3]}, "recompute has 3; expected modules, or patterns of their names"),
        ({"recompute": [nn.Linear(2, 2)]}, "recompute has a Linear that is not in net"),
        ({"recompute": True, "compile": True}, "recompute is given, and compile: the compiler"),
    ],
)
def test_wrong_schedules_and_modules_to_recompute_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


def test_modules_to_recompute_are_given_by_pattern_or_as_they_are():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert recomputed_paths(net, ["1.*"]) == ("1.0", "1.1")
    assert recomputed_paths(net, [net[1], "0"]) == ("1", "0")
    assert recomputed_paths(net, [net]) is True
    assert recomputed_paths(net, False) is False


def test_lbfgs_is_refused_because_it_needs_a_closure():
    net = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="closure"):
        gs.Model(net, nn.MSELoss(), torch.optim.LBFGS(net.parameters()))


def test_a_network_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match=r"net is a function; expected a torch.nn.Module"):
        gs.Model(lambda x: x)


def test_training_without_an_optimizer_says_how_to_give_one():
    with pytest.raises(ConfigurationError, match="train needs an optimizer"):
        gs.Model(nn.Linear(2, 2), nn.MSELoss()).train(1, [])


def test_eval_without_metrics_says_how_to_give_some():
    with pytest.raises(ConfigurationError, match="eval needs metrics"):
        gs.Model(nn.Linear(2, 2), nn.MSELoss()).eval([])


def test_a_role_without_init_is_refused(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    with pytest.raises(ConfigurationError, match=r"gs.init\(\) was not called"):
        make()


def test_explain_in_one_process_plans_for_the_workers_that_placements_ask_for():
    net, model = make()
    net[2].place("MS_WORKER", 2)
    text = model.explain(*BATCHES[0])
    assert "linear" in text
    assert "worker 2" in text


def test_explain_in_one_process_shows_what_a_job_adds_to_clip_by_all_gradients() -> None:
    net, model = make(clip=gs.clip.GlobalNorm(1.0))
    net[2].place("MS_WORKER", 1)
    assert "norms and checks of gradients" in model.explain(*BATCHES[0], detail="operations")


def test_explain_in_one_process_leaves_tensors_that_forward_keeps_as_they_are() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(4, 2), {"mean": torch.zeros(2), "last": None}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            if self.kept["last"] is not None:
                h = h - self.kept["last"].mean(0)
            self.kept["last"] = h.detach()
            self.kept["mean"].mul_(0.9).add_(h.detach().mean(0))
            return h - self.kept["mean"]

    def losses(*, explains: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net, x, target = Keeps(), torch.randn(3, 4), torch.tensor([0, 1, 0])
        model = gs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        found = []
        for _ in range(3):
            found.append(model.train_step(x, target))
            if explains:
                assert "train graph on 1 worker" in model.explain(x, target)
        return [*found, *net.kept.values()]

    told, untold = losses(explains=True), losses(explains=False)
    assert all(map(torch.equal, told, untold))


def test_a_plan_is_shown_for_a_batch_only() -> None:
    net = nn.Linear(2, 2)
    model = gs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    model.train_step(torch.ones(1, 2), torch.zeros(1).long())
    with pytest.raises(ConfigurationError, match="the plain loop, without a plan\n  Fix: pass a"):
        model.explain()


def test_a_network_with_a_train_of_its_own_has_it_called_as_a_plain_loop_calls_it():
    calls: list[bool] = []

    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            calls.append(mode)
            super().train(mode)
            self[0].train(False)
            return self

    def network() -> nn.Module:
        torch.manual_seed(0)
        return Frozen(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Dropout(0.5))

    reference, nets = network(), [network() for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (reference, *nets)]
    reference.train()
    reference[1].eval()
    for inputs, target in BATCHES:
        optimizers[0].zero_grad()
        nn.functional.cross_entropy(reference(inputs), target).backward()
        optimizers[0].step()
    calls.clear()
    for net, optimizer in zip(nets, optimizers[1:], strict=True):
        net[1].eval()  # on purpose, and it stays so
        torch.manual_seed(0)
        _ = network()  # draws what the reference has drawn
        model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
        if net is nets[0]:
            model.train(1, BATCHES)
        else:
            for inputs, target in BATCHES:
                model.train_step(inputs, target)
        assert calls == [True]
        assert [module.training for module in net.modules()] == [True, False, False, True, True]
        assert_same(net.state_dict(), reference.state_dict())
        calls.clear()
