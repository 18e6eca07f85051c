"""The hooks on parameters that code has registered, or removed, between two steps.

A hook runs where its parameter lives. All workers run the script, and register it alike; but a data
set registers it where it is read, so before each step workers compare which parameters have others
than when they last compared. One that lives here and that another worker has given a hook was
missed here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.errors import OwnershipError
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.optimizers.parameter_hooks import (
    HookState,
    hook_tables,
    hooks_of,
    line_of,
    state_of_hooks,
)
from graphsplit.partition.checks.one_state import reached_apart
from graphsplit.partition.plan import PartitionPlan
from graphsplit.torch_ext.attributes import num_hooks

_HAS = " has hooks: "  # between the name of a parameter and how many; one's line follows
Told = tuple[int, bool, str]  # how many a parameter has, whether they are others, one's line
_NOTHING = (0, False, "")
Numbers = dict[str, tuple[int, ...]]  # that torch gives to the hooks of each parameter


class ParameterHooks:
    """The hooks on a Model's parameters, as workers compare them.

    Args:
        tensors: Gives all parameters and buffers by name.
        owners: Gives the owners of all that have one.
        rank: This worker.

    Attributes:
        shared: Python state that hooks of this worker's parameters share with those of others, or
            with code kept whole; it stays one list.
        num_registered: How many hooks, on anything, this process had registered when they were
            looked at last.
        tensors_alone: Whether of ``shared`` only tensors count: an own loop watches the rest.
        are_there: Whether there are any, or were when workers compared.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        owners: Callable[[], Mapping[str, int]],
        rank: Callable[[], int],
    ) -> None:
        self._tensors, self._owners, self._rank = tensors, owners, rank
        self.shared: list[HookState] = []
        self.tensors_alone = False
        self._compared: Numbers = {}
        self._begun: Numbers = {}
        self._is_due = self._tells_all = False  # whether workers have yet to compare all hooks
        self.num_registered, self.are_there = -1, False
        self._hooked: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        self._plans: list[weakref.ref[PartitionPlan]] = []

    def shared_with(self, plan: PartitionPlan) -> Sequence[HookState]:
        """``shared``, for a plan that is new: its calls kept whole may share state as well."""
        self._plans = [known for known in self._plans if known() is not None]
        self._plans.append(weakref.ref(plan))
        self._share()
        return self.shared

    def all(self) -> list[Any]:
        """All hooks there are."""
        return [hook for tensor in self._tensors().values() for hook in hooks_of(tensor)]

    def look(self, *, compares_all: bool) -> None:
        """Take the hooks as they are now.

        Args:
            compares_all: Whether workers compare all of them before the next step.
        """
        self.num_registered, self._begun = -1, {}  # owners may be others than before
        self.shared.clear()
        self._look()
        self._is_due, self._tells_all = compares_all, False
        self._settle()

    def told(self) -> tuple[str, ...]:
        """The parameters with other hooks than when workers last compared, for ``hooks_apart``."""
        if self._is_due:
            self.num_registered = -1  # names may be others
        self._look()
        self._tells_all, now, before = self._is_due, self._begun, self._compared
        if now == before and not (now and self._is_due):
            return ()
        # Those of a parameter that has got another name are no others.
        kept = {(), *now.values()} & {(), *before.values()}
        changed = [
            n
            for n in dict.fromkeys((*now, *before))
            if now.get(n) != before.get(n)
            and not kept.issuperset((now.get(n, ()), before.get(n, ())))
        ]
        told = dict.fromkeys((*changed, *now)) if self._is_due else changed
        tensors, new = self._tensors(), frozenset(changed)
        return tuple(f"{n}{_HAS}{_described(tensors.get(n), n in new)}" for n in told)

    def pass_over(self) -> None:
        """Let what was registered since ``told`` be none of the code of the step."""
        self._look()

    def read_again(self) -> None:
        """Let what was registered be compared: batches of earlier steps were read here.

        Had it been of parameters that live here, this worker would have read those batches then.
        """
        self._look()
        self._settle()

    @contextmanager
    def left_by_loader(self) -> Iterator[None]:
        """Draw a batch, in a job that recovers: a worker that comes back would not have the hook.

        Raises:
            OwnershipError: That has registered or removed hooks on parameters.
        """
        self._look()
        before = self._begun
        yield
        self._look()
        for name in self._begun.keys() | before.keys():
            if self._begun.get(name) != before.get(name):
                line = "".join(map(line_of, hooks_of(self._tensors()[name])[-1:]))
                raise OwnershipError(
                    f"a loader registers or removes a hook on {name!r}{line}, and this job goes on "
                    f"when workers are lost: who comes back would not have it\n"
                    f"  Fix: register hooks in the script or in a callback; or start the job with "
                    f"fail_fast."
                )

    def after_step(self) -> None:
        """Note that a step is over.

        Raises:
            OwnershipError: Code of the step itself has registered a hook on a parameter that is not
                here; it runs on one worker alone.
        """
        begun = self._begun
        self._look()
        if self._begun is not begun:
            for name, tensor in self._tensors().items():
                if is_elsewhere(tensor) and self._begun.get(name, ()) != begun.get(name, ()):
                    _refuse_within_step(name, tensor, self._owners().get(name))
        self._settle()
        self._is_due &= not self._tells_all

    def _settle(self) -> None:
        self._compared = self._begun
        self.are_there = bool(self._begun)

    def _look(self) -> None:
        """See which hooks there are, if any can have come or gone."""
        registered = num_hooks()
        if registered == self.num_registered and all(
            _numbers_of(tensor) == numbers for tensor, numbers in self._hooked
        ):
            return
        self.num_registered = registered
        tensors = self._tensors()
        found = {name: _numbers_of(tensor) for name, tensor in tensors.items()}
        now = {name: numbers for name, numbers in found.items() if numbers}
        if now != self._begun:
            self._hooked = [(tensors[name], numbers) for name, numbers in now.items()]
            self._begun = now
            self.are_there = bool(now or self._compared)
            self._share()

    def _share(self) -> None:
        self.shared.clear()
        if self._begun:
            rank, plans = self._rank(), [p for known in self._plans if (p := known()) is not None]
            called = {key for plan in plans for key in reached_apart(plan, rank)}
            graphs = (plan.placed.graph for plan in plans if plan.is_microbatched)
            read = [w.place for graph in graphs for w in graph.state.guards.watched]
            held = state_of_hooks(self._tensors(), self._owners(), rank, called, read)
            self.shared += [one for one in held if one[0].is_tensor or not self.tensors_alone]


