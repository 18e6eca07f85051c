"""One loop that runs: what it goes through, how far it is, and how it is begun in its middle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit.checkpoint.generators import put_remembered
from graphsplit.checkpoint.other_loaders import length_of
from graphsplit.checkpoint.position import (
    EpochStart,
    LoaderWatch,
    generators_of,
    set_now,
)
from graphsplit.encoding.values import Fixed
from graphsplit.errors import ConfigurationError
from graphsplit.recovery.loops.body import Body


@dataclass(frozen=True)
class LoopPlace:
    """Where a loop stands.

    Attributes:
        number: Which loop it is, counted from the beginning of the one around it.
        index: Its round, from 0.
    """

    number: int
    index: int


@dataclass(eq=False)
class LoopRounds:
    """One loop that runs.

    Attributes:
        number: Which loop it is, counted from the beginning of the one around it.
        source: What it goes through.
        watch: Remembers the generators from which it began.
        body: What it does.
        iterator: Gives what comes next.
        index: How many rounds have begun.
        num_inner: How many loops have begun in this round.
    """

    number: int
    source: Any
    watch: LoaderWatch
    body: Body
    iterator: Iterator[Any] = field(default_factory=lambda: iter(()))
    index: int = 0
    num_inner: int = 0

    @property
    def can_go_on_here(self) -> bool:
        """Whether it can be begun where it is: not at its end, where the body would never run."""
        length = length_of(self.source)
        is_stateful = hasattr(self.source, "load_state_dict")
        return (length is None or self.index < length) and (self.index > 0 or not is_stateful)

    def begin_round(self) -> None:
        """The next one is given out."""
        self.index += 1
        self.num_inner = 0

    def state(self, process: Fixed) -> dict[str, Any]:
        """All that it takes to begin in its middle."""
        return {"loader": self.watch.state(process), "generator": self.watch.epoch_generator}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Let its generators go on from where they were."""
        state = saved["loader"]
        set_now(generators_of(self.source), state["generators"])
        put_remembered(self.source, state["remembered"][1])


def reopened(
    source: Any, saved: Mapping[str, Any], index: int
) -> tuple[Iterator[Any], LoaderWatch]:
    """Begin in the middle, at a round; generators are left wherever that brings them.

    Args:
        source: What is gone through.
        saved: What ``LoopRounds.state`` gave.
        index: The round.

    Raises:
        ConfigurationError: It ends before that, or is another one.
    """
    state = saved["loader"]
    torch.default_generator.set_state(saved["generator"])
    start = EpochStart(index, saved["generator"], None, state)
    watch = LoaderWatch()
    watch.loader, watch.epoch_generator = source, saved["generator"]
    watch.generator_starts = {path: pair[0] for path, pair in state["generators"].items()}
    watch.remembered = state["remembered"][0]
    if index or state["own"] is not None:
        return start.open(source), watch
    generators = generators_of(source)
    for path, (began, _) in state["generators"].items():
        if path not in generators:
            raise ConfigurationError(
                "the loader of gs.loop is another one than before the restart\n"
                "  Fix: let the script make the same one each time it is started."
            )
        generators[path].set_state(began)
    put_remembered(source, state["remembered"][0])
    return iter(source), watch
