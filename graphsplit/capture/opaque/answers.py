"""Find the shapes that code returns which asks for the values of tensors.

There are no values while a network is captured. Where code asks for one (``if x.sum() > 0``), it
is run twice: once with every answer 0 or False, once with every answer 1 or True. If what comes
back looks alike both times, that is what the call returns; each real call is checked against it.
A loop that does not end with one answer tells what it reads and writes, but returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from graphsplit.capture.observe import Observer, TooManyQuestionsError
from graphsplit.errors import CaptureError, GraphsplitError
from graphsplit.torch_ext.private import DataDependentOutputException, pytree

R = TypeVar("R", bound=Any)


def _asked_for_values() -> tuple[type[Exception], ...]:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode, DataDependentOutputException


def run_with_answers(attempt: Callable[[int | None], R], label: str, source: str) -> R:
    """Run code on fake tensors; with made-up answers where it asks for values.

    Args:
        attempt: Runs it, given the answer to every such question, or None.
        label: What it is, for people.
        source: The user's line.

    Raises:
        CaptureError: What it returns cannot be found out.
    """
    runs: list[R] = []
    cut_short: list[Observer] = []
    reason = ""
    for answer in (None, 0, 1):
        try:
            runs.append(attempt(answer))
        except TooManyQuestionsError as error:
            cut_short.append(error.observer)
            reason = str(error)
        except _asked_for_values() as error:
            reason = str(error)
        except GraphsplitError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if runs and answer is None:
            return runs[0]
    if not runs:
        raise _refusal(label, source, reason) from None
    if len({_look(run.result) for run in runs}) > 1:
        raise _refusal(label, source, "its branches return tensors of several shapes or dtypes")
    chosen = max(runs, key=lambda run: _num_with_grad(run.result))
    for observer in (*(run.observer for run in runs), *cut_short):
        _join(chosen.observer, observer)
    return chosen


def _num_with_grad(result: Any) -> int:
    found = pytree.tree_leaves(result)
    return sum(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in found)


def _look(result: Any) -> str:
    found, spec = pytree.tree_flatten(result)
    looks = [
        (leaf.dtype, str(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in found
    ]
    return f"{spec} {looks}"


def _join(observer: Observer, other: Observer) -> None:
    observer.is_random |= other.is_random
    observer.written |= other.written
    observer.foreign.update(other.foreign)
    observer.assigned.update(other.assigned)
    observer.placements += other.placements


def _refusal(label: str, source: str, reason: str) -> CaptureError:
    first = reason.strip().splitlines()[0][:300] if reason.strip() else "no reason given"
    return CaptureError(
        f"{label} is kept whole, but the shapes that it returns cannot be found by running it on "
        f"tensors without values\n  {source}\n  the error was: {first}\n"
        f"  Fix: say what it returns, with gs.opaque(..., outputs=f), where f takes the same "
        f"arguments and returns tensors of the same shapes and dtypes."
    )
