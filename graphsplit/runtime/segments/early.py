"""Run inside a backward what may run there; see ``program.early``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set

import torch

from graphsplit.program.early import Needs
from graphsplit.runtime.step_state import Action, StepState
from graphsplit.torch_ext.attributes import OwnHooks


class EarlyRun:
    """The instructions behind one backward that run as soon as their gradients are there.

    Args:
        first: The position of the first of them in the program.
        needs: For each, the contributions of this backward that it needs.
        run: Runs the instruction at a position.

    Attributes:
        positions: Their positions.
    """

    def __init__(self, first: int, needs: Needs, run: Callable[[int, StepState], None]) -> None:
        self._first, self._needs, self._run = first, needs, run
        self.positions = range(first, first + len(needs))
        self._leaves = frozenset[int]().union(*needs)
        self._num_done, self._thread = 0, 0
        self._came: set[int] = set()

    def begin(
        self,
        state: StepState,
        microbatch: int,
        contributions: Sequence[int],
        leaves: Sequence[torch.Tensor | None],
    ) -> Set[int]:
        """The backward begins.

        Args:
            state: The step's state.
            microbatch: Whose backward it is.
            contributions: All that it makes the gradients of.
            leaves: Their leaves; of those that are needed here, gradients are taken when they come.

        Returns:
            Those whose gradients have come; it grows while the backward runs.
        """
        self._num_done, self._came = 0, set()
        self._thread = threading.get_ident()
        for contribution, leaf in zip(contributions, leaves, strict=True):
            if contribution in self._leaves and leaf is not None and not state.is_kept:
                self._take_when_it_comes(leaf, contribution, state, microbatch)
        return self._came

    def unless_done(self, position: int, action: Action) -> Action:
        """The instruction at a position where the program has it: the backward may have run it."""

        def run_unless_done(state: StepState) -> None:
            if position - self._first >= self._num_done:
                action(state)
            if position == self.positions[-1]:
                self._num_done = 0

        return run_unless_done

    def _take_when_it_comes(
        self, leaf: torch.Tensor, contribution: int, state: StepState, microbatch: int
    ) -> None:
        collected = state.collected[microbatch]

        def take(leaf: torch.Tensor) -> None:
            if threading.get_ident() != self._thread:  # a device's: channels have one thread each
                return
            collected[contribution], leaf.grad = leaf.grad, None
            self._came.add(contribution)
            self._go_on(state)

        leaf.register_post_accumulate_grad_hook(take)
        OwnHooks.count += 1

    def _go_on(self, state: StepState) -> None:
        while self._num_done < len(self._needs) and self._needs[self._num_done] <= self._came:
            self._num_done += 1
            self._run(self._first + self._num_done - 1, state)
