"""Outputs that share memory with an input, or one another: the script's writes show as in eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, placed, plain
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


class Parts(nn.Module):
    """Returns parts of what it was given, and of what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x) * 2
        hidden[:, 0].add_(1)
        made = self.last(hidden)
        return {
            "given": (x.view(-1), x[:, 1:3], x.t(), x[1:], x),
            "made": [made, made[:, :2], made.view(-1), made.t()[1]],
            "overlapping": (hidden[:3], hidden[1:], hidden[2]),
            "complex": torch.view_as_complex(made.view(-1, 2, 2)),
            "alone": hidden * 2,
        }


def _write(found: Any, x: torch.Tensor) -> Iterator[Any]:
    """Write to each output, and look at all of them."""
    every = [*found["given"], *found["made"], *found["overlapping"], found["complex"]]
    for number, one in enumerate(every):
        one.mul_(0.5 + number)
        yield x.tolist(), [other.tolist() for other in (*every, found["alone"])]


def test_predictions_of_a_model() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        net = Parts()
        placed(net, [net.first, net.last], ranks)
        model = None if distribute is plain else gs.Model(net)
        for rows in (4, 5):
            memory = torch.randn(7, 6)
            x = memory[1 : rows + 1]
            with torch.no_grad():
                found = net(x) if model is None else model.predict(x)
            yield from _write(found, memory)

    assert_same_bits(loop, 2)


class FromTheMiddle(nn.Module):
    """Returns what begins where sizes say so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        made, half = self.last(self.first(x)), x.shape[1] // 2
        return [x[:, half:], x[x.shape[0] - 1], made, made[:, half:], made[1:, :half], made[0]]


@pytest.mark.parametrize("is_called", [False, True])
def test_they_may_begin_where_sizes_say_so(is_called: bool) -> None:
    """Of a batch that may be of any size, and a part of a longer one."""

    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        net: Any = FromTheMiddle()
        placed(net, [net.first, net.last], ranks)
        sizes = {0: 16, 1: 16}
        if distribute is plain:
            call = net
        elif is_called:
            call = gs.distribute(net, dynamic_dims=sizes)
        else:
            call = gs.Model(net, dynamic_dims=sizes).predict
        for rows, columns, skipped in ((4, 8, 0), (5, 9, 0), (6, 7, 2), (3, 12, 1)):
            memory = torch.randn(rows + skipped, columns, 6)
            with torch.no_grad():
                found = call(memory[skipped:])
            for number, one in enumerate(found):
                one.mul_(0.5 + number)
                yield memory.tolist(), [other.tolist() for other in found]

    assert_same_bits(loop, 2)


def test_values_of_an_own_loop_have_the_sizes_of_the_batch_on_every_worker() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        own = FromTheMiddle()
        placed(own, [own.first, own.last], ranks)
        net = own if distribute is plain else gs.distribute(own, dynamic_dims={0: 16, 1: 16})
        for rows, columns in ((4, 8), (5, 9), (3, 12)):
            found = net(torch.randn(rows, columns, 6))[2:]
            yield [(tuple(one.shape), one.stride()) for one in found]
            sum(one.square().sum() / one.shape[0] for one in found).backward()
            yield own.first.weight.grad

    assert_same_bits(loop, 2)


class Halves(nn.Module):
    """Returns a value, its halves and a part of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *, with_all: bool = True) -> Any:
        made = self.last(self.first(x))
        return made if with_all else None, made[:, :2], made[:, 2:], x[:, 1:3]


def _write_all(made: Any, half: Any, part: Any, x: Any) -> None:
    made.mul_(2)


def _write_half(made: Any, half: Any, part: Any, x: Any) -> None:
    with torch.no_grad():
        half[0].zero_()


def _apply_in_place(made: Any, half: Any, part: Any, x: Any) -> None:
    nn.functional.relu(made, inplace=True)


def _write_part_of_input(made: Any, half: Any, part: Any, x: Any) -> None:
    with torch.no_grad():
        part.add_(1)


def _look_after_a_write_to_the_input(made: Any, half: Any, part: Any, x: Any) -> None:
    with torch.no_grad():
        x.add_(1)
    part.sum()


@pytest.mark.parametrize(
    "act",
    [
        _write_all,
        _write_half,
        _apply_in_place,
        _write_part_of_input,
        _look_after_a_write_to_the_input,
    ],
)
@pytest.mark.parametrize("is_made", [False, True])
def test_with_gradients_a_write_to_what_shares_memory_is_refused(act: Any, is_made: bool) -> None:
    """The input is a tensor of the script, or a value that another network has made."""

    def script(rank: int) -> None:
        own, before = Halves(), nn.Linear(6, 6)
        net = gs.distribute(placed(own, [own.first, own.last], [0, 1]))
        x = torch.randn(4, 6, requires_grad=True)
        if is_made:
            x = gs.distribute(placed(before, [before], [1]))(x)
        made, half, _, part = net(x)
        with pytest.raises(ConfigurationError, match=r"returned has a gradient.*\n  Fix: .*clone"):
            act(made, half, part, x)

    ThreadCluster(script, 2, is_recoverable=False).run()


def test_with_gradients_parts_that_share_no_element_may_be_written_to() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        own = Halves()
        net = distribute(placed(own, [own.first, own.last], ranks))
        _, one, other, _ = net(torch.randn(4, 6), with_all=False)
        other.clamp_(-0.1, 0.1)
        yield one.tolist(), other.tolist()
        (one * other).sum().backward()
        yield own.first.weight.grad

    assert_same_bits(loop, 2)


def test_outputs_of_an_own_loop() -> None:

    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        own = Parts()
        net = distribute(placed(own, [own.first, own.last], ranks))
        x = torch.randn(4, 6)
        with torch.no_grad():
            yield from _write(net(x), x)
        found = net(x)
        found["made"][0].square().sum().backward()
        found["given"][1].mul_(2)
        yield x, found["given"][0].tolist(), net.first.weight.grad

    assert_same_bits(loop, 2)
