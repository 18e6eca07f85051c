"""Writes down what each Model of a script computes, step after step, for ``graphsplit check``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from graphsplit.check.record import (
    STEPS,
    NotedValue,
    NoteKind,
    Notes,
    Operation,
    What,
)
from graphsplit.check.request import NoteRequest, operations_file, read_request, requested_file
from graphsplit.encoding import records
from graphsplit.planning.task import Task
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.witness.operations import WorkersOperations, watching_plain_loop
from graphsplit.witness.values import Generators, ModelValues, plain_value, tensor_value


def witness_for(task: Task) -> Witness | None:
    """The witness that sees what a new Model computes; None where nobody asks."""
    file = requested_file(os.environ)
    return None if file is None else Witness(notebook(file), task)


class Notebook:
    """The notes of this process, of all its Models.

    Args:
        file: Where.
        request: What.

    Attributes:
        num_models: How many Models there are.
    """

    def __init__(self, file: Path, request: NoteRequest) -> None:
        self.request = request
        self.num_models = 0
        self._file = file
        self._generators = Generators()
        self._begun = What.START
        self._numbers: Counter[What] = Counter()
        self._num_noted = 0
        file.touch()

    @property
    def has_enough(self) -> bool:
        """Whether all training steps were noted that were asked for."""
        return self._num_noted >= self.request.num_steps

    @property
    def watches_now(self) -> bool:
        """Whether the operations of the step that has begun are asked for; before all, none is."""
        begun = self._begun.name, self._numbers[self._begun]
        return begun == self.request.operations_of and not self.has_enough

    def note(self, what: What, model: int, number: int, values: Iterator[NotedValue]) -> None:
        """Note some values, and the generators."""
        if self.has_enough:
            return
        record = Notes(what, model, number, (*values, *self._generators.values()))
        self._write(self._file, records.to_text(record))
        self._num_noted += what in STEPS

    def begin(self, what: What) -> int:
        """Begin a step or a call; returns its number."""
        self._begun = what
        self._numbers[what] += 1
        return self._numbers[what]

    def take_back(self, what: What) -> None:
        """There was no such step."""
        self._numbers[what] -= 1

    def note_operation(self, operation: Operation) -> None:
        """Note an operation of the step that is watched."""
        self._write(operations_file(self._file), records.to_text(operation))

    def _write(self, path: Path, line: str) -> None:
        with path.open("a") as file:
            file.write(f"{line}\n")


@lru_cache(maxsize=1)
def notebook(file: Path) -> Notebook:
    """The one of this process."""
    return Notebook(file, read_request(file))


class Witness:
    """Notes what one Model computes."""

    def __init__(self, notebook: Notebook, task: Task) -> None:
        notebook.num_models += 1
        self._notebook = notebook
        self._number = notebook.num_models
        self._task = task
        self._values = ModelValues(task, notebook.request.whole)
        self._has_begun = False
        self._number_now = 0
        self._operations = WorkersOperations(notebook.note_operation)

    @property
    def has_enough(self) -> bool:
        """Whether all training steps were seen that were asked for: the script is to end."""
        return self._notebook.has_enough

    def begins(self, what: What = What.STEP) -> None:
        """A training step begins, or ``forward_backward``."""
        if not self._has_begun:
            self._has_begun = True
            self._note(What.START, 0, self._at_start())
        self._number_now = self._notebook.begin(what)

    def trained(self, loss: torch.Tensor, what: What = What.STEP) -> None:
        """A training step, or ``forward_backward``, has given a loss."""
        self._note(what, self._number_now, self._after_step(loss))

    def stepped(self) -> None:
        """The gradients that ``forward_backward`` has added were used: the end of a step."""
        self._note(What.STEP, self._notebook.begin(What.STEP), self._values.state())

    def of_epoch(self, losses: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """See the training steps of an epoch, by their losses."""
        self.begins()
        for loss in losses:
            self.trained(loss)
            yield loss
            self.begins()
        self._notebook.take_back(What.STEP)  # there was none after the last

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """A call of eval has given metrics."""
        values = (plain_value(NoteKind.METRIC, name, float(v)) for name, v in metrics.items())
        self._note(What.EVAL, self._notebook.begin(What.EVAL), values)

    def predicted(self, outputs: Any) -> None:
        """A call of predict has given outputs."""
        values = self._values.tree(NoteKind.OUTPUT, "", outputs)
        self._note(What.PREDICT, self._notebook.begin(What.PREDICT), values)

    def _note(self, what: What, number: int, values: Iterator[NotedValue]) -> None:
        self._notebook.note(what, self._number, number, values)

    def _at_start(self) -> Iterator[NotedValue]:
        yield plain_value(NoteKind.THREADS, "", torch.get_num_threads())
        yield from self._values.state()

    def _after_step(self, loss: torch.Tensor) -> Iterator[NotedValue]:
        yield tensor_value(NoteKind.LOSS, "", loss, whole=False)
        yield from self._values.state()

    def watch(self, runner: ProgramRunner | None = None) -> AbstractContextManager[None]:
        """The context of a program's run; without one, of a training step of the plain loop."""
        if not self._notebook.watches_now:
            return nullcontext()
        if runner is None:
            return watching_plain_loop(self._task, self._notebook.note_operation)
        return self._operations.watching(runner)
