"""Functions as metrics, outputs for a whole loader, a loss beside logits: alone and on workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from recovery_features.parts import adam, batches, pairs, plain_net, put
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader

import graphsplit as gs
from graphsplit.errors import ConfigurationError, JobFailedError
from graphsplit.train import arguments

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
    tensors = [inputs for inputs, _ in ordered()]
    for alone in (tensors, [[one] for one in tensors]):
        loader = DataLoader(alone, batch_size=None)  # type: ignore[arg-type]
        everywhere(lambda loader=loader: model_of().predict(loader), expected)
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


class OfTasks(WithLoss):
    """Returns a mapping, as a network of several tasks does."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss, scores = super().forward(inputs, labels)
        return {"loss": loss, self.name: scores}


@pytest.mark.parametrize("name", ["logits", "classes"])
def test_accuracy_finds_logits_in_a_mapping(name: str):
    def script(place: bool = True) -> Any:
        net = OfTasks(place=place)
        net.name = name
        return gs.Model(net, metrics={"A": gs.metrics.Accuracy()}).eval(as_mappings())

    net = WithLoss(place=False).eval()
    if name == "logits":
        right = sum(int((net(**b)[1].argmax(1) == b["labels"]).sum()) for b in as_mappings())
        everywhere(script, {"A": right / 20})
        return
    told = r"found dict of 'loss', 'classes' and \[8\]\n  Fix: .*call them 'logits' in a mapping"
    with pytest.raises(ConfigurationError, match=told):
        script()


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


