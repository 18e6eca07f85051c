"""The cost of an own loop: what moves between workers, where code runs, what takes memory."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import recovery_helpers
import torch
from loop_helpers import placed, ranks_for
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated import memory
from torch import nn
from torch.nn import functional

import graphsplit as gs
from graphsplit.distribute.following import forms as following
from graphsplit.distribute.following import run as run_here
from graphsplit.job import joined
from graphsplit.planning.planner import Planner
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

NUM_WORKERS = 3
VOCABULARY = 500
_ran: list[tuple[str, int]] = []
_lock = threading.Lock()


def _note(what: str) -> None:
    with _lock:
        _ran.append((what, joined.get_rank()))


@torch.library.custom_op("own_loop_costs::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Notes which worker runs it."""
    _note("forward")
    return x.clone()


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    _note("backward")
    return gradient.clone()


counted.register_autograd(_backward)


class Counted(nn.Module):
    """An operation that notes where it runs, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        y: torch.Tensor = counted(self.layer(x))
        return y


def language() -> nn.Sequential:
    """Logits of many words on the last worker, where they are made."""
    torch.manual_seed(0)
    head = nn.Linear(16, VOCABULARY)
    parts = [nn.Embedding(VOCABULARY, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.1), Counted()]
    net: nn.Sequential = placed(nn.Sequential(*parts, head), parts, ranks_for(NUM_WORKERS))
    head.place("MS_WORKER", NUM_WORKERS - 1)  # type: ignore[operator]
    return net


def criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of next words."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def by_train_step(num_steps: int) -> list[float]:
    """Losses of a Model."""
    net = language()
    model = gs.Model(net, criterion, torch.optim.SGD(net.parameters(), lr=0.1))
    words = torch.arange(24).view(4, 6)
    return [model.train_step(words, words).item() for _ in range(num_steps)]


def by_own_loop(num_steps: int) -> list[float]:
    """Losses of an own loop with the criterion outside."""
    net = language()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net = gs.distribute(net)
    words, losses = torch.arange(24).view(4, 6), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = criterion(net(words), words)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(script: Callable[[], Any]) -> list[Any]:
    return ThreadCluster(lambda rank: script(), NUM_WORKERS, is_recoverable=False).run()


def test_a_step_moves_no_more_than_train_step_and_a_kilobyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender: Any = vars(memory)["_MemorySender"]
    original, sent = sender.send, []

    def send(self: Any, value: torch.Tensor | None, **options: Any) -> None:
        sent.append(64 + (0 if value is None else value.nbytes))
        original(self, value, **options)

    def of_one_step(script: Callable[[int], list[float]]) -> int:
        totals = []
        for num_steps in (3, 4):
            sent.clear()
            run(lambda num_steps=num_steps: script(num_steps))  # type: ignore[misc]
            totals.append(sum(sent))
        return totals[1] - totals[0]

    monkeypatch.setattr(sender, "send", send)
    whole, own = of_one_step(by_train_step), of_one_step(by_own_loop)
    assert 0 < own <= whole + 1024
    assert own < 24 * VOCABULARY * 4  # the logits alone


def test_what_an_optimizer_writes_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    told, original = [], Planner._message

    def message(self: Planner, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        told.append(found.written)
        return found

    monkeypatch.setattr(Planner, "_message", message)
    run(lambda: by_own_loop(3))
    assert len(told) > NUM_WORKERS and told[-2 * NUM_WORKERS :] == [()] * 2 * NUM_WORKERS


def test_forward_and_backward_run_where_a_module_is_placed() -> None:
    _ran.clear()
    found = run(lambda: by_own_loop(2))
    assert found == [found[0]] * NUM_WORKERS
    home = ranks_for(NUM_WORKERS)[2]
    assert _ran == [("forward", home), ("backward", home)] * 2


def here(entries: Any) -> Any:
    """The entries of an optimizer's state on this worker."""
    return entries.here


def test_the_parameters_of_others_take_no_memory() -> None:
    whole = sum(p.nbytes for p in language().parameters())

    def held() -> int:
        net = gs.distribute(language())
        optimizer = torch.optim.Adam(net.parameters())
        criterion(net(torch.arange(24).view(4, 6)), torch.arange(24)).backward()
        optimizer.step()
        with DisableTorchFunctionSubclass():
            kept = [t for state in here(optimizer.state).values() for t in state.values()]
            gradients = [p.grad for p in net.parameters() if p.grad is not None]
            tensors = [*net.parameters(), *kept, *gradients]
            return sum(t.untyped_storage().nbytes() for t in tensors)

    of_each = run(held)
    assert max(of_each) < 4 * whole
    assert 4 * whole <= sum(of_each) < 4 * whole + 1024


