"""This process's part in a job: joined by ``gs.init``, left by ``gs.finalize`` or at exit."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from graphsplit import logs
from graphsplit.check.request import leave_generator, left_generator, requested_file
from graphsplit.cluster.member.member import Member
from graphsplit.cluster.wire.messages import END_OF_SCRIPT, NodeIdentity
from graphsplit.errors import ConfigurationError, MembershipChangedError
from graphsplit.failure import AbortSignal
from graphsplit.frames import warn_users
from graphsplit.job.data_plane import GENERATOR_KEY, LABELS_KEY, DataPlane
from graphsplit.job.endings import install_endings, install_last_words
from graphsplit.job.job import Job
from graphsplit.job.meter import Meter
from graphsplit.job.script import ModelCall
from graphsplit.job.when_joined import on_joined
from graphsplit.launchers.environment import IN_WORDS, find_launcher
from graphsplit.launchers.join import Joined, join_launcher
from graphsplit.marks.annotations import WORKER_ROLE
from graphsplit.marks.unused import never_used
from graphsplit.marks.workers import names_of, set_names
from graphsplit.metrics_port import serve_metrics
from graphsplit.reports import note_init
from graphsplit.security.names import WORKER
from graphsplit.security.protection import load_protection
from graphsplit.settings import GO_ON, WAIT_REJOIN, ClusterSettings
from graphsplit.text import called
from graphsplit.transport.wait import FINISHED
from graphsplit.version import __version__

_job: Job | None = None
_one_process = False
_for_call = False
_MOST_NAMED = 5


@called("gs.init")
def init() -> None:
    """Join the cluster that the ``MS_*`` variables describe, or the launcher's that started this.

    Without ``MS_ROLE``, and not under torchrun, srun, mpirun or a Kubernetes Indexed Job, this
    process trains alone. In the scheduler's process this serves until the
    job ends and then leaves the script by ``SystemExit``, with a non-zero status if a worker
    failed. Where the workers' generators differ (no ``torch.manual_seed`` before), all get one
    seed.

    Raises:
        ConfigurationError: Variables are missing or malformed, a port is in use, or a second call.
        ClusterError: The scheduler is not there.
        RegistrationRefusedError: The scheduler refuses this worker.
        JobFailedError: Not all workers came in time, or one failed.
    """
    global _job, _one_process
    if _job is not None or _one_process or _for_call:
        if _for_call or (_one_process and not os.environ.get("MS_ROLE")):
            return
        raise ConfigurationError("gs.init() was called twice\n  Fix: call it once, at the start.")
    install_last_words()
    # gRPC's own fork handlers print at every fork of a data loader; see cluster.forked.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    note_init(os.environ)
    launched = join_launcher(os.environ)
    settings = ClusterSettings.from_environ(os.environ)
    if settings is None:
        _one_process = True
        _warn_of_no_role(os.environ)
        set_names({})
        _begin_as_workers_did()
        return
    if settings.is_scheduler:
        from graphsplit.cluster.scheduler.server import serve

        raise SystemExit(serve(settings))
    # Else whoever connects to a worker's port without a certificate costs a line of its log.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    logs.configure(os.environ, prefix="graphsplit", stream=lambda: sys.stderr)
    _job = _join_beside(launched, settings)
    logs.CONTEXT.source = _job.log_fields
    set_names(_names(_job))
    for action in on_joined:
        action(_job)
    install_endings(_job, finalize)
    _serve_metrics(_job, settings)
    _share_generator(_job)


def _warn_of_no_role(environ: Mapping[str, str]) -> None:
    """Say that this process trains alone, where its variables speak of a job."""
    given = [f"{one}={environ[one]}" for one in ("MS_WORKER_NUM", "MS_NODE_ID") if environ.get(one)]
    is_meant = environ.get("GS_LAUNCHER") == "none" or given == ["MS_WORKER_NUM=1"]
    if given and not is_meant:
        num = environ.get("MS_WORKER_NUM") or "N"
        warn_users(
            f"MS_ROLE is not set, but {' and '.join(given)}: this process trains alone\n"
            f"  Fix: graphsplit run -n {num} starts all processes; or set MS_ROLE=MS_WORKER, and "
            f"start a scheduler by MS_ROLE=MS_SCHED; or unset {given[0].partition('=')[0]}."
        )


def _join_beside(launched: Joined | None, settings: ClusterSettings) -> Job:
    """Join; where another launcher has started this process, with what that means for it."""
    if launched is None:
        return _join(settings)
    if launched.line:
        logs.say(launched.line, event="launcher")
    try:
        job = _join(settings)
    except BaseException:
        launched.close()
        raise
    job.at_close.append(launched.close)
    if settings.recovery not in (WAIT_REJOIN, GO_ON):
        launched.forget_place()  # all are here
    return job


def init_late() -> None:
    """Join the cluster that the ``MS_*`` variables describe, where the script has not done so."""
    if os.environ.get("MS_ROLE") and not is_initialized():
        init()


def init_for_call() -> None:
    """Join for a function, which may call ``init`` itself as scripts do: that does nothing then."""
    global _for_call
    init()
    _for_call = True


def _join(settings: ClusterSettings) -> Job:
    abort = AbortSignal()
    meter = None if settings.watching.metrics_port is None else Meter()
    doors = DataPlane(settings, _generator_digest(), meter)
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
        member,
        transport,
        member.abort,
        doors=doors,
        meter=meter,
        trace_folder=settings.trace,
        recapture_every=settings.recapture_every,
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


def _names(job: Job) -> dict[str, list[int]]:
    """The workers that each name of a host, or label, stands for."""
    peers = sorted(job.member.peers, key=lambda peer: peer.rank)
    labels = [peer.endpoints.get(LABELS_KEY, "").split(",") for peer in peers]
    return names_of(
        (peer.host, list(filter(None, own))) for peer, own in zip(peers, labels, strict=True)
    )


def _generator_digest() -> str:
    return hashlib.sha256(torch.default_generator.get_state().numpy().tobytes()).hexdigest()[:16]


def _share_generator(job: Job) -> None:
    """One seed for all, unless the script has brought all generators to one state already."""
    digests = {peer.endpoints.get(GENERATOR_KEY) for peer in job.member.peers}
    if len(digests) > 1:
        torch.manual_seed(job.member.plan.seed)
    file = requested_file(os.environ)
    if file is not None and job.rank == 0:
        leave_generator(file, torch.default_generator.get_state().numpy().tobytes())


def _begin_as_workers_did() -> None:
    """Start from the generator that a job's workers left: a script without a seed is compared."""
    file = requested_file(os.environ)
    state = left_generator(file) if file is not None else None
    if state is not None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@called("gs.finalize")
