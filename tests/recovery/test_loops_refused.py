"""Loops that could not go on after a loss are refused where they begin, with the way out."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError
from graphsplit.recovery.loops.text import BodyText, body_of
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
in_threads = pytest.mark.usefixtures("threads_as_workers")


def text(source: str, line: int = 1) -> BodyText:
    found = body_of(ast.parse(textwrap.dedent(source)), line)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        ("total += loss", {"total"}),
        ("x = f(batch); y = x", set()),
        ("print(last); last = batch", {"last"}),
        ("if batch: x = 1\n    print(x)", {"x"}),
        ("if batch: x = 1\n    else: x = 2\n    print(x)", set()),
        ("if not batch: continue\n    x = 1\n    print(x)", set()),
        ("losses = [loss for loss in batch]", set()),
        ("for i in batch: n = i\n    print(n)", {"n"}),
        ("for i in gs.loop(batch): n = i\n    print(n)", set()),
        ("with f() as g: x = g\n    print(x, g)", set()),
        ("counts['a'] += 1; self.steps += 1", set()),
        ("try: x = 1\n    except E: x = 2\n    print(x)", set()),
        ("try: x = 1\n    except E: pass\n    print(x)", {"x"}),
        ("step = lambda: step0 + 1; step0 = 2", {"step0"}),
        ("if (n := f()) > 1: print(n)", set()),
        ("match batch:\n        case [a, b]: print(a)\n    a = 1", set()),
    ],
)
def test_names_that_a_round_reads_before_it_sets_them_are_carried(
    body: str, carried: set[str]
) -> None:
    assert text(f"for batch in loop(data):\n    {body}\n").carried == carried


def test_plain_loops_around_are_known_with_what_they_read() -> None:
    found = text(
        """\
        for epoch in range(3):
            best = min(best, 1)
            for x in gs.loop(data):
                loss = f(x)
            print(loss, epoch)
        """,
        3,
    )
    (around,) = found.around
    assert around.carried == {"best"} and around.left == {"loss"} and around.line == 1
    assert text("for i, x in enumerate(gs.loop(data)): pass").counted == "enumerate"
    assert body_of(ast.parse("xs = list(gs.loop(data))"), 1) is None


class Meter:
    """Counts, without a state that could be kept."""

    def __init__(self) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1


class WarmingUp(nn.Module):
    """A loss that counts in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = nn.Module(), 0
        self.inner.register_buffer("scale", torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return value / self.count


class Trained:
    """A network and its optimizer, under a job that waits for lost workers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        net[0].place("MS_WORKER", 0)
        net[1].place("MS_WORKER", 1)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.net = gs.distribute(net)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.net(torch.ones(3, 4)).sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def carries() -> None:
    one, total = Trained(), 0.0
    for _ in gs.loop(range(3), [one.optimizer]):
        total += one.step().item()


def appends() -> None:
    one, losses = Trained(), []
    for _ in gs.loop(range(3), [one.optimizer]):
        losses.append(one.step().item())


def counts_in_an_object() -> None:
    one, meter = Trained(), Meter()
    for _ in gs.loop(range(3), [one.optimizer]):
        one.step()
        meter.update()


def counts_in_a_module() -> None:
    one, weigh = Trained(), nn.Sequential(WarmingUp())
    del weigh[0].inner.scale
    for _ in gs.loop(range(3), [one.optimizer]):
        weigh(one.step())


def counts_in_a_module_that_is_kept() -> None:
    one, weigh = Trained(), nn.Sequential(WarmingUp())
    for _ in gs.loop(range(3), [one.optimizer, weigh]):
        weigh(one.step())


def writes_into_a_tensor() -> None:
    one, sums = Trained(), torch.zeros(1)
    for _ in gs.loop(range(3), [one.optimizer]):
        one.step()
        sums.add_(1)


def keeps_no_optimizer() -> None:
    one = Trained()
    steps = {"hidden": one.step}
    for _ in gs.loop(range(3)):
        steps["hidden"]()


def forgets_the_scheduler() -> None:
    one = Trained()
    scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 2)
    for _ in gs.loop(range(3), [one.optimizer]):
        one.step()
        scheduler.step()


def keeps_what_has_no_state() -> None:
    one = Trained()
    for _ in gs.loop(range(3), [one.optimizer, Meter()]):
        one.step()


def counts_around() -> None:
    one = Trained()
    for i, _ in enumerate(gs.loop(range(3), [one.optimizer])):
        print(i)
        one.step()


def is_no_for() -> None:
    one = Trained()
    steps = gs.loop(range(3), [one.optimizer])
    next(steps)


def goes_through_once() -> None:
    one = Trained()
    for _ in gs.loop(iter([1, 2]), [one.optimizer]):
        one.step()


def evaluates_in_a_plain_loop() -> None:
    one = Trained()
    for _ in range(2):
        for _ in gs.loop(range(2), [one.optimizer]):
            one.step()
        one.net(torch.ones(3, 4))


def appends_in_a_plain_loop() -> None:
    one, epochs = Trained(), []
    for epoch in range(2):
        for _ in gs.loop(range(2), [one.optimizer]):
            one.step()
        epochs.append(epoch)


def goes_through_two_loops() -> None:
    one = Trained()
    for _ in gs.loop(range(2), [one.optimizer]):
        one.step()
    for _ in gs.loop(range(2), [one.optimizer]):
        one.step()


def keeps_inside() -> None:
    one, counts = Trained(), {"n": 0}
    for _ in gs.loop(range(2), [one.optimizer]):
        for _ in gs.loop(range(2), [counts]):
            one.step()


def trains_a_model_beside() -> None:
    one = Trained()
    gs.Model(one.net, nn.MSELoss())


@in_threads
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (carries, "carries 'total' from one batch to the next"),
        (appends, "a batch changes losses, which is not kept"),
        (counts_in_an_object, "a batch changes meter.count, which is not kept"),
        (counts_in_a_module, "a batch changes weigh.0.count, which is not kept"),
        (counts_in_a_module_that_is_kept, "a batch changes weigh.0.count, which is not kept"),
        (writes_into_a_tensor, "a batch changes sums, which is not kept"),
        (forgets_the_scheduler, "uses scheduler, a StepLR with a state, which is not kept"),
        (keeps_no_optimizer, "the loop steps an optimizer, SGD, that it does not keep"),
        (keeps_what_has_no_state, "entry 1 is a Meter, whose state cannot be kept"),
        (counts_around, "enumerate(gs.loop(...)) begins to count anew"),
        (is_no_for, "no `for` statement of a file goes through it"),
        (goes_through_once, "can be gone through only once"),
        (evaluates_in_a_plain_loop, "repeats calls of the network between its rounds"),
        (appends_in_a_plain_loop, "a round of the loop around it changes epochs"),
        (goes_through_two_loops, "a second gs.loop after another one"),
        (keeps_inside, "an inner gs.loop keeps a dict that the outermost one does not"),
        (trains_a_model_beside, "has a gs.Model, and a network of gs.distribute"),
    ],
)
def test_a_loop_that_could_not_go_on_is_refused(script: Callable[[], None], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ThreadCluster(lambda rank: script(), 2, SnapshotSettings(every=2)).run()
    assert said in str(caught.value) and "Fix: " in str(caught.value)


@in_threads
def test_without_recovery_it_is_the_loaders_own_iterator() -> None:
    data = [1, 2]
    kinds = [type(iter(data)), type(enumerate(data))]
    assert [type(gs.loop(data)), type(gs.loop(data, numbered=True))] == kinds

    def run(rank: int) -> Any:
        gs.distribute(nn.Sequential(nn.Linear(2, 2)))
        return [type(gs.loop(data)), type(gs.loop(data, [object()], numbered=True))]

    assert ThreadCluster(run, 2, is_recoverable=False).run() == [kinds, kinds]
