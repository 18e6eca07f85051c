"""Tickets: what the worker that reads the loader first tells the others before a step.

A ticket that brings nothing new says only that: which step it is for, and checksums. The first of
its kind, and every other one, is a message (``step.proto``)::

    length of the message u32 | message                     | zeros
    0                     u32 | step u64, two checksums u32 | zeros
"""

from __future__ import annotations

import math
import struct
from collections.abc import Container
from typing import NamedTuple

import torch
from google.protobuf.message import DecodeError

from graphsplit._proto.step_pb2 import MicrobatchRun, StepTicket
from graphsplit.errors import FrameError
from graphsplit.partition.edges import ALL_GENERATORS_BYTES, GENERATOR_BYTES
from graphsplit.runtime.job import Job
from graphsplit.train.batch import Signature
from graphsplit.train.microbatches import Shape
from graphsplit.train.signature_text import check_signature_text

_LENGTH = struct.Struct("<I")
_REPEATED = struct.Struct("<IQII")
_STEP_BYTES = 256
# PyTorch's generator alone, or Python's and NumPy's with it.
_GENERATOR_BYTES = (GENERATOR_BYTES, ALL_GENERATORS_BYTES)


class Ticket(NamedTuple):
    """What is announced of a batch.

    Attributes:
        step: Which one it is.
        shape: What the batch and its microbatches look like; None at the end of the epoch.
        checksum: Of the batch, where all workers hold it; else 0.
        previous_checksum: Of the batch before, where readers drew it from their loaders; else 0.
        generator: State of the generator, where drawing the batch changed it; else empty. With
            Python's and NumPy's generators, where these may matter.
    """

    step: int
    shape: Shape | None
    checksum: int = 0
    previous_checksum: int = 0
    generator: bytes = b""


class Tickets:
    """Sends and reads tickets; remembers every signature's text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._texts: dict[str, str] = {}
        self._step = -1
        self._shape: Shape | None = None  # announced last

    def send(
        self,
        shape: Shape | None,
        *,
        generator: torch.Tensor | None,
        quiet: Container[int] = (),
        checksum: int = 0,
        previous_checksum: int = 0,
    ) -> None:
        """Announce the next batch; None announces the end of the epoch.

        Args:
            shape: What the batch and its microbatches look like.
            generator: State of the generator, where drawing the batch changed it.
            quiet: Workers that need not be woken for the ticket.
            checksum: Of the batch, where all workers hold it.
            previous_checksum: Of the batch before, where readers drew it from their loaders.
        """
        self._step += 1
        is_last = shape is not None and self._job.asked_to_stop
        if shape is not None and shape == self._shape and generator is None and not is_last:
            data = _padded(_REPEATED.pack(0, self._step, checksum, previous_checksum))
        else:
            ticket = StepTicket(step=self._step, end=shape is None, last=is_last)
            ticket.fingerprint, ticket.previous_fingerprint = checksum, previous_checksum
            if shape is not None:
                self._describe_shape(shape, ticket)
            if generator is not None:
                ticket.generator = generator.numpy().tobytes()
            data = message_of(ticket)
        self._shape = shape
        self._job.is_stopping |= is_last
        self._job.control.send_ticket(data, quiet=quiet)

    def _describe_shape(self, shape: Shape, ticket: StepTicket) -> None:
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
        _, step, checksum, previous = _REPEATED.unpack_from(data)
        if self._shape is None:
            raise FrameError(
                f"worker {leader} announces a batch like the one before, but there was none"
            )
        return Ticket(step, self._shape, checksum, previous)

    def _read(self, data: bytes, leader: int) -> Ticket:
        """A ticket that brings news."""
        message = StepTicket()
        message.ParseFromString(_content(data))
        if len(message.generator) not in (0, *_GENERATOR_BYTES):
            raise FrameError(f"worker {leader} sent a generator state of a wrong size")
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
        )

    def _learn(self, message: StepTicket | MicrobatchRun, leader: int) -> None:
        signature = Signature.read(message.signature_text)
        if signature.digest != message.signature_digest:
            raise FrameError(f"worker {leader} sent a signature that is not the announced one")
        check_signature_text(signature.text, what=f"worker {leader} describes a batch wrongly")
        self._texts[signature.digest] = signature.text

    def _shape_of(self, message: StepTicket) -> Shape:
        return Shape(
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
