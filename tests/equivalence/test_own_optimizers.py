"""An optimizer that looks at more than one parameter gives the bits of one process, or an error."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import own_optimizers as own
import pytest
import torch
from equivalence_helpers import Tower, batches_of, on_two, rows_against_target
from own_optimizers import stepped, with_hook
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import graphsplit as gs
from graphsplit.errors import ConfigurationError
from graphsplit.optimizers.optimizer import are_same
from graphsplit.optimizers.own_step import code_of_step, guard_step
from graphsplit.planning.task import Task

BATCHES = batches_of(4, 8, num=6)
MAKE: dict[str, Callable[[Any], Optimizer]] = {
    kind.__name__: functools.partial(kind) for kind in (own.Momentum, own.Tutorial, own.Slow,
                                                        own.Sharpness, own.Distance)
} | {
    kind.__name__: functools.partial(kind, lr=0.05, momentum=0.9)
    for kind in (own.Lars, own.Normalized, own.ClipsLarge, own.SkipsNan, own.Grows, own.Late)
}  # fmt: skip
# Keep what they find beside the state of parameters.
COUNTING = ("Distance", "Slow", "Grows", "Late")
BY_ITSELF = ("Momentum", "Tutorial", "Lars")


same = functools.partial(
    assert_same_bits,
    Tower,
    BATCHES,
    num_workers=2,
    place=on_two,
    loss_fn=rows_against_target,
    evaluate_after=(),
)
CAPTURES = Captures()


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", BY_ITSELF)
def test_one_that_treats_every_parameter_by_itself_may_be_split(name, microbatches) -> None:
    same(
        make_optimizer=lambda net: MAKE[name](net.parameters()),
        microbatches=microbatches,
        captures=CAPTURES,
    )


@pytest.mark.parametrize("name", sorted(set(MAKE) - set(BY_ITSELF)))
def test_one_that_looks_at_several_is_refused_by_name(name) -> None:
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(ConfigurationError) as refused:
        same(make_optimizer=lambda net: MAKE[name](net.parameters()), captures=CAPTURES)
    message = str(refused.value)
    assert re.match(
        rf"{name} \(.*own_optimizers.py:\d+\) cannot be stepped worker by worker", message
    )
    assert "Fix: let all its parameters live on one worker" in message
    assert "clip=gs.clip.GlobalNorm" in message and "gs.per_parameter(optimizer)" in message
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


@pytest.mark.parametrize("name", [n for n in MAKE if n not in COUNTING])
@pytest.mark.parametrize("layers", [("first",), ("second", "third")])
def test_with_all_its_parameters_on_one_worker_it_gives_the_bits(name, layers) -> None:
    def make(network: nn.Module) -> Optimizer:
        return MAKE[name]([p for n in layers for p in network.get_submodule(n).parameters()])

    same(
        make_optimizer=make,
        captures=CAPTURES,
        make_scaler=lambda: torch.amp.GradScaler("cpu", init_scale=64.0),
    )


@pytest.mark.parametrize("name", COUNTING)
def test_what_other_workers_would_see_wrongly_is_refused(name) -> None:
    with pytest.raises(ConfigurationError, match=r"has its parameters on other workers \(1\)"):
        same(make_optimizer=lambda net: MAKE[name](net.second.parameters()), captures=CAPTURES)


@pytest.mark.parametrize("name", MAKE)
def test_a_job_of_one_worker_takes_any(name) -> None:
    same(
        make_optimizer=lambda net: MAKE[name](net.parameters()),
        num_workers=1,
        place=None,
        captures=CAPTURES,
    )


def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in stepped(optimizer):
        parameter.grad.mul_(0.5)


def average(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in stepped(optimizer):
        state = optimizer.state[parameter]
        state["average"] = state.get("average", parameter.detach()).lerp(parameter.detach(), 0.1)


def normalize(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    norm = own.norm_of(stepped(optimizer))
    for parameter in stepped(optimizer):
        parameter.grad.div_(norm)


def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_(stepped(optimizer), 1.0)


def noise(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in stepped(optimizer):
        parameter.grad.add_(torch.randn_like(parameter))


def vary(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * random.random()


def vary_by_numpy(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * np.random.rand()


def freeze(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.param_groups[0]["params"] = stepped(optimizer)[:1]


NORMS: list[float] = []


def log(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    NORMS.append(sum(float(p.grad.norm()) for p in stepped(optimizer)))


def test_hooks_that_treat_every_parameter_by_itself_run() -> None:
    same(make_optimizer=with_hook(halve))
    same(make_optimizer=with_hook(average, after=True))


def test_a_hook_that_takes_the_time_is_no_difference() -> None:
    times = []
    same(make_optimizer=with_hook(lambda *_: times.append(time.perf_counter())))
    assert len(times) == len(BATCHES) * 3


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (normalize, "the value of 'first.weight' differs"),
        (clip, "OwnershipError: a norm over 2 gradient"),
        (noise, "it draws from torch's generator"),
        (vary, "it draws from Python's random"),
        (vary_by_numpy, "it draws from numpy.random"),
        (freeze, "changes its groups, or their parameters, as it steps"),
        (log, r"what is kept in hooks\[0\] NORMS\[\d\] differs"),
    ],
)
def test_other_hooks_are_refused_by_name(hook, reason) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"SGD with the step hook {hook.__name__} .*{reason}"
    ):
        same(make_optimizer=with_hook(hook), captures=CAPTURES)
    assert len(NORMS) == (hook is log)  # the plain loop's: the trial has left no trace
    NORMS.clear()


def test_a_hook_of_all_optimizers_is_found() -> None:
    handle = register_optimizer_step_pre_hook(normalize)
    try:
        with pytest.raises(ConfigurationError, match="SGD with the step hook normalize"):
            same(captures=CAPTURES)
    finally:
        handle.remove()


def test_a_step_that_was_replaced_is_found() -> None:
    def make(network: nn.Module) -> Optimizer:
        optimizer = SGD(network.parameters(), lr=0.05)
        plain = optimizer.step

        def step(closure: Any = None) -> None:
            normalize(optimizer, (), {})
            plain()

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer

    with pytest.raises(ConfigurationError, match="SGD with a step of its own"):
        same(make_optimizer=make, captures=CAPTURES)


def test_draws_are_refused_where_one_worker_has_all_parameters() -> None:
    def make(network: Tower) -> Optimizer:
        optimizer = SGD(network.first.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(noise)
        return optimizer

    with pytest.raises(ConfigurationError, match=r"noise .* draws from torch's generator"):
        same(make_optimizer=make, captures=CAPTURES)


def test_the_users_word_overrules_the_trial() -> None:
    def make(network: nn.Module) -> Optimizer:
        return gs.per_parameter(with_hook(log)(network))

    same(make_optimizer=make, captures=CAPTURES)
    assert NORMS
    NORMS.clear()


def test_only_an_optimizer_can_be_said_to_be_per_parameter() -> None:
    with pytest.raises(
        ConfigurationError, match=r"per_parameter was given an int; expected a torch.opt"
    ):
        gs.per_parameter(3)  # type: ignore[type-var]


def test_parameters_too_large_for_a_trial_are_tried_smaller() -> None:
    class Wide(Tower):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.first, self.second = nn.Linear(8, 1100), nn.Linear(1100, 1100)
            self.third = nn.Linear(1100, 8)

    wide = functools.partial(
        assert_same_bits, Wide, BATCHES[:2], num_workers=2, place=on_two,
        loss_fn=rows_against_target, evaluate_after=(), captures=Captures(),
    )  # fmt: skip
    wide(make_optimizer=lambda net: own.Momentum(net.parameters()))
    with pytest.raises(ConfigurationError, match="Normalized"):
        wide(make_optimizer=lambda net: own.Normalized(net.parameters()))


def step_by_step(
    make: Callable[[Any], Optimizer], change: Callable[[Any, Optimizer, int], None]
) -> None:
    """Compare with a plain loop where the script changes something after every step."""

    def start() -> tuple[Tower, Optimizer]:
        torch.manual_seed(0)
        network = Tower()
        return network, make(network)

    on_workers = []

    def make_task() -> Task:
        network, optimizer = start()
        on_two(network)
        on_workers.append((network, optimizer))
        return Task(network, rows_against_target, optimizer, "affinity", with_loss=True)

    with torch.random.fork_rng(devices=()):
        network, optimizer = start()
        cluster = SimulatedCluster(make_task, 2, captures=Captures())
    for number, (inputs, target) in enumerate(BATCHES):
        optimizer.zero_grad()
        rows_against_target(network(inputs), target).backward()
        optimizer.step()
        cluster.train_step(((inputs, target), {}))
        for name, parameter in network.named_parameters():
            owner = cluster.owner_of(name).task.network
            assert torch.equal(parameter, owner.get_parameter(name)), (number, name)
        for of_one in [(network, optimizer), *on_workers]:
            change(*of_one, number)


@pytest.mark.parametrize(
    "kind",
    [
        functools.partial(SGD, lr=0.1, momentum=0.9),
        # What it keeps of a tensor of another worker is let go, so it cannot be tried out anew.
        lambda parameters: gs.per_parameter(own.Momentum(parameters)),
    ],
)
def test_a_group_may_be_added_between_steps(kind) -> None:
    def add(network: Tower, optimizer: Optimizer, number: int) -> None:
        if number == 2:
            optimizer.add_param_group({"params": list(network.third.parameters()), "lr": 0.3})
            for parameter in network.third.parameters():
                if isinstance(optimizer, own.Momentum):
                    optimizer.state[parameter]["velocity"] = torch.zeros(parameter.shape)

    step_by_step(lambda net: kind(net.first.parameters()), add)


def test_a_group_that_brings_another_worker_in_is_tried_anew() -> None:
    def add(network: Tower, optimizer: Optimizer, number: int) -> None:
        if number == 1:
            optimizer.add_param_group({"params": list(network.third.parameters())})

    with pytest.raises(ConfigurationError, match=r"Normalized .* cannot be stepped"):
        step_by_step(lambda net: own.Normalized(net.first.parameters(), lr=0.1), add)


def test_parameters_may_be_swapped_between_steps() -> None:
    def swap(network: Tower, optimizer: Optimizer, number: int) -> None:
        members = optimizer.param_groups[0]["params"]
        if number == 1:
            optimizer.param_groups[0]["params"] = [network.third.weight, network.first.weight]
        elif number == 3:
            members[0] = network.second.weight

    step_by_step(lambda net: SGD([net.first.weight, net.second.weight], lr=0.1), swap)


def test_a_hook_may_come_and_go() -> None:
    handles = {}

    def change(network: Tower, optimizer: Optimizer, number: int) -> None:
        if number == 1:
            handles[optimizer] = optimizer.register_step_pre_hook(halve)
        elif number == 3:
            handles[optimizer].remove()

    step_by_step(lambda net: SGD(net.parameters(), lr=0.1), change)


def test_a_hook_that_comes_later_is_tried_before_it_runs() -> None:
    def change(network: Tower, optimizer: Optimizer, number: int) -> None:
        if number == 1:
            optimizer.register_step_pre_hook(normalize)

    with pytest.raises(ConfigurationError, match="SGD with the step hook normalize"):
        step_by_step(lambda net: SGD(net.parameters(), lr=0.1), change)


def test_a_zero_grad_of_its_own_runs() -> None:
    class Decaying(SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for parameter in stepped(self):
                parameter.grad.mul_(0.5)

    step_by_step(lambda net: Decaying(net.parameters(), lr=0.1), lambda *_: None)


def _takes_another_step(optimizer: Optimizer) -> Callable[[], object]:
    optimizer.step = lambda: None  # type: ignore[method-assign]
    return lambda: vars(optimizer).pop("step")


def _is_of_another_class(optimizer: Optimizer) -> Callable[[], object]:
    before = type(optimizer)
    optimizer.__class__ = type("Other", (before,), {})
    return lambda: setattr(optimizer, "__class__", before)


def _is_said_to_be_known(optimizer: Optimizer) -> Callable[[], object]:
    gs.per_parameter(optimizer)
    return lambda: vars(optimizer).pop("_graphsplit_per_parameter")


@pytest.mark.parametrize(
    "change",
    [
        *(_takes_another_step, _is_of_another_class, _is_said_to_be_known),
        lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None).remove,
        lambda optimizer: optimizer.register_step_post_hook(lambda *_: None).remove,
        lambda optimizer: register_optimizer_step_pre_hook(lambda *_: None).remove,
    ],
)
def test_all_that_decides_what_a_step_does_is_seen_at_the_next_one(
    change: Callable[[Optimizer], Callable[[], object]],
) -> None:
    optimizer = own.Momentum(Tower().parameters())
    guard_step(optimizer)
    before = code_of_step(optimizer)
    for _ in range(3):
        assert are_same(before, code_of_step(optimizer))
        take_back = change(optimizer)
        assert not are_same(before, code_of_step(optimizer))
        take_back()
    assert are_same(before, code_of_step(optimizer))