def two_parts(outputs: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """A loss with its parts."""
    entropy = nn.functional.cross_entropy(outputs, target)
    size = outputs.pow(2).mean()
    return {"loss": entropy + 0.1 * size, "entropy": entropy, "size": size, "each": outputs}


def one_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return two_parts(outputs, target)["loss"]


def parts_of_a_plain_loop(num_microbatches: int) -> list[tuple[Any, ...]]:
    """Of each step the loss, its parts, and the outputs."""
    net = plain_net(place=False)
    optimizer, found = adam(net), []
    seed, is_split = torch.initial_seed(), num_microbatches > 1
    for step, batch in enumerate(ordered()):
        optimizer.zero_grad()
        before, made, each = torch.get_rng_state(), [], []
        pieces = gs.split_microbatches(batch, num_microbatches)
        for index, ((inputs, target), weight) in enumerate(pieces):
            if is_split:
                torch.set_rng_state(gs.microbatch_rng_state(seed, step, index))
            outputs = net(inputs)
            parts = two_parts(outputs, target)
            (parts["loss"] * weight if is_split else parts["loss"]).backward()
            made.append((parts, weight))
            each.append(outputs.detach().clone())
        if is_split:
            torch.set_rng_state(before)
        optimizer.step()
        loss, *others = (
            sum(parts[n].detach() * weight for parts, weight in made)
            if is_split
            else made[0][0][n].detach()
            for n in ("loss", "entropy", "size")
        )
        parts = dict(zip(("entropy", "size"), others, strict=True))
        found.append((loss, parts, each if is_split else each[0]))
    return found


class Seen(gs.callbacks.Callback):
    """Keeps what a step gave."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.steps.append((context.loss, dict(context.losses), context.outputs))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_parts_of_a_loss_and_outputs_reach_train_step_and_callbacks(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
):
    options = {"microbatches": microbatches, "keep_outputs": True}
    with pytest.raises((ConfigurationError, JobFailedError), match="keep_outputs=True in a job th"):
        ThreadCluster(lambda _: model_of(keep_outputs=True), NUM_WORKERS).run()  # it recovers
    monkeypatch.setattr(arguments, "FAIL_FAST", "wait_rejoin")

    def script() -> Any:
        net, seen = plain_net(place=True), Seen()
        model = gs.Model(net, two_parts, adam(net), **options)  # type: ignore[arg-type]
        assert (model.last_losses, model.last_outputs) == ({}, None)
        model.train(1, ordered(), [seen])
        assert difference(seen.steps[-1][1:], (model.last_losses, model.last_outputs)) is None
        return seen.steps

    everywhere(script, parts_of_a_plain_loop(microbatches))


def test_parts_without_outputs_and_as_metrics():
    def script() -> Any:
        net = plain_net(place=True)
        metrics = {"whole": gs.metrics.Loss(), "size": gs.metrics.Loss("size")}
        model = gs.Model(net, two_parts, adam(net), metrics)
        found = []
        for inputs, target in ordered():
            loss = model.train_step(inputs, target)
            found.append((loss, model.last_losses, model.last_outputs))
        return found, model.eval(ordered())

    steps = [(loss, parts, None) for loss, parts, _ in parts_of_a_plain_loop(1)]
    found, means = script()
    assert difference(steps, found) is None and 0.0 < means["size"] != means["whole"]
    everywhere(script, (steps, means))
    net = plain_net(place=False)
    model = gs.Model(net, two_parts, adam(net), {"L": gs.metrics.Loss("no")})
    with pytest.raises(ConfigurationError, match=r"no scalar.*; there is entropy, size"):
        model.eval(ordered())


def as_targets(name: str) -> list[dict[str, torch.Tensor]]:
    return [{"input": inputs, name: target} for inputs, target in ordered()]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_mapping_with_a_loss_fn(microbatches: int):
    def script(batches: Any) -> Any:
        net, seen = plain_net(place=True), Seen()
        metrics = {"A": gs.metrics.Accuracy()}
        model = gs.Model(net, one_loss, adam(net), metrics, microbatches=microbatches)
        model.train(1, batches(), [seen])
        return (
            [loss for loss, *_ in seen.steps],
            model.eval(batches()),
            model.predict(DataLoader(list(pairs(4)), batch_size=2)),
        )

    expected = script(ordered)
    everywhere(lambda: script(lambda: as_targets("labels")), expected)
    with pytest.raises(ConfigurationError, match=r"a mapping with input, y; the Model has a loss"):
        script(lambda: as_targets("y"))


class LargestOfAll:
    """As torchmetrics' metrics are: called, it gives the value of one batch."""

    def reset(self) -> None:
        self.seen: list[torch.Tensor] = []

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.seen.append(preds[target == 0])

    def compute(self) -> torch.Tensor:
        return torch.cat(self.seen).max()

    def __call__(self, preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return preds[target == 0].max()


def test_an_object_that_counts_sees_all_batches():
    net = nn.Identity()
    batches = [
        (torch.tensor([[1.0], [9.0]]), torch.tensor([0, 1])),
        (torch.tensor([[4.0]]), torch.tensor([0])),
    ]
    model = gs.Model(
        net, lambda outputs, target: outputs.sum(), metrics={"Largest": LargestOfAll()}
    )
    found = model.eval(batches)
    assert found == {"Largest": 4.0} and type(found["Largest"]) is float


def of_torchmetrics() -> dict[str, torchmetrics.Metric]:
    return {
        "Accuracy": torchmetrics.Accuracy("multiclass", num_classes=3),
        "F1": torchmetrics.F1Score("multiclass", num_classes=3, average="macro"),
        "AUC": torchmetrics.AUROC("multiclass", num_classes=3),  # keeps all scores
    }


@pytest.mark.parametrize("microbatches", [1, 2])
def test_metrics_of_torchmetrics_see_all_batches(microbatches: int):
    net, metrics = plain_net(place=False).eval(), of_torchmetrics()
    with torch.no_grad():
        for inputs, target in ordered():
            for metric in metrics.values():
                metric.update(net(inputs), target)
    expected = {name: metric.compute().item() for name, metric in metrics.items()}

    def script() -> Any:
        model = model_of(metrics=of_torchmetrics(), microbatches=microbatches)
        return [model.eval(ordered()) for _ in range(2)]

    everywhere(script, [expected, expected])


def test_what_is_no_metric_is_refused():
    with pytest.raises(ConfigurationError, match="an object with reset, update and compute"):
        gs.Model(nn.Identity(), metrics={"Largest": LargestOfAll})


class LargestOf(gs.metrics.Metric):
    """Is updated as metrics of other libraries are; gives all classes' largest scores, or one."""

    def __init__(self, made):
        self.made = made

    def reset(self):
        self.largest = torch.zeros(3)

    def update(self, outputs, target):
        self.largest = torch.maximum(self.largest, outputs.amax(0))

    def compute(self):
        return self.made(self.largest)


def test_a_metric_may_be_updated_as_those_of_other_libraries():
    net = plain_net(place=False).eval()
    with torch.no_grad():
        found = max(0.0, *(net(inputs).max().item() for inputs, _ in ordered()))
    everywhere(lambda: model_of(metrics={"L": LargestOf(torch.max)}).eval(ordered()), {"L": found})


def test_a_metric_that_computes_no_number_is_named():
    model = model_of(metrics={"L": LargestOf(torch.abs)})
    with pytest.raises(ConfigurationError, match=r"metric 'L' gave \[3\]; expected one number"):
        model.eval(ordered())
