"""Tickets: what the worker that reads the loader first tells the others before a step.

It is a message (see ``job.stream``) of its own kind, numbered by steps::

    header | six numbers u32, lifted numbers and settings f64 | news | zeros

A ticket that brings nothing new says only which step it is for, checksums, and the numbers that a
recording and the optimizers compute with. The first of its kind, and every other one, has news:
``News`` as JSON.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Container, Sequence
from ctypes import string_at
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch

from graphsplit.batches.microbatches import BatchDescription
from graphsplit.batches.signature import Signature
from graphsplit.batches.signature_text import check_signature_text
from graphsplit.encoding import records
from graphsplit.encoding.fields import integer, string
from graphsplit.errors import FrameError, LoaderMismatchError
from graphsplit.job.group import read_record
from graphsplit.job.job import Job
from graphsplit.job.process_generators import NOTHING_DRAWN, ProcessStates, is_state
from graphsplit.job.stream import HEADER, TICKET, TICKET_BYTES
from graphsplit.partition.edges import GENERATOR_BYTES
from graphsplit.planning.compared.announced import NOTHING_READ, PythonStep
from graphsplit.transport.base import Sender

_STEP_BYTES = 512
_NUMBERS = struct.Struct("<IIIIII")
_BEFORE_LIFTED = HEADER.size + _NUMBERS.size


@dataclass(frozen=True)
class Described:
    """The look of a batch, or of microbatches that follow each other and look alike.

    Attributes:
        digest: Of its signature.
        text: The signature, where it was not told before; else empty.
        count: How many they are.
    """

    digest: Annotated[str, string(64)]
    text: str = ""
    count: Annotated[int, integer(1, 1 << 31)] = 1


@dataclass(frozen=True)
class News:
    """The part of a ticket that the one before it has not told.

    Attributes:
        whole: The batch; None at the end of the epoch.
        parts: Its microbatches, in order, where it is split.
        weights: What the loss of each microbatch is multiplied by.
        is_last: The job was asked to end: all leave when this step is done.
        generator: See ``Ticket``.
        process: See ``Ticket``.
        loader_changed: See ``Ticket``.
        changed: See ``PythonStep``.
        written: See ``PythonStep``.
        turns: See ``Ticket``.
    """

    whole: Described | None = None
    parts: tuple[Described, ...] = ()
    weights: tuple[float, ...] = ()
    is_last: bool = False
    generator: bytes = b""
    process: tuple[bytes, bytes] = NOTHING_DRAWN
    loader_changed: bool = False
    changed: tuple[tuple[str, str], ...] = ()
    written: tuple[str, ...] = ()
    turns: tuple[Annotated[int, integer(0, 1 << 62)], ...] = ()


class Ticket(NamedTuple):
    """The announcement of a batch.

    Attributes:
        shape: What the batch and its microbatches look like; None at the end of the epoch.
        checksum: Of the batch, where all workers hold it; else 0.
        previous_checksum: Of the batch before, where readers drew it from their loaders; else 0.
        generator: State of the generator, where drawing the batch changed it; else empty.
        process: States of Python's and NumPy's generators, likewise.
        loader_changed: At the end of an epoch: whether what the loader remembers follows.
        python: The Python values behind the step.
        turns: At which batches of the epoch replicas begin to read their own rows, or to read whole
            batches again; see ``OwnRows``.
        drawn: Where PyTorch's generator stood before the batch was drawn; see ``position_of``.
        step: Which one it is, numbered by ``Tickets.send``.
    """

    shape: BatchDescription | None
    checksum: int = 0
    previous_checksum: int = 0
    generator: bytes = b""
    process: ProcessStates = NOTHING_DRAWN
    loader_changed: bool = False
    python: PythonStep = NOTHING_READ
    turns: tuple[int, ...] = ()
    drawn: int = 0
    step: int = 0


class Tickets:
    """Sends and reads tickets; remembers every signature's text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._texts: dict[str, str] = {}
        self._step = -1
        self._shape: BatchDescription | None = None  # announced last
        self._turns: tuple[int, ...] = ()  # likewise
        self._senders: dict[int, Sender] = {}  # by worker; none before the first ticket
        self._read_last: tuple[Any, PythonStep] = (None, NOTHING_READ)  # without news
        # Always the same memory: a channel is quicker with values that are laid out alike.
        self._ticket = torch.empty(0, dtype=torch.uint8)
        self._memory = self._ticket.numpy().data

    def send(self, ticket: Ticket, *, quiet: Container[int] = ()) -> None:
        """Announce the next batch, or the end of the epoch.

        Args:
            ticket: What to tell.
            quiet: Workers that need not be woken for the ticket.

        Raises:
            FrameError: The batch has too many parts to describe them in 128 KiB.
        """
        self._step += 1
        shape, python, turns = ticket.shape, ticket.python, ticket.turns
        is_last = shape is not None and self._job.member.state.stops_soon
        brings_news = bool(ticket.generator) or ticket.process != NOTHING_DRAWN or is_last
        brings_news |= turns != self._turns
        brings_news |= (
            bool(python.changed or python.written) or shape is None or shape != self._shape
        )
        news = None
        if brings_news:
            news = News(
                is_last=is_last,
                generator=ticket.generator,
                process=ticket.process,
                loader_changed=ticket.loader_changed,
                changed=python.changed,
                written=python.written,
                turns=turns,
                **({} if shape is None else self._described(shape)),
            )
        numbers = ticket.checksum, ticket.previous_checksum, python.recording, ticket.drawn
        floats = python.lifted, python.settings
        data = ticket_of(self._step, news, *numbers, lifted=floats[0], settings=floats[1])
        self._shape, self._turns = shape, turns
        self._job.is_stopping |= is_last
        self._send(data, quiet)

    def _send(self, data: bytes, quiet: Container[int]) -> None:
        if len(data) > TICKET_BYTES:
            raise FrameError(
                f"a step ticket takes {len(data)} bytes; at most {TICKET_BYTES} are allowed\n"
                f"  Fix: a batch of this many parts cannot be described; group them into tensors."
            )
        if len(self._memory) != len(data):
            self._ticket = torch.empty(len(data), dtype=torch.uint8)
            self._memory = self._ticket.numpy().data
        self._memory[:] = data
        if not self._senders:
            others = (peer for peer in range(self._job.num_workers) if peer != self._job.rank)
            self._senders = {peer: self._job.control.ticket_sender(peer) for peer in others}
        for peer, sender in self._senders.items():
            sender.send(self._ticket, step=0, microbatch=0, quiet=peer in quiet)

    def _described(self, shape: BatchDescription) -> dict[str, Any]:
        return {
            "whole": self._describe(shape.whole),
            "parts": tuple(self._describe(*part) for part in shape.parts),
            "weights": tuple(shape.weights),
        }

    def _describe(self, signature: Signature, count: int = 1) -> Described:
        """Name a signature; the first time, in full."""
        is_known = signature.digest in self._texts
        self._texts[signature.digest] = signature.text
        return Described(signature.digest, "" if is_known else signature.text, count)

    def receive(self, leader: int) -> Ticket:
        """Wait for the leader's next ticket.

        Raises:
            FrameError: It is malformed, or not the next one.
        """
        self._step += 1
        octets = self._job.control.ticket_receiver(leader).receive(step=0, microbatch=0)
        if octets is None:
            raise FrameError(f"an empty step ticket from worker {leader}")
        ticket = self._read(octets.numpy().tobytes(), leader)
        if ticket.step != self._step:
            raise FrameError(
                f"worker {leader} announces batch {ticket.step}; expected {self._step}"
                f"{_OTHER_MODEL}"
            )
        self._shape, self._turns = ticket.shape, ticket.turns
        return ticket

    def _read(self, data: bytes, leader: int) -> Ticket:
        try:
            kind, step, size = HEADER.unpack_from(data)
            numbers = _NUMBERS.unpack_from(data, HEADER.size)
        except struct.error as error:
            raise FrameError(f"{_malformed(leader)}: {error}") from error
        checksum, previous, recording, drawn, num_lifted, num_settings = numbers
        num_floats = num_lifted + num_settings
        begin, end = _BEFORE_LIFTED + 8 * num_floats, HEADER.size + size
        if kind != TICKET or not begin <= end <= len(data):
            found = f"kind {kind}, {size} bytes, {num_floats} of them numbers"
            raise FrameError(f"{_malformed(leader)}: {found}")
        known, python = self._read_last
        told = recording, num_lifted, data[_BEFORE_LIFTED:begin]
        if told != known:  # else the same object: what agreed with it need not be compared again
            floats = struct.unpack_from(f"<{num_floats}d", data, _BEFORE_LIFTED)
            python = PythonStep(recording, floats[:num_lifted], settings=floats[num_lifted:])
            self._read_last = told, python
        if begin < end:
            text = data[begin:end].decode(errors="replace")
            news = read_record(News, text, what=_malformed(leader))
            shape, turns = self._learned(news, leader), news.turns
            if news.changed or news.written:
                python = python._replace(changed=news.changed, written=news.written)
            process = ProcessStates(*news.process)
        elif self._shape is None:
            raise FrameError(
                f"worker {leader} announces a batch like the one before, but there was none"
            )
        else:
            news, shape, turns, process = _NO_NEWS, self._shape, self._turns, NOTHING_DRAWN
        return Ticket(
            shape,
            checksum,
            previous,
            news.generator,
            process,
            news.loader_changed,
            python,
            turns,
            drawn,
            step,
        )

    def _learned(self, news: News, leader: int) -> BatchDescription | None:
        """The look of the batch, by what is believed of the news."""
        if len(news.generator) not in (0, GENERATOR_BYTES):
            raise FrameError(f"worker {leader} sent a generator state of a wrong size")
        if not all(state == b"" or is_state(state) for state in news.process):
            raise FrameError(f"worker {leader} sent no state of Python's or NumPy's generator")
        counts = [part.count for part in news.parts]
        weights = news.weights
        if sum(counts) != len(weights) or not all(map(math.isfinite, weights)):
            raise FrameError(
                f"worker {leader} announces {sum(counts)} microbatches in runs of {counts[:8]} "
                f"with {len(weights)} weights; expected a finite weight for each"
            )
        self._job.is_stopping |= news.is_last
        whole = None if news.whole is None else self._signature(news.whole, leader)
        parts = tuple((self._signature(part, leader), part.count) for part in news.parts)
        return None if whole is None else BatchDescription(whole, parts, weights)

    def _signature(self, described: Described, leader: int) -> Signature:
        if described.text:
            found = Signature.read(described.text)
            if found.digest != described.digest:
                raise FrameError(f"worker {leader} sent a signature that is not the announced one")
            check_signature_text(found.text, what=f"worker {leader} describes a batch wrongly")
            self._texts[found.digest] = found.text
        text = self._texts.get(described.digest)
        if text is None:
            raise FrameError(
                f"worker {leader} announces a batch of a kind that it never described{_OTHER_MODEL}"
            )
        return Signature(text, described.digest)


