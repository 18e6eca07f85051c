"""Memory that is modified in place gives eager's bits wherever the operations on it are placed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import (
    assert_same_wherever_placed,
    batches_of,
    rows_against_target,
)
from simulated.compare import difference
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from torch import nn

from graphsplit import opaque, place
from graphsplit.errors import PlacementError, StepFailedError
from graphsplit.planning.task import Task

Function = Callable[[Any, torch.Tensor], torch.Tensor]
BATCHES = batches_of(4, 8)


class Runs(nn.Module):
    """A network whose forward is a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.fc, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


LINE = f"{__file__}:{Runs.forward.__code__.co_firstlineno + 1}"


def columns_written_on_two_workers(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    with place("MS_WORKER", 0):
        y[:, 0] = net.fc(x)[:, 0]
    with place("MS_WORKER", 1):
        y[:, 1] = net.fc2(x)[:, 1]
        y[:, 2:] += x[:, 2:]
    return y * 2


def a_view_modified_elsewhere(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        y = net.fc(x) * 1.0
        first, turned = y[0], y.t()
    with place("MS_WORKER", 1):
        first.mul_(3)
    with place("MS_WORKER", 2):
        return y + turned.sum(0)[:, None] * first


def a_buffer_written_and_read_on_three_workers(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        net.mean.mul_(0.9).add_(x.mean(0))
    with place("MS_WORKER", 1):
        net.count += 1
        y = net.fc(x) + net.mean
    with place("MS_WORKER", 2):
        net.mean[:4] += 1
        return y * net.mean * net.count


def one_batch_norm_on_three_workers(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        y = net.norm(x)
    with place("MS_WORKER", 1):
        z = net.norm(net.fc(y))
    with place("MS_WORKER", 2):
        return net.norm(net.fc2(z)) + net.norm.running_mean


def a_weight_clamped_where_it_does_not_live(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 1), torch.no_grad():
        net.fc.weight.clamp_(-0.2, 0.2)
    with place("MS_WORKER", 0):
        y = net.fc(x)
    with place("MS_WORKER", 2):
        net.fc2.weight.data.mul_(0.9)
    return net.fc2(y) + net.fc(y)


def averages_written_through_data(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        y = net.fc(x)
    with place("MS_WORKER", 1):
        net.mean.data.mul_(0.9).add_(y.mean(0), alpha=0.1)
        net.cache.data[:2, :4].copy_(y[:2, 4:] + net.mean[:4])
    with place("MS_WORKER", 2):
        return net.fc2(y) * net.mean + net.cache.sum(0)


def a_buffer_written_through_a_view_that_was_elsewhere(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        y = net.fc(x) + net.cache.sum(0)
    with place("MS_WORKER", 1):
        view = net.cache[:2]
    with place("MS_WORKER", 0):
        view[:, :4].copy_(y.detach()[:2, 4:])
        return net.fc2(y) + net.cache.sum(0)


def a_buffer_read_through_a_view_that_was_elsewhere(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        before = net.cache * 2
    with place("MS_WORKER", 1):
        view = net.cache[:2]
    with place("MS_WORKER", 0):
        net.cache.add_(1)
        return net.fc(x) + view.sum(0) + before.sum(0)


def a_cache_filled_row_by_row(net: Runs, x: torch.Tensor) -> torch.Tensor:
    for row in range(4):
        with place("MS_WORKER", row % 3):
            net.cache[row] = net.cache[row] * 0.5 + x[row]
    return net.fc(x) + net.cache


def a_buffer_replaced(net: Runs, x: torch.Tensor) -> torch.Tensor:
    before = net.mean
    with place("MS_WORKER", 1):
        net.mean = net.mean * 0.9 + x.mean(0)
    with place("MS_WORKER", 2):
        net.mean = net.mean + 0.1
    return net.fc(x) * net.mean + before


def an_input_modified(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        y = x.sum(1, keepdim=True)
    with place("MS_WORKER", 1):
        x[:, 0].mul_(2)
    with place("MS_WORKER", 2):
        x += 1
        return net.fc(x) + y


APART = [
    columns_written_on_two_workers,
    a_view_modified_elsewhere,
    a_buffer_written_and_read_on_three_workers,
    one_batch_norm_on_three_workers,
    a_weight_clamped_where_it_does_not_live,
    averages_written_through_data,
    a_buffer_written_through_a_view_that_was_elsewhere,
    a_buffer_read_through_a_view_that_was_elsewhere,
    a_cache_filled_row_by_row,
    a_buffer_replaced,
    an_input_modified,
]


@pytest.mark.parametrize(
    ("function", "microbatches"),
    [
        *((function, 1) for function in APART),
        *((function, 2) for function in APART if function is not a_cache_filled_row_by_row),
    ],
)
def test_operations_on_one_memory_on_several_workers(function: Function, microbatches: int) -> None:
    assert_same_bits(
        lambda: Runs(function),
        batches_of(4, 8, num=3),
        num_workers=3,
        loss_fn=rows_against_target,
        microbatches=microbatches,
    )


def adding_a_value_to_itself(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    y.add_(y)
    left = y[:, :4]
    left.add_(left)
    left.add_(y[:, 4:])
    return y.exp() * left.sum(1, keepdim=True)


def reading_what_is_being_written(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    y[:, 1:].add_(y[:, :-1])
    y[1:].sub_(y[:1])
    return y + net.fc2(x)


def memory_with_turned_strides(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x).t() * 1.0
    first = y[0]
    y.cumsum_(1)
    first.add_(1)
    total = y.sum(0)
    y.add_(total)
    return y.t() + (total * first)[:, None]


def overlapping_views_read_after_a_write(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    wide, windows = y[:1].expand(4, -1), y.unfold(1, 3, 2)
    y.mul_(2)
    return y + wide + windows.sum(2).repeat(1, 3)[:, :8]


def complex_views_of_real_memory(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    plane = torch.view_as_complex(y.view(4, 4, 2))
    real = plane.real
    plane.mul_(1j)
    y.add_(1)
    return y + torch.view_as_real(plane).flatten(1) + real.repeat(1, 2)


def tuples_of_views(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    with torch.no_grad():
        left, right = y.split(4, 1)
        rows = y.unbind(0)
        left.mul_(2)
        right.add_(left)
        last = rows[3] * 1
    return y + last


def detached_views(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    detached = y.detach()
    detached.add_(1)
    detached[0].mul_(2)
    return y.tanh() + detached


def modified_without_gradients(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x)
    with torch.no_grad():
        net.mean.mul_(0.9).add_(y.mean(0))
        y.mul_(1.5)
    return net.fc2(y) + net.mean


def random_numbers_in_place(net: Runs, x: torch.Tensor) -> torch.Tensor:
    noise = torch.empty_like(x)
    noise[:2].uniform_()
    noise[2:].normal_()
    y = net.fc(x) * 1.0
    first = y[:, 0]
    F.dropout(y, 0.3, net.training, inplace=True)
    y[:, 1:].bernoulli_(0.5)
    return y + noise * net.fc2(x) + first[:, None]


def results_put_into_given_memory(net: Runs, x: torch.Tensor) -> torch.Tensor:
    total, top = torch.zeros(4, 8), torch.empty(4)
    where = torch.empty(4, dtype=torch.int64)
    row = total[0]
    torch.add(x, x, out=total)
    torch.max(x, 1, out=(top, where))
    return net.fc(total) + row + (top * where)[:, None]


def several_values_at_once(net: Runs, x: torch.Tensor) -> torch.Tensor:
    zeros, y = torch.zeros(4, 8), net.fc(x) * 1.0
    column = y[:, 0]
    torch._foreach_add_([zeros, y[0]], 1.0)
    torch._foreach_mul_([column, zeros], [2.0, 3.0])
    return zeros + y + column[:, None]


def indices_and_masks(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    row = y[0]
    y[y > 0.5] = 0.5
    y.index_put_((torch.arange(2),), net.fc2(x)[:2], accumulate=True)
    y.masked_fill_(x > 1, 0.0)
    y.scatter_(1, x.argsort(1)[:, :3], net.fc2(x)[:, :3])
    y.index_add_(0, torch.tensor([0, 1]), x[:2])
    y.copy_(y.double() * 2)
    y.fill_diagonal_(0.1)
    return y + row


def shapes_changed_in_place(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    row = y[0]
    y.unsqueeze_(0)
    row.mul_(2)
    y.squeeze_(0)
    y.t_()
    y[0].add_(1)
    return y.t() + row


def a_list_filled_in_a_loop(net: Runs, x: torch.Tensor) -> torch.Tensor:
    made, h = torch.empty(4, 8), x
    for column in range(6):
        h = torch.tanh(net.fc(h))
        made[:, column] = h[:, column]
    made[:, 6:].zero_()
    return made * net.fc2(made)


def under_autocast(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    left = y[:, :4]
    with torch.autocast("cpu", torch.bfloat16):
        z = net.fc2(y)
        left.mul_(z[:, :4])
        y.add_(z.float())
        w = net.fc2(y)
    return w.float() + y + left.repeat(1, 2)


class Tripled(torch.autograd.Function):
    """Modifies its operand, and has a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def a_custom_function_that_modifies_its_operand(net: Runs, x: torch.Tensor) -> torch.Tensor:
    y = net.fc(x) * 1.0
    row = y[0]
    Tripled.apply(y)
    return y + row * net.fc2(y)


SCATTERED = [
    adding_a_value_to_itself,
    reading_what_is_being_written,
    memory_with_turned_strides,
    overlapping_views_read_after_a_write,
    complex_views_of_real_memory,
    tuples_of_views,
    detached_views,
    modified_without_gradients,
    random_numbers_in_place,
    results_put_into_given_memory,
    several_values_at_once,
    indices_and_masks,
    shapes_changed_in_place,
    a_list_filled_in_a_loop,
    under_autocast,
    a_custom_function_that_modifies_its_operand,
]


@pytest.mark.parametrize("function", [*APART, *SCATTERED])
def test_every_operation_on_a_worker_of_its_own(function: Function) -> None:
    assert_same_wherever_placed(lambda: Runs(function), BATCHES, placements=range(1, 6))


FORMULAS = {
    "elu": lambda y: F.elu(y, inplace=True),
    "selu": lambda y: F.selu(y, inplace=True),
    "celu": lambda y: F.celu(y, 0.7, inplace=True),
    "power of a number": lambda y: y.abs().pow_(1.5),
    "copy": lambda y: torch.empty_like(y).copy_(y),
    "copy over something": lambda y: (y * 1.0).copy_(y.sin()),
    "logical not": lambda y: y * (m := torch.zeros_like(y).logical_not_()) + (m + m),
    "logical or": lambda y: y * (m := torch.zeros_like(y).logical_or_(y.detach() > 0)) + (m + m),
    "number of type": lambda y: y * (m := torch.zeros(8, dtype=torch.long).logical_not_()) + m + m,
    "fill": lambda y: y + torch.zeros_like(y).fill_(0.5) * y,
    "leaky relu": lambda y: F.leaky_relu(y, 0.1, inplace=True),
    "relu6": lambda y: F.relu6(y, inplace=True),
}


@pytest.mark.parametrize("operation", FORMULAS.values(), ids=FORMULAS.keys())
def test_operations_that_are_others_without_their_underscore(operation: Any) -> None:
    def forward(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = operation(net.fc(x))
        return net.fc2(y) + y

    make, both = partial(Runs, forward), Captures()
    assert_same_bits(make, BATCHES, num_workers=1, loss_fn=rows_against_target, captures=both)
    assert_same_wherever_placed(make, BATCHES, placements=range(1, 4), captures=both)


def test_uses_before_a_write_to_what_is_a_view_inside_another_operation() -> None:
    def forward(net: Runs, x: torch.Tensor) -> torch.Tensor:
        h = net.fc(x.reshape(2, 2, 8))
        first, second = h * 0.5, h * 0.3
        h.relu_()
        return (net.fc2(h) + first + second).reshape(4, 8)

    make = partial(Runs, forward)
    assert_same_bits(make, BATCHES, num_workers=1, loss_fn=rows_against_target)
    assert_same_bits(
        make,
        BATCHES,
        num_workers=2,
        loss_fn=rows_against_target,
        place=lambda net: net.fc2.place("MS_WORKER", 1),
    )


def test_an_opaque_module_that_changes_its_buffer_where_the_buffer_does_not_live() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.detach().mean(0))
            return x + self.seen

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.counting = nn.Linear(8, 8), opaque(Counting())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.counting(self.fc(x)) + self.counting.seen + self.counting(x)

    assert_same_wherever_placed(Net, BATCHES, placements=range(1, 6))


def test_a_buffer_owned_by_an_earlier_plan_is_written_elsewhere() -> None:
    # In training worker 1 writes the buffer and owns it; in eval mode worker 0 writes it.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with place("MS_WORKER", 1 if self.training else 0):
                self.seen.add_(x.mean(0))
                return self.fc(x) * self.seen

    assert_same_bits(
        Net,
        batches_of(4, 8, num=4),
        num_workers=2,
        loss_fn=rows_against_target,
        evaluate_after=range(4),
    )


def test_tied_buffers_are_one_memory() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.first, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
            self.second.running_mean = self.first.running_mean

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.fc(self.first(x))) + self.first.running_mean

    assert_same_wherever_placed(Net, BATCHES, placements=range(1, 6))


def test_the_buffer_that_predict_returns_is_what_it_became() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.seen.add_(1)
            return self.fc(x), self.seen, self.seen[:2]

    assert_same_bits(
        Net,
        BATCHES,
        num_workers=3,
        loss_fn=lambda outputs, target: rows_against_target(outputs[0] + outputs[1], target),
    )


def test_a_gradient_through_a_buffer_reaches_the_parameters() -> None:
    # For one step: eager mode refuses a second one, for the buffer then holds freed history.
    def function(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with place("MS_WORKER", 1):
            net.cache[:, 0] = net.fc(x)[:, 0]
        return net.cache * 2 + net.fc2(x)

    torch.manual_seed(0)
    network = Runs(function)
    x, target = BATCHES[0]
    loss = rows_against_target(network(x), target)
    loss.backward()
    cluster = one_step_over_workers(function)
    owner = cluster.owner_of("fc.weight")
    assert owner.rank == 1
    assert_same(owner.task.network.fc.weight.grad, network.fc.weight.grad)
    assert_same(cluster.owner_of("cache").task.network.cache, network.cache.detach())


def test_what_eager_mode_refuses_to_modify_is_refused_on_any_placement() -> None:
    def function(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        wide = y[:, :1].expand(-1, 8)
        with place("MS_WORKER", 1):
            wide.add_(1)
        return y

    with pytest.raises(StepFailedError, match="refers to a single memory location") as caught:
        one_step_over_workers(function)
    assert "write_to_copy[aten.add_.Tensor]" in str(caught.value)


def test_a_gradient_written_through_a_detached_view_is_refused_with_the_users_line() -> None:
    def function(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with place("MS_WORKER", 0):
            y = net.fc(x)
        detached = y.detach()
        with place("MS_WORKER", 1):
            detached.add_(net.fc2(x))
        return y * detached

    with pytest.raises(PlacementError) as caught:
        one_step_over_workers(function)
    assert "writes something with a gradient through a detached view" in str(caught.value)
    assert LINE in str(caught.value)
    assert "Fix: write value.detach() there" in str(caught.value)


def one_step_over_workers(function: Function) -> SimulatedCluster:
    """Train one step over two workers, without the eager loop."""

    def make() -> Task:
        torch.manual_seed(0)
        network = Runs(function)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        return Task(network, rows_against_target, optimizer, "affinity", True)

    x, target = BATCHES[0]
    cluster = SimulatedCluster(make, 2)
    cluster.train_step(((x, target), {}))
    return cluster


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert difference(expected, actual, strides=True) is None


class ReadBefore(nn.Module):
    """A value that is read twice, and then written to elsewhere; ``linear`` on rows gives a view.

    Eager adds up the gradients of the two reads first, and then that of the write.
    """

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.fc, self.dims = nn.Linear(8, 8), dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x if self.dims == 2 else x[:, None].expand(4, 3, 8))
        before = h.exp() - h * 2.0 + h[..., :1]
        with place("MS_WORKER", 1):
            h.relu_()
        return (before + h * 0.5).reshape(4, -1)


@pytest.mark.parametrize("dims", [2, 3])
def test_gradients_of_what_an_operation_gives_as_a_view_of_its_own(dims: int) -> None:
    assert_same_bits(
        partial(ReadBefore, dims),
        batches_of(4, 8, num=3),
        num_workers=2,
        loss_fn=rows_against_target,
    )
