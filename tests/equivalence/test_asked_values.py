"""Code that asks tensors for their values, around modules that are on several workers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.capture.python import answers
from graphsplit.errors import CaptureError, PlacementError

assert threads_as_workers
pytestmark = [
    pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning"),
]
Use = Callable[[Any, torch.Tensor], torch.Tensor]


class Asking(nn.Module):
    """Parts on two workers, and code between them that asks."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.mid, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.use, self.count, self.history = use, 0, []  # type: ignore[var-annotated]

    def forward(self, x: torch.Tensor) -> Any:
        h = self.use(self, torch.tanh(self.first(x)))
        return h if h.shape[1] == 3 else self.last(h)


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.mid.place("MS_WORKER", 1)
    net.other.place("MS_WORKER", 0)
    net.last.place("MS_WORKER", 1)


def caught(net: Any, h: torch.Tensor) -> torch.Tensor:
    try:
        k = float(h.detach().sum())
    except Exception:
        k = 5.0
    return h * k


def caught_whatever(net: Any, h: torch.Tensor) -> torch.Tensor:
    try:
        k = net.mid(h).detach().mean().item()
    except:  # noqa: E722
        k = 5.0
    return h * math.exp(-abs(k))


def branches(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = net.norm(h)
    if h[0].sum() > 0:
        net.count += 1
        h = net.norm(net.mid(F.dropout(h, 0.3, net.training)))
        if torch.isnan(h).any():
            raise ValueError("nan")
    return F.dropout(h * (1 + 0.1 * net.count), 0.5, net.training)


def counted(net: Any, h: torch.Tensor) -> torch.Tensor:
    n = int((h.mean(1) > 0).sum()) % 3
    for _ in range(n):
        h = torch.tanh(net.mid(h))
    return torch.cat([h[:, :n] * 2, h[:, n:]], 1)


def until(net: Any, h: torch.Tensor) -> torch.Tensor:
    rounds = 0
    while h.norm() > 1.0 and rounds < 3:
        h, rounds = torch.tanh(net.mid(h)) * 0.5, rounds + 1
    return h


def leaves_early(net: Any, h: torch.Tensor) -> torch.Tensor:
    if h.abs().max() < 0.9:
        return net.last(h)  # type: ignore[no-any-return]
    return net.mid(h)  # type: ignore[no-any-return]


def remembers(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.history.append(float(h.detach().mean()))
    return h * (1.0 if len(net.history) < 3 else net.history[-2])


def chosen(net: Any, h: torch.Tensor) -> torch.Tensor:
    low, high = h.detach().mean(0)[:2].tolist()
    part = {True: net.mid, False: net.other}[bool(h.mean() > low)]
    return part(h) * high if torch.equal(h, h.clamp(min=-0.9)) else h  # type: ignore[no-any-return]


USES: list[Use] = [
    *(caught, caught_whatever, branches, counted, until, leaves_early, remembers, chosen),
]


def batches(num: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    return [(torch.randn(size, 6), torch.randn(size, 3)) for _ in range(num)]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_code_that_asks_for_values_gets_those_of_the_plain_loop(
    use: Use, microbatches: int
) -> None:
    assert_same_bits(
        lambda: Asking(use),
        batches(3),
        num_workers=2,
        place=place,
        loss_fn=F.mse_loss,
        microbatches=microbatches,
        plan_everywhere=True,
        evaluate_after=(1,),
    )


def test_a_number_of_a_tensor_is_an_operand_after_its_second_value() -> None:
    """So many steps take no more captures."""
    cluster = assert_same_bits(
        lambda: Asking(lambda net, h: h / (1.0 + abs(float(h.detach().mean())))),
        batches(5),
        num_workers=2,
        place=place,
        loss_fn=F.mse_loss,
        plan_everywhere=True,
        evaluate_after=(),
    )
    (planner, *_) = (worker.planner for worker in cluster.workers)
    assert len(list(planner.recordings)) == 3  # the question, and two answers


class Counting(Asking):
    """Has a counter under two names, which a buffer that steers cannot have."""

    def __init__(self) -> None:
        super().__init__(counts)
        self.register_buffer("steps", torch.tensor(0))
        self.mid.register_buffer("same", self.steps)


def counts(net: Any, h: torch.Tensor) -> torch.Tensor:
    if net.steps < 2:
        h = net.mid(h)
    net.steps.add_(1)
    return h


def test_a_buffer_under_two_names_is_asked() -> None:
    assert_same_bits(
        Counting,
        batches(3),
        num_workers=2,
        place=place,
        loss_fn=F.mse_loss,
        plan_everywhere=True,
        evaluate_after=(1,),
    )


def in_own_loop(net: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss = F.mse_loss(net(batch[0]), batch[1])
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return loss.detach()


@pytest.mark.usefixtures("threads_as_workers")
def test_a_distributed_network_asks_too() -> None:
    torch.manual_seed(3)
    start = Asking(branches)
    plain = copy.deepcopy(start)
    torch.manual_seed(4)
    expected = [in_own_loop(plain, batch) for batch in batches(2)]

    def run(rank: int) -> Any:
        net = copy.deepcopy(start)
        place(net)
        torch.manual_seed(4)
        given = batches(2)
        distributed = gs.distribute(net)
        return [float(in_own_loop(distributed, one)) for one in given], net.state_dict()

    for losses, state in ThreadCluster(run, 2, is_recoverable=False).run():
        assert losses == [float(loss) for loss in expected]
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name


def as_array(net: Any, h: torch.Tensor) -> torch.Tensor:
    return net.mid(h) * float(h.detach().numpy().mean())  # type: ignore[no-any-return]


def many(net: Any, h: torch.Tensor) -> torch.Tensor:
    found: list[float] = h.detach()[0].tolist()
    return net.mid(h) * sum(found)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("use", "reason", "fix"),
    [
        (as_array, "a tensor leaves PyTorch", "with gs.opaque"),
        (many, "asks tensors for more than 2 values", "compute with the tensors"),
    ],
)
def test_what_is_asked_otherwise_is_refused_with_its_line(
    use: Use, reason: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MOST", 2)
    with pytest.raises(CaptureError) as caught:
        train(use)
    assert reason in str(caught.value)
    assert fix in str(caught.value)
    assert f"{__file__}:{use.__code__.co_firstlineno + 1}" in str(caught.value)


def train(use: Use) -> None:
    assert_same_bits(
        lambda: Asking(use),
        batches(1),
        num_workers=2,
        place=place,
        loss_fn=F.mse_loss,
        plan_everywhere=True,
    )


def norms(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = net.norm(h)
    if h[0].sum() > 0:
        h = net.norm(F.dropout(net.mid(h), 0.3, net.training))
    return F.dropout(h, 0.5, net.training)


def in_a_region(net: Any, h: torch.Tensor) -> torch.Tensor:
    """Replicas behind the question."""
    if h.mean() > 0:
        h = net.mid(h)
    with gs.place("MS_WORKER", [0, 2, 1]):
        return torch.tanh(h) * 2


def whole(net: Any) -> None:
    net.place("MS_WORKER", [0, 1, 2])


def mixed(net: Any) -> None:
    net.place("MS_WORKER", [0, 1])
    net.mid.place("MS_WORKER", [2, 1], rows=(1, 2))
    net.last.place("MS_WORKER", 2)


@pytest.mark.parametrize(
    ("use", "replicas", "options"),
    [
        (norms, whole, {}),
        (norms, mixed, {"gradient_order": "pairs"}),
        (counted, whole, {"gradient_order": "pairs", "schedule": "zero_bubble"}),
        (until, mixed, {"accumulate": 2}),
        (chosen, mixed, {}),
        (in_a_region, place, {"gradient_order": "pairs"}),
        (in_a_region, place, {}),
    ],
)
def test_replicas_ask_for_their_own_microbatches(use: Use, replicas: Any, options: Any) -> None:
    cluster = assert_same_bits(
        lambda: Asking(use),
        batches(4, 14),
        num_workers=3,
        place=replicas,
        loss_fn=F.mse_loss,
        microbatches=6,
        plan_everywhere=True,
        evaluate_after=(1,),
        **options,
    )
    if replicas is whole:  # each runs two of the six
        plans = cluster.workers[0].planner._plans.values()
        ran = {segment.worker for one in plans for segment in one.plan.segments}
        assert ran == {0, 1, 2}


@pytest.mark.usefixtures("threads_as_workers")
def test_replicas_that_only_predict_ask() -> None:
    torch.manual_seed(3)
    start = Asking(norms).eval()
    data = batches(5)
    with torch.no_grad():
        expected = [start(x) for x, _ in data]

    def run(rank: int) -> Any:
        net = copy.deepcopy(start)
        whole(net)
        return gs.Model(net, F.mse_loss).predict(iter(data))

    for found in ThreadCluster(run, 3, is_recoverable=False).run():
        assert all(map(torch.equal, expected, found))


def test_kept_microbatches_do_not_ask() -> None:
    with pytest.raises(PlacementError, match="asks a tensor for its value, and gradients are kept"):
        assert_same_bits(
            lambda: Asking(caught),
            batches(2),
            num_workers=2,
            place=place,
            loss_fn=F.mse_loss,
            microbatches=4,
            accumulate=2,
            accumulate_by="microbatch",
            plan_everywhere=True,
        )
