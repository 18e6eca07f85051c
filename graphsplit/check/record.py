"""A process's notes of a run: frozen values, and their lines in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from graphsplit.encoding import records

_Note = TypeVar("_Note")


class What(Enum):
    """The moment at which something was noted."""

    START = "start"
    STEP = "training step"
    BATCH = "forward_backward"
    EVAL = "eval"
    PREDICT = "predict"
    LOOP_STEP = "optimizer.step() in a loop of the script's own"


STEPS = frozenset({What.STEP, What.LOOP_STEP})
"""What counts as a training step."""


class NoteKind(Enum):
    """The kinds of values."""

    LOSS = "loss"
    METRIC = "metric"
    OUTPUT = "output"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer state"
    SETTING = "optimizer setting"
    SCALER = "scaler"
    PARAMETER = "parameter"
    GENERATOR = "generator"
    THREADS = "threads"


LIVES_SOMEWHERE = frozenset(
    {NoteKind.BUFFER, NoteKind.GRADIENT, NoteKind.OPTIMIZER, NoteKind.SETTING, NoteKind.PARAMETER}
)
"""Kinds of which each worker has its own part. All others every worker has whole."""


TORCHS = "torch"
"""The generator that ``gs.init()`` seeds where the script does not; nobody seeds the others."""

UNTOUCHED = "as it was when the first Model was built"
"""The form of a generator's state while nobody has used it since: where nobody seeds it, Python has
started it anew in each process."""


@dataclass(frozen=True)
class NotedValue:
    """One value.

    Attributes:
        kind: What it is.
        name: Which one: ``"fc1.weight"``.
        form: Its dtype and shape, ``"float32[10, 5]"``; or the type of what is no tensor.
        digest: Equal for equal bytes alone.
        elements: Its elements as text, where they are few or were asked for.
    """

    kind: NoteKind
    name: str
    form: str
    digest: str
    elements: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[NoteKind, str]:
        """The key by which it is compared."""
        return self.kind, self.name

    def is_same(self, other: NotedValue) -> bool:
        """Whether both are the same bits of the same form."""
        return (self.form, self.digest) == (other.form, other.digest)

    def __str__(self) -> str:
        return f"{self.kind.value} of {self.name}" if self.name else self.kind.value


@dataclass(frozen=True)
class Notes:
    """A process's notes at one moment.

    Attributes:
        what: What was going on.
        model: Number of the Model in the script, from 1.
        number: The number of the training step in the script, from 1; of a call of eval, predict or
            forward_backward likewise; 0 for the start.
        values: What it held.
    """

    what: What
    model: int
    number: int
    values: tuple[NotedValue, ...] = ()

    @property
    def place(self) -> tuple[What, int, int]:
        """Where in the run this is."""
        return self.what, self.model, self.number


@dataclass(frozen=True)
class Operation:
    """One operation that a process ran in a training step.

    Attributes:
        name: As it was run: ``"aten.mul.Tensor"``.
        digests: Of its results.
        order: Where in the step it comes, comparable between workers; of the plain loop the count.
        target: The operation of the captured graph, empty in the plain loop and outside of forward.
        module: The path of the innermost module around it; None where it is in none.
        source: The user's line.
        reads: Names of the parameters and buffers that it reads, where they are known.
    """

    name: str
    digests: tuple[str, ...]
    order: tuple[int, ...] = ()
    target: str = ""
    module: str | None = None
    source: str = ""
    reads: tuple[str, ...] = ()


def read_lines(kind: type[_Note], lines: Iterable[str]) -> tuple[_Note, ...]:
    """The notes of one kind. A last line that was cut off with its process is left out."""
    return tuple(records.from_text(kind, line) for line in lines if line.endswith("\n"))
