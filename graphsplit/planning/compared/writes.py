"""The parameters and buffers that code has written to, or replaced, between two steps.

Several Models may share modules. Then a step of any of them compares what was written before it,
and the next step of another one must not find it again::

    judge.train_step(...)
    for p in d.parameters(): p.clamp_(-0.01, 0.01)     on the owner; left out and noted elsewhere
    maker.train_step(...)       compares the writes to d, and the step itself writes to d's buffers
    judge.train_step(...)       nothing was written to since

So how often a tensor had been written to when workers last compared is known to the job
(``optimizers.tensor_owners.ComparedWrites``), whichever Model did it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.utils.hooks import RemovableHandle

from graphsplit.optimizers.ownership import (
    LEFT_OUT,
    Elsewhere,
    is_elsewhere,
    num_writes,
)
from graphsplit.optimizers.tensor_owners import ComparedWrites
from graphsplit.planning.compared.announced import PythonStep
from graphsplit.planning.compared.hooks import ParameterHooks, hooks_apart, without_hooks
from graphsplit.torch_ext.attributes import OwnHooks
from graphsplit.torch_ext.data_attribute import LENT, settle_lent

_MAX_NAMED = 1 << 15  # characters of names: they travel in a ticket


def written_apart(
    mine: PythonStep,
    leaders: PythonStep,
    ranks: tuple[int, int],
    owners: Callable[[], Mapping[str, int]],
) -> list[str]:
    """The tensors that one of two workers has written to, or given hooks, in words.

    What its owner alone writes to is written: a callback may go through the parameters that live
    there. What others write to is left out there, so its owner must have done it.

    Args:
        mine: This worker's values.
        leaders: The leader's.
        ranks: This worker, and the leader.
        owners: Gives the owners of all tensors that have one.
    """
    if mine.written == leaders.written:
        return []
    (rank, leader), whose = ranks, owners()
    here, there = without_hooks(mine.written), without_hooks(leaders.written)
    pairs = ((rank, leader, here, there), (leader, rank, there, here))
    return [
        *(
            f"{name!r} was written to on worker {one}, and not on worker {other}"
            for one, other, names, others in pairs
            for name in names
            if name not in others and whose.get(name) != one
        ),
        *hooks_apart(mine.written, leaders.written, ranks, whose),
    ]


class Writes:
    """The parameters and buffers of a Model that were written to, or replaced, since the last step.

    Args:
        tensors: Gives all of them by name.
        compared: What any Model of the job has compared.
        hooks: The hooks on them, which are compared as writes are.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        compared: ComparedWrites,
        hooks: ParameterHooks,
    ) -> None:
        self._tensors = tensors
        self._compared = compared
        self.hooks = hooks
        self._held: dict[str, torch.Tensor] = {}
        self._here: list[torch.Tensor] = []
        self._keys: list[int] = []
        self._begun = self._settled = 0  # numbers of writes that were left out

    def look(self, *, compares_hooks: bool = True) -> None:
        """Take the tensors as they are now: what is written from now on counts.

        Of those that a Model knew before counts what was written since it compared.

        Args:
            compares_hooks: Whether workers compare all hooks before the next step; not before they
                know who owns what.
        """
        self.hooks.look(compares_all=compares_hooks)
        self._held = dict(self._tensors())
        self._here = [t for t in self._held.values() if not is_elsewhere(t)]
        self._keys = list(map(self._compared.key_of, self._here))

    def start_over(self) -> None:
        """Look, and let nothing be written so far: somebody may be new, and know nothing of it."""
        self.look()
        self._settle()

    def forget(self) -> None:
        """Know no tensor, as before the first plan: nobody compares what is written then."""
        for tensor in self._tensors().values():
            vars(tensor).pop(LEFT_OUT, None)
        self._compared.forget()
        self._held, self._here, self._keys = {}, [], []
        self._begun = self._settled = Elsewhere.num_left_out

    def names(self, *, with_replaced: bool) -> tuple[str, ...]:
        """Those written to or with other hooks; with those that are others now, if asked for."""
        found = self._written(with_replaced=with_replaced)
        hooks = self.hooks.told() if self._hooks_count() else ()
        return _short((*found, *hooks)) if hooks else found

    def _hooks_count(self) -> bool:
        """Whether there are hooks, or any can have come; looked at here, as it is every step."""
        hooks, own = self.hooks, OwnHooks.count
        return hooks.are_there or hooks.num_registered != RemovableHandle.next_id - own

    def _written(self, *, with_replaced: bool) -> tuple[str, ...]:
        self._begun = Elsewhere.num_left_out
        if not with_replaced and self._begun == self._settled and not LENT:
            before = list(map(self._compared.writes.__getitem__, self._keys))
            if list(map(num_writes, self._here)) == before:
                return ()
        tensors = dict(self._tensors()) if with_replaced else self._held
        return _short(
            tuple(
                name
                for name, tensor in tensors.items()
                if hasattr(tensor, LEFT_OUT)
                or self._compared.is_written_to(tensor)
                or (with_replaced and self._held.get(name, tensor) is not tensor)
            )
        )

    def counts(self) -> tuple[int, ...]:
        """How often each tensor was written to so far, and how often one that is elsewhere."""
        return (Elsewhere.num_left_out, *map(num_writes, self._here))

    def pass_over(self) -> None:
        """Let writes since ``names`` be none of the code of the step."""
        self._begun = Elsewhere.num_left_out
        self.hooks.pass_over()

    @contextmanager
    def read_again(self) -> Iterator[None]:
        """Let writes to what is left out inside be none: batches of earlier steps are read here.

        Had this worker owned any of it, it would have read those batches then.
        """
        before = {name: getattr(t, LEFT_OUT, 0) for name, t in self._held.items()}
        yield
        self.hooks.read_again()
        for name, tensor in self._held.items():
            if getattr(tensor, LEFT_OUT, 0) != before[name]:
                vars(tensor).pop(LEFT_OUT)
                if before[name]:
                    setattr(tensor, LEFT_OUT, before[name])

    def pass_over_own(self) -> None:
        """Let writes to what lives here be none of the script: its own loop compares them itself.

        Where a write was left out all stays as it is, for that is compared with the owner's.
        """
        self.hooks.tensors_alone = True
        if Elsewhere.num_left_out == self._settled:
            self._settle()

    def after_step(self) -> None:
        """Note that a step is over.

        Raises:
            OwnershipError: Code of the step itself has written to a tensor that is not here; it
                runs on one worker alone.
        """
        if Elsewhere.num_left_out != self._begun:
            for tensor in self._held.values():
                is_late = getattr(tensor, LEFT_OUT, 0) > self._begun
                if isinstance(tensor, Elsewhere) and is_late:
                    tensor.need_value("an operation in place, within a step")
        if self._hooks_count():
            self.hooks.after_step()
        self._settle()

    def _settle(self) -> None:
        self._compared.writes.update(zip(self._keys, map(num_writes, self._here), strict=True))
        if LENT:
            settle_lent(self._here)
        if Elsewhere.num_left_out != self._settled:
            for tensor in self._held.values():
                vars(tensor).pop(LEFT_OUT, None)
            self._settled = Elsewhere.num_left_out


def _short(found: tuple[str, ...]) -> tuple[str, ...]:
    if sum(map(len, found)) <= _MAX_NAMED:
        return found
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]
    return (f"{len(found)} tensors (SHA-256 {digest})",)
