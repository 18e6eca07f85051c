"""Tickets: what the worker that reads the loader first tells the others before a step.

A ticket that brings nothing new says only that: which step it is for, and checksums. The first of
its kind, and every other one, is a message (``step.proto``)::

    length of the message u32 | message                                     | zeros
    0                     u32 | step u64, four numbers u32, lifted numbers | zeros
"""

from __future__ import annotations

import math
import struct
from collections.abc import Container
from typing import NamedTuple

import torch
from google.protobuf.message import DecodeError

from graphsplit._proto.step_pb2 import MicrobatchRun, StepTicket
from graphsplit.batches.batch import Signature
from graphsplit.batches.microbatches import BatchDescription
from graphsplit.batches.signature_text import check_signature_text
from graphsplit.errors import FrameError
from graphsplit.job.job import Job
from graphsplit.job.process_generators import NOTHING_DRAWN, ProcessStates, is_state
from graphsplit.planning.announced import NOTHING_READ, PythonStep

_STEP_BYTES = 256
_LENGTH = struct.Struct("<I")
_REPEATED = struct.Struct("<IQIIII")
_MAX_LIFTED = (_STEP_BYTES - _REPEATED.size) // 8
_GENERATOR_BYTES = torch.default_generator.get_state().numel()


class Ticket(NamedTuple):
    """The announcement of a batch.

    Attributes:
        step: Which one it is.
        shape: What the batch and its microbatches look like; None at the end of the epoch.
        checksum: Of the batch, where all workers hold it; else 0.
        previous_checksum: Of the batch before, where readers drew it from their loaders; else 0.
        generator: State of the generator, where drawing the batch changed it; else empty.
        process: States of Python's and NumPy's generators, likewise.
        loader_changed: At the end of an epoch: whether what the loader remembers follows.
        python: The Python values behind the step.
    """

    step: int
    shape: BatchDescription | None
    checksum: int = 0
    previous_checksum: int = 0
    generator: bytes = b""
    process: ProcessStates = NOTHING_DRAWN
    loader_changed: bool = False
    python: PythonStep = NOTHING_READ


