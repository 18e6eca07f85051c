"""Who started this process, and as which of how many: a pure reading of the environment.

In this order, and the first that is there counts::

    MS_ROLE                   graphsplit's own variables; nothing else is looked at
    torchrun                  TORCHELASTIC_RUN_ID; in a Slurm step or under mpirun it is torchrun
    RANK, WORLD_SIZE, ...     all four variables of ``env://``, as Kubeflow's PyTorchJob sets them
    PET_*                     torchrun's own settings, where PyTorchJob starts no torchrun
    Open MPI                  OMPI_COMM_WORLD_*; its processes may inherit a Slurm step's variables
    MPICH, Intel MPI          PMI_RANK and PMI_SIZE, where they are not a Slurm step's
    Slurm                     a step of srun, never a batch script or an interactive shell
    Kubernetes                JOB_COMPLETION_INDEX of an Indexed Job, with MS_WORKER_NUM

The inner one wins: torchrun and mpirun start processes inside what Slurm or Kubernetes gave them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphsplit.errors import ConfigurationError
from graphsplit.settings import (
    FAIL_FAST,
    GO_ON,
    MAX_WORKERS,
    RESTART,
    WAIT_REJOIN,
    recovery_policy,
)

TORCHRUN, ENV, MPI, PMI, SLURM = "torchrun", "env", "mpi", "pmi", "slurm"
KUBERNETES = "kubernetes"
AUTO, NONE = "auto", "none"
LAUNCHERS = (TORCHRUN, ENV, MPI, PMI, SLURM, KUBERNETES)
IN_WORDS = {
    TORCHRUN: "torchrun",
    ENV: "the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
    MPI: "Open MPI",
    PMI: "MPICH (PMI_RANK and PMI_SIZE)",
    SLURM: "a Slurm step",
    KUBERNETES: "a Kubernetes Indexed Job",
}

# A rank without the number of processes, outside of Slurm's steps: PRRTE's prun tells no more.
_HALVES = (("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", "OMPI_COMM_WORLD_SIZE"))
_ENV_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PET_NAMES = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Slurm's steps that are none: of a batch script, of an interactive shell, and others inside it.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# What other libraries take for an order to start data parallelism of their own.
_TAKEN_AWAY = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME"
    r"|ROLE_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_\w+|PET_\w+"
    r"|OMPI_COMM_WORLD_\w+|PMI_\w+|PMIX_\w+|MV2_COMM_WORLD_\w+|MPI_LOCAL(RANKID|NRANKS)"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|TASK_PID|STEP_NUM_TASKS|STEP_TASKS_PER_NODE"
    r"|TASKS_PER_NODE|NTASKS_PER_NODE)|JOB_COMPLETION_INDEX"
)


@dataclass(frozen=True)
class Found:
    """A process that another launcher has started as one of several.

    Attributes:
        launcher: ``"torchrun"``, ``"env"``, ``"mpi"``, ``"pmi"``, ``"slurm"`` or ``"kubernetes"``.
        rank: Its rank.
        num_workers: How many there are.
        host: A host that all can reach, where rank 0 runs; empty if the launcher names none.
        port: Where a store of the launcher's, as torchrun's, listens on ``host``; 0 without one.
        is_one_host: Whether all of them are known to run on one host.
        job: Tells this start of this job from others, where the launcher says it; else empty.
    """

    launcher: str
    rank: int
    num_workers: int
    host: str = ""
    port: int = 0
    is_one_host: bool = False
    job: str = ""


def find_launcher(environ: Mapping[str, str]) -> Found | None:
    """Read who started this process; None where ``MS_ROLE`` says it, or it runs by itself.

    Raises:
        ConfigurationError: The variables are incomplete or contradict each other, or the launcher
            cannot do what ``GS_RECOVERY`` asks for. Names every one of them.
    """
    if environ.get("MS_ROLE", "").strip():
        return None
    reader = _Reader(environ)
    found = _find(reader)
    if found is not None:
        _compare_own(reader, found)
        if found.num_workers > 1:
            _check_recovery(reader, found)
    reader.raise_if_any()
    return found if found is not None and found.num_workers > 1 else None


def left_to_others(environ: Mapping[str, str]) -> set[str]:
    """The variables by which other libraries would start data parallelism of their own."""
    return {name for name in environ if _TAKEN_AWAY.fullmatch(name)}


class _Reader:
    """Reads variables, and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._problems: list[str] = []

    def text(self, name: str) -> str:
        return self.environ.get(name, "").strip()

    def has(self, *names: str) -> bool:
        return all(self.text(name) for name in names)

    def number(self, name: str, *, lowest: int = 0, highest: int = MAX_WORKERS) -> int:
        value = self.text(name)
        if re.fullmatch(r"[0-9]{1,9}", value) and lowest <= int(value) <= highest:
            return int(value)
        self.problem(f"{self.shown(name)}; expected a whole number from {lowest} to {highest}")
        return lowest

    def shown(self, name: str) -> str:
        value = self.environ.get(name)
        return f"{name} is not set" if value is None else f"{name}={value[:60]!r}"

    def problem(self, text: str) -> None:
        if text not in self._problems:
            self._problems.append(text)

    def raise_if_any(self) -> None:
        if self._problems:
            lines = "\n  ".join(self._problems)
            raise ConfigurationError(
                f"gs.init() cannot tell which worker this process is (MS_ROLE is not set)\n  "
                f"{lines}\n  Fix: mend the variables, or say whom to believe: GS_LAUNCHER="
                f"{' or '.join(LAUNCHERS)}; GS_LAUNCHER=none trains in this process alone."
            )


