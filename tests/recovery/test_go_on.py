"""Jobs that go on without the workers that were lost, and take in those who come."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recovery_features.parts import Last, adam, all_of, batches
from recovery_features.replicated import normed
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import (
    ClusterError,
    ConfigurationError,
    GraphsplitError,
    JobFailedError,
    PlacementError,
    StateError,
)
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.disk import SnapshotFolder
from graphsplit.settings import GO_ON

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]


def script(
    ranks: list[int], *, head: Any = None, order: Any = "pairs", dtype: Any = None, **options: Any
) -> Any:
    """Three epochs of three batches in 4 microbatches, the last one ragged; eval; single steps."""
    net = normed(ranks, place=bool(ranks))
    if ranks:
        net[1].place(ranks if head is None else head)
    if dtype is not None:
        gs.wire(net[0], dtype)
    model = gs.Model(
        *(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()}),
        microbatches=4,
        gradient_order=order,
        gradient_dtype=dtype,
        clip=gs.clip.GlobalNorm(0.5),
        **options,
    )
    last = Last()
    model.train(3, batches(12, 33), [last])
    found = model.eval(batches(7))
    losses = [model.train_step(*batch) for batch in list(batches(12, 33))]
    return last.losses, found, losses, model.predict(torch.ones(4, 4)), all_of(model, is_end=False)


def undisturbed(run: Callable[..., Any] = script, **options: Any) -> Any:
    state = torch.default_generator.get_state()
    try:
        return run([], **options)
    finally:
        torch.default_generator.set_state(state)


def going_on(
    workers: int, kills: dict[int, list[int]], run: Callable[..., Any] = script, **options: Any
) -> ThreadCluster:
    ranks = list(range(workers))
    settings = options.pop("settings", SnapshotSettings(every=2))
    return ThreadCluster(lambda _: run(ranks), workers, settings, kills, policy=GO_ON, **options)


@pytest.mark.parametrize("at", [3, 70, 200])  # before any snapshot; in training twice
@pytest.mark.parametrize(("workers", "lost"), [(2, 1), (3, 0), (4, 2)])
def test_the_others_go_on_in_the_bits_of_one_process(workers: int, lost: int, at: int) -> None:
    expected = undisturbed()
    cluster = going_on(workers, {lost: [at]})
    found = cluster.run()
    assert cluster.num_killed == 1 and found[lost] is None
    for rank in set(range(workers)) - {lost}:
        assert difference(expected, found[rank]) is None


def test_rounded_values_and_gradients_are_those_of_one_process_too() -> None:
    run = functools.partial(script, dtype=torch.bfloat16)
    cluster = going_on(3, {1: [70]}, run, joins={1: (130, 2)})
    found = cluster.run()
    assert (cluster.num_killed, cluster.num_joined) == (1, 1)
    assert all(difference(undisturbed(run), one) is None for one in found)


@pytest.mark.parametrize("at", [40, 300, 350])
def test_one_after_the_other_is_lost_until_one_is_left(at: int) -> None:
    expected = undisturbed()
    cluster = going_on(4, {0: [at], 2: [at + 60], 3: [at + 90]})
    found = cluster.run()
    assert cluster.num_killed == 3 and cluster.seats == (1,)
    assert difference(expected, found[1]) is None


@pytest.mark.parametrize(("at", "back"), [(5, 3), (30, 40), (100, 60), (240, 120)])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_newcomer_is_taken_in(lost: int, at: int, back: int) -> None:
    expected = undisturbed()
    cluster = going_on(3, {lost: [at]}, joins={lost: (at + back, 2)})
    found = cluster.run()
    assert (cluster.num_killed, cluster.num_joined, cluster.seats) == (1, 1, (0, 1, 2))
    for one in found:
        assert difference(expected, one) is None


@pytest.mark.parametrize("at", [6, 20, 78, 223])
def test_parts_that_are_kept_until_a_step_ends_go_to_those_who_go_on(at: int) -> None:
    """Steps of two batches, four and a half of them in train; a newcomer is taken in as well."""

    def kept(ranks: list[int]) -> Any:
        return script(ranks, accumulate=2, accumulate_by="microbatch")

    expected = undisturbed(kept)
    settings = SnapshotSettings(every=1)
    lost = at % 3
    joins = {lost: (at + 40, (lost + 1) % 3)} if at < 200 else {}
    cluster = going_on(3, {lost: [at]}, kept, settings=settings, joins=joins)
    found = cluster.run()
    assert cluster.num_killed == 1 and cluster.num_joined == (at < 200)
    for one in found if at < 200 else (found[rank] for rank in cluster.seats):
        assert difference(expected, one) is None


def test_a_newcomer_may_be_lost_again_and_another_one_meanwhile() -> None:
    expected = undisturbed()
    kills = {1: [60, 30], 0: [400]}
    cluster = going_on(3, kills, joins={1: (120, 2)})
    found = cluster.run()
    assert (cluster.num_killed, cluster.num_joined, cluster.seats) == (3, 1, (2,))
    assert difference(expected, found[2]) is None


@pytest.mark.parametrize("at", [3, 150])
def test_two_that_are_no_neighbours_are_lost_at_once(at: int) -> None:
    expected = undisturbed()
    cluster = going_on(4, {0: [at]}, together=(0, 2))
    found = cluster.run()
    assert cluster.num_killed == 2 and cluster.seats == (1, 3)
    for rank in (1, 3):
        assert difference(expected, found[rank]) is None


@pytest.mark.parametrize("later", [0, 1, 3, 9])
def test_a_survivor_is_lost_while_a_newcomer_is_taken_in(later: int) -> None:
    expected = undisturbed()
    cluster = going_on(3, {1: [60], 0: [140 + later]}, joins={1: (140, 2)})
    found = cluster.run()
    assert (cluster.num_killed, cluster.num_joined, cluster.seats) == (2, 1, (1, 2))
    for rank in (1, 2):
        assert difference(expected, found[rank]) is None


def test_one_that_is_alone_takes_a_newcomer_in() -> None:
    expected = undisturbed()
    cluster = going_on(2, {1: [60]}, joins={1: (150, 0)})
    found = cluster.run()
    assert (cluster.num_joined, cluster.generation) == (1, 3)
    assert difference(expected, found[1]) is None


@pytest.mark.parametrize("at", [60, 150])
def test_models_that_share_a_network_go_on_together(at: int) -> None:
    def run(ranks: list[int]) -> Any:
        net = normed(ranks, place=bool(ranks))
        if ranks:
            net[1].place(ranks)
        smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
        first = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=4)
        second = gs.Model(net, smooth, adam(net, 0.01), microbatches=3)
        losses = []
        for batch in list(batches(12)) * 3:
            losses += [first.train_step(*batch), second.train_step(*batch)]
        return losses, all_of(first, second, is_end=False)

    expected = undisturbed(run)
    found = going_on(2, {1: [at]}, run, settings=SnapshotSettings(every=3)).run()
    assert difference(expected, found[0]) is None


def test_pieces_beside_what_is_replicated_stay_where_they_are() -> None:
    def run(ranks: list[int]) -> Any:
        return script(ranks, head=1, order="left")

    expected = undisturbed(order="left")
    cluster = going_on(3, {2: [150], 0: [260]}, run)
    found = cluster.run()
    assert cluster.num_killed == 2
    assert difference(expected, found[1]) is None


def test_the_loss_of_a_last_copy_ends_the_job_with_its_name() -> None:
    cluster = going_on(3, {2: [150]}, lambda ranks: script(ranks, head=2))
    with pytest.raises(GraphsplitError, match=r"module '1' is on MS_WORKER 2 alone, and no such "):
        cluster.run()


def test_a_network_without_replicas_is_refused() -> None:
    def run(ranks: list[int]) -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        net[1].place(1)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        model.train(1, batches())

    with pytest.raises(PlacementError, match=r"go_on, and nothing of the network is placed on sev"):
        going_on(2, {}, run).run()


def test_two_neighbours_that_are_lost_at_once_need_a_disk(tmp_path: Any) -> None:
    cluster = going_on(3, {1: [250]}, together=(1, 2))
    with pytest.raises(ClusterError, match=r"cannot go on without workers 1, 2: one of them held"):
        cluster.run()
    expected = undisturbed()
    settings = SnapshotSettings(every=1, disk_every=1, folder=tmp_path)
    cluster = going_on(3, {1: [250]}, together=(1, 2), settings=settings)
    cluster.dies_when = lambda: bool(SnapshotFolder(tmp_path).numbers())
    found = cluster.run()
    assert cluster.num_killed == 2
    assert difference(expected, found[0]) is None


def test_what_the_script_wrote_since_the_last_snapshot_is_not_lost_unnoticed() -> None:
    def run(ranks: list[int]) -> Any:
        net = normed(ranks, place=bool(ranks))
        if ranks:
            net[1].place(ranks)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=4)
        for batch in list(batches(12, 33)) * 4:
            model.train_step(*batch)
            with torch.no_grad():
                for parameter in net[0].parameters():
                    parameter.clamp_(-0.2, 0.2)
        return all_of(model, is_end=False)

    expected = undisturbed(run)
    assert difference(expected, going_on(2, {}, run).run()[0]) is None
    with pytest.raises(ConfigurationError, match="the script wrote to parameters"):
        going_on(2, {1: [150]}, run).run()


class Own(Last):
    """Keeps what is another value on each worker."""

    def state_dict(self) -> dict[str, Any]:
        return {"rank": gs.get_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("begins", [True, False])
def test_a_callback_that_keeps_its_workers_own_is_refused_before_anybody_is_lost(
    begins: bool,
) -> None:
    def run(_: int) -> None:
        net = normed([0, 1], place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=4)
        if not begins:
            model.train(1, batches(12), [Last()])
        model.train(1, batches(12), [Last(), Own()])

    cluster = ThreadCluster(run, 2, SnapshotSettings(every=2), policy=GO_ON)
    found = r"(?s)the state of Own is not the same on worker 0 and worker 1, so.*=wait_rejoin"
    with pytest.raises(StateError, match=found):
        cluster.run()


def test_own_loops_are_refused() -> None:
    def run(ranks: list[int]) -> None:
        gs.distribute(nn.Linear(4, 4))

    with pytest.raises(ConfigurationError, match="distribute was called in a job with GS_RECOV"):
        going_on(2, {}, run).run()


def test_calls_that_name_workers_are_refused() -> None:
    def run(ranks: list[int]) -> None:
        gs.broadcast(torch.ones(2), src=1)

    with pytest.raises(ConfigurationError, match="some of the workers that it names may be away"):
        going_on(2, {}, run).run()


def test_a_rank_is_the_same_for_the_whole_job() -> None:
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}

    class Watching(gs.callbacks.Callback):
        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            seen[gs.get_rank()].append(context.rank)

    def run(ranks: list[int]) -> None:
        net = normed(ranks, place=True)
        net[1].place(ranks)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=4)
        model.train(3, batches(12, 33), [Watching()])

    assert not isinstance(going_on(3, {0: [100]}, run).run(), JobFailedError)
    assert set(seen[2]) == {2} and len(seen[2]) >= 9
