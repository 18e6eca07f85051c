"""A script that another launcher starts several times, and that never calls ``gs.init()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError
from graphsplit.job import joined

STARTED = {
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    },
    "the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT": {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    },
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "MPICH (PMI_RANK and PMI_SIZE)": {"PMI_RANK": "1", "PMI_SIZE": "2"},
    "a Slurm step": {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "a01",
    },
    "a Kubernetes Indexed Job": {"JOB_COMPLETION_INDEX": "1", "MS_WORKER_NUM": "2"},
}
CALLS: dict[str, Callable[[], object]] = {
    "Model": lambda: gs.Model(nn.Linear(2, 2), nn.MSELoss()),
    "distribute": lambda: gs.distribute(nn.Linear(2, 2)),
    "barrier": gs.barrier,
    "all_gather": lambda: gs.all_gather(1),
}


@pytest.fixture(params=STARTED)
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in STARTED[request.param].items():
        monkeypatch.setenv(name, value)
    return str(request.param)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_refused_with_the_fix_instead_of_training_alone(launcher: str, call: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        CALLS[call]()
    assert str(error.value) == (
        f"by {launcher} this is rank 1 of 2, but gs.init() was not called; this process would "
        f"train alone\n  Fix: call gs.init() first in the script, or set GS_LAUNCHER=none for "
        f"runs that have nothing to do with each other."
    )


@pytest.mark.parametrize("call", CALLS)
def test_runs_of_a_sweep_say_that_each_trains_alone(
    launcher: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GS_LAUNCHER", "none")
    CALLS[call]()


def test_one_process_of_torchrun_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**STARTED["torchrun"], "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    CALLS["Model"]()


def test_variables_of_a_job_without_a_role_are_a_warning() -> None:
    told = r"MS_ROLE is not set, but MS_WORKER_NUM=2 and MS_NODE_ID=0: this process trains alone"
    with pytest.warns(UserWarning, match=told) as warned:
        joined._warn_of_no_role({"MS_WORKER_NUM": "2", "MS_NODE_ID": "0"})
    assert "graphsplit run -n 2" in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for meant in ({}, {"MS_WORKER_NUM": "1"}, {"MS_WORKER_NUM": "2", "GS_LAUNCHER": "none"}):
            joined._warn_of_no_role(meant)
