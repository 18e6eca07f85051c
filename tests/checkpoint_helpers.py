"""Workers that are threads of one process, for tests of saving and loading.

Only what touches no shared generator may run in several of them at a time: saving, comparing,
loading. Training is simulated (``simulated.simulate``) or real.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from simulated.memory import MemoryFabric, MemoryTransport

from graphsplit.checkpoint.holder import StateHolder
from graphsplit.checkpoint.states import States
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.job.control import ControlChannels
from graphsplit.job.group import WorkerGroup
from graphsplit.planning.step_plan import TrainingProgress
from graphsplit.planning.task import Task
from graphsplit.runtime.segments.part_sums import PartSums
from graphsplit.security.private_files import open_instead
from graphsplit.transport.base import Transport
from graphsplit.transport.wait import WaitPolicy

T = TypeVar("T")
DEADLINE_S = 30.0


class ThreadHolder(StateHolder):
    """Where one thread's state is.

    Args:
        group: All threads.
        owners: Owners by name; empty before there is a plan.
        loader_rank: Whose loader counts.
    """

    def __init__(self, group: WorkerGroup, owners: Mapping[str, int], loader_rank: int = 0) -> None:
        self._group = group
        self.fixed = dict(owners)
        self.loader_rank = loader_rank
        self.progress = TrainingProgress()
        self.sums = PartSums()
        self.waiting: dict[str, Callable[[], None]] = {}
        self.network: Any = None  # where it has code of its own for states

    def group(self) -> WorkerGroup:
        return self._group

    def owners(self) -> Mapping[str, int]:
        return self.fixed

    def when_settled(self, what: str, action: Callable[[], None]) -> None:
        if self.fixed or self._group.num_workers == 1:
            action()
        else:
            self.waiting[what] = action

    def when_planned(self, action: Callable[[], None]) -> None:
        if self.fixed or self._group.num_workers == 1:
            action()
        else:
            self.once_planned = action

    def settle_now(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for action in waiting.values():
            action()

    def state_dict(self) -> dict[str, Any]:
        assert self.network is not None
        return self.network.state_dict()

    def note_put(self, names: Sequence[str]) -> None:
        """Nobody takes snapshots."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.network is not None
        self.network.load_state_dict(state)


class SmallDisk:
    """A disk with room for so many bytes.

    Args:
        room: How many bytes it takes before it is full.
    """

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path: Path) -> Any:
        """In place of ``open_instead``."""
        return _OnSmallDisk(open_instead(path), self)


class _OnSmallDisk:
    def __init__(self, file: Any, disk: SmallDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        self._disk.room -= len(data)
        if self._disk.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _OnSmallDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def alone(task: Task) -> States:
    """The state of a task in one process."""
    holder = ThreadHolder(WorkerGroup(), {})
    holder.network = task.network
    return States(task, holder)


def task_of(network: Any, optimizer: Any = None, loss_fn: Any = None) -> Task:
    return Task(network, loss_fn, optimizer, "affinity", False)


def groups_of(num_workers: int, transports: Sequence[Transport] = ()) -> list[ControlChannels]:
    """All workers' groups over memory."""
    fabric, abort = MemoryFabric(), AbortSignal()
    policy = WaitPolicy(abort, DEADLINE_S)
    made = transports or [
        MemoryTransport(fabric, generation=1, policy=policy) for _ in range(num_workers)
    ]
    groups = [ControlChannels(transport, rank, num_workers) for rank, transport in enumerate(made)]
    for group in groups:
        group.abort = abort  # type: ignore[attr-defined]
    return groups


def together(
    groups: Sequence[WorkerGroup], run: Callable[[WorkerGroup], T]
) -> list[T | BaseException]:
    """Run a function on every worker at once; returns what each returned or raised."""
    results: list[Any] = [None] * len(groups)

    def worker(rank: int) -> None:
        try:
            with torch.random.fork_rng(enabled=False):
                results[rank] = run(groups[rank])
        except BaseException as error:
            results[rank] = error
            if not getattr(error, "is_told", False) and not _is_agreed(error):
                cause = FailureCause("exception", f"worker {rank}: {error!r}")
                groups[rank].abort.set(cause)  # type: ignore[attr-defined]

    threads = [
        threading.Thread(target=functools.partial(worker, rank)) for rank in range(len(groups))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


def _is_agreed(error: BaseException) -> bool:
    """Errors that all workers raise alike leave the others in step."""
    return type(error).__name__ in ("CheckpointError", "StateError")


def all_well(results: Sequence[Any]) -> list[Any]:
    """The results, if nobody raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
