"""A joined job, as one worker sees it: membership, transport, and how it goes on or ends."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Any, NoReturn

from graphsplit.cluster.member.member import Member
from graphsplit.errors import (
    ClusterError,
    FrameError,
    JobFailedError,
    MembershipChangedError,
    PlanMismatchError,
    RaisedInEagerError,
    TransportError,
)
from graphsplit.failure import AbortSignal
from graphsplit.frames import users_line_now
from graphsplit.job.control import ControlChannels
from graphsplit.job.data_plane import DataPlane
from graphsplit.job.meter import Meter
from graphsplit.job.readers import LoaderReaders
from graphsplit.job.script import Script
from graphsplit.job.stream import ASKED, SENT
from graphsplit.optimizers.tensor_owners import ComparedWrites, TensorOwners
from graphsplit.settings import FAIL_FAST, GO_ON
from graphsplit.transport.base import Transport

# Interrupts a main thread that sleeps or computes in user code when the job is ended elsewhere.
WAKE_SIGNAL = getattr(signal, "SIGURG", None)
_REPORTED = "_graphsplit_reported"


class _Reporting:
    """See ``Job.reporting``; several at each step, for which a generator would take its time."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._job.raised = None
        if self._job.is_forked:
            raise ClusterError(
                f"a child process that this worker has forked makes a call of the whole job\n"
                f"  {users_line_now()}\n"
                f"  Fix: make it in the worker itself, and give the child what it returns."
            )
        self._job.depth += 1

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, RaisedInEagerError) and error.is_settled:
                self._job.raise_as_eager(error)
            is_settled = getattr(error, "is_settled", False) or error is self._job.raised
            if error is not None and not is_settled:
                self._job._leave(error)
        finally:
            self._job.depth -= 1


