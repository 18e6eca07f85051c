"""The placements under which every model of the zoo runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from simulated.scattered import scattered
from simulated.simulate import Captures
from torch import nn

Place = Callable[[nn.Module], None]
KINDS = ("one", "layers", "modules", "operations")
SEEDS = range(2)


def placements(captures: Captures, kind: str, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The options of ``assert_same_bits`` for each placement.

    Args:
        captures: Where graphs are kept: a model is captured once for all its placements.
        kind: ``"one"``: all on one worker; ``"layers"``: layer after layer; ``"modules"``: some
            modules somewhere; ``"operations"``: every operation somewhere.
        sizes: Numbers of workers.
    """
    for size in sizes:
        options = {"num_workers": size, "captures": captures, "name": f"{kind} over {size}"}
        if kind == "layers":
            yield {**options, "place": by_layer(size)}
        elif kind == "modules":
            yield {**options, "place": by_module(size)}
        elif kind == "operations":
            seeds = [(10 * size + seed, size) for seed in SEEDS]
            yield from ({**own, "place": None} for own in scattered(captures, seeds))
        else:
            yield {**options, "place": None}


def by_layer(num_workers: int) -> Place:
    """Layer after layer, the first on worker 0, the last on the last worker."""

    def place(network: nn.Module) -> None:
        layers = list(_layers(network))
        for position, layer in enumerate(layers):
            layer.place("MS_WORKER", position * num_workers // len(layers))

    return place


def _layers(network: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order of registration; those that hold a list of layers are taken apart."""
    for child in network.children():
        if any(isinstance(m, (nn.ModuleList, nn.Sequential)) for m in child.modules()):
            yield from _layers(child)
        else:
            yield child


def by_module(num_workers: int) -> Place:
    """Every third module somewhere; the nearest placed ancestor decides for the others."""

    def place(network: nn.Module) -> None:
        choices = random.Random(num_workers)
        for module in network.modules():
            if choices.random() < 0.35:
                module.place("MS_WORKER", choices.randrange(num_workers))

    return place
