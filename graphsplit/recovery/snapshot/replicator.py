"""Parts of snapshots go to their holders beside compute, and count once all are there.

Each worker's part is held by the next worker; worker 0 counts::

    worker 1 ── PART 7 ──► worker 2     worker 2 ── HELD 7 ──► worker 0
    worker 2 ── PART 7 ──► worker 0     ...
    worker 0: all parts of 7 are held ── COMMITTED 7 ──► everybody

What is older than a committed snapshot is forgotten. A part that goes to disk is written by
another thread, and counted likewise: ``STORED`` from everybody, then ``ON_DISK``.

[Note: at most two] A worker takes the next snapshot only when the one before is committed, so that
two copies are enough. Nobody waits in vain: who waits has done, and sent, all that the others need
to come as far.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit.errors import FrameError, GraphsplitError
from graphsplit.job.job import Job
from graphsplit.job.stream import SNAPSHOTS, IncomingStream, Message, OutgoingStream, channel_spec
from graphsplit.recovery.snapshot.disk import WRITTEN, DiskWriter
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.transport.session import TICK_S

PART, HELD, COMMITTED, STORED, ON_DISK, LOG, LOG_BEGINS = range(1, 8)
# How often to look at the channels; and while the computing thread waits for a snapshot.
POLL_S, AWAITED_POLL_S = 4e-3, 1e-3
# For how long computing goes first, and how often to look whether it waits for a value itself.
PATIENCE_S, LOOK_S = 10e-3, 0.5e-3
MOST_PART_BYTES = 1 << 40  # memory is taken for what has come, not for what is announced
_COORDINATOR = 0
_AWAITED = "a snapshot, of which every worker has a part"


@dataclass
class HeldCopies:
    """The copies that a worker keeps of the one before it, without looking inside.

    Attributes:
        parts: Complete parts, by number.
        log: Lines of what its calls returned, with the number of the snapshot they came with.
    """

    parts: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    log: list[tuple[int, tuple[torch.Tensor, ...]]] = field(default_factory=list)

    def only(self, number: int) -> HeldCopies:
        """The copies that belong to a snapshot."""
        return HeldCopies(
            {n: pieces for n, pieces in self.parts.items() if n == number},
            [(n, pieces) for n, pieces in self.log if n <= number],
        )

    def lines(self) -> list[torch.Tensor]:
        """The lines, as bytes."""
        return [piece for _, pieces in self.log for piece in pieces]


class Replicator:
    """Brings this worker's parts where they are safe, in one generation of a job.

    Args:
        job: The job.
        held: What is here already of the worker before this one.
        disk: Writes parts to disk; None if nothing goes there.

    Attributes:
        offered: Number of the part that was offered last; -1 before.
        own: This worker's parts that may still be needed, by number.
        held: What is here of the worker before this one.
        committed: Number of the newest snapshot all of whose parts are held; -1 before.
        on_disk: Number of the newest snapshot that is complete on disk; -1 before.
    """

    def __init__(self, job: Job, *, held: HeldCopies, disk: DiskWriter | None = None) -> None:
        self._job = job
        self._rank, self._num_workers = job.rank, job.num_workers
        self._disk = disk
        self.own: dict[int, SnapshotShard] = {}
        self.held = held
        self.committed = self.on_disk = -1
        self.on_release: Callable[[SnapshotShard], None] = _keep_nothing
        self.offered = self._to_store = -1
        self._holders: dict[int, set[int]] = {}
        self._stored: dict[int, dict[int, str]] = {}
        self._outgoing: dict[int, OutgoingStream] = {}
        self._incoming: dict[int, IncomingStream] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_waiting = 0
        self._thread: threading.Thread | None = None
        job.abort.add_waker(self._wake)

    # The computing thread.

    def offer(
        self,
        part: SnapshotShard,
        lines: Sequence[torch.Tensor],
        *,
        script: Mapping[str, Any] | None = None,
    ) -> None:
        """Let a part be brought away. Its memory must stay as it is until it is released.

        Args:
            part: The part.
            lines: The lines that were added since the part before; the first time, all.
            script: The place in the script, if the part shall go to disk.
        """
        self._open()
        with self._changed:
            self.own[part.number] = part
            is_first, self.offered = self.offered < 0, part.number
            if script is not None and self._disk is not None:
                self._to_store = part.number
                self._disk.put(part, script)
            if self._num_workers > 1:
                successor = self._outgoing[(self._rank + 1) % self._num_workers]
                if is_first or lines:
                    successor.put(LOG_BEGINS if is_first else LOG, part.number, lines)
                successor.put(PART, part.number, part.padded)
            else:
                self._note_held(self._rank, part.number)
            self._changed.notify_all()
        self._start()

    def wait_committed(self, number: int) -> None:
        """Wait until all parts of a snapshot are held.

        Raises:
            MembershipChangedError, JobFailedError: The generation is over.
        """
        self._wait_until(lambda: self.committed >= number)

    def wait_stored(self) -> None:
        """Wait until the last snapshot that goes to disk is complete there.

        Raises:
            MembershipChangedError, JobFailedError: The generation is over.
            CheckpointError: It cannot be written.
        """
        self._wait_until(lambda: self.on_disk >= self._to_store)

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        with self._changed:
            if is_done():
                return
            self._num_waiting += 1
            self._job.member.position.awaits_all = _AWAITED
            self._changed.notify_all()
            try:
                while not is_done():
                    self._job.abort.raise_if_set()
                    if self._error is not None:
                        raise self._error
                    self._wait()
            finally:
                self._num_waiting -= 1
                self._job.member.position.awaits_all = ""

    def _wait(self) -> None:
        self._changed.wait(TICK_S)

    def close(self) -> None:
        """End the thread; what is under way is given up."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _open(self) -> None:
        """Open all channels, by the thread that opens all others: senders first."""
        if self._outgoing or self._incoming or self._num_workers == 1:
            return
        n, me = self._num_workers, self._rank
        others = {peer for peer in range(n) if peer != me}
        notes = others if me == _COORDINATOR else {_COORDINATOR}
        for peer in sorted({(me + 1) % n} | notes):
            sender = self._job.transport.open_sender(channel_spec(SNAPSHOTS, me, peer, n))
            self._outgoing[peer] = OutgoingStream(sender)
        for peer in sorted({(me - 1) % n} | notes):
            receiver = self._job.transport.open_receiver(channel_spec(SNAPSHOTS, peer, me, n))
            stream = IncomingStream(receiver, source=peer, limit_bytes=MOST_PART_BYTES)
            self._incoming[peer] = stream

    def _start(self) -> None:
        if self._thread is None:
            name = f"graphsplit-snapshots-{self._rank}"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The thread beside it.

    @property
    def _is_busy(self) -> bool:
        return (
            self.committed < self.offered
            or self.on_disk < self._to_store
            or any(not out.is_empty for out in self._outgoing.values())
        )

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_busy or self._is_closed)
                    if self._is_over():
                        return
                self._let_computing_first()
                while self._pump():
                    if self._is_over():
                        return
                with self._changed:
                    self._changed.wait(AWAITED_POLL_S if self._num_waiting else POLL_S)
        except Exception as error:
            with self._changed:
                self._error = error if isinstance(error, GraphsplitError) else _wrapped(error)
                self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._is_closed or self._job.abort.cause is not None

    def _let_computing_first(self) -> None:
        """Wait for a moment in which the computing thread waits too; not for long.

        What this thread does then takes nothing from it: neither its core nor the interpreter.
        """
        until = time.perf_counter() + PATIENCE_S
        while not self._is_computing_idle() and time.perf_counter() < until:
            time.sleep(LOOK_S)

    def _is_computing_idle(self) -> bool:
        return self._num_waiting > 0 or self._job.member.position.waiting_source() is not None

    def _pump(self) -> bool:
        has_moved = False
        for outgoing in self._outgoing.values():
            has_moved |= outgoing.pump()
        for source, incoming in self._incoming.items():
            for message in incoming.pump():
                has_moved = True
                if message is not None:
                    self._handle(source, message)
        has_moved |= self._collect_stored()
        self._job.member.position.aside += has_moved
        return has_moved

    def _handle(self, source: int, message: Message) -> None:
        number = message.number
        is_from_before = source == (self._rank - 1) % self._num_workers
        with self._changed:
            if message.kind == PART and is_from_before:
                self.held.parts[number] = message.pieces
                self._report(HELD, number)
            elif message.kind in (LOG, LOG_BEGINS) and is_from_before:
                if message.kind == LOG_BEGINS:
                    self.held.log = []
                if message.pieces:
                    self.held.log.append((number, message.pieces))
            elif message.kind == HELD and self._rank == _COORDINATOR:
                self._note_held(source, number)
            elif message.kind == STORED and self._rank == _COORDINATOR and self._disk is not None:
                self._note_stored(source, number, message.octets().decode())
            elif message.kind == COMMITTED and source == _COORDINATOR:
                self._commit(number)
            elif message.kind == ON_DISK and source == _COORDINATOR:
                self._note_on_disk(number)
            else:
                raise FrameError(f"message {message.kind} of a snapshot from worker {source}")
            self._changed.notify_all()

    def _report(self, kind: int, number: int, text: str = "") -> None:
        if self._rank != _COORDINATOR:
            pieces = [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)] if text else []
            self._outgoing[_COORDINATOR].put(kind, number, pieces)
        elif kind == HELD:
            self._note_held(self._rank, number)
        else:
            self._note_stored(self._rank, number, text)

    def _note_held(self, holder: int, number: int) -> None:
        holders = self._holders.setdefault(number, set())
        holders.add(holder)
        if len(holders) == self._num_workers:
            del self._holders[number]
            self._tell_all(COMMITTED, number)
            self._commit(number)

    def _note_stored(self, source: int, number: int, text: str) -> None:
        stored = self._stored.setdefault(number, {})
        stored[source] = text
        if len(stored) == self._num_workers and self._disk is not None:
            del self._stored[number]
            self._disk.commit(number, [stored[rank] for rank in range(self._num_workers)])

    def _note_on_disk(self, number: int) -> None:
        self.on_disk = number
        if self._disk is not None:
            self._disk.prune(number)

    def _tell_all(self, kind: int, number: int) -> None:
        for peer in range(self._num_workers):
            if peer != _COORDINATOR:
                self._outgoing[peer].put(kind, number)

    def _commit(self, number: int) -> None:
        self.committed = number
        for older in [n for n in self.held.parts if n < number]:
            del self.held.parts[older]
        self._release_before(number)

    def _release_before(self, number: int) -> None:
        writing = self._disk.writing if self._disk is not None else ()
        for older in [n for n in self.own if n < number and n not in writing]:
            self.on_release(self.own.pop(older))

    def _collect_stored(self) -> bool:
        done = self._disk.take_done() if self._disk is not None else None
        if done is None:
            return False
        what, number, text = done
        with self._changed:
            if what == WRITTEN:
                self._report(STORED, number, text)
                self._release_before(self.committed)
            else:
                self._tell_all(ON_DISK, number)
                self._note_on_disk(number)
            self._changed.notify_all()
        return True


def _wrapped(error: Exception) -> GraphsplitError:
    return GraphsplitError(f"a snapshot could not be kept: {type(error).__name__}: {error}")


def _keep_nothing(part: Any) -> None:
    """Nobody wants the memory back."""
