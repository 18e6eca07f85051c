"""This process's part in a job: joined by ``gs.init``, left by ``gs.finalize`` or at exit."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphsplit import logs
from graphsplit.cluster.identity import NodeIdentity
from graphsplit.cluster.member import Member
from graphsplit.errors import (
    ClusterError,
    ConfigurationError,
    FrameError,
    JobFailedError,
    MembershipChangedError,
    PlanMismatchError,
    TransportError,
)
from graphsplit.failure import AbortSignal
from graphsplit.metrics_port import serve_metrics
from graphsplit.placement.annotations import WORKER_ROLE
from graphsplit.runtime.control import ControlChannels
from graphsplit.runtime.endings import WAKE_SIGNAL, install_endings, install_last_words
from graphsplit.runtime.meter import Meter
from graphsplit.runtime.ownership import TensorOwners
from graphsplit.runtime.script import Call, Script
from graphsplit.security.names import WORKER
from graphsplit.security.protection import load_protection
from graphsplit.settings import ClusterSettings
from graphsplit.transport.base import Transport
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import FINISHED, WaitPolicy
from graphsplit.version import __version__

_GENERATOR_KEY = "generator"

_job: Job | None = None
_one_process = False

on_joined: list[Callable[[Job], None]] = []
"""Called with every job that this process joins, by whoever knows more of what it does."""


class Job:
    """A joined job, as one worker sees it.

    Attributes:
        member: Membership: rank, peers, agreement, barriers.
        transport: Moves tensors between workers.
        control: Small and chunked messages outside any plan.
        abort: Set when the job fails, anywhere.
        is_ending: This worker has an error of its own, or leaves; news of the job's end must not
            interrupt it any more.
        joined_generation: The generation in which this process came: above 1 when it takes the
            place of a lost one, and has to catch up.
        owners: Where the tensors of all Models live.
        script: The calls of the user's script that concern all workers.
        num_barriers: How many barriers the script came to in this generation.
        after_recovery: Called by ``finalize`` after a recovery at the end of the job, so that
            this worker takes its part in what the others do after ``recover``.
        at_end: Called by ``finalize``, by all workers together, while all are still there.
        depth: How many calls of a Model are under way, one inside the other.
        has_stepped: Whether a Model has begun a step.
        is_stopping: The step under way is the last one: the job was asked to end.
        at_close: Called when this worker leaves, however the job has ended.
        meter: Counts steps and traffic; None where no metrics are served.
    """

    def __init__(
        self,
        member: Member,
        transport: Transport,
        abort: AbortSignal,
        *,
        doors: Doors | None = None,
        meter: Meter | None = None,
        trace_folder: str = "",
    ) -> None:
        self.member = member
        self.transport = transport
        self.abort = abort
        self.control = ControlChannels(transport, member.rank, member.num_workers)
        self._doors = doors
        self.meter = meter
        self.script = Script()
        self.owners = TensorOwners()
        self.num_barriers = 0
        self._closed = False
        self._was_asked = False
        self.depth = 0
        self.has_stepped = False
        self.is_stopping = False
        self._num_plans = 0
        self.is_ending = False
        self.joined_generation = member.generation
        self.after_recovery: Callable[[], None] | None = None
        self.at_end: list[Callable[[], None]] = []
        self.at_close: list[Callable[[], None]] = []
        self._trace_folder = trace_folder

    def take_trace_folder(self) -> str:
        """Where the one who asks first writes a trace; empty for all others."""
        folder, self._trace_folder = self._trace_folder, ""
        return folder

    @property
    def generation(self) -> int:
        """The present generation, 1 in a new job; ``recover`` moves on to the next one."""
        return self.member.generation

    @property
    def recovery_policy(self) -> str:
        """What the job does about a lost worker: ``fail_fast``, ``wait_rejoin``, ``restart``."""
        return self.member.recovery

    def recover(self) -> None:
        """Wait until the next generation is formed, and become part of it.

        Call it after a ``MembershipChangedError``. When it returns, ``transport``, ``control``
        and ``abort`` are new ones, ``generation`` has grown, plan numbers begin again, and
        nothing of the former generation can arrive any more. A worker that is lost meanwhile is
        waited for as well.

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
        self.control = ControlChannels(self.transport, self.rank, self.num_workers)
        self._num_plans = 0
        self.abort.add_waker(self.interrupt_main_thread)

    def next_plan_number(self) -> int:
        """A number for a plan that no other plan of the job has; every worker draws alike."""
        self._num_plans += 1
        return self._num_plans - 1

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.member.rank

    @property
    def num_workers(self) -> int:
        """How many workers the job has."""
        return self.member.num_workers

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left."""
        return self._closed

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report what is raised inside as this worker's failure, so that all workers end.

        An error that only follows from a failure elsewhere becomes ``JobFailedError``, or
        ``MembershipChangedError`` if the job recovers, with the root cause.
        """
        self.depth += 1
        try:
            yield
        except BaseException as error:
            root_cause = self._report(error)
            if root_cause is not None:
                raise root_cause from None
            raise
        finally:
            self.depth -= 1

    @property
    def asked_to_stop(self) -> bool:
        """Whether all workers are to end in order, as soon as a step tells them so."""
        return self.member.stops_soon

    def ask_to_stop(self) -> bool:
        """Ask all workers to end when their step is done. Safe in a signal handler.

        Returns:
            False if that is no use: nothing has begun, the job ends anyway, or it was asked before.
        """
        is_over = self.is_ending or self._closed or self.abort.cause is not None
        if self._was_asked or is_over or not self.has_stepped:
            return False
        self._was_asked = True
        self.member.ask_to_stop()
        return True

    def _report(self, error: BaseException) -> JobFailedError | MembershipChangedError | None:
        """Report an error; or return what it only follows from."""
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
            self.member.await_verdict()
        verdict = self.abort.cause
        if verdict is None or (not self.abort.recovers and self.member.is_own(verdict)):
            return None
        self.is_ending = not self.abort.recovers
        return self.abort.error()

    def _report_own(self, error: BaseException) -> None:
        """What the script itself did wrong ends the job, even one that recovers."""
        cause = self.member.failure_of(error)
        if cause is not None:
            self.member.report_failure(cause)

    def interrupt_main_thread(self) -> None:
        """Called by another thread when the job ends: the main thread may be in user code."""
        if not self._closed and WAKE_SIGNAL is not None:
            with suppress(ProcessLookupError, ValueError):
                signal.pthread_kill(threading.main_thread().ident or 0, WAKE_SIGNAL)

    def log_fields(self) -> dict[str, Any]:
        """What every line of this worker's log belongs to."""
        step = self.member.position.location().step
        rank, job = self.rank, self.member.job
        return {"job": job, "generation": self.generation, "rank": rank, "step": step}

    def close(self) -> None:
        """Leave without waiting for anybody."""
        if not self._closed:
            self._closed = self.is_ending = True
            for action in self.at_close:
                action()
            self.script.close()
            self.transport.close()
            self.member.close()


