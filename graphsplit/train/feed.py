"""Batches for workers: who reads them, and what the others learn of them.

Only workers whose program consumes an input read their loader; the others decode nothing. Before
each step the *leader*, the reader that stands earliest in the pipeline, tells all others by a
ticket what the batch looks like, and the generator's state if drawing the batch changed it::

    leader     draw batch ── ticket ───────────────► run step
    reader     draw batch ── receive ticket ───────► run step
    others      receive ticket, take over generator ─► run step

Checksums cost time, so leader and readers compute them while they wait for values, and a ticket
carries that of the batch before: a difference ends the job one step late, and names the right one.

Before the first plan nobody knows who reads. The worker of the first placed module leads then; if
it turns out to consume nothing, it has read one epoch for the others, and the next epoch's leader
is a consumer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from google.protobuf.message import DecodeError
from torch import nn

from graphsplit._proto.step_pb2 import StepTicket
from graphsplit.capture.graph import Mode
from graphsplit.errors import FrameError, LoaderMismatchError
from graphsplit.placement.annotations import module_annotation
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.runtime.job import Job
from graphsplit.train.batch import Arguments, Signature, fingerprint, split_batch
from graphsplit.train.planner import Planned, Planner

_LENGTH = struct.Struct("<I")
_TICKET_STEP_BYTES = 256
_GENERATOR_BYTES = torch.default_generator.get_state().numel()


def likely_first_reader(network: nn.Module, unplaced: UnplacedRule, num_workers: int) -> int:
    """The worker that probably consumes the first input: a guess for the very first batch."""
    for module in network.modules():
        annotation = module_annotation(module)
        if annotation is not None:
            return annotation.rank if annotation.rank < num_workers else 0
        is_leaf = next(module.children(), None) is None
        if unplaced == "worker0" and is_leaf and next(module.parameters(), None) is not None:
            return 0
    return 0


Fed = tuple[Planned, Arguments | None, Callable[[], None] | None]


class Tickets:
    """Sends and reads tickets; remembers every signature's text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._texts: dict[str, str] = {}
        self._step = -1

    def send(
        self,
        arguments: Arguments | None,
        *,
        signature: Signature | None,
        generator: torch.Tensor | None,
        quiet: Container[int] = (),
        checksum: int | None = None,
        previous_checksum: int = 0,
    ) -> None:
        """Announce the next batch; None announces the end of the epoch.

        Args:
            arguments: The batch.
            signature: Its signature.
            generator: State of the generator, where drawing the batch changed it.
            quiet: Workers that need not be woken for the ticket.
            checksum: Of the batch, where all workers hold it.
            previous_checksum: Of the batch before, where readers drew it from their loaders.
        """
        self._step += 1
        ticket = StepTicket(step=self._step, end=arguments is None)
        if arguments is not None and signature is not None:
            ticket.signature_digest = signature.digest
            ticket.fingerprint = checksum or 0
            if signature.digest not in self._texts:
                self._texts[signature.digest] = signature.text
                ticket.signature_text = signature.text
        ticket.previous_fingerprint = previous_checksum
        if generator is not None:
            ticket.generator = generator.numpy().tobytes()
        self._job.control.send_ticket(_padded(ticket.SerializeToString()), quiet=quiet)

    def receive(self, leader: int) -> StepTicket:
        """Wait for the leader's next ticket.

        Raises:
            FrameError: It is malformed, or not the next one.
        """
        self._step += 1
        ticket = StepTicket()
        try:
            ticket.ParseFromString(_unpadded(self._job.control.receive_ticket(leader)))
        except DecodeError as error:
            raise FrameError(f"a malformed step ticket from worker {leader}: {error}") from error
        if ticket.step != self._step:
            raise FrameError(
                f"worker {leader} announces batch {ticket.step}; expected {self._step}"
            )
        if len(ticket.generator) not in (0, _GENERATOR_BYTES):
            raise FrameError(f"worker {leader} sent a generator state of a wrong size")
        if ticket.signature_text:
            signature = Signature.read(ticket.signature_text)
            if signature.digest != ticket.signature_digest:
                raise FrameError(f"worker {leader} sent a signature that is not the announced one")
            self._texts[signature.digest] = signature.text
        return ticket

    def signature(self, ticket: StepTicket) -> Signature:
        """The signature that a ticket announces."""
        text = self._texts.get(ticket.signature_digest)
        if text is None:
            raise FrameError(f"batch {ticket.step} has a signature that was never described")
        return Signature(text, ticket.signature_digest)


