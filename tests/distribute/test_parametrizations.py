"""Weight norms that a loop of the script's own puts on and takes away: the bits of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, Loop, assert_same_bits
from loops import small
from recovery_helpers import threads_as_workers
from torch import nn
from torch.nn.utils import parametrizations, parametrize, remove_weight_norm, weight_norm

from graphsplit.errors import ConfigurationError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

Changes = Callable[[Any], Any]


def _put_old(layer: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older of two ways
        return weight_norm(layer)


def _taken_away(layer: Any) -> Any:
    return parametrize.remove_parametrizations(layer, "weight")


def loop_with(put: Changes, take: Changes) -> Loop:
    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = small(ranks)
        put(net.first)
        put(net.last)
        net = distribute(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        for step in range(6):
            if step == 3:
                take(net.first)
                take(net.last)
                optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(torch.randn(6, 8)), torch.arange(6) % 4)
            loss.backward()
            optimizer.step()
            yield loss.item()
        yield dict(net.state_dict())

    return loop


@pytest.mark.filterwarnings("ignore:network or loss reads the class")
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize(
    ("put", "take"),
    [
        (parametrizations.weight_norm, _taken_away),
        (_put_old, remove_weight_norm),
        (parametrizations.spectral_norm, _taken_away),
        (parametrizations.orthogonal, _taken_away),
    ],
    ids=["weight norm", "weight norm, the older way", "spectral norm", "orthogonal"],
)
def test_they_are_put_on_and_taken_away(put: Changes, take: Changes, num_workers: int) -> None:
    assert_same_bits(loop_with(put, take), num_workers)


def _made_of(distribute: Distribute, ranks: list[int]) -> tuple[Any, Any]:
    net: Any = distribute(small(ranks))
    net(torch.randn(6, 8)).sum().backward()
    made = net.first.weight * 0.5
    net.first.weight = nn.Parameter(made)
    return net, made


def written_later(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    net, made = _made_of(distribute, ranks)
    with torch.no_grad():
        made.detach().add_(1)
    yield net(torch.randn(6, 8)).sum().item()


def looked_at_later(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    net, made = _made_of(distribute, ranks)
    with torch.no_grad():
        net.first.weight.add_(1)
    yield made.sum().item()


def stepped_later(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    net, made = _made_of(distribute, ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(6, 8)).sum().backward()
        optimizer.step()
    yield made.sum().item()


@pytest.mark.parametrize("loop", [written_later, looked_at_later, stepped_later])
def test_a_value_that_became_a_parameter_has_its_memory_in_one_process(loop: Loop) -> None:
    with pytest.raises(ConfigurationError, match="in one process"):
        assert_same_bits(loop, 2)
