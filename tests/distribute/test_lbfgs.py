"""LBFGS of ``torch.optim`` in a loop of the script's own: the same bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, assert_same_bits
from loops import small
from recovery_helpers import threads_as_workers
from torch import nn

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

Between = Callable[[Any, Any, int], Any]


def steps(between: Between = lambda net, optimizer, step: None, **settings: Any) -> Any:
    """Three steps, with ``between`` after each."""

    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = small(ranks)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, **settings)
        net = distribute(net)
        for step in range(3):
            x, y = torch.randn(6, 8), torch.arange(6) % 4
            calls = [0]

            def closure(x: Any = x, y: Any = y, calls: Any = calls) -> Any:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
                calls[0] += 1
                return loss

            loss = optimizer.step(closure)  # type: ignore[no-untyped-call]
            yield loss.item(), calls[0]
            yield between(net, optimizer, step)
        yield dict(net.state_dict())

    return loop


def saved_and_loaded(net: Any, optimizer: Any, step: int) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    (entry,) = state["state"].values()
    return entry["func_evals"], entry["n_iter"], entry["d"].tolist(), float(entry["t"])


def frozen_later(net: Any, optimizer: Any, step: int) -> Any:
    next(net.parameters()).requires_grad_(step == 1)
    optimizer.param_groups[0]["lr"] *= 0.5


def stored(net: Any, optimizer: Any, step: int) -> Any:
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    (entry,) = torch.load(file)["state"].values()
    return entry["old_dirs"], entry["prev_flat_grad"].sum(), entry["H_diag"] * 1


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize(
    "loop",
    [
        steps(stored, lr=0.3),
        steps(),
        steps(line_search_fn="strong_wolfe", history_size=3),
        steps(saved_and_loaded, lr=0.3),
        steps(saved_and_loaded, lr=0.3, line_search_fn="strong_wolfe"),
        steps(frozen_later, lr=0.5),
    ],
    ids=["stored", "plain", "line search", "saved", "saved, line search", "frozen later"],
)
def test_its_steps_are_those_of_one_process(loop: Any, num_workers: int) -> None:
    assert_same_bits(loop, num_workers)