def init() -> None:
    """Join the cluster that the ``MS_*`` variables describe.

    Without ``MS_ROLE`` this process trains alone. In the scheduler's process this serves until the
    job ends and then leaves the script by ``SystemExit``, with a non-zero status if a worker
    failed. Where the workers' generators differ (no ``torch.manual_seed`` before), all get one
    seed.

    Raises:
        ConfigurationError: Variables are missing or malformed, a port is in use, or a second call.
        ClusterError: The scheduler is not there.
        RegistrationRefusedError: The scheduler does not want this worker.
        JobFailedError: Not all workers came in time, or one failed.
    """
    global _job, _one_process
    if _job is not None or _one_process:
        if _one_process and not os.environ.get("MS_ROLE"):
            return
        raise ConfigurationError("gs.init() was called twice\n  Fix: call it once, at the start.")
    install_last_words()
    # gRPC's own fork handlers print at every fork of a data loader; see cluster.forked.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    settings = ClusterSettings.from_environ(os.environ)
    if settings is None:
        _one_process = True
        return
    if settings.is_scheduler:
        from graphsplit.cluster.scheduler import serve

        raise SystemExit(serve(settings))
    logs.configure(os.environ, prefix="graphsplit", stream=lambda: sys.stderr)
    _job = _join(settings)
    logs.CONTEXT.source = _job.log_fields
    for action in on_joined:
        action(_job)
    install_endings(_job, finalize)
    _serve_metrics(_job, settings)
    _share_generator(_job)


@dataclass(frozen=True)
class Doors:
    """Opens this worker's part of the data plane, anew for every generation.

    A new generation has new addresses and a new secret, so that what was sent in an earlier one
    has no way in.

    Attributes:
        settings: The cluster.
        generator: Digest of the generator's state when this process joined.
        meter: Counts what goes through; None: nobody counts.
    """

    settings: ClusterSettings
    generator: str
    meter: Meter | None = None

    def open(self) -> Hub:
        """Listen for peers."""
        settings = self.settings
        return Hub(
            bind_host=settings.worker_host,
            mode=settings.transport,  # type: ignore[arg-type]
            protection=load_protection(settings.security, role=WORKER, rank=settings.wished_rank),
            num_workers=settings.num_workers,
            silence_s=settings.node_timeout_s,
        )

    def endpoints(self, hub: Hub) -> dict[str, str]:
        """What to tell the peers."""
        return {**hub.endpoints, _GENERATOR_KEY: self.generator}

    def connect(self, hub: Hub, member: Member) -> Transport:
        """Become part of the generation that runs."""
        try:
            policy = WaitPolicy(member.abort, self.settings.receive_timeout_s, member.progress)
            member.position.waiting_source = policy.waiting.now
            return hub.connect(
                rank=member.rank,
                job=member.job,
                generation=member.generation,
                peers=[peer.endpoints for peer in member.peers],
                policy=policy,
                traffic=None if self.meter is None else self.meter.traffic,
            )
        except BaseException as error:
            cause = member.failure_of(error)
            if cause is not None:
                member.report_failure(cause)
            raise


