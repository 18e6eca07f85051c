"""Which worker a process is, for each mix of variables; or why that cannot be told."""

from __future__ import annotations

import pytest

from graphsplit.errors import ConfigurationError
from graphsplit.launchers.environment import Found, find_launcher, first_host, left_to_others

RUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a.example",
    "MASTER_PORT": "29500",
}
TORCHRUN = {
    **RUN,
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}
ENV = {name: RUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
PET = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
    "PET_MASTER_ADDR": "job-0.job",
    "PET_MASTER_PORT": "29500",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-a-7@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "6"}
MPICH = {**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "5231-e5e2", "HYDRA_LAUNCH_TYPE": "2"}
PALS = {**PMI, "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PALS_RANKID": "1"}
# What a batch script has, and what a step of srun has beside it.
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[03-04]",
    "SLURM_NNODES": "2",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[03-04]",
    "SLURM_STEP_NUM_NODES": "2",
}
POD = {"JOB_COMPLETION_INDEX": "2", "MS_WORKER_NUM": "3"}

AS_TORCHRUN = Found("torchrun", 1, 4, "a.example", 29500, is_one_host=True, job="none.29500.0")
AS_ENV = Found("env", 1, 4, "a.example", 29500)
AS_MPI = Found("mpi", 2, 3, is_one_host=True, job="prterun-a-7@1")
AS_MPICH = Found("pmi", 1, 4, is_one_host=True)
AS_STEP = Found("slurm", 1, 4, "n03", job="77.0.")
AS_POD = Found("kubernetes", 2, 3)

