"""This process's part in a job: joined by ``gs.init``, left by ``gs.finalize`` or at exit."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

import torch

from graphsplit.cluster.identity import NodeIdentity
from graphsplit.cluster.member import Member
from graphsplit.errors import (
    ConfigurationError,
    JobFailedError,
    PlanMismatchError,
    TransportError,
)
from graphsplit.failure import AbortSignal
from graphsplit.placement.annotations import WORKER_ROLE
from graphsplit.runtime.control import ControlChannels
from graphsplit.settings import ClusterSettings
from graphsplit.transport.base import Transport
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import FINISHED, WaitPolicy
from graphsplit.version import __version__

_ROOT_CAUSE_GRACE_S = 2.0
# Interrupts a main thread that sleeps or computes in user code when the job is ended elsewhere.
_WAKE_SIGNAL = getattr(signal, "SIGURG", None)
_GENERATOR_KEY = "generator"

_job: Job | None = None
_one_process = False


class Job:
    """A joined job, as one worker sees it.

    Attributes:
        member: Membership: rank, peers, agreement, barriers.
        transport: Moves tensors between workers.
        control: Small and chunked messages outside any plan.
        abort: Set when the job fails, anywhere.
        is_ending: This worker has an error of its own, or leaves; news of the job's end must not
            interrupt it any more.
    """

    def __init__(self, member: Member, transport: Transport, abort: AbortSignal) -> None:
        self.member = member
        self.transport = transport
        self.abort = abort
        self.control = ControlChannels(transport, member.rank, member.num_workers)
        self._closed = False
        self._num_plans = 0
        self.is_ending = False

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

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report what is raised inside as this worker's failure, so that all workers end.

        An error that only follows from a failure elsewhere becomes ``JobFailedError`` with the
        root cause.
        """
        try:
            yield
        except BaseException as error:
            root_cause = self._report(error)
            if root_cause is not None:
                raise root_cause from None
            raise

    def _report(self, error: BaseException) -> JobFailedError | None:
        """Report an error; or return what it only follows from."""
        self.is_ending = True
        if isinstance(error, TransportError):
            self._wait_for_root_cause()
        if self.abort.cause is not None:
            if isinstance(error, (JobFailedError, PlanMismatchError)):
                return None
            return self.abort.error()
        cause = self.member.failure_of(error)
        if cause is not None:
            self.member.report_failure(cause)
        return None

    def _wait_for_root_cause(self) -> None:
        """A link that broke is rarely the cause: give the scheduler a moment to say what was."""
        told = threading.Event()
        self.abort.add_waker(told.set)
        told.wait(_ROOT_CAUSE_GRACE_S)

    def interrupt_main_thread(self) -> None:
        """Called by another thread when the job ends: the main thread may be in user code."""
        if not self._closed and _WAKE_SIGNAL is not None:
            with suppress(ProcessLookupError, ValueError):
                signal.pthread_kill(threading.main_thread().ident or 0, _WAKE_SIGNAL)

    def close(self) -> None:
        """Leave without waiting for anybody."""
        if not self._closed:
            self._closed = self.is_ending = True
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
    # gRPC's own fork handlers print at every fork of a data loader; see cluster.forked.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    settings = ClusterSettings.from_environ(os.environ)
    if settings is None:
        _one_process = True
        return
    if settings.is_scheduler:
        from graphsplit.cluster.scheduler import serve

        raise SystemExit(serve(settings))
    _job = _join(settings)
    _install_endings(_job)
    _share_generator(_job)


def _join(settings: ClusterSettings) -> Job:
    abort = AbortSignal()
    hub = Hub(bind_host=settings.worker_host, mode=settings.transport)  # type: ignore[arg-type]
    endpoints = {**hub.endpoints, _GENERATOR_KEY: _generator_digest()}
    try:
        member = Member.join(settings, endpoints=endpoints, identity=_identity(), abort=abort)
    except BaseException:
        hub.close()
        raise
    try:
        policy = WaitPolicy(abort, settings.receive_timeout_s, member.progress)
        transport = hub.connect(
            rank=member.rank,
            job=member.job,
            generation=member.generation,
            peers=[peer.endpoints for peer in member.peers],
            policy=policy,
        )
    except BaseException as error:
        cause = member.failure_of(error)
        if cause is not None:
            member.report_failure(cause)
        member.close()
        hub.close()
        raise
    return Job(member, transport, abort)


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


def _install_endings(job: Job) -> None:
    """Say why this process ends, whichever way it ends."""
    previous = sys.excepthook

    def report_and_print(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        job.is_ending = True
        previous(kind, error, trace)
        sys.stderr.flush()
        if not job._closed:
            cause = job.member.failure_of(error)
            if cause is not None:
                job.member.report_failure(cause)
            job.close()

    sys.excepthook = report_and_print
    atexit.register(_finalize_at_exit)
    if threading.current_thread() is threading.main_thread():
        _raise_on(job, _WAKE_SIGNAL)
        _end_on_terminate()
    job.abort.add_waker(job.interrupt_main_thread)


def _raise_on(job: Job, number: signal.Signals | None) -> None:
    if number is None or signal.getsignal(number) not in (signal.SIG_DFL, None):
        return

    def wake(signum: int, frame: FrameType | None) -> None:
        if not job.is_ending and not job.abort.was_raised:
            job.abort.raise_if_set()

    signal.signal(number, wake)


def _end_on_terminate() -> None:
    """SIGTERM and SIGINT end the job with a reason instead of a vanished process.

    A background child of a shell inherits SIGINT as ignored; here it must end the worker.
    """

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"ended by {signal.Signals(signum).name}")

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, terminate)


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
        if job.abort.cause is None:
            with job.reporting():
                job.member.position.progress = FINISHED
                job.member.finish()
    finally:
        job.close()


def _finalize_at_exit() -> None:
    """At exit nothing can catch an error any more; what ended the job is still told."""
    try:
        finalize()
    except JobFailedError as error:
        print(f"graphsplit: {error}", file=sys.stderr, flush=True)


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


_num_barriers = 0


def barrier() -> None:
    """Wait until all workers have come here. Does nothing in one process.

    Raises:
        JobFailedError: The job was ended meanwhile.
    """
    global _num_barriers
    job = current()
    if job is not None:
        _num_barriers += 1
        with job.reporting():
            job.member.barrier(f"barrier {_num_barriers}")
