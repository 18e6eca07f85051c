"""Operations that backward runs again, by ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from graphsplit.capture.reach.holders import Holder


class Recomputed:
    """Called by a segment's code in the place of a group of operations.

    Autograd's graph is that of the operations themselves, so sums of gradients keep their order;
    what they would save is made again when backward first asks for it: with the random numbers of
    the first time, and from the buffers as they were then, which are not modified once more. (The
    network's own checkpoints do modify them once more, as in eager mode.)

    Args:
        run: The operations: takes what goes in, returns the tuple of what comes out.
        name: A name for the generated code.
        changing: Which of its arguments are buffers that some operation modifies.
        is_random: Whether it draws from the default generator.
        repeats_writes: Whether the second time works on those buffers as they are then, and
            modifies them once more.
        state: Python state that it can reach. The second time finds it as the first time did, and
            changes nothing for good.
    """

    def __init__(
        self,
        run: Callable[..., tuple[Any, ...]],
        name: str,
        *,
        changing: Sequence[int],
        is_random: bool,
        repeats_writes: bool = False,
        state: Sequence[Holder] = (),
    ) -> None:
        self._run = run
        self._state = tuple(state)
        self._changing = tuple(changing)
        self._is_random = is_random
        self._repeats_writes = repeats_writes
        self.__name__ = self.__qualname__ = name
        self.__module__ = "graphsplit_recomputed"

    def __call__(self, *arguments: Any) -> Any:
        """Run the operations for the first time."""
        if not torch.is_grad_enabled():
            return self._run(*arguments)
        again = self._with_state(self._run)
        if not self._changing:
            return self._checkpoint(again, arguments)
        # What changes must not be among the arguments: those are saved as they are.
        before = {index: arguments[index] for index in self._changing}
        if not self._repeats_writes:
            before = {index: _copy_of(tensor) for index, tensor in before.items()}
        current = {index: arguments[index] for index in self._changing}
        others = [a for index, a in enumerate(arguments) if index not in before]

        def run(*given: Any) -> tuple[Any, ...]:
            state = current or {index: self._again(kept) for index, kept in before.items()}
            rest = iter(given)
            own = [state[i] if i in before else next(rest) for i in range(len(arguments))]
            try:
                return again(*own)
            finally:
                current.clear()

        return self._checkpoint(run, others)

    def _with_state(self, run: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """Runs the operations, the second time with Python's state as the first time."""
        if not self._state:
            return run
        before = [holder.held() for holder in self._state]
        has_run = False

        def run_with_state(*arguments: Any) -> tuple[Any, ...]:
            nonlocal has_run
            if not has_run:
                has_run = True
                return run(*arguments)
            now = [holder.held() for holder in self._state]
            _hold(self._state, before)
            try:
                return run(*arguments)
            finally:
                _hold(self._state, now)

        return run_with_state

    def _again(self, kept: torch.Tensor) -> torch.Tensor:
        return kept if self._repeats_writes else _copy_of(kept)

    def _checkpoint(self, run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        # To the end: some operations save memory first and fill it later, as RReLU does its noise.
        with set_checkpoint_early_stop(False):
            return checkpoint(
                run, *arguments, use_reentrant=False, preserve_rng_state=self._is_random
            )


def _hold(holders: Sequence[Holder], states: Sequence[Any]) -> None:
    for holder, state in zip(holders, states, strict=True):
        holder.hold(state)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for which the same is saved: of a parameter one that has a gradient, too."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
