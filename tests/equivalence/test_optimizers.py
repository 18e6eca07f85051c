"""Every optimizer of ``torch.optim`` gives the bits of one process, wherever parameters live."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, on_three, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from torch import nn
from torch.optim import Optimizer

from graphsplit.errors import ConfigurationError, OwnershipError
from graphsplit.optimizers.clip import GlobalNorm
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.optimizers.per_parameter import PER_PARAMETER, is_listed
from graphsplit.train.model import Model

Group = list[dict[str, Any]]
BATCHES = batches_of(4, 8, num=4)


class Tower(nn.Module):
    """Three linear layers; the last shares the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.third.weight = self.first.weight

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


class Words(nn.Module):
    """Embeddings with sparse gradients, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.embedding(x).sum(1))


same_over_three = functools.partial(
    assert_same_bits,
    Tower,
    BATCHES,
    num_workers=3,
    place=on_three,
    loss_fn=rows_against_target,
    captures=Captures(),
    evaluate_after=(),
)


def two_groups(network: Tower) -> Group:
    return [
        {"params": list(network.first.parameters()), "lr": 0.02, "weight_decay": 0.1},
        {"params": [*network.second.parameters(), network.third.bias]},
    ]


# For every class, the settings under which it is tried.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"foreach": True, "maximize": True}],
    "Adadelta": [{}, {"foreach": True, "maximize": True}],
    "Adafactor": [{}, {"foreach": True}],
    "Adagrad": [{}, {"foreach": True, "lr_decay": 0.1}, {"fused": True}],
    "Adam": [
        {"amsgrad": True},
        {"foreach": True},
        {"foreach": False, "maximize": True},
        {"fused": True, "amsgrad": True},
    ],
    "AdamW": [{"amsgrad": True}, {"foreach": True, "maximize": True}, {"fused": True}],
    "Adamax": [{}, {"foreach": True, "maximize": True}],
    "NAdam": [{}, {"foreach": True, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"foreach": True, "maximize": True}],
    "RMSprop": [{"momentum": 0.5, "centered": True}, {"foreach": True, "maximize": True}],
    "Rprop": [{}, {"foreach": True, "maximize": True}],
    "SGD": [
        {"momentum": 0.9, "nesterov": True},
        {"foreach": True, "momentum": 0.9, "dampening": 0.1},
        {"fused": True, "momentum": 0.9},
        {"maximize": True},
    ],
}
OTHERS = {"LBFGS", "Muon", "SparseAdam"}  # have tests of their own


def found_classes() -> set[str]:
    return {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }


def test_every_class_of_torch_optim_is_tried() -> None:
    assert found_classes() - OTHERS == set(SETTINGS)


def test_every_class_of_torch_optim_but_one_is_known_to_be_per_parameter() -> None:
    assert {kind.__name__ for kind in PER_PARAMETER} == found_classes() - {"LBFGS"}


def test_only_pytorchs_own_code_is_known() -> None:
    class Own(torch.optim.SGD):
        pass

    parameters = list(nn.Linear(2, 2).parameters())
    plain, scheduled, hooked, patched = (torch.optim.SGD(parameters, lr=0.1) for _ in range(4))
    torch.optim.lr_scheduler.StepLR(scheduled, step_size=1)
    hooked.register_step_pre_hook(lambda *_: None)
    step = patched.step
    patched.step = functools.wraps(step)(lambda closure=None: step())  # type: ignore[method-assign]
    assert is_listed(plain) and is_listed(scheduled)
    assert not is_listed(hooked) and not is_listed(patched)
    torch.optim.lr_scheduler.StepLR(hooked, step_size=1)
    assert not is_listed(hooked) and not is_listed(Own(parameters, lr=0.1))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, id=f"{name} {settings or ''}")
        for name, several in SETTINGS.items()
        for settings in several
    ],
)
def test_an_optimizer_gives_the_bits_of_one_process(name: str, settings: dict[str, Any]) -> None:
    make: Callable[..., Optimizer] = functools.partial(getattr(torch.optim, name), **settings)
    same_over_three(make_optimizer=lambda net: make(two_groups(net), lr=0.01))


def test_muon_steps_matrices_and_another_optimizer_the_rest() -> None:
    def make(network: Tower) -> Sequence[Optimizer]:
        matrices = [p for p in network.parameters() if p.dim() == 2]
        others = [p for p in network.parameters() if p.dim() != 2]
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(others, lr=0.05)

    same_over_three(make_optimizer=make)


def test_sparse_gradients_are_stepped_where_the_embedding_lives() -> None:
    generator = torch.Generator().manual_seed(3)
    words = [
        (torch.randint(0, 16, (4, 3), generator=generator), torch.randn(4, generator=generator))
        for _ in range(3)
    ]

    def make(network: Words) -> Sequence[Optimizer]:
        return (
            torch.optim.SparseAdam(network.embedding.parameters(), lr=0.05),
            torch.optim.Adam(network.linear.parameters(), lr=0.05),
        )

    assert_same_bits(
        Words,
        words,
        num_workers=2,
        place=lambda net: net.embedding.place("MS_WORKER", 1),
        loss_fn=rows_against_target,
        make_optimizer=make,
    )


def test_lbfgs_is_refused() -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="LBFGS runs the step several times"):
        Model(network, optimizer=torch.optim.LBFGS(network.parameters()))


def test_a_differentiable_optimizer_is_refused() -> None:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(network.parameters(), differentiable=True)
    with pytest.raises(ConfigurationError, match="Adam has differentiable=True"):
        Model(network, optimizer=optimizer)


def test_capturable_fails_as_in_one_process() -> None:
    with pytest.raises(AssertionError, match="capturable=True"):
        same_over_three(
            make_optimizer=lambda net: torch.optim.Adam(net.parameters(), capturable=True)
        )


def test_several_optimizers_are_stepped_in_order() -> None:
    def make(network: Tower) -> Sequence[Optimizer]:
        weights = [p for p in network.parameters() if p.dim() == 2]
        return (
            torch.optim.SGD(weights, lr=0.05, momentum=0.9),
            torch.optim.AdamW(network.parameters(), lr=0.01),  # the weights once more
        )

    same_over_three(make_optimizer=make)


def test_parameters_of_no_optimizer_add_up_their_gradients() -> None:
    same_over_three(make_optimizer=lambda net: torch.optim.SGD(net.second.parameters(), lr=0.05))


def test_gradients_set_to_zero_are_stepped_too() -> None:
    class Halves(Tower):
        def forward(self, x):
            return self.third(torch.relu(self.first(x)))

    for set_to_none in (True, False):  # the middle layer has no gradient, or a zero one
        assert_same_bits(
            Halves,
            BATCHES,
            num_workers=3,
            place=on_three,
            loss_fn=rows_against_target,
            make_optimizer=lambda net: torch.optim.AdamW(net.parameters(), weight_decay=0.1),
            set_to_none=set_to_none,
        )


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    ],
)
def test_schedulers_change_the_settings_of_every_group(make_scheduler: Any) -> None:
    same_over_three(
        make_optimizer=lambda net: torch.optim.SGD(two_groups(net), lr=0.05, momentum=0.9),
        make_scheduler=make_scheduler,
    )


def test_hooks_on_gradients_change_them_on_the_owner() -> None:
    halved = []

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
        halved.append(parameter.shape)

    def make(network: Tower) -> Optimizer:
        network.second.weight.register_hook(lambda gradient: gradient * 2)
        network.first.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))  # shared
        network.third.bias.register_post_accumulate_grad_hook(halve)
        return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)

    same_over_three(make_optimizer=make)
    assert len(halved) == 2 * len(BATCHES)  # in the plain loop, and on the owner


def test_hooks_around_the_optimizer_run_on_every_worker() -> None:
    called = []

    def make(network: Tower) -> Optimizer:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        optimizer.register_step_pre_hook(lambda o, args, kwargs: called.append("before"))

        def halve(o: Optimizer, args: Any, kwargs: Any) -> None:
            called.append("after")
            for group in o.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.5)

        optimizer.register_step_post_hook(halve)
        return optimizer

    same_over_three(make_optimizer=make, steps=2)
    assert called == ["before", "after"] * 2 * (3 + 1)  # steps, workers and the plain loop


def test_gradients_may_be_changed_before_the_step() -> None:
    def reverse(network: nn.Module) -> None:
        for parameter in network.parameters():
            if not is_elsewhere(parameter):
                assert parameter.grad is not None
                parameter.grad.neg_()

    same_over_three(on_gradients=reverse)


def test_a_gradient_that_lives_elsewhere_is_not_taken_for_none() -> None:
    cluster = same_over_three(steps=1)
    network = cluster.workers[1].task.network
    with pytest.raises(OwnershipError, match=r"the gradient of 'first.weight' lives on worker 2"):
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    with pytest.raises(OwnershipError, match=r"clip=gs.clip.GlobalNorm"):
        network.second.weight.grad  # noqa: B018
    network.zero_grad()  # treats every parameter by itself
    cluster.workers[1].task.optimizers[0].zero_grad()
    assert network.third.bias.grad is None


def test_an_optimizer_of_foreign_parameters_is_refused() -> None:
    other = nn.Linear(3, 3)
    with pytest.raises(ConfigurationError, match=r"2 parameter\(s\) that are neither in net"):
        same_over_three(make_optimizer=lambda net: torch.optim.SGD(other.parameters(), lr=0.1))


class Keeping(Tower):
    """Uses a layer by a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = {"second": self.second}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.third(torch.relu(self.layers["second"](self.first(x))))
        return made