def _find(reader: _Reader) -> Found | None:
    wanted = reader.text("GS_LAUNCHER") or AUTO
    if wanted == NONE:
        return None
    if wanted not in (AUTO, *LAUNCHERS):
        reader.problem(f"{reader.shown('GS_LAUNCHER')}; expected auto, none or a launcher's name")
        return None
    for launcher, (is_there, read) in _READERS.items():
        if wanted == launcher or (wanted == AUTO and is_there(reader)):
            found = read(reader)
            if not 0 <= found.rank < found.num_workers:
                reader.problem(
                    f"{IN_WORDS[found.launcher]}: "
                    f"rank {found.rank} of {found.num_workers} processes"
                )
            if wanted == AUTO:
                _compare_others(reader, found)
            return found
    for names in (_ENV_NAMES, _PET_NAMES):
        rank, size, *others = names
        if reader.has(rank, size) and reader.text(size) != "1":
            missing = [name for name in others if not reader.has(name)]
            reader.problem(f"{rank} and {size} are set, and {' and '.join(missing)} not")
    for rank, size in _HALVES if not reader.has("SLURM_STEP_ID") else ():
        if reader.has(rank) and not reader.has(size):
            reader.problem(f"{reader.shown(rank)}, and {size} does not say of how many")
    return None


def _torchrun(reader: _Reader) -> Found:
    size = reader.number("WORLD_SIZE", lowest=1)
    return Found(
        TORCHRUN,
        reader.number("RANK"),
        size,
        _host(reader, "MASTER_ADDR"),
        reader.number("MASTER_PORT", lowest=1, highest=65535),
        is_one_host=reader.text("LOCAL_WORLD_SIZE") == str(size),
        job=f"{reader.text('TORCHELASTIC_RUN_ID')}.{reader.text('MASTER_PORT')}"
        f".{reader.text('TORCHELASTIC_RESTART_COUNT')}",
    )


def _env(reader: _Reader) -> Found:
    if not reader.has(*_ENV_NAMES) and reader.has(*_PET_NAMES):
        return _pet(reader)
    host = _host(reader, "MASTER_ADDR")
    size = reader.number("WORLD_SIZE", lowest=1)
    port = reader.number("MASTER_PORT", lowest=1, highest=65535)
    return Found(ENV, reader.number("RANK"), size, host, port, is_one_host=host in LOOPBACK)


def _pet(reader: _Reader) -> Found:
    if reader.text("PET_NPROC_PER_NODE") not in ("", "1"):
        reader.problem(
            f"{reader.shown('PET_NPROC_PER_NODE')} asks for several processes on each node, which "
            f"torchrun starts: use `torchrun train.py` as the command"
        )
    host, rank = _host(reader, "PET_MASTER_ADDR"), reader.number("PET_NODE_RANK")
    port = reader.number("PET_MASTER_PORT", lowest=1, highest=65535)
    return Found(ENV, rank, reader.number("PET_NNODES", lowest=1), host, port)