def _numbers_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple([number for table in hook_tables(tensor) for number in table])


def _described(tensor: torch.Tensor | None, is_changed: bool) -> str:
    hooks = [] if tensor is None else hooks_of(tensor)
    line = line_of(hooks[-1])[:200] if hooks else ""
    return f"{len(hooks)} {'new' if is_changed else 'old'}{line}"


def _refuse_within_step(name: str, tensor: torch.Tensor, owner: int | None) -> None:
    raise OwnershipError(
        f"code that one worker alone runs within a step registers or removes a hook on {name!r}"
        f"{''.join(map(line_of, hooks_of(tensor)[-1:]))}, which lives on worker {owner}\n"
        f"  Fix: do so between two steps, on every worker."
    )


def without_hooks(told: Iterable[str]) -> tuple[str, ...]:
    """All that is told of anything else."""
    return tuple([entry for entry in told if _HAS not in entry])


def hooks_apart(
    mine: Collection[str],
    leaders: Collection[str],
    ranks: tuple[int, int],
    owners: Mapping[str, int],
) -> Iterator[str]:
    """The hooks that one of two workers has not, though they are to run there, in words.

    What its owner alone registers counts: a callback may go through the parameters that live there.

    Args:
        mine: What this worker's hooks have told, among other things.
        leaders: What the leader's have.
        ranks: This worker, and the leader.
        owners: The owners of all tensors that have one.
    """
    (rank, leader), (here, there) = ranks, (_read(mine), _read(leaders))
    for name in dict.fromkeys((*here, *there)):
        one, other = here.get(name), there.get(name)
        owner = owners.get(name)
        if owner not in ranks:
            is_apart = one is None or other is None or one[:2] != other[:2]
        else:
            owners_own, others = (one, other) if owner == rank else (other, one)
            is_apart = others is not None and _has_missed(owners_own or _NOTHING, others)
        if is_apart:
            told = f"{_in_words(one)} on worker {rank}, {_in_words(other)} on worker {leader}"
            yield f"{name!r} has {told}"


def _has_missed(owners_own: Told, others: Told) -> bool:
    return owners_own[0] < others[0] or (others[1] and not owners_own[1])


def _read(told: Iterable[str]) -> dict[str, Told]:
    found: dict[str, Told] = {}
    for entry in told:
        name, mark, rest = entry.rpartition(_HAS)
        count, state, *line = rest.split(" ", 2) if mark else ("", "")
        if count.isdigit():
            found[name] = (int(count), state == "new", "".join(line))
    return found


def _in_words(told: Told | None) -> str:
    if told is None:
        return "those it had"
    count, _, line = told
    return f"{count} hook{'' if count == 1 else 's'}{f' {line}' if line else ''}"