def _join(settings: ClusterSettings) -> Job:
    abort = AbortSignal()
    meter = None if settings.watching.metrics_port is None else Meter()
    doors = Doors(settings, _generator_digest(), meter)
    hub = doors.open()
    try:
        member = Member.join(
            settings, endpoints=doors.endpoints(hub), identity=_identity(), abort=abort
        )
    except BaseException:
        hub.close()
        raise
    try:
        transport = doors.connect(hub, member)
    except BaseException:
        member.close()
        hub.close()
        raise
    return Job(
        member, transport, member.abort, doors=doors, meter=meter, trace_folder=settings.trace
    )


def _serve_metrics(job: Job, settings: ClusterSettings) -> None:
    meter = job.meter
    if meter is None:
        return
    with job.reporting():
        stop = serve_metrics(
            lambda: meter.metrics(job.generation),
            settings.watching,
            settings.security,
            load_protection(settings.security, role=WORKER, rank=settings.wished_rank),
            offset=1 + job.rank,
            what=f"the metrics of worker {job.rank}",
        )
    job.at_close.append(stop)


def _identity() -> NodeIdentity:
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    digest = ""
    if script is not None and script.is_file():
        digest = hashlib.sha256(script.read_bytes()).hexdigest()
    python = ".".join(platform.python_version_tuple()[:2])
    return NodeIdentity(
        versions={"graphsplit": __version__, "torch": torch.__version__, "python": python},
        script_digest=digest,
        num_threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
    )


def _generator_digest() -> str:
    return hashlib.sha256(torch.default_generator.get_state().numpy().tobytes()).hexdigest()[:16]


def _share_generator(job: Job) -> None:
    """One seed for all, unless the script has brought all generators to one state already."""
    digests = {peer.endpoints.get(_GENERATOR_KEY) for peer in job.member.peers}
    if len(digests) > 1:
        torch.manual_seed(job.member.seed)


def finalize() -> None:
    """Leave the cluster, once all workers have come to the same point.

    Called at exit where the script does not. Does nothing in one process, or after a failure.

    Raises:
        JobFailedError: The job failed before all had finished.
    """
    global _job
    job, _job = _job, None
    if job is None or job._closed:
        return
    try:
        if job.abort.cause is None or job.abort.recovers:
            _finish(job)
            if not job.is_stopping:
                job.script.finished()
    finally:
        job.close()


def _finish(job: Job) -> None:
    """Come to the end with all others, however often somebody is lost on the way there."""
    position = job.member.position
    progress = position.progress
    while True:
        try:
            if job.abort.recovers:
                job.recover()
                if job.after_recovery is not None:
                    job.after_recovery()
            with job.reporting():
                for action in job.at_end:
                    action()
                progress, position.progress = position.progress, FINISHED
                job.member.finish(stopped=job.is_stopping)
            return
        except MembershipChangedError:
            position.progress = progress


def current() -> Job | None:
    """The joined job, or None in one process.

    Raises:
        ConfigurationError: ``MS_ROLE`` is set, but ``gs.init()`` was not called.
    """
    if _job is None and not _one_process and os.environ.get("MS_ROLE", "").strip():
        raise ConfigurationError(
            f"MS_ROLE={os.environ['MS_ROLE']} is set, but gs.init() was not called; this process "
            f"would train alone\n  Fix: call gs.init() before building a Model, or unset MS_ROLE."
        )
    return _job


def is_initialized() -> bool:
    """Whether ``gs.init()`` was called and ``gs.finalize()`` was not."""
    return _job is not None or _one_process


def get_rank() -> int:
    """This worker's rank; 0 in one process."""
    return 0 if _job is None else _job.rank


def get_world_size() -> int:
    """How many workers the job has; 1 in one process."""
    return 1 if _job is None else _job.num_workers


def get_role() -> str:
    """``"MS_WORKER"``; the scheduler never returns from ``init``."""
    return WORKER_ROLE


def barrier() -> None:
    """Wait until all workers have come here. Does nothing in one process.

    Raises:
        JobFailedError: The job was ended meanwhile.
    """
    job = current()
    if job is not None:
        job.script.run(Call("barrier", _wait_barrier, (job,)))


def _wait_barrier(job: Job) -> None:
    with job.reporting():
        job.num_barriers += 1
        job.member.barrier(f"barrier {job.num_barriers}")