def finalize() -> None:
    """Leave the cluster, once all workers have come to the same point.

    Called at exit where the script does not. Does nothing in one process, or after a failure.

    Raises:
        JobFailedError: The job failed before all had finished.
    """
    global _job
    job, _job = _job, None
    if job is None or job.is_closed:
        return
    try:
        if job.abort.cause is None or job.abort.recovers:
            _name_unused(job)
            _finish(job)
            if not job.is_stopping:
                job.script.finished()
    finally:
        job.close()


def _name_unused(job: Job) -> None:
    """Say which placements had no effect: each worker has trained that by itself, if at all."""
    unused = never_used()
    if unused and job.rank == 0:
        shown = ", ".join(unused[:_MOST_NAMED]) + (", ..." if len(unused) > _MOST_NAMED else "")
        line = (
            f"placed modules were never given to a gs.Model or gs.distribute that ran: {shown}\n"
            f"  Fix: train with gs.Model(net, ...), or call gs.distribute(net) before your loop; "
            f"else each worker trains a whole copy."
        )
        logs.say(line, event="unused", level="warning")


def _finish(job: Job) -> None:
    """Come to the end with all others, however often somebody is lost on the way there."""
    position = job.member.position
    progress = position.progress
    while True:
        try:
            if job.abort.recovers:
                job.script.leave_generation()
                job.recover()
                if job.after_recovery is not None:
                    job.after_recovery()
            with job.reporting():
                for action in job.at_end:
                    action()
                progress, position.progress = position.progress, FINISHED
                position.calls.begin(END_OF_SCRIPT)
                job.member.finish(stopped=job.is_stopping)
            return
        except MembershipChangedError:
            position.progress = progress


def current() -> Job | None:
    """The joined job, or None in one process.

    Raises:
        ConfigurationError: This is one process of several, by ``MS_ROLE`` or by the launcher that
            started it, and ``gs.init()`` was not called.
    """
    if _job is None and not _one_process:
        _require_alone(os.environ)
    return _job


def _require_alone(environ: Mapping[str, str]) -> None:
    """Refuse to train in this process alone what was started as one of several."""
    role, found = environ.get("MS_ROLE", "").strip(), find_launcher(environ)
    if role:
        why, way_out = f"MS_ROLE={role} is set", "unset MS_ROLE"
    elif found is not None:
        why = f"by {IN_WORDS[found.launcher]} this is rank {found.rank} of {found.num_workers}"
        way_out = "set GS_LAUNCHER=none for runs that have nothing to do with each other"
    else:
        return
    raise ConfigurationError(
        f"{why}, but gs.init() was not called; this process would train alone\n"
        f"  Fix: call gs.init() first in the script, or {way_out}."
    )


@called("gs.is_initialized")
def is_initialized() -> bool:
    """Whether ``gs.init()`` was called and ``gs.finalize()`` was not."""
    return _job is not None or _one_process


@called("gs.get_rank")
def get_rank() -> int:
    """This worker's rank, for the job's whole life; 0 in one process."""
    return 0 if _job is None else _job.seat


@called("gs.get_world_size")
def get_world_size() -> int:
    """How many workers the job has, those included that it goes on without; 1 in one process."""
    return 1 if _job is None else _job.member.num_seats


@called("gs.get_role")
def get_role() -> str:
    """``"MS_WORKER"``; the scheduler never returns from ``init``."""
    return WORKER_ROLE


@called("gs.barrier")
def barrier() -> None:
    """Wait until all workers have come here. Does nothing in one process.

    Raises:
        JobFailedError: The job was ended meanwhile.
    """
    job = current()
    if job is not None:
        job.script.collective(ModelCall("barrier", _wait_barrier, (job,)))


def _wait_barrier(job: Job) -> None:
    with job.reporting():
        job.num_barriers += 1
        job.member.barrier(f"barrier {job.num_barriers}")
