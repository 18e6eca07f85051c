"""What one worker alone does to parameters, gradients, hooks and optimizers ends the job.

Each worker would have its part of what the script wrote, and nobody would see it. The error names
what was done and its line, whichever worker did it; where all do it, the bits are those of one
process.
"""

from __future__ import annotations

import collections
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, placed
from loops import small
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

Act = Callable[[nn.Module, Any, nn.Parameter], Any]


def data(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    p.data = torch.full(p.shape, 0.01)


def data_of_a_value(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    p.data = p.data * 0.5


def data_in_place(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    p.data.mul_(0.5)


def memory(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    with torch.no_grad():
        p.set_(torch.full(p.shape, 0.01))  # type: ignore[call-overload]


def copied(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(torch.full(p.shape, 0.01))


def initial(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    nn.init.constant_(p, 0.01)


def hooked(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    p.register_hook(lambda gradient: gradient * 2)


def hooked_after(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    p.register_post_accumulate_grad_hook(double)


def forgotten(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    optimizer.state = collections.defaultdict(dict)


def rate(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def moment(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    optimizer.state[p]["exp_avg"].zero_()


def moment_set(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    if (entry := optimizer.state.get(p)) is not None:
        entry["exp_avg"] = torch.zeros(p.shape)


def entry_deleted(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    del optimizer.state[p]


def entry_set(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    optimizer.state[p] = {}


def state_cleared(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
    optimizer.state.clear()


ACTS: dict[Act, str] = {
    data: "data of parameter",
    data_of_a_value: "data of parameter",
    data_in_place: "mul_(0.5) at ",
    memory: "data of parameter",
    copied: "copy_(tensor of",
    initial: "constant_(0.01) at ",
    hooked: "hook",
    hooked_after: "hook",
    forgotten: "Adam.state",
    rate: "lr of the optimizer's group 0",
}


def of(act: Act, index: int, who: int | None = None, when: str = "") -> Any:
    """A loop in which one worker, or all, does something to a parameter."""

    def training(distribute: Distribute, ranks: list[int], rank: int = 0) -> Iterator[Any]:
        net: Any = small(ranks)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        net = distribute(net)
        parameter = list(net.parameters())[index]

        def may_act(now: str) -> None:
            if now == when and who in (rank, None):
                act(net, optimizer, parameter)

        may_act("first")
        for step in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(torch.randn(6, 8)), torch.arange(6) % 4)
            loss.backward()
            may_act(f"backward {step}")
            optimizer.step()
            yield loss.item()
        may_act("last")
        yield dict(net.state_dict())
        yield copy.deepcopy(optimizer.state_dict())
        may_act("end")

    return training


def alone(act: Act, index: int, who: int, when: str) -> str:
    """The error that ends the job."""
    training = of(act, index, who, when)

    def run(rank: int) -> Any:
        torch.manual_seed(3)
        return list(training(gs.distribute, [0, 1, 0], rank))

    with pytest.raises(gs.errors.GraphsplitError) as caught:
        ThreadCluster(run, 2, is_recoverable=False).run()
    return str(caught.value)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("index", [0, 2], ids=["of worker 0", "of worker 1"])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_what_one_worker_alone_does_ends_the_job_with_what_and_where(
    act: Act, index: int, who: int
) -> None:
    for when in ("backward 1", "last", "end"):
        if (act, when) in ((rate, "end"), (forgotten, "end")):
            continue  # nothing comes of it
        told = alone(act, index, who, when)
        assert ACTS[act] in told and f"worker {who}" in told and "Fix: " in told
        assert "test_one_alone.py:" in told


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("index", [0, 2], ids=["of worker 0", "of worker 1"])
@pytest.mark.parametrize("act", [moment, moment_set, entry_deleted, entry_set, state_cleared])
def test_what_one_alone_writes_into_the_state_of_an_optimizer_ends_the_job(
    act: Act, index: int, who: int
) -> None:
    for when in ("backward 1", "last"):
        told = alone(act, index, who, when)
        assert "optimizer.state" in told and "Fix: " in told
        assert re.search(r"of Adam at .*test_one_alone\.py:", told), told


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("index", [0, 2], ids=["of worker 0", "of worker 1"])
@pytest.mark.parametrize("act", [data, data_in_place, copied, initial, hooked, rate])
def test_what_one_alone_does_before_the_first_call_does_too(act: Act, index: int, who: int) -> None:
    told = alone(act, index, who, "first")
    expected = "values of Small before its first call" if act not in (hooked, rate) else ACTS[act]
    assert expected in told


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_what_all_do_has_the_bits_of_one_process(act: Act) -> None:
    for when in ("first", "backward 1", "last"):
        for index in (0, 2):
            assert_same_bits(of(act, index, when=when), 2)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("index", [0, 2], ids=["of worker 0", "of worker 1"])
@pytest.mark.parametrize("when", ["backward 1", "last", "end"])
def test_a_layer_that_one_alone_resets_ends_the_job(when: str, index: int, who: int) -> None:
    def resets(net: nn.Module, optimizer: Any, p: nn.Parameter) -> None:
        (net.first if index == 0 else net.second).reset_parameters()  # type: ignore[operator, union-attr]

    told = alone(resets, index, who, when)
    assert "test_one_alone.py:" in told or "one of them has drawn random numbers alone" in told
    assert "Fix: " in told


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("index", [0, 2], ids=["of worker 0", "of worker 1"])
def test_a_hook_that_one_alone_has_for_one_backward_is_seen(index: int, who: int) -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(3)
        net: Any = gs.distribute(small([0, 1, 0]))
        net(torch.ones(6, 8))
        parameter = list(net.parameters())[index]
        handles = [parameter.register_hook(torch.neg)] if rank == who else []
        net(torch.ones(6, 8)).sum().backward()
        for handle in handles:
            handle.remove()
        return [p.grad for p in net.parameters()]

    with pytest.raises(gs.errors.GraphsplitError, match="hook"):
        ThreadCluster(run, 2, is_recoverable=False).run()


def test_a_hook_that_removes_itself_where_it_runs_is_no_ones_alone() -> None:
    def once(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = distribute(small(ranks))
        net(torch.randn(6, 8))

        def double(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * 2

        handle = net.second.weight.register_hook(double)
        for _ in range(3):
            net(torch.randn(6, 8)).sum().backward()
            yield [p.grad.clone() for p in net.parameters()]

    assert_same_bits(once, 2)


@pytest.mark.parametrize("first", [0, 1])
def test_a_hook_of_a_tied_parameter_is_no_ones_alone_under_another_name(first: int) -> None:
    def renamed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net[1].weight = net[0].weight
        net = distribute(placed(net, [*net], ranks))
        for step in range(5):
            net.zero_grad()
            net(torch.randn(6, 8)).square().sum().backward()
            yield [p.grad.clone() for p in net.parameters()]
            if step == 0:
                net[1].weight.register_hook(lambda gradient: gradient * 0.5)
            if step in (1, 2):
                index = (step + first) % 2
                net[index] = nn.Sequential(net[index], nn.Tanh())
            if step == 3:
                net[0][0].weight.register_hook(torch.neg)

    assert_same_bits(renamed, 2)
