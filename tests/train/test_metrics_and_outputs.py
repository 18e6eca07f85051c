"""Functions as metrics, outputs for a whole loader, a loss beside logits: alone and on workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recovery_features.parts import adam, batches, pairs, plain_net, put
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn
from torch.utils.data import DataLoader

import graphsplit as gs
from graphsplit.errors import ConfigurationError, JobFailedError
from graphsplit.testing.compare import difference

assert threads_as_workers
NUM_WORKERS = 3
pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("threads_as_workers")]


def ordered() -> DataLoader[Any]:
    return DataLoader(pairs(20), batch_size=8)  # the last batch is smaller


def largest(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.max() + target[0]


def everywhere(script: Callable[[], Any], expected: Any) -> None:
    """One process gives this, and so does each of three workers."""
    assert difference(expected, script()) is None
    for found in ThreadCluster(lambda _: script(), NUM_WORKERS).run():
        assert difference(expected, found) is None


def model_of(**options: Any) -> gs.Model:
    net = plain_net(place=True)
    return gs.Model(net, nn.CrossEntropyLoss(), adam(net), **options)


def test_a_function_is_a_metric():
    net = plain_net(place=False).eval()
    total = 0.0
    with torch.no_grad():
        for inputs, target in ordered():
            total += float(largest(net(inputs), target)) * len(inputs)
    everywhere(lambda: model_of(metrics={"L": largest}).eval(ordered()), {"L": total / 20})


def test_predict_over_a_loader():
    net = plain_net(place=False).eval()
    with torch.no_grad():
        expected = [net(inputs) for inputs, _ in ordered()]
    everywhere(lambda: model_of().predict(ordered()), expected)
    assert difference(expected, model_of().predict(iter(ordered()))) is None
    with pytest.raises((ConfigurationError, JobFailedError), match="only once"):
        ThreadCluster(lambda _: model_of().predict(iter(ordered())), NUM_WORKERS).run()
    shuffled = batches()

    def after_training() -> Any:
        model = model_of()
        model.train(1, batches())
        return model.predict(batches())

    assert len(shuffled) == 3
    everywhere(after_training, after_training())


class WithLoss(nn.Module):
    """Returns loss and logits."""

    def __init__(self, place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        put(self, "first", "second", "third", place=place)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.third(torch.relu(self.second(torch.relu(self.first(inputs)))))
        return nn.functional.cross_entropy(logits, labels), logits


def as_mappings() -> list[dict[str, torch.Tensor]]:
    return [{"inputs": inputs, "labels": labels} for inputs, labels in ordered()]


def test_a_loss_beside_logits():
    net = WithLoss(place=False)
    optimizer, losses = adam(net), []
    for batch in as_mappings():
        optimizer.zero_grad()
        loss, _ = net(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    right = sum(int((net(**b)[1].argmax(1) == b["labels"]).sum()) for b in as_mappings())

    def script() -> Any:
        net = WithLoss(place=True)
        model = gs.Model(net, None, adam(net), {"A": gs.metrics.Accuracy()})
        found = [model.train_step(**batch) for batch in as_mappings()]
        return found, model.eval(as_mappings())["A"]

    everywhere(script, (losses, right / 20))


def test_eval_of_nothing_is_an_error():
    def script() -> Any:
        return model_of(metrics={"A": gs.metrics.Accuracy()}).eval([])

    with pytest.raises(ConfigurationError, match="the loader gave no batch"):
        script()
    with pytest.raises((ConfigurationError, JobFailedError), match="the loader gave no batch"):
        ThreadCluster(lambda _: script(), NUM_WORKERS).run()


def test_a_function_that_gives_no_number_is_an_error():
    model = model_of(metrics={"shape": lambda outputs, target: outputs})
    with pytest.raises(ConfigurationError, match=r"metric 'shape' gave \[8, 3\]; expected one num"):
        model.eval(ordered())
    with pytest.raises(ConfigurationError, match="metric 'A' is the class Accuracy"):
        model_of(metrics={"A": gs.metrics.Accuracy})