def test_forms_of_results_are_found_out_once() -> None:
    forms: Any = vars(following)["_forms"]
    forms.clear()
    x = torch.randn(6, 8, device="meta", requires_grad=True)
    labels = torch.empty(6, dtype=torch.long, device="meta")

    def step() -> list[Any]:
        loss = functional.cross_entropy(x.half().float(), labels)
        made = [loss, *torch.autograd.grad(loss, x), *x.topk(2), x.view(8, 6), labels / 1, x * 1]
        return [(type(m), m.shape, m.stride(), m.dtype, m.requires_grad, m.device) for m in made]

    expected = step()
    sizes = []
    for _ in range(2):
        with following.Following():
            assert step() == expected
        sizes.append(len(forms))
    assert sizes == [12, 12]  # all but the view
    torch.set_default_dtype(torch.float64)
    try:
        expected = step()
        with following.Following():
            assert step() == expected
        assert len(forms) == 24
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("func", "args", "is_known"),
    [
        (functional.cross_entropy, (torch.arange(6),), "always"),
        (torch.mul, (2.0,), "always"),
        (torch.Tensor.sum, (1,), "always"),
        (torch.Tensor.argmax, (1,), "always"),
        (functional.normalize, (), "without gradients"),  # uses its operand twice
        (torch.Tensor.view, (8, 6), "never"),  # shares memory
        (torch.Tensor.relu_, (), "never"),
        (torch.Tensor.sort, (), "never"),  # several results
        (functional.dropout, (0.5,), "never"),  # draws
    ],
)
def test_an_operation_that_another_worker_runs_is_followed_once(
    monkeypatch: pytest.MonkeyPatch, func: Any, args: tuple[Any, ...], is_known: str
) -> None:
    monkeypatch.setattr(run_here, "_remembered", {})  # whatever other tests have run

    def met() -> Any:
        leaf = torch.empty_strided((8, 6), (1, 8), device="meta", requires_grad=True)
        operands = [leaf.T * 1, *args]
        key = run_here.key_of((func, False, len(operands)), operands)
        is_there = run_here.is_known(key)
        given = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in operands]
        found, draws = run_here.run_or_follow(
            func, func.__name__, given, lambda given: (tuple(given), {}), key, is_here=False
        )
        made = found[0] if isinstance(found, tuple) else found
        gradients: list[torch.Tensor] = []
        for strides in (made.stride(), (0,) * made.dim()) * made.requires_grad:
            gradient = torch.empty_strided(made.shape, strides, device="meta")
            gradients += torch.autograd.grad(made, leaf, gradient, retain_graph=True)
        forms = [(one.shape, one.stride(), one.dtype, one.device) for one in (made, *gradients)]
        return is_there, (forms, made.requires_grad, draws)

    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients):
            (before, expected), (then, found) = met(), met()
        assert not before
        assert then == (is_known == "always" or (is_known != "never" and not has_gradients))
        assert found == expected


@pytest.mark.parametrize("ask", [torch.Tensor.item, bool, repr, torch.Tensor.tolist])
def test_an_answer_goes_to_all_once(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender: Any = vars(memory)["_MemorySender"]
    original, senders = sender.send, []

    def send(self: Any, value: torch.Tensor | None, **options: Any) -> None:
        senders.append(joined.get_rank())
        original(self, value, **options)

    def answers(num_questions: int) -> list[Any]:
        words = torch.arange(24).view(4, 6)
        loss = criterion(gs.distribute(language())(words), words)
        return [ask(loss + number) for number in range(num_questions)]

    def num_sent(num_questions: int) -> int:
        senders.clear()
        of_workers = run(lambda: answers(num_questions))
        assert of_workers == of_workers[:1] * NUM_WORKERS
        return senders.count(NUM_WORKERS - 1)  # by the worker that has the loss

    monkeypatch.setattr(sender, "send", send)
    assert num_sent(3) - num_sent(0) == 3 * (NUM_WORKERS - 1)


def test_a_network_that_nobody_holds_any_more_is_freed_with_its_optimizer() -> None:
    def seen() -> Any:
        net = gs.distribute(language())
        twin = copy.deepcopy(net)
        optimizer = torch.optim.Adam(net.parameters())
        words = torch.arange(24).view(4, 6)
        criterion(net(words), words).backward()
        optimizer.step()
        twin(words)
        held = (net, twin, optimizer, *net.parameters())
        return joined.current(), [weakref.ref(one) for one in held]

    of_workers = run(seen)
    vars(vars(recovery_helpers)["CAPTURES"])["_graphs"].clear()  # of these tests
    gc.collect()
    gc.collect()  # what was noted of a network goes when it does
    for job, held in of_workers:
        assert job is not None
        assert [one() is None for one in held] == [True] * 20
