"""The place where a worker is in the script, as its messages about values say it.

All workers come to the same lines in the same order. A message that another line has sent, or that
is about another value, is no answer: who gets it says what both workers do, and where.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType

import torch

from graphsplit.distribute.workers.taken import FromOutside
from graphsplit.errors import CollectiveMismatchError, FrameError
from graphsplit.frames import line_at, users_frame
from graphsplit.job.job import Job
from graphsplit.job.stream import OtherTopicError

_SUM = (1 << 32) - 1  # of what a message begins with: the checksum, above it the text's size
_HEAD_BYTES = 8
WITHOUT_PLACE = 1 << 40  # topics of messages that are a value, and do not begin with a place
_MOST_TEXT_BYTES = 500
MOST_TOLD_BYTES = _HEAD_BYTES + _MOST_TEXT_BYTES


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
        frame = users_frame(sys._getframe(1))
        line = "" if frame is None else _line(frame.f_code, frame.f_lineno)
        return f"{self.doing}{line and f' at {line}'}"

    def told(self) -> torch.Tensor:
        """The beginning of a message: the checksum of what was taken from outside, and the place.

        It has ``MOST_TOLD_BYTES`` at most.
        """
        text = str(self).encode()[-_MOST_TEXT_BYTES:]
        head = self.taken.checksum | len(text) << 32
        return torch.frombuffer(bytearray(head.to_bytes(_HEAD_BYTES, "little") + text), dtype=_BYTE)

    def read(self, message: torch.Tensor, source: int, *, mine: int | None = None) -> torch.Tensor:
        """The rest of another worker's message, after its beginning.

        Args:
            message: The message.
            source: Who has sent it.
            mine: The checksum here at the place that it is from; by default the present one.

        Raises:
            LoaderMismatchError: It took other numbers and tensors from outside.
            FrameError: The message has no such beginning.
        """
        if len(message) < _HEAD_BYTES:
            raise FrameError(f"worker {source} sent {len(message)} bytes about a value")
        head = int.from_bytes(message[:_HEAD_BYTES].numpy().tobytes(), "little")
        mine = self.taken.checksum if mine is None else mine
        self.taken.compare(head & _SUM, self.job.rank, source, mine=mine)
        return message[_HEAD_BYTES + (head >> 32) :]

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


_BYTE = torch.uint8


def _place(error: OtherTopicError) -> str:
    """The place of a message's sender, if the message says it."""
    if error.topic >= WITHOUT_PLACE:
        return "an operation on a value, at another line"
    size = int.from_bytes(error.octets[4:_HEAD_BYTES], "little")
    text = error.octets[_HEAD_BYTES:][: min(size, _MOST_TEXT_BYTES)].decode(errors="replace")
    return "".join(char if char.isprintable() else "?" for char in text) or "another call"


@functools.lru_cache(maxsize=1024)
def _line(code: CodeType, number: int) -> str:
    return line_at(code, number)