class Tickets:
    """Sends and reads tickets; remembers every signature's text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._texts: dict[str, str] = {}
        self._step = -1
        self._shape: BatchDescription | None = None  # announced last

    def send(
        self,
        shape: BatchDescription | None,
        *,
        generator: torch.Tensor | None,
        process: ProcessStates = NOTHING_DRAWN,
        loader_changed: bool = False,
        quiet: Container[int] = (),
        checksum: int = 0,
        previous_checksum: int = 0,
        python: PythonStep = NOTHING_READ,
    ) -> None:
        """Announce the next batch; None announces the end of the epoch.

        Args:
            shape: What the batch and its microbatches look like.
            generator: State of the generator, where drawing the batch changed it.
            process: States of Python's and NumPy's generators, likewise.
            loader_changed: Whether what the loader remembers follows, at the end of an epoch.
            quiet: Workers that need not be woken for the ticket.
            checksum: Of the batch, where all workers hold it.
            previous_checksum: Of the batch before, where readers drew it from their loaders.
            python: The Python values behind the step.
        """
        self._step += 1
        is_last = shape is not None and self._job.asked_to_stop
        brings_news = generator is not None or process != NOTHING_DRAWN or is_last
        brings_news |= bool(python.changed) or len(python.lifted) > _MAX_LIFTED
        if shape is not None and shape == self._shape and not brings_news:
            numbers = checksum, previous_checksum, python.recording, len(python.lifted)
            lifted = struct.pack(f"<{len(python.lifted)}d", *python.lifted)
            data = _padded(_REPEATED.pack(0, self._step, *numbers) + lifted)
        else:
            ticket = StepTicket(step=self._step, end=shape is None, last=is_last)
            ticket.python_generator, ticket.numpy_generator = process
            ticket.loader_changed = loader_changed
            ticket.fingerprint, ticket.previous_fingerprint = checksum, previous_checksum
            if shape is not None:
                self._describe_shape(shape, ticket)
            ticket.recording = python.recording
            ticket.lifted.extend(python.lifted)
            for place, value in python.changed:
                ticket.changed.add(place=place, value=value)
            if generator is not None:
                ticket.generator = generator.numpy().tobytes()
            data = message_of(ticket)
        self._shape = shape
        self._job.is_stopping |= is_last
        self._job.control.send_ticket(data, quiet=quiet)

    def _describe_shape(self, shape: BatchDescription, ticket: StepTicket) -> None:
        self._describe(shape.whole, ticket)
        for signature, count in shape.parts:
            self._describe(signature, ticket.microbatches.add(count=count))
        ticket.loss_weights.extend(shape.weights)

    def _describe(self, signature: Signature, message: StepTicket | MicrobatchRun) -> None:
        """Name a signature; the first time, in full."""
        message.signature_digest = signature.digest
        if signature.digest not in self._texts:
            self._texts[signature.digest] = signature.text
            message.signature_text = signature.text

    def receive(self, leader: int) -> Ticket:
        """Wait for the leader's next ticket.

        Raises:
            FrameError: It is malformed, or not the next one.
        """
        self._step += 1
        data = self._job.control.receive_ticket(leader)
        try:
            (length,) = _LENGTH.unpack_from(data)
            ticket = self._repeated(data, leader) if length == 0 else self._read(data, leader)
        except (DecodeError, struct.error) as error:
            raise FrameError(f"a malformed step ticket from worker {leader}: {error}") from error
        if ticket.step != self._step:
            raise FrameError(
                f"worker {leader} announces batch {ticket.step}; expected {self._step}"
            )
        self._shape = ticket.shape
        return ticket

    def _repeated(self, data: bytes, leader: int) -> Ticket:
        """A ticket for a batch that looks like the one before."""
        _, step, checksum, previous, recording, num_lifted = _REPEATED.unpack_from(data)
        lifted = struct.unpack_from(f"<{min(num_lifted, _MAX_LIFTED)}d", data, _REPEATED.size)
        if self._shape is None:
            raise FrameError(
                f"worker {leader} announces a batch like the one before, but there was none"
            )
        python = PythonStep(recording, lifted)
        return Ticket(step, self._shape, checksum, previous, python=python)

    def _read(self, data: bytes, leader: int) -> Ticket:
        """A ticket that brings news."""
        message = StepTicket()
        message.ParseFromString(_content(data))
        if len(message.generator) not in (0, _GENERATOR_BYTES):
            raise FrameError(f"worker {leader} sent a generator state of a wrong size")
        process = ProcessStates(message.python_generator, message.numpy_generator)
        if not all(state == b"" or is_state(state) for state in process):
            raise FrameError(f"worker {leader} sent no state of Python's or NumPy's generator")
        described: list[StepTicket | MicrobatchRun] = [message, *message.microbatches]
        for one in described:
            if one.signature_text:
                self._learn(one, leader)
        _check_microbatches(message, leader)
        self._job.is_stopping |= message.last
        return Ticket(
            message.step,
            None if message.end else self._shape_of(message),
            message.fingerprint,
            message.previous_fingerprint,
            message.generator,
            process,
            message.loader_changed,
            PythonStep(
                message.recording,
                tuple(message.lifted),
                tuple((one.place, one.value) for one in message.changed),
            ),
        )

    def _learn(self, message: StepTicket | MicrobatchRun, leader: int) -> None:
        signature = Signature.read(message.signature_text)
        if signature.digest != message.signature_digest:
            raise FrameError(f"worker {leader} sent a signature that is not the announced one")
        check_signature_text(signature.text, what=f"worker {leader} describes a batch wrongly")
        self._texts[signature.digest] = signature.text

    def _shape_of(self, message: StepTicket) -> BatchDescription:
        return BatchDescription(
            self._signature(message, message),
            tuple((self._signature(message, run), run.count) for run in message.microbatches),
            tuple(message.loss_weights),
        )

    def _signature(self, ticket: StepTicket, message: StepTicket | MicrobatchRun) -> Signature:
        text = self._texts.get(message.signature_digest)
        if text is None:
            raise FrameError(f"batch {ticket.step} has a signature that was never described")
        return Signature(text, message.signature_digest)


def _check_microbatches(ticket: StepTicket, leader: int) -> None:
    counts = [run.count for run in ticket.microbatches]
    weights = ticket.loss_weights
    if not all(counts) or sum(counts) != len(weights) or not all(map(math.isfinite, weights)):
        raise FrameError(
            f"worker {leader} announces {sum(counts)} microbatches in runs of {counts[:8]} with "
            f"{len(weights)} weights; expected a finite weight for each"
        )


def message_of(ticket: StepTicket) -> bytes:
    """A ticket with news, as it travels."""
    content = ticket.SerializeToString()
    return _padded(_LENGTH.pack(len(content)) + content)


def _padded(data: bytes) -> bytes:
    """Most tickets are then of one size: a channel is quicker with values like the one before."""
    return data.ljust(-(-len(data) // _STEP_BYTES) * _STEP_BYTES, b"\0")


def _content(data: bytes) -> bytes:
    """The message in a ticket with news."""
    (length,) = _LENGTH.unpack_from(data)
    content = data[_LENGTH.size : _LENGTH.size + length]
    if len(content) != length:
        raise DecodeError(f"{length} bytes are announced, {len(content)} came")
    return content
