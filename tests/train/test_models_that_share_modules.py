"""Several Models of the same modules: each tensor has one owner, whichever Model ran first."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_features.calls import Adversaries
from recovery_features.parts import adam, batches, put
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import CollectiveMismatchError, FrameError, JobFailedError
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
NUM_WORKERS = 3
NEVER = 10**9
ONES = torch.ones(8, 1)


def models(
    place: bool, *, all_placed: bool = True, normed: bool = False
) -> tuple[gs.Model, gs.Model]:
    """One of the judge, one of the maker through the judge; both are built before either runs.

    Where not all is placed, each Model by itself would put the judge's first layer elsewhere.
    """
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    if normed:  # its weight is computed by each call, and left in an attribute
        nn.utils.spectral_norm(judge[0])
    if all_placed:
        put(maker, "0", "2", place=place)
        put(judge, "0", "2", place=place)
    elif place:
        maker[0].place("MS_WORKER", 1)
        judge[2].place("MS_WORKER", 2)
    score = nn.BCEWithLogitsLoss()
    judging = gs.Model(judge, score, adam(judge))
    return judging, gs.Model(Adversaries(maker, judge), score, adam(maker))


def judge_all(judging: gs.Model) -> list[torch.Tensor]:
    return [judging.train_step(x, ONES) for x, _ in batches()]


def state_of_one_that_never_ran(place: bool, folder: Path) -> Any:
    judging, making = models(place)
    losses = judge_all(judging)
    return losses, making.state_dict(), making.optimizer_state_dict()


def saved_by_one_that_never_ran(place: bool, folder: Path) -> Any:
    judging, making = models(place)
    losses = judge_all(judging)
    making.save(folder)
    new_judging, new_making = models(place)
    new_making.load(folder)
    return losses, new_making.state_dict(), new_judging.state_dict()


def loaded_by_one_that_never_ran(place: bool, folder: Path) -> Any:
    judging, making = models(place)
    losses = judge_all(judging)
    making.save(folder)
    losses += judge_all(judging)
    making.load(folder)
    between = copy.deepcopy([making.state_dict(), judging.state_dict()])
    losses.append(making.train_step(torch.ones(8, 2), ONES))
    return losses, between, judging.state_dict(), making.state_dict()


def state_dict_loaded_by_one_that_never_ran(place: bool, folder: Path) -> Any:
    judging, making = models(place)
    first = copy.deepcopy(making.state_dict())
    losses = judge_all(judging)
    making.load_state_dict(first)
    losses.append(making.train_step(torch.ones(8, 2), ONES))
    return losses, judging.state_dict(), making.state_dict()


def would_place_it_elsewhere(place: bool, folder: Path) -> Any:
    judging, making = models(place, all_placed=False)
    losses = judge_all(judging)
    losses += [making.predict(torch.ones(8, 2))]
    losses += [making.train_step(torch.ones(8, 2), ONES) for _ in range(3)]
    return losses, judging.state_dict(), making.state_dict()


def would_place_it_elsewhere_the_other_way_round(place: bool, folder: Path) -> Any:
    judging, making = models(place, all_placed=False)
    losses = [making.train_step(torch.ones(8, 2), ONES) for _ in range(3)]
    losses += judge_all(judging)
    return losses, judging.state_dict(), making.state_dict()


@pytest.mark.parametrize("every", [1, NEVER])
@pytest.mark.parametrize(
    "script",
    [
        state_of_one_that_never_ran,
        saved_by_one_that_never_ran,
        loaded_by_one_that_never_ran,
        state_dict_loaded_by_one_that_never_ran,
        would_place_it_elsewhere,
        would_place_it_elsewhere_the_other_way_round,
    ],
    ids=lambda script: script.__name__,
)
def test_the_cut_is_invisible(script: Any, every: int, tmp_path: Path):
    before = torch.default_generator.get_state()
    expected = script(False, tmp_path / "plain")
    torch.default_generator.set_state(before)
    cluster = ThreadCluster(
        lambda rank: script(True, tmp_path / "split"), NUM_WORKERS, SnapshotSettings(every=every)
    )
    for found in cluster.run():
        assert difference(expected, found) is None


def with_a_weight_that_each_call_computes(place: bool) -> Any:
    judging, making = models(place, normed=True)
    losses = []
    for x, _ in batches():
        losses += [judging.train_step(x, ONES), making.train_step(x[:, :2], ONES)]
    return losses, judging.state_dict(), making.state_dict()


def test_a_weight_that_each_call_computes_is_that_of_the_call():
    expected = with_a_weight_that_each_call_computes(False)
    cluster = ThreadCluster(
        lambda rank: with_a_weight_that_each_call_computes(True), NUM_WORKERS, is_recoverable=False
    )
    for found in cluster.run():
        assert difference(expected, found) is None


def two_alike() -> tuple[gs.Model, gs.Model]:
    """Models of the same shape, each with a plan."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        put(net, "0", "1", place=True)
        made.append(gs.Model(net, nn.MSELoss(), adam(net)))
    for model in made:
        model.train_step(torch.ones(8, 2), ONES)
    return made[0], made[1]


