"""The results of calls, as lines of text: a worker that comes back is given them again.

One line for each call: its number, its name, its result as packed values. A further line holds the
states of the generators after a call, where the script drew from them before the next one.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit import errors
from graphsplit.encoding.packed import Packed
from graphsplit.encoding.values import from_text, to_text
from graphsplit.errors import CheckpointError, FrameError, GraphsplitError, StateError
from graphsplit.job.stream import joined

MAX_RESULTS_BYTES = 256 * 1024 * 1024
"""How much one worker remembers; what is returned beyond it cannot be given again."""


def pack(value: Any, *, what: str) -> str:
    """A value as text.

    Raises:
        StateError: It cannot be written.
    """
    return base64.b64encode(joined(Packed.of(value, what=what).pieces())).decode()


def unpack(text: Any, *, what: str) -> Any:
    """The value that was packed.

    Raises:
        CheckpointError: It is none.
    """
    try:
        octets = bytearray(base64.b64decode(text, validate=True))
        pieces = [torch.frombuffer(octets, dtype=torch.uint8)] if octets else []
        return Packed.read(pieces, what=what).value()
    except (FrameError, TypeError, ValueError) as error:
        raise CheckpointError(f"{what} is no packed value: {error}") from None


@dataclass
class Remembered:
    """One call as it is remembered.

    Attributes:
        name: What was called.
        model: Index of the Model; -1 for none.
        result: What it returned, packed; None where it cannot be given again.
        error: Class and message of what it raised, if that is its result.
        after: What else the call changed: see the kind of the call.
        kept: Where tensors stood that code keeps, packed, if there were any.
        generators: The generators' states after it, packed, if they matter.
    """

    name: str
    model: int
    result: Any = None
    error: list[str] | None = None
    after: Any = None
    kept: Any = None
    generators: Any = None

    def raise_error(self) -> None:
        """Raise what the call raised."""
        if self.error is not None:
            kind = getattr(errors, self.error[0], GraphsplitError)
            is_ours = isinstance(kind, type) and issubclass(kind, GraphsplitError)
            raise (kind if is_ours else GraphsplitError)(self.error[1])


@dataclass
class Results:
    """All lines, and what they take.

    Attributes:
        lines: One for each call, in order, and those of generators.
        lost: The calls whose results cannot be given again, in words.
    """

    lines: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _size: int = 0

    def add(self, node: dict[str, Any]) -> None:
        """Add a line."""
        line = to_text(node)
        self._size += len(line)
        self.lines.append(line)

    def add_call(
        self,
        ordinal: int,
        name: str,
        model: int,
        pack_result: Callable[[], str],
        **besides: Any,
    ) -> None:
        """Add a call that has returned, and what counts besides of ``Remembered``'s attributes."""
        node: dict[str, Any] = {"call": ordinal, "name": name, "model": model}
        node.update({name: value for name, value in besides.items() if value is not None})
        try:
            result = pack_result()
            if self._size + len(result) > MAX_RESULTS_BYTES:
                raise StateError(f"it takes {len(result)} bytes")
            node["result"] = result
        except StateError as error:
            node["lost"] = str(error)
            self.lost.append(f"call {ordinal + 1} of the script, {name}(): {error}")
        self.add(node)

    def add_error(self, ordinal: int, name: str, model: int, error: Exception) -> None:
        """Add a call that has raised what all workers raise alike."""
        told = [type(error).__name__, str(error)]
        self.add({"call": ordinal, "name": name, "model": model, "error": told})

    def cut(self, num_lines: int) -> None:
        """Forget the calls that came after; they are made again. What was looked up stays."""
        if num_lines < len(self.lines):
            later = [line for line in self.lines[num_lines:] if "call" not in from_text(
                line, what="a remembered call")]  # fmt: skip
            self.replace([*self.lines[:num_lines], *later])

    def replace(self, lines: Iterable[str]) -> None:
        """Take the lines of an earlier process."""
        self.lines = list(lines)
        self._size = sum(map(len, self.lines))
        self.lost = []


class Memory:
    """The results of an earlier process, call by call.

    Args:
        lines: Its lines.

    Raises:
        CheckpointError: They are none.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._calls: dict[int, Remembered] = {}
        self._looks: list[Remembered] = []
        for line in lines:
            node = from_text(line, what="a remembered call")
            number = node.get("call")
            if "generators" in node and number in self._calls:
                self._calls[number].generators = node["generators"]
                continue
            found = Remembered(
                str(node.get("name")),
                int(node.get("model", -1)),
                node.get("result"),
                node.get("error"),
                node.get("after"),
                node.get("kept"),
            )
            if type(number) is int:
                self._calls[number] = found
            else:
                self._looks.append(found)

    def call(self, ordinal: int, name: str, model: int) -> Remembered:
        """The result of a call.

        Raises:
            StateError: The script makes another call than before, or the result was not kept.
        """
        found = self._calls.get(ordinal)
        if found is None or (found.name, found.model) != (name, model):
            was = "nothing" if found is None else f"{found.name}() of {_model(found.model)}"
            raise StateError(
                f"call {ordinal + 1} of the script is {name}() of {_model(model)}; before the "
                f"restart it was {was}\n  Fix: the script must make the same calls each time it is "
                f"started: let nothing depend on the time, or on files that it changes itself."
            )
        if found.result is None and found.error is None:
            raise StateError(
                f"call {ordinal + 1} of the script, {name}(), returned more than can be kept, and "
                f"cannot be given again"
            )
        return found

    def look(self, name: str, model: int) -> Remembered | None:
        """The result of the next call that concerned one worker alone; None if there was none."""
        if self._looks and (self._looks[0].name, self._looks[0].model) == (name, model):
            return self._looks.pop(0)
        return None


def _model(index: int) -> str:
    return "graphsplit" if index < 0 else f"Model {index}"
