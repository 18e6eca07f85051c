"""Exchanges of scripts between steps: in the order of ranks, by some workers, and once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recovery_features.parts import adam, batches, plain_net
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import CollectiveMismatchError, ConfigurationError, JobFailedError

assert threads_as_workers
pytestmark = [pytest.mark.usefixtures("threads_as_workers"), pytest.mark.timeout(100)]
NUM_WORKERS = 3
OPS = ("sum", "mean", "prod", "min", "max")


def run(script: Callable[[int], Any], *, is_recoverable: bool = False) -> list[Any]:
    return ThreadCluster(script, NUM_WORKERS, is_recoverable=is_recoverable).run()


def value_of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sums of these depend on their order: the second one is a thousand times as large."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(50, generator=generator) * (1000 if rank == 1 else 1)).to(dtype)


def in_order(op: str, values: list[torch.Tensor]) -> torch.Tensor:
    """By hand: from the lowest rank to the highest."""
    total = values[0]
    for one in values[1:]:
        if op in ("sum", "mean"):
            total = total + one
        elif op == "prod":
            total = total * one
        else:
            total = torch.minimum(total, one) if op == "min" else torch.maximum(total, one)
    return total / len(values) if op == "mean" else total


@pytest.mark.parametrize("is_recoverable", [False, True])
def test_reductions_run_in_the_order_of_ranks(is_recoverable: bool) -> None:
    kinds = [(op, dtype) for op in OPS for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    kinds.remove(("mean", torch.int64))

    def script(rank: int) -> Any:
        return [
            (gs.all_reduce(value_of(rank, dtype), op), gs.reduce(value_of(rank, dtype), 1, op))
            for op, dtype in kinds
        ]

    for rank, found in enumerate(run(script, is_recoverable=is_recoverable)):
        for (op, dtype), (on_all, on_one) in zip(kinds, found, strict=True):
            expected = in_order(op, [value_of(peer, dtype) for peer in range(NUM_WORKERS)])
            assert difference(expected, on_all) is None, (op, dtype)
            assert difference(expected if rank == 1 else None, on_one) is None, (op, dtype)


def test_numbers_are_reduced_as_pythons() -> None:
    def script(rank: int) -> Any:
        return (
            gs.all_reduce(2**53 + rank), gs.all_reduce(0.1 * rank, "mean"),
            gs.all_reduce(rank == 1, "max"), gs.all_reduce(1j * rank, "prod"),
        )  # fmt: skip

    for found in run(script):
        assert repr(found) == repr((3 * 2**53 + 3, (0.0 + 0.1 + 0.2) / 3, True, 0j * 1j * 2j))


@pytest.mark.parametrize("is_recoverable", [False, True])
def test_values_go_to_all_and_to_each(is_recoverable: bool) -> None:
    shared = {"name": "x", 3: (1, [2.5, None]), "t": torch.arange(6).reshape(2, 3).t()}

    def script(rank: int) -> Any:
        rows = torch.full((rank, 2), float(rank))
        whole = torch.arange(12.0).reshape(6, 2)
        mine = gs.scatter(whole if rank == 2 else None, src=2)
        mine.add_(0)  # memory of its own
        return (
            gs.broadcast(value_of(rank), src=1), gs.broadcast_object(rank and shared, src=2),
            gs.all_gather(rows), gs.gather(rows, dst=1), gs.all_gather(rank), mine,
        )  # fmt: skip

    rows = torch.tensor([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]])
    for rank, found in enumerate(run(script, is_recoverable=is_recoverable)):
        mine = torch.arange(12.0).reshape(6, 2)[2 * rank : 2 * rank + 2]
        on_one = rows if rank == 1 else None
        expected = (value_of(1), shared, rows, on_one, torch.arange(3), mine)
        assert difference(expected, found) is None
        assert found[1]["t"].stride() == (1, 3)


@pytest.mark.parametrize("is_recoverable", [False, True])
def test_some_workers_make_a_call(is_recoverable: bool) -> None:
    """Others need not, where none can come back."""

    def script(rank: int) -> Any:
        if rank == 1 and not is_recoverable:
            return gs.all_reduce(rank)
        some = gs.all_reduce(value_of(rank), ranks=[2, 0])
        first = gs.broadcast(rank, src=2, ranks=[0, 2])
        return some, first, gs.all_reduce(rank)

    some = in_order("sum", [value_of(0), value_of(2)])
    left_out = (value_of(1), 1, 3) if is_recoverable else 3
    found = run(script, is_recoverable=is_recoverable)
    assert difference([(some, 2, 3), left_out, (some, 2, 3)], found) is None


def test_values_are_taken_when_the_other_worker_wants_them() -> None:
    """A ring, with calls of all in between."""

    def script(rank: int) -> Any:
        following, before = (rank + 1) % NUM_WORKERS, (rank - 1) % NUM_WORKERS
        gs.send(value_of(rank), following)
        gs.send({"from": rank}, following)
        net = plain_net(place=True)
        gs.Model(net, nn.CrossEntropyLoss(), adam(net)).train(1, batches())
        total = gs.all_reduce(rank)
        return gs.recv(before), gs.recv(before), total

    for rank, found in enumerate(run(script)):
        before = (rank - 1) % NUM_WORKERS
        assert difference((value_of(before), {"from": before}, 3), found) is None


def test_one_process_gets_its_argument_back() -> None:
    one, rows = torch.ones(2), torch.arange(3)
    assert gs.all_reduce(one) is gs.reduce(one) is gs.broadcast(one) is one
    assert gs.all_gather(rows) is gs.gather(rows) is gs.scatter(rows) is rows
    assert gs.all_reduce(5, "max") == 5 and gs.broadcast_object(one) is one
    assert difference(torch.tensor([5]), gs.all_gather(5)) is None
    with pytest.raises(ConfigurationError, match="there is one process, and no worker 1"):
        gs.send(one, 1)


class Own:
    pass


INTEGERS = (torch.int32, torch.int64)
MISTAKES: dict[str, tuple[str, Callable[[int], Any]]] = {
    "shapes": (r"worker 0: all_reduce\(op='sum', float32 of \[4\]\), at .*test_collectives.py:\d+",
               lambda rank: gs.all_reduce(torch.ones(4 - rank))),
    "dtypes": (r"worker 1: all_gather\(int64 of \[\*, 2\]\)",
               lambda rank: gs.all_gather(torch.ones(1, 2).to(INTEGERS[rank > 0]))),
    "operations": (r"worker 1: all_reduce\(op='max', an int\)",
                   lambda rank: gs.all_reduce(rank, "max" if rank == 1 else "sum")),
    "calls": (r"do not fit together\n  worker 0: broadcast\(src=0\)",
              lambda rank: gs.all_reduce(rank) if rank else gs.broadcast(rank)),
    "objects": (r"value/a is a .*Own and cannot be sent",
                lambda rank: gs.broadcast_object({"a": Own()} if rank == 2 else None, src=2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_calls_that_do_not_fit_end_the_job_with_both_lines(kind: str) -> None:
    text, call = MISTAKES[kind]
    kinds = (CollectiveMismatchError, ConfigurationError, JobFailedError)
    with pytest.raises(kinds, match=text):
        run(call)


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "a gradient": ("all_reduce\\(value.detach\\(\\)\\)",
                   lambda: gs.all_reduce(torch.ones(2, requires_grad=True))),
    "no tensor": ("broadcast_object takes other", lambda: gs.broadcast("x")),  # type: ignore[type-var]
    "no operation": ("op='avg'; expected one of", lambda: gs.all_reduce(1, "avg")),  # type: ignore[arg-type]
    "whole means": ("have no mean", lambda: gs.all_reduce(1, "mean")),
    "sums of booleans": ("booleans have no sum", lambda: gs.all_reduce(True)),
    "order of complex": ("has no max", lambda: gs.all_reduce(1j, "max")),
    "large numbers": ("more than 64 bits", lambda: gs.all_reduce(1 << 70)),
    "parts": ("cannot be split into 3 equal parts", lambda: gs.scatter(torch.ones(4))),
    "a rank": ("there is no worker 7", lambda: gs.reduce(1, dst=7)),
    "a root outside": ("is without 0", lambda: gs.broadcast(1, ranks=[1, 2])),
    "itself": ("worker 0 is this one", lambda: gs.send(1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_answer_is_refused_before_anything_moves(kind: str) -> None:
    text, call = REFUSED[kind]

    def script(rank: int) -> int:
        if rank == 0:
            with pytest.raises(ConfigurationError, match=text):
                call()
        return gs.all_reduce(rank)  # goes on

    assert run(script) == [3, 3, 3]


def test_what_only_two_make_is_refused_where_workers_come_back() -> None:
    def script(rank: int) -> None:
        with pytest.raises(ConfigurationError, match=r"gs.broadcast\(value, src=...\)"):
            gs.send(rank, 1) if rank == 0 else gs.recv(0 if rank else 1)

    run(script, is_recoverable=True)


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_whole_numbers_that_take_more_than_64_bits_together_end_the_job(op: str) -> None:
    with pytest.raises((ConfigurationError, JobFailedError), match="takes more than 64 bits"):
        run(lambda rank: gs.all_reduce(1 << 62, op))  # type: ignore[arg-type]


CALLS_OF_DATA = {
    "state_dict": lambda model: model.state_dict(),
    "predict": lambda model: model.predict(torch.ones(1, 4)),
    "barrier": lambda model: gs.barrier(),
    "all_reduce": lambda model: gs.all_reduce(1.0),
    "broadcast": lambda model: gs.broadcast(1.0, ranks=[0, 1]),
}


@pytest.mark.parametrize(
    ("name", "is_recoverable"),
    [*((name, True) for name in CALLS_OF_DATA), ("barrier", False), ("all_reduce", False)],
)
def test_a_call_of_all_by_a_data_set_is_refused_at_once(name: str, is_recoverable: bool) -> None:
    """Where lost workers are waited for, and where the data set does not lead to the Model."""

    class Calling(torch.utils.data.Dataset[Any]):
        def __init__(self, model: gs.Model | None) -> None:
            self.model, self.inner = model, batches().dataset

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index == 5:
                CALLS_OF_DATA[name](self.model)
            return self.inner[index]

    def script(rank: int) -> None:
        net = plain_net(place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        data = Calling(model if is_recoverable else None)
        model.train(1, torch.utils.data.DataLoader(data, batch_size=4))

    with pytest.raises(ConfigurationError, match=rf"{name}\(\) is called by a loader or its data"):
        run(script, is_recoverable=is_recoverable)


@pytest.mark.parametrize("is_recoverable", [False, True])
@pytest.mark.parametrize("name", CALLS_OF_DATA)
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("loss", "forward or a loss: they are recorded once"),
        ("metric", "a metric: metrics run on one worker alone"),
        ("compute", "a metric: metrics run on one worker alone"),
    ],
)
def test_a_call_of_all_where_others_do_not_make_it_is_refused_at_once(
    place: str, why: str, name: str, is_recoverable: bool
) -> None:
    models: dict[int, gs.Model] = {}

    class Metric(gs.metrics.Metric):
        def reset(self) -> None:
            pass

        def update(self, **given: Any) -> None:
            call("metric")

        def compute(self) -> float:
            call("compute")
            return 0.0

    def call(here: str) -> None:
        if here == place:  # metrics run on one worker, and a test's workers record once
            CALLS_OF_DATA[name](models[gs.get_rank()])

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        call("loss")
        return nn.functional.cross_entropy(outputs, target)

    def script(rank: int) -> None:
        net = plain_net(place=True)
        models[rank] = model = gs.Model(net, loss, adam(net), metrics={"own": Metric()})
        if place == "loss":
            model.train(1, batches())
        model.eval(batches())

    with pytest.raises(ConfigurationError, match=rf"{name}\(\) cannot be called in {why}"):
        run(script, is_recoverable=is_recoverable)


PLACES_OF_CODE = ("kept whole", "hook")


@pytest.mark.parametrize("is_recoverable", [False, True])
@pytest.mark.parametrize("name", CALLS_OF_DATA)
@pytest.mark.parametrize("place", PLACES_OF_CODE)
def test_a_call_of_all_in_code_that_a_step_runs_is_refused_at_once(
    place: str, name: str, is_recoverable: bool
) -> None:
    models: dict[int, gs.Model] = {}

    def script(rank: int) -> None:
        net = with_code(place, lambda: CALLS_OF_DATA[name](models[gs.get_rank()]))
        models[rank] = model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        model.train(1, batches())

    with pytest.raises(ConfigurationError, match=rf"{name}\(\) cannot be called in code that a st"):
        run(script, is_recoverable=is_recoverable)


@pytest.mark.parametrize("place", PLACES_OF_CODE)
def test_a_call_of_all_in_code_that_an_own_loop_runs_is_refused_at_once(place: str) -> None:
    def script(rank: int) -> None:
        net = gs.distribute(with_code(place, gs.barrier))
        for inputs, target in gs.loop(batches()):
            nn.functional.cross_entropy(net(inputs), target).backward()

    with pytest.raises(ConfigurationError, match=r"barrier\(\) cannot be called in code that a st"):
        run(script)


@pytest.mark.parametrize("is_recoverable", [False, True])
def test_on_gradients_calls_what_all_workers_call(is_recoverable: bool) -> None:
    class Summing(gs.callbacks.Callback):
        def __init__(self) -> None:
            self.sums: list[Any] = []

        def on_gradients(self, context: gs.callbacks.RunContext) -> None:
            self.sums.append(gs.all_reduce(context.rank))

    def script(rank: int) -> Any:
        net, callback = plain_net(place=True), Summing()
        gs.Model(net, nn.CrossEntropyLoss(), adam(net)).train(1, batches(), [callback])
        return callback.sums

    assert run(script, is_recoverable=is_recoverable) == [[3, 3, 3]] * NUM_WORKERS


def with_code(place: str, call: Callable[[], Any]) -> nn.Module:
    """A network of which one worker makes this call in each step, and no recording does."""

    class Calling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if place == "kept whole" and not hasattr(x, "fake_mode"):
                call()
            return super().forward(x)

    net = plain_net(place=True)
    assert isinstance(net, nn.Sequential)
    net[2] = layer = Calling(8, 8).place(2)
    if place == "kept whole":
        gs.opaque(layer)
    else:
        layer.weight.register_hook(lambda gradient: call())
    return net
