"""The place where a worker is in the script, as its messages about values say it.

All workers come to the same lines in the same order. A message that another line has sent, or that
is about another value, is no answer: who gets it says what both workers do, and where.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from graphsplit.errors import CollectiveMismatchError, FrameError, LoaderMismatchError
from graphsplit.frames import line_at, script_frame
from graphsplit.job.job import Job
from graphsplit.job.stream import OtherTopicError
from graphsplit.optimizers.update import MOST_SETTINGS, Settings
from graphsplit.tensor_meta import sample_of

# Numbers and tensors that operations of the script take from outside: each worker has its own.
#
# A value of the loop is on one worker. A target, the weight of a loss, a learning rate is on each:
# an operation takes that of the worker where it runs. Where they differ, as without a common seed,
# a step would mix them, and nobody would see it. So each worker keeps a checksum of all that it
# met, which goes with messages that are sent anyway.
_NUMBERS = (type(None), float, bool, int, str, complex)  # the usual ones first
_MOST_NAMED = 8
_MOST_OPERANDS = 16  # of one operation that are shown
_MOST_OPTIMIZERS = 4  # whose settings are told: those that came first into use, of the latest


@dataclass(frozen=True)
class TakenNumbers:
    """The numbers of one worker at one moment, to be compared with those of another.

    Attributes:
        checksum: Of all that operations took from outside.
        settings: How optimizers step, as numbers.
    """

    checksum: int
    settings: tuple[float, ...]


class FromOutside:
    """The checksum of what the operations of one worker took from outside.

    Attributes:
        count: How many operations were noted, calls of networks, and backwards.
        checksum: Of all of them.
        written: Of those that change what one worker has.
    """

    def __init__(self) -> None:
        self.count = 0
        self.checksum = self.written = 0
        self._settings = Settings(())
        self._stepped: deque[weakref.ref[Any]] = deque(maxlen=_MOST_OPTIMIZERS)
        self._numbers: tuple[float, ...] = ()
        self._latest: deque[_Noted] = deque(maxlen=_MOST_NAMED)
        self._write: _Noted | None = None

    def note(
        self,
        name: str,
        operands: Iterable[Any],
        marks: Iterable[int] = (),
        *,
        is_write: bool = False,
    ) -> None:
        """Take note of an operation's operands; values of the loop are not among them.

        Args:
            name: The operation, as errors name it.
            operands: Numbers and tensors count; all else is left out.
            marks: What tells the values of the loop that it is given from others.
            is_write: Whether it changes what one worker has: the next message names it, for the
                others do not know of it where they differ.
        """
        found: list[Any] = []
        own = 0
        self.count += 1
        for operand in operands:
            if type(operand) in _NUMBERS:
                found.append(operand)
            elif isinstance(operand, torch.Tensor):
                if is_dense(operand):
                    own = zlib.crc32(sample_of(operand), own)
                    found.append(operand.shape)
            elif isinstance(operand, _NUMBERS):
                found.append(operand)
        own = zlib.crc32(repr((name, found, [*marks])).encode(), own)
        self.checksum = (self.checksum * 31 + own) & _SUM
        noted = name, found, line_now()
        self._latest.append(noted)
        if is_write:
            self._write, self.written = noted, (self.written * 31 + own) & _SUM

    def note_emptied(self, mark: int) -> None:
        """Take note that the gradient of a parameter becomes None, or zeros."""
        self.checksum = (self.checksum * 31 + mark) & _SUM
        if not self._latest or self._latest[-1][0] != _EMPTIED:
            self._latest.append((_EMPTIED, [], line_now()))

    def latest_write(self) -> str:
        """The latest operation that changes what one worker has, and its line; told once."""
        noted, self._write = self._write, None
        return "" if noted is None else f", after {_described(noted)}"

    def note_step(
        self, optimizer: torch.optim.Optimizer, values: Iterable[Any], what: str = "step"
    ) -> None:
        """Take note of an optimizer's step, and of the values that it steps by."""
        self.note(f"{type(optimizer).__name__}.{what}", values)
        if not any(known() is optimizer for known in self._stepped):
            self._stepped.append(weakref.ref(optimizer))
            self._settings = Settings([one for known in self._stepped if (one := known())])
        self._numbers = self._settings.numbers()

    def now(self) -> TakenNumbers:
        """All that was noted by now."""
        return TakenNumbers(self.checksum, self._numbers)

    def next(self) -> int:
        """A number for a value, the same on all workers: they come here together."""
        self.count += 1
        return self.count

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, this worker does something alone, as saving: what it meets does not count."""
        before = self.count, self.checksum, self.written
        try:
            yield
        finally:
            self.count, self.checksum, self.written = before

    def compare(
        self,
        told: TakenNumbers,
        rank: int,
        other: int,
        message: torch.Tensor,
        *,
        mine: TakenNumbers,
    ) -> None:
        """Compare it with that of another worker.

        Args:
            told: That of the other one.
            rank: This worker.
            other: That worker.
            message: That of the other one, which says what it does, and where.
            mine: That of this one, at the same place of the script.

        Raises:
            LoaderMismatchError: They differ.
        """
        if told.checksum == mine.checksum:
            self._latest.clear()
            self._write = None
            return
        others = self._settings.differing(mine.settings, told.settings, (rank, other))
        where = f"{'; '.join(others[:_MOST_NAMED])}\n  " if others else ""
        raise LoaderMismatchError(
            f"workers {rank} and {other} ran the script's operations on different numbers or "
            f"tensors: {where}on worker {rank} they were, latest last: {self.described()}; "
            f"worker {other} came to {_text_of(message.numpy().tobytes())}\n"
            f"  Fix: give every worker the same targets, weights and learning rates: seed all "
            f"generators alike, and let none of them depend on the rank. What changes a "
            f"parameter, a gradient, a hook or an optimizer is done by all workers."
        )

    def described(self) -> str:
        """The latest operations, as errors show them."""
        return ", ".join(map(_described, self._latest)) or "none"


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor can be looked at."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


_Noted = tuple[str, list[Any], tuple[CodeType, int] | None]  # with the user's line


def line_now() -> tuple[CodeType, int] | None:
    """The script's innermost line of the stack that runs; quickly: it is asked in every step."""
    frame = script_frame(sys._getframe(2))
    return None if frame is None else (frame.f_code, frame.f_lineno)