def _mpi(reader: _Reader) -> Found:
    size = reader.number("OMPI_COMM_WORLD_SIZE", lowest=1)
    return Found(
        MPI,
        reader.number("OMPI_COMM_WORLD_RANK"),
        size,
        is_one_host=reader.text("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size),
        job=reader.text("PMIX_NAMESPACE"),
    )


def _is_pmi(reader: _Reader) -> bool:
    """Whether Hydra did this, or a launcher like it; ``srun`` sets the same numbers for its step.

    Inside of a step Hydra is told by the number of its processes on this host.
    """
    if not reader.has("PMI_RANK", "PMI_SIZE"):
        return False
    return reader.has("MPI_LOCALNRANKS") or not reader.has("SLURM_STEP_ID")


def _pmi(reader: _Reader) -> Found:
    size = reader.number("PMI_SIZE", lowest=1)
    on_host = reader.text("MPI_LOCALNRANKS") or reader.text("PMI_LOCAL_SIZE")
    return Found(
        PMI,
        reader.number("PMI_RANK"),
        size,
        is_one_host=on_host == str(size),
        job=reader.text("I_MPI_HYDRA_UUID"),
    )


def _is_slurm(reader: _Reader) -> bool:
    """Whether a step of ``srun`` started this; a shell that it started for a person did not."""
    step = reader.text("SLURM_STEP_ID")
    is_step = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    return is_step and reader.has("SLURM_PROCID") and not reader.has("SLURM_PTY_PORT")


def _slurm(reader: _Reader) -> Found:
    tasks = "SLURM_STEP_NUM_TASKS" if reader.has("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    hosts = reader.text("SLURM_STEP_NODELIST") or reader.text("SLURM_JOB_NODELIST")
    nodes = reader.text("SLURM_STEP_NUM_NODES") or reader.text("SLURM_NNODES")
    job = f"{reader.text('SLURM_JOB_ID')}.{reader.text('SLURM_STEP_ID')}"
    return Found(
        SLURM,
        reader.number("SLURM_PROCID"),
        reader.number(tasks, lowest=1),
        first_host(hosts),
        is_one_host=nodes == "1",
        job=f"{job}.{reader.text('SLURM_RESTART_COUNT')}",
    )


def _kubernetes(reader: _Reader) -> Found:
    size = reader.number("MS_WORKER_NUM", lowest=1)
    return Found(KUBERNETES, reader.number("JOB_COMPLETION_INDEX"), size)


def _with(*names: str) -> Callable[[_Reader], bool]:
    """Whether all of these variables are set."""
    return lambda reader: reader.has(*names)


_READERS = {
    TORCHRUN: (_with("TORCHELASTIC_RUN_ID"), _torchrun),
    ENV: (_with(*_ENV_NAMES), _env),
    "pet": (_with(*_PET_NAMES), _pet),
    MPI: (_with("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), _mpi),
    PMI: (_is_pmi, _pmi),
    SLURM: (_is_slurm, _slurm),
    # A worker of an Indexed Job; without a number, each pod works by itself.
    KUBERNETES: (_with("JOB_COMPLETION_INDEX", "MS_WORKER_NUM"), _kubernetes),
}


def _host(reader: _Reader, name: str) -> str:
    value = reader.text(name)
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,255}", value):
        reader.problem(f"{reader.shown(name)}; expected a host name or an IP address")
    return value


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: ``a01`` of ``a[01-03,7],b``."""
    match = re.match(r"([^\[,]+)(?:\[([0-9]+))?", nodes)
    return (match[1] + (match[2] or "")) if match else ""


def _compare_others(reader: _Reader, found: Found) -> None:
    """Launchers of which neither runs inside the other one must agree.

    torchrun and mpirun number their processes anew inside of a step, so those do not count.
    """
    names = [name for name in (MPI, PMI, SLURM) if _READERS[name][0](reader)]
    rivals = names if found.launcher == ENV else []
    if found.launcher == SLURM and reader.has("PMI_RANK", "PMI_SIZE"):
        rivals = [PMI]  # the step's own numbers, or those of a launcher that runs inside of it
    for name in rivals:
        other = _READERS[name][1](reader)
        if (other.rank, other.num_workers) != (found.rank, found.num_workers):
            reader.problem(
                f"by {IN_WORDS[found.launcher]} this is rank {found.rank} of {found.num_workers}, "
                f"and by {IN_WORDS[name]} it is rank {other.rank} of {other.num_workers}"
            )


def _compare_own(reader: _Reader, found: Found) -> None:
    """Own variables that are set must agree with what the launcher says."""
    said = {"MS_WORKER_NUM": found.num_workers, "MS_NODE_ID": found.rank}
    for name, value in said.items():
        own = reader.text(name)
        if own and own != str(value) and (name == "MS_WORKER_NUM" or own.isdecimal()):
            reader.problem(f"{reader.shown(name)}, and by {IN_WORDS[found.launcher]} it is {value}")


_CANNOT = {
    (TORCHRUN, WAIT_REJOIN): "torchrun ends all processes when one is lost",
    (MPI, WAIT_REJOIN): "mpirun ends all processes when one is lost",
    (MPI, RESTART): "mpirun starts nothing again",
    (PMI, WAIT_REJOIN): "mpiexec ends all processes when one is lost",
    (PMI, RESTART): "mpiexec starts nothing again",
    (PMI, GO_ON): "mpiexec ends all processes when one is lost",
    (TORCHRUN, GO_ON): "torchrun ends all processes when one is lost",
    (MPI, GO_ON): "mpirun ends all processes when one is lost",
    (SLURM, GO_ON): "srun may end all processes when one is lost",
    (SLURM, WAIT_REJOIN): "srun starts no process again",
    (SLURM, RESTART): "srun starts no process again",
}


def _check_recovery(reader: _Reader, found: Found) -> None:
    """A policy that the launcher cannot do is refused now, not after the first loss."""
    policy = recovery_policy(reader.environ)
    why = _CANNOT.get((found.launcher, policy))
    if (found.launcher, policy) == (TORCHRUN, RESTART) and reader.text(
        "TORCHELASTIC_MAX_RESTARTS"
    ) in ("", "0"):
        why = "torchrun starts nothing again without --max-restarts"
    if why is not None:
        reader.problem(
            f"GS_RECOVERY={policy}, and {why}; {IN_WORDS[found.launcher]} can do {FAIL_FAST}"
        )