def _malformed(leader: int) -> str:
    return f"a malformed step ticket from worker {leader}"


_NO_NEWS = News()
_OTHER_MODEL = (
    ": it may be in a call of another gs.Model\n"
    "  Fix: every worker makes the calls of several Models in the same order."
)
_END_BYTES = 32  # at both ends of a generator's state, which tell where it stands


def torch_state() -> bytes:
    """The state of PyTorch's generator; bytes are compared in a tenth of the time of tensors."""
    state = torch.default_generator.get_state()
    return string_at(state.data_ptr(), state.numel())


def position_of(state: bytes) -> int:
    """A short checksum of a state of PyTorch's generator: of its seed, and of how far it has come.

    Most of a state is words that all who began with one seed have alike.
    """
    return zlib.crc32(state[-_END_BYTES:], zlib.crc32(state[:_END_BYTES]))


def other_generator(ranks: tuple[int, int], when: str) -> LoaderMismatchError:
    """The error where PyTorch's generators of two workers stand elsewhere: one has drawn more.

    Args:
        ranks: The leader, and this worker.
        when: Before which step.
    """
    return LoaderMismatchError(
        f"PyTorch's random generator is in another state on worker {ranks[1]} than on worker "
        f"{ranks[0]} before {when}\n"
        f"  Fix: let script, callbacks and metrics draw the same random numbers on every worker, "
        f"without an if on the rank, and not for the parameters of one worker alone."
    )


def ticket_of(
    step: int,
    news: News | None,
    checksum: int = 0,
    previous_checksum: int = 0,
    recording: int = 0,
    drawn: int = 0,
    *,
    lifted: Sequence[float] = (),
    settings: Sequence[float] = (),
) -> bytes:
    """A ticket, as it travels. Most are of one size: a channel is quicker with known ones."""
    told = b"" if news is None else records.to_text(news).encode()
    numbers = checksum, previous_checksum, recording, drawn, len(lifted), len(settings)
    floats = *lifted, *settings
    body = _NUMBERS.pack(*numbers) + struct.pack(f"<{len(floats)}d", *floats) + told
    data = HEADER.pack(TICKET, step, len(body)) + body
    return data.ljust(-(-len(data) // _STEP_BYTES) * _STEP_BYTES, b"\0")
