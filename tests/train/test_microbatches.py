"""How batches are split, what each microbatch counts, and what is refused."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.batches.microbatches import Divider
from graphsplit.errors import ConfigurationError


def sizes(batch: Any, number: int) -> list[int]:
    return [len(piece[0]) for piece, _ in gs.split_microbatches(batch, number)]


@pytest.mark.parametrize(
    ("rows", "number", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (10, 4, [3, 3, 2, 2]),
        (3, 4, [1, 1, 1]),
        (1, 4, [1]),
        (5, 1, [5]),
        (0, 4, [0]),
    ],
)
def test_the_first_microbatches_get_the_rows_that_are_left_over(rows, number, expected):
    assert sizes((torch.arange(rows), torch.zeros(rows, 2)), number) == expected


def test_weights_are_the_shares_of_the_rows():
    pairs = gs.split_microbatches((torch.arange(10),), 4)
    assert [weight for _, weight in pairs] == [3 / 10, 3 / 10, 2 / 10, 2 / 10]


def test_microbatches_are_views_in_the_structure_of_the_batch():
    rows, flags = torch.arange(6.0).view(3, 2), torch.tensor(2.0)
    batch = {"x": [rows, (flags, None, "text", 3)], "y": rows.t().contiguous().t()}
    (first, _), (second, _) = gs.split_microbatches(batch, 2)
    assert first["x"][0].data_ptr() == rows.data_ptr() and len(first["x"][0]) == 2
    assert second["x"][0].data_ptr() == rows[2:].data_ptr()
    assert second["x"][1] == (flags, None, "text", 3)
    assert second["y"].stride() == batch["y"].stride()


@dataclasses.dataclass
class Inner:
    rows: torch.Tensor


@dataclasses.dataclass
class Outer:
    inner: Inner
    name: str


def test_dataclasses_and_mappings_of_all_kinds_are_taken_apart():
    (first, _), _ = gs.split_microbatches(Outer(Inner(torch.arange(4)), "a"), 2)
    assert isinstance(first, Outer) and first.name == "a"
    assert first.inner.rows.tolist() == [0, 1]
    (first, _), _ = gs.split_microbatches(UserDict(x=torch.arange(4)), 2)
    assert first["x"].tolist() == [0, 1]


def test_a_tensor_with_other_rows_is_named_with_the_way_out():
    batch = {"ids": torch.zeros(4, 2), "positions": torch.zeros(2)}
    with pytest.raises(ConfigurationError) as caught:
        gs.split_microbatches(batch, 2)
    assert str(caught.value) == (
        "a batch cannot be split along dimension 0: batch['positions'] has 2 rows (shape [2]), "
        "batch['ids'] has 4\n"
        "  Fix: let the Model split it: Model(..., split=fn), fn(batch, M) -> sequence of batches."
    )


def test_a_batch_with_nothing_to_split_is_refused():
    with pytest.raises(ConfigurationError, match="no tensor with a dimension to split"):
        gs.split_microbatches({"scale": torch.tensor(1.0), "n": 3}, 2)


@pytest.mark.parametrize("number", [0, -1, 2.0, True, None])
def test_a_number_of_microbatches_that_is_none_is_refused(number):
    with pytest.raises(ConfigurationError, match="expected an int of 1 or more"):
        gs.split_microbatches((torch.zeros(4),), number)


def divided(divider: Divider, rows: int = 4) -> Any:
    batch = (torch.arange(float(rows)), torch.arange(rows))
    return divider.divide(batch, has_loss_fn=True)


def test_loss_weights_are_shares_of_what_the_function_counts():
    counts = iter([torch.tensor(3), 1.0, 0, 4])
    division = divided(Divider(4, None, lambda x, y: next(counts)))
    assert division.weights == (3 / 8, 1.0 / 8, 0 / 8, 4 / 8)


def test_the_function_gets_inputs_and_target_or_the_keywords():
    seen = []
    divided(Divider(2, None, lambda *args: seen.append(args) or 1))
    assert [[part.tolist() for part in args] for args in seen] == [[[0, 1]] * 2, [[2, 3]] * 2]
    named = Divider(2, None, lambda *, ids: len(ids))
    division = named.divide({"ids": torch.arange(3)}, has_loss_fn=False)
    assert division.weights == (2 / 3, 1 / 3)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (-1, r"loss_weight returned -1; expected a finite number"),
        (float("nan"), r"loss_weight returned nan"),
        ("many", r"loss_weight returned a str"),
        (torch.zeros(2), r"loss_weight returned a tensor of shape \[2\]"),
        (0, r"loss_weight gives \[0, 0\] for the microbatches.*at least one is above 0"),
    ],
)
def test_a_loss_weight_that_cannot_be_used_is_refused(count, message):
    with pytest.raises(ConfigurationError, match=message):
        divided(Divider(2, None, lambda x, y: count))


def test_a_split_that_returns_nothing_is_told_so():
    with pytest.raises(ConfigurationError, match=r"split returned an empty list; expected"):
        divided(Divider(2, lambda batch, number: []))


@pytest.mark.parametrize("made", [None, [], "ab", iter([])])
def test_a_split_that_returns_no_batches_is_refused(made):
    with pytest.raises(ConfigurationError, match=r"split returned .*one or more batches"):
        divided(Divider(2, lambda batch, number: made))


def test_a_split_whose_rows_cannot_be_counted_asks_for_loss_weight():
    def split(batch: Any, number: int) -> Any:
        return [(batch[0], batch[1][:2])] * 2

    with pytest.raises(ConfigurationError) as caught:
        divided(Divider(2, split))
    assert str(caught.value) == (
        "a microbatch of split cannot be split along dimension 0: batch[1] has 2 rows (shape [2]), "
        "batch[0] has 4\n"
        "  Fix: say what each microbatch's loss counts: Model(..., loss_weight=fn)."
    )


def test_a_generator_state_follows_from_seed_step_and_microbatch_alone():
    state = gs.microbatch_rng_state(3, 5, 1)
    torch.rand(7)
    assert torch.equal(state, gs.microbatch_rng_state(3, 5, 1))
    others = [(3, 5, 2), (3, 6, 1), (4, 5, 1), (35, 1, 1), (-3, 5, 1), (2**64 - 1, 5, 1)]
    assert not any(torch.equal(state, gs.microbatch_rng_state(*other)) for other in others)
    generator = torch.Generator()
    generator.set_state(state)
    assert generator.initial_seed() == 9894612663654252860  # the same on every machine, for good


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(self.first(x), 0.5, self.training))


def data() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator), torch.ones(n, 1)) for n in (8, 7, 3)]


def printed_loop(batches: list[Any], number: int) -> tuple[list[torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    network, loss_fn = Dropped(), nn.MSELoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    seed, losses = torch.initial_seed(), []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        before, parts = torch.get_rng_state(), []
        for m, ((x, y), weight) in enumerate(gs.split_microbatches(batch, number)):
            torch.set_rng_state(gs.microbatch_rng_state(seed, step, m))
            loss = loss_fn(network(x), y)
            (loss * weight).backward()
            parts.append(loss.detach() * weight)
        torch.set_rng_state(before)
        optimizer.step()
        losses.append(sum(parts))
    return losses, network


def test_a_model_in_one_process_is_the_printed_loop():
    losses, expected = printed_loop(data() + data(), 4)
    end = torch.get_rng_state()
    torch.manual_seed(0)
    network = Dropped()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = gs.Model(network, nn.MSELoss(), optimizer, microbatches=4)
    seen: list[torch.Tensor] = []

    class Keep(gs.callbacks.Callback):
        def on_step_end(self, context: Any) -> None:
            seen.append(context.loss)

    model.train(1, data(), [Keep()])
    seen += [model.train_step(*batch) for batch in data()]
    assert all(map(torch.equal, losses, seen)) and len(seen) == 6
    for mine, reference in zip(network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, reference)
    assert torch.equal(torch.get_rng_state(), end)


def test_one_microbatch_is_the_plain_loop_whose_generator_runs_on():
    torch.manual_seed(0)
    network = Dropped()
    before = torch.get_rng_state()
    model = gs.Model(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1))
    model.train_step(*data()[0])
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches=0; expected an int of 1 or more"),
        ({"microbatches": "4"}, "microbatches='4'; expected an int"),
        ({"microbatches": True}, "microbatches=True; expected an int"),
        ({"microbatches": 2, "split": 3}, "split is an int; expected a function"),
        ({"microbatches": 2, "loss_weight": [1]}, "loss_weight is a list; expected a function"),
        ({"loss_weight": len}, "loss_weight is given, but microbatches=1"),
        ({"split": len}, "split is given, but microbatches=1"),
    ],
)
def test_arguments_of_a_model_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        gs.Model(nn.Linear(2, 2), nn.MSELoss(), **options)


def test_explain_shows_the_plan_of_a_microbatch():
    network = nn.Linear(4, 2)
    model = gs.Model(
        network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1), microbatches=4
    )
    whole = gs.Model(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1))
    batch = (torch.randn(8, 4), torch.randn(8, 2))
    texts = whole.explain(*(part[:2] for part in batch)), model.explain(*batch)
    text, of_microbatch = (text.partition("\n\nCompute")[0] for text in texts)
    assert of_microbatch == text.replace("per step", "per microbatch")


def test_a_batch_by_position_and_keyword_cannot_be_split_by_a_function():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
            return (self.layer(x) * scale).mean()

    def model(**options: Any) -> gs.Model:
        network = Loss()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        return gs.Model(network, optimizer=optimizer, microbatches=2, **options)

    assert model().train_step(torch.randn(4, 4), scale=torch.ones(4, 1)).dim() == 0
    with pytest.raises(ConfigurationError, match=r"split=fn, which takes one batch"):
        model(split=lambda batch, number: [batch]).train_step(torch.randn(4, 4), scale=2.0)