def _padded(message: bytes) -> bytes:
    """Length, message, zeros: tickets of steps that bring nothing new are then all of one size.

    A channel is quicker with values of the same size as the one before.
    """
    size = -(-(len(message) + _LENGTH.size) // _TICKET_STEP_BYTES) * _TICKET_STEP_BYTES
    return (_LENGTH.pack(len(message)) + message).ljust(size, b"\0")


def _unpadded(padded: bytes) -> bytes:
    if len(padded) < _LENGTH.size:
        raise DecodeError("too short for its length")
    (length,) = _LENGTH.unpack_from(padded)
    message = padded[_LENGTH.size : _LENGTH.size + length]
    if len(message) != length:
        raise DecodeError(f"{length} bytes are announced, {len(message)} came")
    return message


class _Cursor:
    """A loader's batches, one by one."""

    def __init__(self, loader: Iterable[Any], *, has_loss_fn: bool) -> None:
        self._iterator = iter(loader)
        self._has_loss_fn = has_loss_fn

    def draw(self) -> Arguments | None:
        """The next batch; None at the end."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        return split_batch(batch, has_loss_fn=self._has_loss_fn)


class Feed:
    """The batches of one epoch, as one worker sees them.

    Yields, for each step, the plan to run, the batch, and what to do while the step waits for its
    first value. The batch is None where this worker does not consume it.

    Raises while iterating:
        LoaderMismatchError: This worker's loader disagrees with the leader's.
    """

    def __init__(
        self,
        job: Job,
        planner: Planner,
        tickets: Tickets,
        *,
        mode: Mode,
        leader: int,
        loader: Iterable[Any],
        has_loss_fn: bool,
    ) -> None:
        self._job = job
        self._planner = planner
        self._tickets = tickets
        self._mode = mode
        self._leader = leader
        self._loader = loader
        self._has_loss_fn = has_loss_fn
        self._epoch_state = torch.default_generator.get_state()
        self._cursor: _Cursor | None = None
        self._step = 0
        self._checksum: int | None = None  # of the batch drawn last
        self._next: Arguments | None = None  # drawn, but not yet announced

    def __iter__(self) -> Iterator[Fed]:
        if self._job.rank == self._leader:
            yield from self._lead()
        else:
            yield from self._follow()

    def _lead(self) -> Iterator[Fed]:
        cursor = _Cursor(self._loader, has_loss_fn=self._has_loss_fn)
        known: torch.Tensor | None = None
        planned: Planned | None = None
        digest = ""
        while True:
            if self._step > 0:
                known = torch.default_generator.get_state()
            arguments = cursor.draw()
            state = torch.default_generator.get_state()
            news = None if known is not None and torch.equal(state, known) else state
            previous = self._checksum or 0
            if arguments is None:
                self._tickets.send(None, signature=None, generator=news, previous_checksum=previous)
                return
            signature = Signature.of(arguments)
            # Workers that wait for a value anyway are woken by it; waking them twice costs more
            # than a hop, when there are fewer cores than workers.
            is_same = planned is not None and signature.digest == digest
            quiet = planned.woken_by_values if planned is not None and is_same else frozenset()
            self._tickets.send(
                arguments,
                signature=signature,
                generator=news,
                quiet=quiet,
                previous_checksum=previous,
            )
            planned, digest = self._planner.plan_for(self._mode, signature), signature.digest
            yield planned, arguments, self._checking(arguments)
            self._step += 1

    def _checking(self, arguments: Arguments) -> Callable[[], None]:
        def check() -> None:
            self._checksum = fingerprint(arguments)

        return check

    def _follow(self) -> Iterator[Fed]:
        while True:
            ticket = self._tickets.receive(self._leader)
            if ticket.end:
                self._compare_previous(ticket)
                self._end(ticket)
                return
            self._compare_previous(ticket)
            planned = self._planner.plan_for(self._mode, self._tickets.signature(ticket))
            if self._job.rank in planned.consumers:
                arguments = self._drawn_for(ticket)
                yield planned, arguments, self._checking(arguments)
            else:
                self._next = None
                self._take_over_generator(ticket)
                yield planned, None, None
            if self._cursor is not None:
                # In program order the next batch is drawn now, after the step and the callbacks:
                # while others still compute, and before its ticket.
                self._next = self._draw()
            planned.runner.expect_first_value()
            self._step += 1

    def _compare_previous(self, ticket: StepTicket) -> None:
        """Compare the batch before with the leader's, if this worker drew it."""
        mine, self._checksum = self._checksum, None
        if mine is not None and mine != ticket.previous_fingerprint:
            self._step -= 1
            raise self._mismatch("its batch has other values", "shapes and dtypes are equal")

    def _take_over_generator(self, ticket: StepTicket) -> None:
        if ticket.generator:
            state = torch.frombuffer(bytearray(ticket.generator), dtype=torch.uint8)
            torch.default_generator.set_state(state)

    def _draw(self) -> Arguments | None:
        if self._cursor is None:
            self._open_cursor()
        assert self._cursor is not None
        return self._cursor.draw()

    def _drawn_for(self, ticket: StepTicket) -> Arguments:
        """This reader's batch, compared with the ticket."""
        arguments = self._draw() if self._cursor is None else self._next
        self._next = None
        if arguments is None:
            raise self._mismatch("its loader has ended", "the leader's has a batch")
        signature = Signature.of(arguments)
        if signature.digest != ticket.signature_digest:
            raise self._mismatch(
                f"its batch is {signature.text}",
                f"the leader's is {self._tickets.signature(ticket).text}",
            )
        if ticket.generator and (
            torch.default_generator.get_state().numpy().tobytes() != ticket.generator
        ):
            raise self._mismatch(
                "its random generator is in another state", "the batches are equal"
            )
        return arguments

    def _open_cursor(self) -> None:
        """Start reading; where earlier batches of this epoch were not read here, skip them."""
        now = torch.default_generator.get_state()
        torch.default_generator.set_state(self._epoch_state)
        self._cursor = _Cursor(self._loader, has_loss_fn=self._has_loss_fn)
        for _ in range(self._step):
            self._cursor.draw()
        if self._step > 0:
            torch.default_generator.set_state(now)

    def _end(self, ticket: StepTicket) -> None:
        if self._next is not None:
            raise self._mismatch("its loader has a further batch", "the leader's has ended")
        self._take_over_generator(ticket)

    def _mismatch(self, mine: str, leaders: str) -> LoaderMismatchError:
        return LoaderMismatchError(
            f"the loaders of workers {self._leader} and {self._job.rank} disagree at "
            f"{self._mode.value} step {self._step} of the epoch\n"
            f"  worker {self._job.rank}: {mine}\n  worker {self._leader}: {leaders}\n"
            f"  Fix: give all workers the same data, order and seed; a script that draws random "
            f"numbers must draw them on every worker."
        )