def test_a_trained_layer_that_is_taken_out_and_used_all_the_same_is_refused() -> None:
    def take_out(step: int, net: Any, loss_fn: Any) -> None:
        if step == 1:
            net.second = nn.Identity()

    with pytest.raises(ConfigurationError, match=r"\[8, 8\] that the optimizer trains"):
        assert_same_bits(
            Keeping,
            batches_of(4, 8),
            num_workers=1,  # of several, one may say that the value lives elsewhere
            loss_fn=rows_against_target,
            before_step=take_out,
            plan_everywhere=True,
        )


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adam", "optimizer is a str; expected a torch.optim.Optimizer"),
        (["adam"], "optimizer is a str; expected a torch.optim.Optimizer"),
        (lambda o: [o, o], "optimizer names the same optimizer twice"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, message: str) -> None:
    network = nn.Linear(2, 2)
    if callable(optimizer):
        optimizer = optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=message):
        Model(network, optimizer=optimizer)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_accumulate_over_several_batches(microbatches: int) -> None:
    same_over_three(accumulate=3, steps=8, microbatches=microbatches)
    same_over_three(
        accumulate=2,
        steps=4,
        microbatches=microbatches,
        clip=GlobalNorm(0.1),
        make_scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1),
        captures=Captures(),
    )


@pytest.mark.parametrize("accumulate", [0, 1.5, True])
def test_what_is_no_number_of_batches_is_refused(accumulate: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"accumulate=.*; expected an int of 1 or more"):
        Model(nn.Linear(2, 2), accumulate=accumulate)