MIXES: dict[str, tuple[dict[str, str], Found | None]] = {
    "nothing": ({}, None),
    "a shell with other variables": ({"HOME": "/root", "MASTER_ADDR": "a"}, None),
    "own variables": ({"MS_ROLE": "MS_WORKER"}, None),
    "own variables under torchrun": ({"MS_ROLE": "MS_SCHED", **TORCHRUN}, None),
    "own variables in a step": ({"MS_ROLE": "MS_WORKER", **STEP}, None),
    "an empty role is none": ({"MS_ROLE": " ", **TORCHRUN}, AS_TORCHRUN),
    "torchrun": (TORCHRUN, AS_TORCHRUN),
    "torchrun, and its first process": (
        {**TORCHRUN, "RANK": "0"},
        Found("torchrun", 0, 4, "a.example", 29500, is_one_host=True, job="none.29500.0"),
    ),
    "torchrun on two hosts": (
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"},
        Found("torchrun", 1, 4, "a.example", 29500, job="none.29500.0"),
    ),
    "torchrun after a restart": (
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"},
        Found("torchrun", 1, 4, "a.example", 29500, is_one_host=True, job="none.29500.2"),
    ),
    "torchrun with one process": ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, None),
    "torchrun in a step of one task a node": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", **TORCHRUN},
        AS_TORCHRUN,
    ),
    "torchrun in a step of other ranks": ({**STEP, "SLURM_PROCID": "3", **TORCHRUN}, AS_TORCHRUN),
    "torchrun in a batch script": ({**BATCH, **TORCHRUN}, AS_TORCHRUN),
    "torchrun under mpirun": ({**MPI, **TORCHRUN}, AS_TORCHRUN),
    "torchrun in a pod": ({"JOB_COMPLETION_INDEX": "0", **TORCHRUN}, AS_TORCHRUN),
    "torchrun by PyTorchJob": ({**PET, **TORCHRUN}, AS_TORCHRUN),
    "torchrun, and the same number said": ({**TORCHRUN, "MS_WORKER_NUM": "4"}, AS_TORCHRUN),
    "torchrun, and a name of the process": ({**TORCHRUN, "MS_NODE_ID": "left"}, AS_TORCHRUN),
    "torchrun that restarts": (
        {**TORCHRUN, "GS_RECOVERY": "restart", "TORCHELASTIC_MAX_RESTARTS": "3"},
        AS_TORCHRUN,
    ),
    "torchrun that is not to be believed": ({**TORCHRUN, "GS_LAUNCHER": "none"}, None),
    "the step around torchrun": ({**STEP, **TORCHRUN, "GS_LAUNCHER": "slurm"}, AS_STEP),
    "env": (ENV, AS_ENV),
    "env on this host": (
        {**ENV, "MASTER_ADDR": "127.0.0.1"},
        Found("env", 1, 4, "127.0.0.1", 29500, is_one_host=True),
    ),
    "env with one process": ({**ENV, "RANK": "0", "WORLD_SIZE": "1"}, None),
    "env in a step that agrees": ({**STEP, **ENV}, AS_ENV),
    "env in a batch script": ({**BATCH, **ENV}, AS_ENV),
    "env in a pod": ({**ENV, "JOB_COMPLETION_INDEX": "3"}, AS_ENV),
    "env whose pods are started again": ({**ENV, "GS_RECOVERY": "wait_rejoin"}, AS_ENV),
    "PyTorchJob without torchrun": (PET, Found("env", 1, 3, "job-0.job", 29500)),
    "PyTorchJob, one process a node": (
        {**PET, "PET_NPROC_PER_NODE": "1"},
        Found("env", 1, 3, "job-0.job", 29500),
    ),
    "mpirun": (MPI, AS_MPI),
    "mpirun on two hosts": (
        {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        Found("mpi", 2, 3, job="prterun-a-7@1"),
    ),
    "mpirun in a step of its own ranks": ({**STEP, **MPI}, AS_MPI),
    "mpirun in a batch script": ({**BATCH, **MPI}, AS_MPI),
    "half of mpirun": ({"OMPI_COMM_WORLD_RANK": "1"}, None),
    "MPICH": (MPICH, AS_MPICH),
    "MPICH on two hosts": ({**MPICH, "MPI_LOCALNRANKS": "2"}, Found("pmi", 1, 4)),
    "MPICH with one process": ({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}, None),
    "Intel MPI": (INTEL, Found("pmi", 1, 4, is_one_host=True, job="5231-e5e2")),
    "Cray's PALS": (PALS, Found("pmi", 1, 4)),
    "PMI by whomever": (PMI, Found("pmi", 1, 4)),
    "MPICH in a batch script": ({**BATCH, **MPICH}, AS_MPICH),
    "MPICH in a step of its proxies": (
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", **MPICH},
        AS_MPICH,
    ),
    "a step of srun --mpi=pmi2": ({**STEP, **PMI}, AS_STEP),
    "a step of srun --mpi=pmix": ({**STEP, "PMIX_RANK": "1"}, AS_STEP),
    "srun --mpi=pmi2 --pty bash": ({**STEP, "SLURM_PTY_PORT": "40123", **PMI}, None),
    "srun --mpi=pmix --pty bash": (
        {**STEP, "SLURM_PTY_PORT": "40123", "PMIX_RANK": "0"},
        None,
    ),
    "the step around MPICH": ({**STEP, **MPICH, "GS_LAUNCHER": "slurm"}, AS_STEP),
    "torchrun under MPICH": ({**MPICH, **TORCHRUN}, AS_TORCHRUN),
    "env under MPICH that agrees": ({**MPICH, **ENV}, AS_ENV),
    "MPICH in a pod, by MPI's operator": ({**POD, **MPICH, "MS_WORKER_NUM": "4"}, AS_MPICH),
    "MPICH under Open MPI": ({**MPICH, **MPI}, AS_MPI),
    "MPICH whose runs are independent": ({**MPICH, "GS_LAUNCHER": "none"}, None),
    "own variables under MPICH": ({"MS_ROLE": "MS_WORKER", **MPICH}, None),
    "a number of processes without a rank": ({"PMI_SIZE": "4"}, None),
    "PRRTE's prun for independent runs": ({"PMIX_RANK": "1", "GS_LAUNCHER": "none"}, None),
    "a step": (STEP, AS_STEP),
    "a step on one node": (
        {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n03"},
        Found("slurm", 1, 4, "n03", is_one_host=True, job="77.0."),
    ),
    "a step of an older Slurm": (
        {k: v for k, v in STEP.items() if not k.startswith("SLURM_STEP_N")},
        AS_STEP,
    ),
    "a step of a job that was requeued": (
        {**STEP, "SLURM_RESTART_COUNT": "1"},
        Found("slurm", 1, 4, "n03", job="77.0.1"),
    ),
    "a step of salloc's shell": ({**STEP, "SLURM_JOB_NAME": "interactive"}, AS_STEP),
    "a step of one task": ({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    "a batch script": (BATCH, None),
    "a batch script of Slurm that numbers it": ({**BATCH, "SLURM_STEP_ID": "4294967291"}, None),
    "an interactive step": ({**STEP, "SLURM_STEP_ID": "4294967290"}, None),
    "srun --pty bash": ({**STEP, "SLURM_PTY_PORT": "40123"}, None),
    "salloc's shell": ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}, None),
    "a pod": (POD, AS_POD),
    "a pod that works by itself": ({"JOB_COMPLETION_INDEX": "2"}, None),
    "a pod that comes back": ({**POD, "GS_RECOVERY": "wait_rejoin"}, AS_POD),
    "mpirun in a pod, by MPI's operator": ({**POD, **MPI}, AS_MPI),
    "mpirun from a shell of srun --pty": ({**STEP, "SLURM_PTY_PORT": "40123", **MPI}, AS_MPI),
    "torchrun under mpirun in a step in a pod": (
        {**POD, **STEP, **MPI, **TORCHRUN, "MS_WORKER_NUM": "4"},
        AS_TORCHRUN,
    ),
    "the mpirun around torchrun": ({**MPI, **TORCHRUN, "GS_LAUNCHER": "mpi"}, AS_MPI),
    "the pod around mpirun": ({**POD, **MPI, "GS_LAUNCHER": " kubernetes "}, AS_POD),
    "env that mpirun was to be compared with, and is not": (
        {**MPI, **ENV, "GS_LAUNCHER": "env"},
        AS_ENV,
    ),
    "PyTorchJob, asked for by name": (
        {**PET, **MPI, "GS_LAUNCHER": "env"},
        Found("env", 1, 3, "job-0.job", 29500),
    ),
    "settings of torchrun for later": ({"PET_NPROC_PER_NODE": "4", "PET_NNODES": "1"}, None),
    "env's numbers without its address, in a step": (
        {**STEP, "RANK": "1", "WORLD_SIZE": "4"},
        AS_STEP,
    ),
    "numbers with blanks and noughts": ({**ENV, "RANK": " 01 ", "WORLD_SIZE": "4 "}, AS_ENV),
    "env by an address of IPv6": (
        {**ENV, "MASTER_ADDR": "fe80::1%eth0"},
        Found("env", 1, 4, "fe80::1%eth0", 29500),
    ),
    "a number of workers, and nobody who started them": ({"MS_WORKER_NUM": "3"}, None),
    "torchrun alone, whatever it could not do": (
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "GS_RECOVERY": "wait_rejoin"},
        None,
    ),
}

REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "torchrun without a rank": (
        {k: v for k, v in TORCHRUN.items() if k != "RANK"},
        "RANK is not set; expected a whole number",
    ),
    "torchrun without an address": ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR=''; expected"),
    "torchrun, and another rank": ({**TORCHRUN, "RANK": "x"}, "RANK='x'; expected"),
    "a rank out of range": ({**TORCHRUN, "RANK": "4"}, "torchrun: rank 4 of 4 processes"),
    "another number of workers": (
        {**TORCHRUN, "MS_WORKER_NUM": "5"},
        "MS_WORKER_NUM='5', and by torchrun it is 4",
    ),
    "another number of this one": (
        {**STEP, "MS_NODE_ID": "0"},
        "MS_NODE_ID='0', and by a Slurm step it is 1",
    ),
    "env against a step": ({**STEP, **ENV, "RANK": "0"}, "by a Slurm step it is rank 1 of 4"),
    "env against mpirun": ({**MPI, **ENV}, "by Open MPI it is rank 2 of 3"),
    "env against MPICH": (
        {**MPICH, **ENV, "RANK": "3"},
        "by MPICH (PMI_RANK and PMI_SIZE) it is rank 1 of 4",
    ),
    "a step against whoever else is inside": (
        {**STEP, "SLURM_PROCID": "0", **PMI},
        "by a Slurm step this is rank 0 of 4, and by MPICH (PMI_RANK and PMI_SIZE) it is rank 1",
    ),
    "MPICH against another number": ({**MPICH, "MS_WORKER_NUM": "2"}, "it is 4"),
    "half of MPICH": ({"PMI_RANK": "1"}, "PMI_RANK='1', and PMI_SIZE does not say of how many"),
    "MPICH, and a rank that is none": ({**MPICH, "PMI_RANK": "-1"}, "PMI_RANK='-1'; expected"),
    "PRRTE's prun": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prte-a"}, "PMIX_RANK='1', and OMPI_"),
    "MPICH replaces nobody": ({**MPICH, "GS_RECOVERY": "wait_rejoin"}, "mpiexec ends all"),
    "MPICH does not go on": ({**MPICH, "GS_RECOVERY": "go_on"}, "mpiexec ends all"),
    "MPICH starts no job again": ({**MPICH, "GS_RECOVERY": "restart"}, "mpiexec starts nothing"),
    "env without a port": ({**ENV, "MASTER_PORT": "x"}, "MASTER_PORT='x'; expected"),
    "half of env": (
        {"RANK": "0", "WORLD_SIZE": "2"},
        "RANK and WORLD_SIZE are set, and MASTER_ADDR and MASTER_PORT not",
    ),
    "several processes on a node by PyTorchJob": (
        {**PET, "PET_NPROC_PER_NODE": "2"},
        "which torchrun starts",
    ),
    "half of PyTorchJob": (
        {"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_MASTER_ADDR": "job-0.job"},
        "PET_NODE_RANK and PET_NNODES are set, and PET_MASTER_PORT not",
    ),
    "PyTorchJob of changing size": ({**PET, "PET_NNODES": "1:3"}, "PET_NNODES='1:3'; expected"),
    "PyTorchJob against a step": ({**STEP, **PET}, "by a Slurm step it is rank 1 of 4"),
    "torchrun of one process in each of three pods": (
        {**POD, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        "MS_WORKER_NUM='3', and by torchrun it is 1",
    ),
    "a step in a pod of another number": ({**POD, **STEP}, "and by a Slurm step it is 4"),
    "one process by env in a step of four": (
        {**STEP, **ENV, "RANK": "0", "WORLD_SIZE": "1"},
        "by a Slurm step it is rank 1 of 4",
    ),
    "env against a step and mpirun": ({**STEP, **MPI, **ENV}, "by Open MPI it is rank 2 of 3"),
    "an address that is a URL": ({**ENV, "MASTER_ADDR": "tcp://a/"}, "MASTER_ADDR='tcp://a/'"),
    "a step without its number of tasks": (
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_JOB_ID": "77"},
        "SLURM_NTASKS is not set",
    ),
    "more workers than there can be": (
        {**MPI, "OMPI_COMM_WORLD_SIZE": "99999999"},
        "OMPI_COMM_WORLD_SIZE='99999999'; expected",
    ),
    "a pod beyond the last": ({**POD, "JOB_COMPLETION_INDEX": "3"}, "rank 3 of 3 processes"),
    "no such launcher": ({"GS_LAUNCHER": "ray"}, "GS_LAUNCHER='ray'; expected auto"),
    "a launcher that is not there": ({"GS_LAUNCHER": "mpi"}, "OMPI_COMM_WORLD_RANK is not set"),
    "torchrun replaces nobody": (
        {**TORCHRUN, "GS_RECOVERY": "wait_rejoin"},
        "GS_RECOVERY=wait_rejoin, and torchrun ends all processes when one is lost",
    ),
    "torchrun replaces nobody, said otherwise": (
        {**TORCHRUN, "MS_ENABLE_RECOVERY": "1"},
        "GS_RECOVERY=wait_rejoin, and torchrun",
    ),
    "torchrun without restarts": (
        {**TORCHRUN, "GS_RECOVERY": "restart"},
        "torchrun starts nothing again without --max-restarts",
    ),
    "srun replaces nobody": ({**STEP, "GS_RECOVERY": "wait_rejoin"}, "srun starts no process"),
    "srun starts no job again": ({**STEP, "GS_RECOVERY": "restart"}, "srun starts no process"),
    "mpirun replaces nobody": ({**MPI, "GS_RECOVERY": "wait_rejoin"}, "mpirun ends all"),
    "mpirun starts no job again": ({**MPI, "GS_RECOVERY": "restart"}, "mpirun starts nothing"),
}


