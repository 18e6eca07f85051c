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

import math
import struct
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from google.protobuf.message import DecodeError
from torch import nn

from graphsplit._proto.step_pb2 import MicrobatchRun, StepTicket
from graphsplit.capture.graph import Mode
from graphsplit.errors import FrameError, LoaderMismatchError
from graphsplit.placement.annotations import module_annotation
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.runtime.job import Job
from graphsplit.train import records
from graphsplit.train.batch import Signature, fingerprint
from graphsplit.train.checkpoint.position import FROM_THE_START, EpochStart
from graphsplit.train.microbatches import Divider, Division, Shape
from graphsplit.train.planner import Planner
from graphsplit.train.signature_text import check_signature_text
from graphsplit.train.step_plan import PlannedStep, Progress, plan_step

_FIX = (
    "give all workers the same data, order and seed; a script that draws random numbers must draw "
    "them on every worker."
)
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


Fed = tuple[PlannedStep, Division | None, Callable[[], None] | None]


class Tickets:
    """Sends and reads tickets; remembers every signature's text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._texts: dict[str, str] = {}
        self._step = -1

    def send(
        self,
        shape: Shape | None,
        *,
        generator: torch.Tensor | None,
        quiet: Container[int] = (),
        checksum: int | None = None,
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
        ticket = StepTicket(step=self._step, end=shape is None)
        if shape is not None:
            self._describe(shape.whole, ticket)
            for signature, count in shape.parts:
                self._describe(signature, ticket.microbatches.add(count=count))
            ticket.loss_weights.extend(shape.weights)
            ticket.fingerprint = checksum or 0
            ticket.last = self._job.asked_to_stop
            self._job.is_stopping |= ticket.last
        ticket.previous_fingerprint = previous_checksum
        if generator is not None:
            ticket.generator = generator.numpy().tobytes()
        self._job.control.send_ticket(_padded(ticket.SerializeToString()), quiet=quiet)

    def _describe(self, signature: Signature, message: StepTicket | MicrobatchRun) -> None:
        """Name a signature; the first time, in full."""
        message.signature_digest = signature.digest
        if signature.digest not in self._texts:
            self._texts[signature.digest] = signature.text
            message.signature_text = signature.text

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
        described: list[StepTicket | MicrobatchRun] = [ticket, *ticket.microbatches]
        for message in described:
            if message.signature_text:
                signature = Signature.read(message.signature_text)
                if signature.digest != message.signature_digest:
                    raise FrameError(
                        f"worker {leader} sent a signature that is not the announced one"
                    )
                what = f"worker {leader} describes a batch wrongly"
                check_signature_text(signature.text, what=what)
                self._texts[signature.digest] = signature.text
        _check_microbatches(ticket, leader)
        self._job.is_stopping |= ticket.last
        return ticket

    def shape(self, ticket: StepTicket) -> Shape:
        """What the batch that a ticket announces looks like, and its microbatches."""
        return Shape(
            self._signature(ticket, ticket),
            tuple((self._signature(ticket, run), run.count) for run in ticket.microbatches),
            tuple(ticket.loss_weights),
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

    def __init__(self, loader: Iterable[Any], *, divider: Divider, has_loss_fn: bool) -> None:
        self._iterator = iter(loader)
        self._divider = divider
        self._has_loss_fn = has_loss_fn

    def draw(self) -> Division | None:
        """The next batch; None at the end."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        return self._divider.divide(batch, has_loss_fn=self._has_loss_fn)


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
        divider: Divider,
        has_loss_fn: bool,
        note: str = "",
        start: EpochStart = FROM_THE_START,
        progress: Progress | None = None,
    ) -> None:
        self._job = job
        self._planner = planner
        self._tickets = tickets
        self._mode = mode
        self._leader = leader
        records.trust_loader(loader)
        self._loader = loader
        self._divider = divider
        self._has_loss_fn = has_loss_fn
        self._note = note
        self._progress = progress
        self._start = start
        start.go_on()
        self._epoch_state = torch.default_generator.get_state()
        if start.generator is not None:
            self._epoch_state = start.generator
        self._cursor: _Cursor | None = None
        self._step = start.step
        self._checksum: int | None = None  # of the batch drawn last
        self._next: Division | None = None  # drawn, but not yet announced

    def __iter__(self) -> Iterator[Fed]:
        if self._job.num_workers == 1:
            yield from self._alone()
        elif self._job.rank == self._leader:
            yield from self._lead()
        else:
            yield from self._follow()

    def _alone(self) -> Iterator[Fed]:
        """There is nobody to tell, and nothing to compare."""
        cursor = self._open_cursor()
        while (division := cursor.draw()) is not None:
            yield self._planned(division.shape()), division, None
            self._step += 1

    def _lead(self) -> Iterator[Fed]:
        cursor = self._open_cursor()
        known: torch.Tensor | None = None
        planned: PlannedStep | None = None
        looked: tuple[Any, ...] = ()
        while True:
            if self._step > 0:
                known = torch.default_generator.get_state()
            division = cursor.draw()
            state = torch.default_generator.get_state()
            news = None if known is not None and torch.equal(state, known) else state
            previous = self._checksum or 0
            if division is None:
                self._tickets.send(None, generator=news, previous_checksum=previous)
                return
            shape = division.shape()
            # Workers that wait for a value anyway are woken by it; waking them twice costs more
            # than a hop, when there are fewer cores than workers.
            is_same = planned is not None and looked == (shape.whole, shape.parts)
            if planned is None or not is_same or self._planner.lowers_again:
                quiet: Container[int] = ()
            else:
                quiet = planned.first.woken_by_values
            self._tickets.send(shape, generator=news, quiet=quiet, previous_checksum=previous)
            planned, looked = self._planned(shape), (shape.whole, shape.parts)
            yield planned, division, self._checking(division)
            self._step += 1

    def _planned(self, shape: Shape) -> PlannedStep:
        return plan_step(self._planner, self._mode, shape, note=self._note, progress=self._progress)

    def _new_cursor(self) -> _Cursor:
        batches = self._start.open(self._loader)
        return _Cursor(batches, divider=self._divider, has_loss_fn=self._has_loss_fn)

    def _checking(self, division: Division) -> Callable[[], None]:
        def check() -> None:
            self._checksum = fingerprint(division.arguments)

        return check

    def _follow(self) -> Iterator[Fed]:
        while True:
            ticket = self._tickets.receive(self._leader)
            if ticket.end:
                self._compare_previous(ticket)
                self._end(ticket)
                return
            self._compare_previous(ticket)
            shape = self._tickets.shape(ticket)
            planned = self._planned(shape)
            if self._job.rank in planned.consumers:
                division = self._drawn_for(ticket, shape)
                yield planned, division, self._checking(division)
            else:
                self._next = None
                self._take_over_generator(ticket)
                yield planned, None, None
            if self._cursor is not None:
                # In program order the next batch is drawn now, after the step and the callbacks:
                # while others still compute, and before its ticket.
                self._next = self._draw()
            planned.first.runner.expect_first_value()
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

    def _draw(self) -> Division | None:
        cursor = self._cursor or self._open_cursor()
        return cursor.draw()

    def _drawn_for(self, ticket: StepTicket, announced: Shape) -> Division:
        """This reader's batch, compared with the ticket."""
        division = self._draw() if self._cursor is None else self._next
        self._next = None
        if division is None:
            raise self._mismatch("its loader has ended", "the leader's has a batch")
        shape = division.shape()
        if shape.whole != announced.whole:
            raise self._mismatch(
                f"its batch is {shape.whole.text}", f"the leader's is {announced.whole.text}"
            )
        if shape != announced:
            raise self._mismatch(
                f"its batch gives {shape.describe()}",
                f"the leader's gives {announced.describe()}",
                fix="split and loss_weight must give the same on every worker: let them look at "
                "nothing but the batch.",
            )
        if ticket.generator and (
            torch.default_generator.get_state().numpy().tobytes() != ticket.generator
        ):
            raise self._mismatch(
                "its random generator is in another state", "the batches are equal"
            )
        return division

    def _open_cursor(self) -> _Cursor:
        """Start reading; where earlier batches of this epoch were not read here, skip them."""
        now = torch.default_generator.get_state()
        torch.default_generator.set_state(self._epoch_state)
        self._cursor = self._new_cursor()
        for _ in range(self._step - self._start.step):
            self._cursor.draw()
        if self._step > 0:
            torch.default_generator.set_state(now)
        return self._cursor

    def _end(self, ticket: StepTicket) -> None:
        if self._next is not None:
            raise self._mismatch("its loader has a further batch", "the leader's has ended")
        self._take_over_generator(ticket)

    def _mismatch(self, mine: str, leaders: str, *, fix: str = _FIX) -> LoaderMismatchError:
        return LoaderMismatchError(
            f"the loaders of workers {self._leader} and {self._job.rank} disagree at "
            f"{self._mode.value} step {self._step} of the epoch\n"
            f"  worker {self._job.rank}: {mine}\n  worker {self._leader}: {leaders}\n"
            f"  Fix: {fix}"
        )
