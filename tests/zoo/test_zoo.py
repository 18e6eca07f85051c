"""Models of transformers under every kind of placement, byte for byte.

Three AdamW steps, then an eval and a predict, for each model; see ``zoo_placements.py``.

    make test-zoo                                       all of it, about twenty minutes
    make test-zoo PYTEST_ARGS="-k llama"                some models
    make pytest PYTEST_ARGS="tests/zoo"                 the sample that `make test` runs
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from torch import nn
from zoo_batches import batches_by
from zoo_models import MODELS, REFUSED, ZooModel
from zoo_placements import KINDS, placements

from graphsplit.errors import CaptureError

SIZES = {"one": (1,), "layers": (2, 3, 5), "modules": (2, 3, 5), "operations": (2, 3, 5)}


def adamw(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=0.01)


def check(model: ZooModel, captures: Captures, *kinds: tuple[str, tuple[int, ...]]) -> None:
    """Compare a model under some kinds of placement, each over numbers of workers."""
    batches = batches_by(model.batch)
    first, *others = [own for kind, sizes in kinds for own in placements(captures, kind, sizes)]
    try:
        assert_same_bits(model.make, batches, make_optimizer=adamw, beside=others, **first)
    except Exception as error:
        raise AssertionError(f"{model.name}: {error}") from error


@pytest.fixture(scope="module")
def captures_of() -> Iterator[dict[str, Captures]]:
    """Graphs by model: one model is captured once for all its placements."""
    kept: dict[str, Captures] = {}
    yield kept
    kept.clear()


@pytest.mark.zoo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_its_bits(name: str, kind: str, captures_of: dict[str, Captures]) -> None:
    if name not in captures_of:
        captures_of.clear()  # the models before it are done
        captures_of[name] = Captures()
    check(MODELS[name], captures_of[name], (kind, SIZES[kind]))


@pytest.mark.zoo
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_branches_on_values_is_refused(name: str) -> None:
    model = REFUSED[name]
    with pytest.raises(CaptureError, match="the code that runs depends on the values of a tensor"):
        assert_same_bits(model.make, batches_by(model.batch), num_workers=1, make_optimizer=adamw)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.quick])
def test_a_sample_of_the_zoo_keeps_its_bits(name: str) -> None:
    check(MODELS[name], Captures(), ("layers", (3,)), ("operations", (2,)))


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_microbatches_without_padding_beside_one_with_some(ranks: list[int]) -> None:
    """As in eager mode, a mask of ones is left out, and the other one is not."""
    model = MODELS["distilbert"]
    assert_same_bits(
        model.make,
        batches_by(model.batch),
        num_workers=2,
        place=lambda network: network.place("MS_WORKER", ranks),
        make_optimizer=adamw,
        microbatches=2,
    )