@pytest.mark.parametrize(("environ", "found"), MIXES.values(), ids=MIXES)
def test_who_started_this_process(environ: dict[str, str], found: Found | None) -> None:
    assert find_launcher(environ) == found


@pytest.mark.parametrize(("environ", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_told_is_one_error(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        find_launcher(environ)
    assert problem in str(error.value)
    assert str(error.value).count("Fix:") == 1


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as error:
        find_launcher(
            {**TORCHRUN, "MS_WORKER_NUM": "5", "MS_NODE_ID": "3", "GS_RECOVERY": "restart"}
        )
    for name in ("MS_WORKER_NUM='5'", "MS_NODE_ID='3'", "GS_RECOVERY=restart"):
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n03", "n03"), ("n[03-04]", "n03"), ("a-b[7,9],c", "a-b7"), ("x,y[1-2]", "x"), ("", "")],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_what_makes_others_start_data_parallelism_goes() -> None:
    """As accelerate, transformers and Lightning look for it."""
    kept = {"HOME", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "MS_NODE_ID"}
    environ = {**TORCHRUN, **PET, **MPI, **STEP, **POD, **MPICH, "MV2_COMM_WORLD_SIZE": "2"}
    left = set(environ) - left_to_others({**environ, **dict.fromkeys(kept, "1")})
    names = {"WORLD_SIZE", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"}
    assert not left & {*names, "TORCHELASTIC_RUN_ID", "MV2_COMM_WORLD_SIZE", "SLURM_PROCID"}
    assert not left_to_others(dict.fromkeys(kept, "1"))