def _described(noted: _Noted) -> str:
    name, operands, place = noted
    shown = [
        f"tensor of {tuple(o)}" if isinstance(o, torch.Size) else str(o)
        for o in operands[:_MOST_OPERANDS]
    ] + ["..."] * (len(operands) > _MOST_OPERANDS)
    line = "" if place is None else _line(*place)
    return f"{name}({', '.join(shown)}){line and f' at {line}'}"


_EMPTIED = "zero_grad"
_SUM = (1 << 32) - 1  # of what a message begins with: the checksum, above it the text's size
_TEXT_BITS = 48  # above which stands how many settings follow it
_HEAD_BYTES = 8
WITHOUT_PLACE = 1 << 40  # topics of messages that are a value, and do not begin with a place
_MOST_TEXT_BYTES = 500
MOST_TOLD_BYTES = _HEAD_BYTES + _MOST_TEXT_BYTES + 8 * MOST_SETTINGS


@dataclass(frozen=True)
class Here:
    """A place of the script.

    Attributes:
        job: The workers.
        taken: What operations of the script took from outside.
        doing: What the script does there: ``"backward()"``.
    """

    job: Job
    taken: FromOutside
    doing: str

    def __str__(self) -> str:
        frame = script_frame(sys._getframe(1))
        line = "" if frame is None else _line(frame.f_code, frame.f_lineno)
        return f"{self.doing}{line and f' at {line}'}"

    def told(self) -> torch.Tensor:
        """The beginning of a message: the checksum of what was taken from outside, and the place.

        After them optimizers' settings, as numbers. It has ``MOST_TOLD_BYTES`` at most.
        """
        text = f"{self}{self.taken.latest_write()}".encode()[-_MOST_TEXT_BYTES:]
        taken = self.taken.now()
        head = taken.checksum | len(text) << 32 | len(taken.settings) << _TEXT_BITS
        numbers = array("d", taken.settings).tobytes()
        return torch.frombuffer(
            bytearray(head.to_bytes(_HEAD_BYTES, "little") + text + numbers), dtype=_BYTE
        )

    def read(
        self, message: torch.Tensor, source: int, *, mine: TakenNumbers | None = None
    ) -> torch.Tensor:
        """The rest of another worker's message, after its beginning.

        Args:
            message: The message.
            source: Who has sent it.
            mine: What was noted here at the place that it is from; by default by now.

        Raises:
            LoaderMismatchError: It took other numbers and tensors from outside.
            FrameError: The message has no such beginning.
        """
        head, text_end = _head_of(message[:_HEAD_BYTES])
        end = text_end + 8 * (head >> _TEXT_BITS)
        if len(message) < max(end, _HEAD_BYTES):
            raise FrameError(f"worker {source} sent {len(message)} bytes about a value")
        settings = tuple(array("d", message[text_end:end].numpy().tobytes()))
        mine = self.taken.now() if mine is None else mine
        told = TakenNumbers(head & _SUM, settings)
        self.taken.compare(told, self.job.rank, source, message, mine=mine)
        return message[end:]

    @contextmanager
    def about(self, topic: int) -> Iterator[None]:
        """Inside, messages are about one thing.

        Raises:
            CollectiveMismatchError: One that came is about another.
        """
        group = self.job.asked
        group.topic = topic
        try:
            yield
        except OtherTopicError as error:
            raise self._apart(error) from None
        finally:
            group.topic = 0

    def _apart(self, error: OtherTopicError) -> CollectiveMismatchError:
        rank, there = self.job.rank, _place(error)
        return CollectiveMismatchError(
            f"workers {rank} and {error.source} are at different places of the script: worker "
            f"{rank} in {self}; worker {error.source} in {there}; the latest operations of worker "
            f"{rank}: {self.taken.described()}\n"
            f"  Fix: every worker asks for the same values in the same order, as in number = "
            f"value.item(), and prints it on one; and runs the same operations before, none below "
            f"an `if` on the rank. A loss may be asked for on one worker alone once backward() was "
            f"called on it."
        )


def _head_of(octets: torch.Tensor) -> tuple[int, int]:
    """The number that a message begins with, and where the text behind it ends."""
    head = int.from_bytes(octets.numpy().tobytes(), "little")
    return head, _HEAD_BYTES + (head >> 32 & 0xFFFF)


_BYTE = torch.uint8


def _place(error: OtherTopicError) -> str:
    """The place of a message's sender, if the message says it."""
    if error.topic >= WITHOUT_PLACE:
        return "an operation on a value, at another line"
    return _text_of(error.octets) or "another call"


def _text_of(octets: bytes) -> str:
    """The text that a message has of its sender."""
    size = int.from_bytes(octets[4:6], "little")
    text = octets[_HEAD_BYTES:][: min(size, _MOST_TEXT_BYTES)].decode(errors="replace")
    return "".join(char if char.isprintable() else "?" for char in text)


@functools.lru_cache(maxsize=1024)
def _line(code: CodeType, number: int) -> str:
    return line_at(code, number)
