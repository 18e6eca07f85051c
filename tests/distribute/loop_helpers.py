"""Loops of scripts' own, with ``gs.distribute`` and without: their results have the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from recovery_helpers import ThreadCluster
from torch import nn

import graphsplit as gs

Distribute = Callable[[Any], Any]
Loop = Callable[[Distribute, list[int]], Iterator[Any]]


def plain(net: Any) -> Any:
    """The loop without graphsplit: the network as it is."""
    return net


def ranks_for(num_workers: int) -> list[int]:
    """Where a network's parts are placed, one after the other."""
    return [0, num_workers - 1, num_workers // 2, *range(num_workers)]


def placed(net: nn.Module, modules: list[nn.Module], ranks: list[int]) -> Any:
    """A network whose modules are placed."""
    for module, rank in zip(modules, ranks, strict=False):
        module.place("MS_WORKER", rank)  # type: ignore[operator]
    return net


def results(loop: Loop, distribute: Distribute, num_workers: int) -> list[Any]:
    """What a loop gives, copied at once, and the generator afterwards."""
    torch.manual_seed(3)
    found = [copy.deepcopy(one) for one in loop(distribute, ranks_for(num_workers))]
    return [*found, torch.get_rng_state()]


def assert_same_bits(loop: Loop, num_workers: int) -> None:
    """Run a loop without graphsplit, and on workers that are threads; compare everything."""
    expected = results(loop, plain, num_workers)
    assert len(expected) > 1
    cluster = ThreadCluster(
        lambda rank: results(loop, gs.distribute, num_workers), num_workers, is_recoverable=False
    )
    for rank, found in enumerate(cluster.run()):
        assert len(found) == len(expected)
        for index, (one, two) in enumerate(zip(found, expected, strict=True)):
            assert is_same(one, two), f"worker {rank}, result {index}: {one} instead of {two}"


def raised(loop: Loop, num_workers: int = 2) -> str:
    """The error with which a loop ends on all workers alike; it names the way out."""

    def run(rank: int) -> Any:
        try:
            results(loop, gs.distribute, num_workers)
        except gs.errors.GraphsplitError as error:
            return str(error)
        return None

    found = ThreadCluster(run, num_workers, is_recoverable=False).run()
    assert found[0] and all(one == found[0] for one in found), found
    assert "Fix: " in found[0]
    return str(found[0])


def is_same(one: Any, two: Any) -> bool:
    """Whether two results have the same bits."""
    if isinstance(one, torch.Tensor):
        return type(two) is type(one) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(is_same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(is_same, one, two))
    return type(one) is type(two) and bool(one == two or (one != one and two != two))
