"""Random trainings, cut in two: the plain loop's bits, and all that the script can see of them.

The trainings are drawn by random_training.py. A few run with the other tests, hundreds with
`make fuzz-changes`, or::

    python -m pytest -m fuzz tests/equivalence/test_random_training.py -k "[17]"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from random_training import Training
from recovery_helpers import threads_as_workers

import graphsplit as gs
from graphsplit.errors import GraphsplitError
from graphsplit.planning import planner
from graphsplit.planning.passes import capture_graph

assert threads_as_workers
pytestmark = pytest.mark.filterwarnings("ignore")
SHORT = (2, 4, 11)
NUM_SEEDS = 300
NAME = "random_training_program"


def _seeds() -> list[Any]:
    others = (seed for seed in range(NUM_SEEDS) if seed not in SHORT)
    return [*SHORT, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in others)]


class _PlainModel(PlainModel):
    """With callbacks, and random numbers of microbatches as the documentation's loop has them."""

    seed: int | None = None
    steps = 0

    def train_step(self, *batch: Any, to: Any = None) -> torch.Tensor:
        assert self.optimizer is not None
        if not self.network.training:
            self.network.train()
        losses = self._backward(batch)
        if to is not None:
            to.on_gradients(None)
        self.optimizer.step()
        return sum(losses[1:], losses[0])

    def _parts(self, batch: Any) -> Iterator[tuple[Any, float | None]]:
        if self._microbatches == 1:
            yield from super()._parts(batch)
            return
        self.seed = torch.initial_seed() if self.seed is None else self.seed
        before = torch.get_rng_state()
        try:
            for m, part in enumerate(gs.split_microbatches(batch, self._microbatches)):
                torch.set_rng_state(gs.microbatch_rng_state(self.seed, self.steps, m))
                yield part
        finally:
            torch.set_rng_state(before)
        self.steps += 1

    def train(self, epochs: int, loader: Any, callbacks: Any = ()) -> None:
        (callback,) = callbacks
        callback.on_train_begin(None)
        for _ in range(epochs):
            callback.on_epoch_begin(None)
            for batch in loader:
                callback.on_step_end(SimpleNamespace(loss=self.train_step(*batch, to=callback)))
            callback.on_epoch_end(None)

    def load_state_dict(self, state: Any, **options: Any) -> Any:
        return self.network.load_state_dict(state, **options)

    def optimizer_state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_optimizer_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def _plain_model(net: Any, loss_fn: Any, optimizer: Any, microbatches: int) -> Any:
    return _PlainModel(net, loss_fn, optimizer, microbatches=microbatches)


def _model(net: Any, loss_fn: Any, optimizer: Any, microbatches: int) -> Any:
    return gs.Model(net, loss_fn, optimizer, microbatches=microbatches)


class _Callback:
    def on_train_begin(self, context: Any) -> None:
        pass

    on_epoch_begin = on_epoch_end = on_step_end = on_gradients = on_train_begin


PLAIN = SimpleNamespace(distribute=lambda net: net, model=_plain_model, base=_Callback)
CUT = SimpleNamespace(distribute=gs.distribute, model=_model, base=gs.callbacks.Callback)


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("seed", _seeds())
def test_a_random_training_is_as_alone(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each worker captures for itself: it has globals and classes of its own.
    monkeypatch.setattr(planner, "capture_graph", capture_graph)
    monkeypatch.delenv("GS_RECAPTURE_EVERY")
    path = tmp_path / f"{NAME}.py"

    def run(make: Any, place: Callable[..., None]) -> list[Any]:
        module = ModuleType(NAME)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, NAME, module)
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        return module.main(make, place)

    def runs(number: int) -> bool:
        path.write_text(Training(number).text())
        try:
            run(PLAIN, lambda net, ranks: None)
        except Exception:
            return False
        return True

    assert any(runs(number) for number in range(100 * seed, 100 * seed + 100))
    try:
        assert_as_alone(lambda: run(PLAIN, lambda net, ranks: None), lambda: run(CUT, _place))
    except GraphsplitError as error:  # by name; all else is wrong
        print(path.read_text())
        print(f"refused: {error}")
    except BaseException:
        print(path.read_text())
        raise


def _place(net: Any, ranks: dict[str, int]) -> None:
    for name, rank in ranks.items():
        getattr(net, name).place("MS_WORKER", rank)
