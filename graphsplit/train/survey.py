"""Train as the plain loop, and find everything that a job of workers would refuse.

A job ends with the first refusal. This goes on: it tries for each Model, and each new kind of batch
in train, eval and predict, whether there is a plan; then it runs the batch eagerly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from graphsplit.batches.microbatches import Division
from graphsplit.batches.signature import Arguments, Signature, split_batch
from graphsplit.capture.graph import Mode
from graphsplit.capture.python.answers import Answers
from graphsplit.capture.state.kept_names import give_back
from graphsplit.check.request import read_request, requested_file, write_refusal
from graphsplit.errors import GraphsplitError
from graphsplit.frames import line_now
from graphsplit.planning.modes import as_in
from graphsplit.planning.passes import capture_graph, plan_ahead
from graphsplit.planning.task import Task, check_trained
from graphsplit.program.lower import StepPart
from graphsplit.train.engine import EagerEngine
from graphsplit.train.metrics import Metric


def one_process_engine(task: Task) -> EagerEngine:
    """The engine that runs a Model's steps in one process."""
    file = requested_file(os.environ)
    request = None if file is None else read_request(file)
    if file is None or request is None or not request.survey_for:
        return EagerEngine(task)
    path = file
    return SurveyEngine(task, request.survey_for, lambda text: write_refusal(path, text))


class SurveyEngine(EagerEngine):
    """The plain loop, and beside it what a job would plan.

    Args:
        task: What the Model runs.
        num_workers: How many workers the job would have.
        note: Takes the text of each refusal.
    """

    def __init__(self, task: Task, num_workers: int, note: Callable[[str], None]) -> None:
        super().__init__(task)
        self._num_workers = num_workers
        self._note = note
        self._seen: set[tuple[Mode, str]] = set()
        self._told: set[tuple[str, str]] = set()
        self._try("a Model", lambda: check_trained(task))

    def train_step(self, division: Division) -> torch.Tensor:
        """Plan it, then train."""
        self._look_at_all(division)
        return super().train_step(division)

    def forward_backward(self, division: Division, scale: float) -> torch.Tensor:
        """Plan it, then add its gradients."""
        self._look_at_all(division)
        return super().forward_backward(division, scale)

    def eval_epoch(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Plan each batch, then evaluate it."""
        return super().eval_epoch(self._looking(loader), metrics)

    def predict(self, arguments: Arguments) -> Any:
        """Plan it, then run it."""
        self._look(Mode.PREDICT, arguments)
        return super().predict(arguments)

    def _look_at_all(self, division: Division) -> None:
        for microbatch in division.microbatches:
            self._look(Mode.TRAIN, microbatch, is_microbatched=bool(division.weights))

    def _looking(self, loader: Iterable[Any]) -> Iterator[Any]:
        for batch in loader:
            arguments = split_batch(batch, has_loss_fn=self._task.loss_fn is not None)
            self._look(Mode.EVAL, arguments)
            yield batch

    def _look(self, mode: Mode, arguments: Arguments, *, is_microbatched: bool = False) -> None:
        """Plan a kind of batch that is new."""

        def plan() -> None:
            signature = Signature.of(arguments)
            if (mode, signature.digest) not in self._seen:
                self._seen.add((mode, signature.digest))
                self._plan(mode, signature, StepPart(is_microbatched=is_microbatched))

        with torch.random.fork_rng(devices=()):
            self._try(mode.value, plan)

    def _plan(self, mode: Mode, signature: Signature, part: StepPart) -> None:
        task = self._task
        try:
            with as_in(mode, task.network):
                graph = capture_graph(task, mode, signature, answers=Answers())
        finally:
            give_back(task.network)
        plan_ahead(graph, task, part, num_workers=self._num_workers, owners={})

    def _try(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except GraphsplitError as error:
            text = f"{type(error).__name__}: {error}"
            if (what, text) not in self._told:  # once, however many kinds of batches meet it
                self._told.add((what, text))
                self._note(f"{what}, {line_now(sys._getframe())}: {text}")
