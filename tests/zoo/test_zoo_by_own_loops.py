"""Models of transformers under own loops, layer after layer on three workers, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, Loop, assert_same_bits
from recovery_helpers import threads_as_workers
from torch.nn.utils import clip_grad_norm_
from zoo_batches import batches_by
from zoo_models import MODELS, ZooModel
from zoo_placements import by_layer

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


def own_loop(model: ZooModel) -> Loop:
    """Two AdamW steps with clipping, then an evaluation."""

    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = model.make()
        by_layer(max(ranks) + 1)(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        net = distribute(net)
        batches = batches_by(model.batch)
        for batch in batches[:2]:
            loss = net(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            yield loss.item(), clip_grad_norm_(net.parameters(), 1.0).item()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            yield net(**batches[2]).loss.item()
        yield dict(net.state_dict())

    return loop


QUICK = [name for name, model in MODELS.items() if model.quick][:2]


@pytest.mark.parametrize("name", QUICK)
def test_a_sample_of_the_zoo_keeps_its_bits_under_an_own_loop(name: str) -> None:
    assert_same_bits(own_loop(MODELS[name]), 3)


@pytest.mark.zoo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_its_bits_under_an_own_loop(name: str) -> None:
    assert_same_bits(own_loop(MODELS[name]), 3)