class Job:
    """A joined job, as one worker sees it.

    Attributes:
        member: Membership: peers, agreement, barriers.
        rank: This worker's rank.
        num_workers: How many workers the job has.
        ranks: The ranks of all of them.
        seats: The ranks that scripts know, of those who are there: all of them, unless the job goes
            on without some. Each worker's own is its ``seat``.
        generation: The present generation, 1 in a new job; ``recover`` moves on to the next one.
        transport: Moves tensors between workers.
        control: Small and chunked messages outside any plan.
        abort: Set when the job fails, anywhere.
        is_ending: This worker has an error of its own, or leaves; news of the job's end must not
            interrupt it any more.
        joined_generation: The generation in which this process came: above 1 when it takes the
            place of a lost one, and has to catch up.
        owners: Where the tensors of all Models live.
        compared_writes: How often they had been written to when workers compared that.
        readers: Which workers have read the loaders of all Models.
        script: The calls of the user's script that concern all workers.
        num_barriers: How many barriers the script came to in this generation.
        after_recovery: Called by ``finalize`` after a recovery at the end of the job, so that
            this worker takes its part in what the others do after ``recover``.
        at_end: Called by ``finalize``, by all workers together, while all are still there.
        depth: How many calls of a Model are under way, one inside the other.
        has_stepped: Whether a Model has begun a step.
        num_plans: The number that the plan made next will have.
        is_closed: This worker has left.
        is_forked: This process is a child that the script has forked.
        raised: An error that all workers have, as plain PyTorch raises it; the script may catch it.
        is_stopping: The step under way is the last one: the job was asked to end.
        at_close: Called when this worker has left, however the job has ended.
        meter: Counts steps and traffic; None where no metrics are served.
        recapture_every: After how many steps graphs are captured again and compared; 0 for never.
    """

    def __init__(
        self,
        member: Member,
        transport: Transport,
        abort: AbortSignal,
        *,
        doors: DataPlane | None = None,
        meter: Meter | None = None,
        trace_folder: str = "",
        recapture_every: int = 0,
    ) -> None:
        self.member = member
        self._take_place()
        self.transport = transport
        self.abort = abort
        self.control = self._channels()
        self._doors = doors
        self.meter = meter
        member.position.calls.is_kept = member.recovery == FAIL_FAST
        member.position.calls.reporting = self.reporting
        self.script = Script(member.position.calls)
        self.owners = TensorOwners()
        self.compared_writes = ComparedWrites()
        self.readers = LoaderReaders()
        self.num_barriers = 0
        self.is_closed = False
        self._was_asked = False
        self.depth = 0
        self.has_stepped = False
        self.is_stopping = False
        self.raised: Exception | None = None
        self.num_plans = 0
        self.is_ending = self.is_forked = False
        self.joined_generation = member.generation
        self.after_recovery: Callable[[], None] | None = None
        self.at_end: list[Callable[[], None]] = []
        self.at_close: list[Callable[[], None]] = []
        self._trace_folder = trace_folder
        self.recapture_every = recapture_every

    def _take_place(self) -> None:
        """Be who this worker is in the present generation."""
        member = self.member
        self.rank, self.num_workers = member.rank, member.num_workers
        self.ranks, self.seats = range(self.num_workers), member.seats
        self.generation = member.generation

    @property
    def seat(self) -> int:
        """The rank by which the script knows this worker, for the job's whole life."""
        return self.seats[self.rank]

    @property
    def seats_left(self) -> tuple[int, ...] | None:
        """The seats, where some workers are away; None where all are there."""
        return None if len(self.seats) == self.member.num_seats else self.seats

    @property
    def goes_on(self) -> bool:
        """Whether the job goes on without those that are lost."""
        return self.recovery_policy == GO_ON

    def take_trace_folder(self) -> str:
        """Where the one who asks first writes a trace; empty for all others."""
        folder, self._trace_folder = self._trace_folder, ""
        return folder

    @cached_property
    def sent(self) -> ControlChannels:
        """The channels of ``gs.send``, whose values are taken at any later time."""
        return ControlChannels(self.transport, self.rank, self.num_workers, self._tick, use=SENT)

    @cached_property
    def asked(self) -> ControlChannels:
        """The channels for values of an own loop, for which some workers alone may ask."""
        return ControlChannels(self.transport, self.rank, self.num_workers, self._tick, use=ASKED)

    def _channels(self) -> ControlChannels:
        return ControlChannels(self.transport, self.rank, self.num_workers, self._tick)

    def _tick(self) -> None:
        self.member.position.progress += 1

    @property
    def recovery_policy(self) -> str:
        """The answer to a lost worker: ``fail_fast``, ``wait_rejoin``, ``restart``, ``go_on``."""
        return self.member.recovery

    def recover(self) -> None:
        """Wait until the next generation is formed, and become part of it.

        Call it after a ``MembershipChangedError``. When it returns, ``transport``, ``control``
        and ``abort`` are new ones, ``generation`` has grown, plan numbers begin again, and
        nothing of the former generation can arrive any more. A worker that is lost meanwhile is
        waited for as well. Where the job goes on without the lost ones, ``rank``, ``num_workers``
        and ``seats`` are those of who is left.

        Raises:
            JobFailedError: The job failed for good, or the lost worker did not come back within
                ``MS_TOPO_TIMEOUT``.
        """
        if not self.abort.recovers or self._doors is None:
            self.abort.raise_if_set()
            raise ClusterError("this job has nothing to recover from: no worker was lost")
        self.is_ending = False
        self.transport.close()
        hub = self._doors.open()
        try:
            self.member.recover(self._doors.endpoints(hub))
            self.abort = self.member.abort
            self.transport = self._doors.connect(hub, self.member)
        except BaseException:
            hub.close()
            raise
        self._take_place()
        if self.goes_on:
            self.forget_owners()
        self.control = self._channels()
        self.num_plans = 0
        self.abort.add_waker(self.interrupt_main_thread)

    def forget_owners(self) -> None:
        """Let owners be fixed anew, among those who are there."""
        self.owners = TensorOwners()

    def next_plan_number(self) -> int:
        """A number for a plan that no other plan of the job has; every worker draws alike."""
        self.num_plans += 1
        return self.num_plans - 1

    def reporting(self) -> AbstractContextManager[None]:
        """Report what is raised inside as this worker's failure, so that all workers end.

        An error that only follows from a failure elsewhere becomes ``JobFailedError``, or
        ``MembershipChangedError`` if the job recovers, with the root cause.
        """
        return _Reporting(self)

    def raise_as_eager(self, found: RaisedInEagerError) -> NoReturn:
        """Raise the error that plain PyTorch raises: the script may decide by what it is."""
        self.raised = error = found.error
        context = error.__context__
        note = str(found).partition("\n")[2]
        if sys.version_info >= (3, 11) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        try:
            raise error
        finally:
            error.__context__ = context  # nor does it come of another one there

    def _leave(self, error: BaseException) -> None:
        root_cause = self._report(error)
        if isinstance(root_cause or error, MembershipChangedError):
            self.script.leave_generation()
        if root_cause is not None:
            raise root_cause from None

    def ask_to_stop(self) -> bool:
        """Ask all workers to end when their step is done. Safe in a signal handler.

        Returns:
            False if that is no use: nothing has begun, the job ends anyway, or it was asked before.
        """
        is_over = self.is_ending or self.is_closed or self.abort.cause is not None
        if self._was_asked or is_over or not self.has_stepped:
            return False
        self._was_asked = True
        self.member.ask_to_stop()
        return True

    def has_reported(self, error: BaseException | None) -> bool:
        """Whether all know of this error, which ends the job."""
        return hasattr(error, _REPORTED)

    def _report(self, error: BaseException) -> JobFailedError | MembershipChangedError | None:
        """Report an error; or return what it only follows from."""
        if self.is_closed or self.has_reported(error):
            return None
        self.is_ending = not isinstance(error, MembershipChangedError)
        if isinstance(error, TransportError) and not isinstance(error, FrameError):
            return self._report_link(error)
        if self.abort.recovers or self.abort.cause is None:
            self._report_own(error)
            return None
        if isinstance(error, (JobFailedError, PlanMismatchError)):
            return None
        self.is_ending = True
        return self.abort.error()

    def _report_link(self, error: TransportError) -> JobFailedError | MembershipChangedError | None:
        """Report a link that broke, and wait for what the scheduler makes of it.

        A link is rarely the cause. Only the scheduler knows whether the worker at its other end is
        lost, or the network between the two, or whether this worker itself is cut off.
        """
        if self.abort.cause is None:
            self._report_own(error)
        verdict = self.abort.cause
        if verdict is None or (not self.abort.recovers and self.member.failures.is_own(verdict)):
            return None
        self.is_ending = not self.abort.recovers
        return self.abort.error()

    def _report_own(self, error: BaseException) -> None:
        """Report what the script itself did wrong: it ends the job, even one that recovers.

        Others may have found the same at once: whose error ended the job, the verdict says.
        """
        cause = self.member.failures.cause_of(error)
        vars(error)[_REPORTED] = True  # else a call around this one would do it again
        if cause is not None:
            self.member.failures.report(cause)
            self.member.failures.await_verdict()

    def interrupt_main_thread(self) -> None:
        """Called by another thread when the job ends: the main thread may be in user code."""
        if not self.is_closed and WAKE_SIGNAL is not None:
            with suppress(ProcessLookupError, ValueError):
                signal.pthread_kill(threading.main_thread().ident or 0, WAKE_SIGNAL)

    def log_fields(self) -> dict[str, Any]:
        """The fields that every line of this worker's log carries."""
        step = self.member.position.location().step
        rank, job = self.rank, self.member.plan.job
        return {"job": job, "generation": self.generation, "rank": rank, "step": step}

    def forget(self) -> None:
        """This process is a child that the script has forked: it has no part in the job."""
        self.is_closed = self.is_ending = self.is_forked = True

    def close(self) -> None:
        """Leave without waiting for anybody."""
        if not self.is_closed:
            self.is_closed = self.is_ending = True
            self.script.close()
            self.transport.close()
            self.member.close()
            for action in self.at_close:
                action()
