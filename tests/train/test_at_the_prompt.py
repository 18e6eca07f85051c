"""What a user meets at the prompt: names, placements, and what monitors print."""

from __future__ import annotations

import pytest
import torch
from recovery_features.parts import Last, adam, batches, plain_net
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import PlacementError
from graphsplit.marks.annotations import module_annotation

assert threads_as_workers


def test_what_is_public_is_shown_and_nothing_else():
    assert dir(gs) == sorted(gs.__all__)


def test_the_role_may_be_left_out():
    short, long = nn.Linear(2, 2), nn.Linear(2, 2)
    assert short.place(1) is short  # type: ignore[operator]
    long.place("MS_WORKER", 1)  # type: ignore[operator]
    ranks = [found.rank for found in map(module_annotation, (short, long)) if found is not None]
    assert ranks == [1, 1]
    for wrong in (("MS_WORKER",), (True,), (-1,)):
        with pytest.raises(PlacementError):
            short.place(*wrong)  # type: ignore[operator]


def monitored() -> list[float]:
    net, last = plain_net(place=True), Last()
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    model.train(1, batches(), [last, gs.callbacks.LossMonitor(every=2)])
    return [float(loss) for loss in last.losses]


@pytest.mark.usefixtures("threads_as_workers")
def test_losses_are_printed_once_with_their_mean(capsys: pytest.CaptureFixture[str]):
    first, second, third = monitored()
    expected = (
        f"epoch: 1 step: 2, loss is {second}, mean {(first + second) / 2:.6g}\n"
        f"epoch: 1 step: 3, loss is {third}, mean {third:.6g}\n"
    )
    assert capsys.readouterr().out == expected
    ThreadCluster(lambda _: monitored(), 3).run()
    assert capsys.readouterr().out == expected


def test_a_progress_bar_ends_with_the_last_loss(capsys: pytest.CaptureFixture[str]):
    net, last = plain_net(place=False), Last()
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    model.train(1, batches(), [last, gs.callbacks.ProgressBar()])
    assert f"loss {float(torch.stack(last.losses)[-1]):.4f}" in capsys.readouterr().err


def test_a_model_shows_itself_in_four_lines():
    net = nn.Linear(40, 50)
    model = gs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    expected = (
        "Model(\n  network: Linear, 2,050 parameters\n  loss: CrossEntropyLoss, optimizer: SGD\n)"
    )
    assert repr(model) == expected
    assert model._repr_html_() == f"<pre>{expected}</pre>"
    assert "network's own" in repr(gs.Model(net))