CALLS = {
    "state_dict": lambda model, folder: model.state_dict(),
    "optimizer_state_dict": lambda model, folder: model.optimizer_state_dict(),
    "a file": lambda model, folder: model.state_dict(to=folder / "weights.safetensors"),
    "save": lambda model, folder: model.save(folder / "saved"),
}


@pytest.mark.parametrize("is_recoverable", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_states_of_models_in_another_order_are_not_mixed(
    call: str, is_recoverable: bool, tmp_path: Path
):
    def script(rank: int) -> None:
        models = two_alike()
        for model in models if rank != 1 else models[::-1]:
            CALLS[call](model, tmp_path)

    told = r"worker 0 gathers the state of another gs.Model than worker 1, which has that of Seq"
    with pytest.raises(CollectiveMismatchError, match=told):
        ThreadCluster(script, 2, is_recoverable=is_recoverable).run()


def test_calls_of_models_in_another_order_say_so():
    def script(rank: int) -> None:
        models = two_alike()
        models[0].predict(torch.ones(8, 2))
        for model in models if rank != 1 else models[::-1]:
            model.predict(torch.ones(8, 2))

    told = (
        r"it may be in a call of another gs.Model\n  Fix: every"
        r"|worker \d is in Model 2.predict\(\) at .*; worker \d is in predict\(\)"
    )
    with pytest.raises((FrameError, JobFailedError), match=told):
        ThreadCluster(script, 2, is_recoverable=False).run()


@pytest.mark.parametrize("trains", [False, True])
def test_a_save_to_another_folder_on_one_worker_is_refused(trains: bool, tmp_path: Path):
    def script(rank: int) -> None:
        judging, _ = models(place=True)
        if trains:
            judge_all(judging)
        judging.save(tmp_path / f"{rank}", gather=True)
        judging.save(tmp_path / f"at {rank}")

    told = rf"worker 0 saves to '{tmp_path}/at 0', worker 1 to '{tmp_path}/at 1': neither"
    with pytest.raises(CollectiveMismatchError, match=told):
        ThreadCluster(script, 2, is_recoverable=False).run()
    assert gs.latest_checkpoint(tmp_path) == tmp_path / "0"


LOADS = {
    "a folder": lambda model, path: model.load(path),
    "a file": lambda model, path: model.load_state_dict(path / "weights.safetensors"),
}


@pytest.mark.parametrize("call", LOADS)
@pytest.mark.parametrize("has_plan", [True, False])
def test_saves_that_workers_load_into_models_in_another_order_are_not_mixed(
    call: str, has_plan: bool, tmp_path: Path
):
    paths = [tmp_path / "first", tmp_path / "second"]
    for model, path in zip(two_alike(), paths, strict=True):
        model.save(path)

    def script(rank: int) -> None:
        made = two_alike() if has_plan else [gs.Model(nn.Linear(2, 4)), gs.Model(nn.Linear(2, 4))]
        pairs = list(zip(made, paths, strict=True))
        for model, path in pairs if rank != 1 else pairs[::-1]:
            LOADS[call](model, path)

    told = r"worker 0 loads (the state of another gs.Model than|'.*first.*', worker 1 '.*second)"
    with pytest.raises(CollectiveMismatchError, match=told):
        ThreadCluster(script, 2, is_recoverable=False).run()
