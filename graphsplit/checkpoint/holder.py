"""The holder of a Model's state, as saving and loading know it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from graphsplit.job.group import WorkerGroup
from graphsplit.planning.step_plan import TrainingProgress
from graphsplit.runtime.segments.part_sums import PartSums


class StateHolder(ABC):
    """Holds the state that is saved and loaded: in this process, unless a subclass says otherwise.

    Attributes:
        progress: Training steps so far, and the seed that microbatches' random numbers follow from.
        loader_rank: The worker whose loader counts.
        sums: The parts of gradients, where they are not added in ``.grad`` at once.
    """

    progress: TrainingProgress
    sums: PartSums
    loader_rank: int = 0

    def group(self) -> WorkerGroup:
        """All workers."""
        return WorkerGroup()

    def owners(self) -> Mapping[str, int]:
        """The owner of every parameter and buffer that has one: of all after the first plan."""
        return {}

    def when_settled(self, what: str, action: Callable[[], None]) -> None:
        """Do something as soon as owners are fixed; replaces what waits under the same name."""
        action()

    def when_planned(self, action: Callable[[], None]) -> None:
        """Do something, which may be collective, once there is a plan; replaces what waits so."""
        action()

    @abstractmethod
    def settle_now(self) -> None:
        """Do what waits for owners as if every worker owned everything. Collective."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The network's full state, by its own ``state_dict``. Collective."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> Any:
        """Load the network's full state, by its own ``load_state_dict``, and return what that does.

        Collective.

        Args:
            state: The state.
            options: Those of ``load_state_dict``, as ``strict``.
        """

    def reached_here(self) -> Collection[int]:
        """The identities of Python state that code kept whole on this worker can reach."""
        return ()

    @abstractmethod
    def note_put(self, names: Sequence[str]) -> None:
        """A load has put values into these attributes, of which a snapshot must know."""
