"""Random changes of random places: the plain loop's bits, and no capture for what is not read.

Networks and losses stand in changing_networks.py, what is changed in random_changes.py. A few seeds
run with the other tests; all of them, more than 3,000 changes, with `make fuzz-changes`, or::

    python -m pytest -m fuzz tests/equivalence/test_random_changes.py -k "script and 17-"
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from alone_helpers import assert_as_alone
from changing_networks import BATCH, LOSSES, NETWORKS, WIDTH, place, shared_state_kept
from equivalence_helpers import batches_of
from random_changes import sites
from recovery_helpers import threads_as_workers
from simulated.equivalence import assert_same_bits, sgd_with_momentum
from simulated.reference import EagerLoop
from torch.utils.data import DataLoader, Dataset

import graphsplit as gs
from graphsplit.errors import GraphsplitError, StaleGraphError
from graphsplit.planning import passes, planner

assert threads_as_workers
capture_graph = passes.capture_graph
pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads")
STEPS = 10
NUM_SEEDS = 60  # each makes some 35 changes; most by a script, as that takes less time


@dataclass
class Changes:
    """What a script, a callback or a data set changes, drawn where it is called first for a step.

    Called for the loop first, then for every worker, which do the same to the same places.

    Attributes:
        seed: What is drawn follows from it.
        with_shared: Whether places may change that all networks of the process have in common.
        with_used: Whether places may change that somebody reads.
        made: The paths of the places, and what is drawn for each, by step.
    """

    seed: int
    with_shared: bool = True
    with_used: bool = True
    made: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def __call__(self, step: int, net: Any, loss_fn: Any) -> None:
        """Change some random places."""
        is_known = step in self.made
        draw = random.Random(1000 * self.seed + step)
        chosen = self.made.setdefault(step, [])
        for number in range(len(chosen) if is_known else 1 + draw.randrange(6)):
            by_path = {
                site.path: site
                for site in sites(net, loss_fn)
                if (self.with_shared or not site.is_shared) and (self.with_used or site.is_unused)
            }
            if not is_known:
                chosen.append((draw.choice(list(by_path)), draw.randrange(1 << 30)))
            path, seed = chosen[number]
            by_path[path].change(random.Random(seed))
            _counts["made"] += not is_known

    def __str__(self) -> str:
        paths = ((step, [path for path, _ in chosen]) for step, chosen in self.made.items())
        return "\n".join(f"  before step {step}: {', '.join(found)}" for step, found in paths)


@dataclass(frozen=True)
class Case:
    """What is trained for a seed: networks and losses in turn, the rest at random."""

    network: Callable[[], Any]
    make_loss: Callable[[], Any]
    microbatches: int
    num_workers: int

    @classmethod
    def of(cls, seed: int) -> Case:
        draw = random.Random(seed)
        return cls(
            NETWORKS[seed % len(NETWORKS)],
            LOSSES[seed // 2 % len(LOSSES)],
            draw.choice((1, 4)),
            draw.choice((1, 1, 2)),
        )

    def make(self) -> tuple[Any, Any, Any, None]:
        """Network, loss, optimizer, and no scheduler."""
        torch.manual_seed(0)
        network = self.network()
        return network, self.make_loss(), sgd_with_momentum(network), None


_counts: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _counts_are_told(request: pytest.FixtureRequest) -> Iterator[None]:
    """How many seeds were tried in this process, and how many changes made."""
    yield
    plugins = request.config.pluginmanager
    terminal, capture = map(plugins.get_plugin, ("terminalreporter", "capturemanager"))
    if terminal is not None and capture is not None:  # they are not in a process of xdist
        told = ", ".join(f"{name} {count}" for name, count in _counts.items())
        with capture.global_and_fixture_disabled():
            terminal.write_line(f"\nrandom changes: {told}")


@pytest.fixture(autouse=True)
def _classes_and_globals_are_put_back() -> Iterator[None]:
    with shared_state_kept():
        yield


def check(case: Case, changes: Changes, train: Callable[[Case, Changes], None]) -> None:
    """The bits of the loop, or an error by name; any other names the changes."""
    _counts["seeds"] += 1
    try:
        train(case, changes)
    except StaleGraphError as error:  # a change that was not seen
        raise AssertionError(f"{case}\n{changes}\n{error}") from error
    except GraphsplitError as error:
        _counts["seeds refused"] += 1
        print(f"refused: {type(error).__name__}: {error}\n{case}\n{changes}")
    except Exception as error:
        raise AssertionError(f"{case}\n{changes}\n{error}") from error


def few_of(seeds: range, few: int) -> list[Any]:
    """Seeds with numbers of steps: a few short runs with the other tests, and the whole ones."""
    short = [pytest.param(seed, 4) for seed in seeds[:few]]
    return [*short, *(pytest.param(seed, STEPS, marks=pytest.mark.fuzz) for seed in seeds)]


# By a script, over simulated workers.


@pytest.mark.parametrize(("seed", "steps"), few_of(range(NUM_SEEDS), 2))
def test_what_a_script_changes_counts(seed: int, steps: int) -> None:
    check(Case.of(seed), Changes(seed), lambda case, changes: by_script(case, changes, steps))


def by_script(case: Case, changes: Changes, steps: int) -> None:
    assert_same_bits(
        case.network,
        batches_of(BATCH, WIDTH, num=3),
        steps=steps,
        num_workers=case.num_workers,
        place=place if case.num_workers > 1 else None,
        loss_fn=case.make_loss(),
        microbatches=case.microbatches,
        before_step=changes,
        plan_everywhere=True,
        evaluate_after=(steps // 2,),
    )


# By a callback or a data set, over Models in threads.


class Rows(Dataset[Any]):
    """Says when a batch is begun."""

    def __init__(self, begin: Callable[[int], object], steps: int) -> None:
        self._begin = begin
        batches = batches_of(BATCH, WIDTH, num=steps)
        self._rows = [row for batch in batches for row in zip(*batch, strict=True)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        if index % BATCH == 0:
            self._begin(index // BATCH)
        return self._rows[index]


class AfterStep(gs.callbacks.Callback):
    """Keeps losses, and says which step is over."""

    def __init__(self, end: Callable[[int], object]) -> None:
        self._end = end
        self.losses: list[torch.Tensor] = []

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        assert context.loss is not None
        self._end(len(self.losses))
        self.losses.append(context.loss.clone())


def _nothing(step: int) -> None:
    pass


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("seed", "steps"), few_of(range(NUM_SEEDS, NUM_SEEDS + 36), 2))
def test_what_a_callback_or_a_data_set_changes_counts(
    seed: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "capture_graph", capture_graph)
    by = ("callback", "data set")[seed % 7 % 2]
    changes = Changes(seed, with_shared=False)
    check(Case.of(seed), changes, lambda case, changes: by_models(case, changes, by, steps))


def by_models(case: Case, changes: Changes, by: str, steps: int) -> None:
    assert_as_alone(
        lambda: by_loop(case, changes, by, steps), lambda: by_model(case, changes, by, steps)
    )


def by_loop(case: Case, changes: Changes, by: str, steps: int) -> Any:
    """The plain loop; returns losses, parameters and buffers."""
    loop = EagerLoop(case.make, microbatches=case.microbatches)

    def change(step: int) -> None:
        changes(step, loop.network, loop.loss_fn)

    with loop.own_generator():
        batches = iter(DataLoader(Rows(change if by == "data set" else _nothing, steps), BATCH))
    losses = []
    for step in range(steps):
        with loop.own_generator():
            batch = next(batches)
        losses.append(loop.train_step(batch))
        if by == "callback":
            with loop.own_generator():
                change(step)
    return losses, {name: t.detach() for name, t in loop.network.named_parameters()}


def by_model(case: Case, changes: Changes, by: str, steps: int) -> Any:
    """A worker of a job."""
    network, loss_fn, optimizer, _ = case.make()
    place(network)
    model = gs.Model(network, loss_fn, optimizer, microbatches=case.microbatches)

    def change(step: int) -> None:
        changes(step, network, loss_fn)

    losses = AfterStep(change if by == "callback" else _nothing)
    model.train(
        1, DataLoader(Rows(change if by == "data set" else _nothing, steps), BATCH), [losses]
    )
    state = model.state_dict()
    return losses.losses, {name: state[name] for name, _ in network.named_parameters()}


# What nobody reads.


@pytest.mark.parametrize("number", range(len(NETWORKS)))
def test_changes_of_what_is_not_read_take_no_capture(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        planner, "capture_graph", lambda *a, **k: (made.append(a), capture_graph(*a, **k))[1]
    )
    monkeypatch.delenv("GS_RECAPTURE_EVERY")

    def captures(before_step: Callable[[int, Any, Any], None]) -> int:
        made.clear()
        assert_same_bits(
            NETWORKS[number],
            batches_of(BATCH, WIDTH),
            steps=6,
            num_workers=1,
            loss_fn=LOSSES[number % len(LOSSES)](),
            before_step=before_step,
            plan_everywhere=True,
            evaluate_after=(),
        )
        return len(made)

    # Network and loss change some of what they read themselves.
    without = captures(lambda step, net, loss_fn: None)
    assert captures(Changes(number, with_used=False)) == without > 0
