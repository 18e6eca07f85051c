"""What the script writes to parameters and buffers between steps, wherever they live."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from script_changes import Change, assert_refused_elsewhere, assert_written_on_the_owner
from simulated.compare import difference
from simulated.simulate import Captures, SimulatedCluster
from torch import nn

from graphsplit.errors import OwnershipError, PlanMismatchError
from graphsplit.planning.task import Task
from graphsplit.train.metrics import Metric


class Net(nn.Module):
    """One buffer of a number lives on each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bn = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.early: torch.Tensor
        self.late: torch.Tensor
        self.register_buffer("early", torch.tensor(0.5))
        self.register_buffer("late", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bn(torch.relu(self.first(x * self.early)))
        made: torch.Tensor = self.second(h) * self.late
        return made


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.bn.place("MS_WORKER", 1)
    net.second.place("MS_WORKER", 1)


def _decay(step: int, net: Any, loss_fn: Any) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.99).clamp_(-0.4, 0.4)


def _average(step: int, net: Any, loss_fn: Any) -> None:
    with torch.no_grad():
        net.bn.weight.lerp_(net.second.bias, 0.1)  # both live on worker 1


def _add_noise(step: int, net: Any, loss_fn: Any) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
            parameter.add_(torch.empty_like(parameter).uniform_(-0.01, 0.01))


def _through_views(step: int, net: Any, loss_fn: Any) -> None:
    with torch.no_grad():
        net.second.weight[step].zero_()
        net.second.weight[:, 1:3].mul_(0.5)
        net.second.weight.view(-1)[3] = 1.0
        net.second.weight.t()[2].fill_(0.1)
        net.second.bias.detach().clamp_(-0.1, 0.1)


def _through_data(step: int, net: Any, loss_fn: Any) -> None:
    for parameter in net.parameters():
        parameter.data.clamp_(-0.3, 0.3)
    net.second.bias.data[step % 4] = 0.1
    net.late.data.mul_(0.9)
    net.first.weight.data *= 0.9
    net.second.weight.data += 0.1
    net.second.weight.data[:2] /= 2


def _start_anew(step: int, net: Any, loss_fn: Any) -> None:
    if step % 2:
        net.second.reset_parameters()
        nn.init.xavier_uniform_(net.first.weight)
        nn.init.normal_(net.second.bias, std=0.1)
        nn.init.orthogonal_(net.second.weight)


def _merge(step: int, net: Any, loss_fn: Any) -> None:
    """As an adapter of low rank is: all of it lives on one worker."""
    net.second.weight.data += 0.1 * net.second.weight.data @ net.second.weight.data.t()
    with torch.no_grad():
        net.second.bias.copy_(net.second.bias * 0.9 - net.bn.bias / 2)
        net.first.bias.sub_(net.first.weight[:, 0].neg(), alpha=0.1)


CHANGES: dict[str, Change] = {
    "merged": _merge,
    "noise": _add_noise,
    "views": _through_views,
    "data": _through_data,
    "reset parameters": _start_anew,
    "a number, scaled": lambda step, net, loss: (net.early.mul_(0.9), net.late.mul_(0.9)),
    "by an operator": lambda step, net, loss: setattr(net, "late", net.late.__imul__(0.9)),
    "an entry": lambda step, net, loss: net.late.__setitem__(step % 4, 0.5),
    "a copy": lambda step, net, loss: net.late.copy_(torch.full((4,), 0.5 + step)),
    "a constant": lambda step, net, loss: nn.init.constant_(net.late, step),
    "a constant weight": lambda step, net, loss: nn.init.constant_(net.second.bias, 0.1 * step),
    "statistics": lambda step, net, loss: net.bn.reset_running_stats(),
    "all parameters": _decay,
    "an average": _average,
    "zeros": lambda step, net, loss: nn.init.zeros_(net.second.bias),
}


CAPTURES = Captures()  # data sets write the same, to workers that capture by themselves


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_script_writes_is_written_on_the_owner(name: str, microbatches: int) -> None:
    options = {"microbatches": microbatches, "captures": CAPTURES}
    assert_written_on_the_owner(Net, place, CHANGES[name], **options)


@pytest.mark.parametrize(
    "use",
    [
        lambda net: net.first.bias.data.copy_(net.second.weight.data @ net.second.bias.data),
        lambda net: torch.add(net.first.bias.data, 1, out=torch.zeros(4)),
        lambda net: float((net.first.bias.data * net.first.bias.data)[0]),
        lambda net: (net.first.bias.data - net.second.bias.data).sum(),
    ],
)
def test_what_is_computed_of_another_worker_s_values_is_refused_elsewhere(use: Any) -> None:
    assert_refused_elsewhere(Net, place, use)


class Writing:
    """A loader whose data set writes to the network."""

    def __init__(self, net: Any, write: Change) -> None:
        self.net, self.write = net, write

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        for step, batch in enumerate(batches_of(8, 3, num=3)):
            self.write(step, self.net, None)
            yield copy.deepcopy(batch)


def _only_at_first(step: int, net: Any, loss_fn: Any) -> None:
    if step == 0:
        net.late.add_(0.5)
        net.early = torch.tensor(2.0)


def make_task() -> Task:
    net = Net()
    place(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return Task(net, rows_against_target, optimizer, unplaced="affinity", with_loss=True)


def plain_losses(write: Change, *, epochs: int) -> list[torch.Tensor]:
    net: Any = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for _ in range(epochs):
        for x, y in Writing(net, write):
            optimizer.zero_grad()
            loss = rows_against_target(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    "write", [*CHANGES.values(), _only_at_first], ids=[*CHANGES, "only at first"]
)
def test_what_a_data_set_writes_is_written_on_the_owner(write: Change) -> None:
    torch.manual_seed(0)
    expected = plain_losses(write, epochs=2)
    torch.manual_seed(0)
    cluster = SimulatedCluster(make_task, 2)
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(2):
        losses = cluster.run(
            lambda worker: list(worker.engine.train_epoch(Writing(worker.task.network, write)))
        )
        for all_of_it, more in zip(found, losses, strict=True):
            all_of_it += more
    for losses in found:
        assert difference(expected, losses) is None


@pytest.mark.parametrize(
    ("writer", "name"), [(0, "late"), (1, "early"), (0, "second.weight"), (1, "first.weight")]
)
def test_a_worker_that_writes_alone_to_what_lives_elsewhere_is_named(
    writer: int, name: str
) -> None:
    cluster = SimulatedCluster(make_task, 2)
    arguments = (batches_of(8, 3)[0], {})
    cluster.train_step(arguments)
    net = cluster.workers[writer].task.network
    with torch.no_grad():
        {**dict(net.named_parameters()), **dict(net.named_buffers())}[name].zero_()
    told = rf"'{name}' was written to on worker {writer}, and not on worker {1 - writer}"
    with pytest.raises(PlanMismatchError, match=told):
        cluster.train_step(arguments)


@pytest.mark.parametrize("writer", [0, 1])
def test_a_worker_that_alone_replaces_a_parameter_is_named(writer: int) -> None:
    cluster, arguments = SimulatedCluster(make_task, 2), (batches_of(8, 3)[0], {})
    cluster.train_step(arguments)
    second: Any = cluster.workers[writer].task.network.second
    second.weight = nn.Parameter(torch.ones_like(second.weight))
    with pytest.raises(PlanMismatchError, match=r"net\.second\._parameters\['weight'\] is .*"):
        cluster.train_step(arguments)


WAYS: dict[str, Callable[[nn.Parameter], object]] = {
    "data": lambda weight: weight.data.mul_(0.5),
    "a view": lambda weight: weight.detach()[0].zero_(),
    "draws": lambda weight: nn.init.normal_(weight),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_worker_that_writes_alone_in_another_way_is_named(name: str) -> None:
    cluster = SimulatedCluster(make_task, 2)
    arguments = (batches_of(8, 3)[0], {})
    for turn in range(2):  # what all have written once is no excuse for the second time
        cluster.train_step(arguments)
        for worker in cluster.workers[: 2 - turn]:
            WAYS[name](worker.task.network.second.weight)
    told = r"'second\.weight' was written to on worker 0, and not on worker 1"
    with pytest.raises(PlanMismatchError, match=told):
        cluster.train_step(arguments)


def test_data_that_a_script_has_kept_is_written_to_on_the_owner() -> None:
    torch.manual_seed(0)
    expected = plain_losses(lambda step, net, loss: net.second.weight.data.mul_(0.5), epochs=1)
    torch.manual_seed(0)
    cluster = SimulatedCluster(make_task, 2)

    def run(worker: Any) -> list[torch.Tensor]:
        net, found, kept = worker.task.network, [], None
        divide = worker.task.divider.divide_arguments
        for batch in batches_of(8, 3, num=3):
            kept = net.second.weight.data if kept is None or len(found) == 1 else kept
            kept.mul_(0.5)
            found.append(worker.engine.train_step(divide((batch, {}))))
        return found

    for found in cluster.run(run):
        assert difference(expected, found) is None


def _as_parameter(net: Any) -> None:
    net.first.bias = nn.Parameter(net.second.bias.detach())


def _as_buffer(net: Any) -> None:
    net.early = net.late.detach()[0]


@pytest.mark.parametrize(
    ("use", "asked"),
    [
        (_as_parameter, "detach"),
        (_as_buffer, "'early', which is a view of it"),
        (lambda net: net.second.bias.data.sum(), "sum"),
        (lambda net: net.late.new_full((2,), net.second.bias[0]), "new_full"),
        (lambda net: pickle.dumps(net.state_dict()), "pickling"),
    ],
)
def test_a_view_of_what_lives_elsewhere_is_no_value(use: Any, asked: str) -> None:
    cluster = SimulatedCluster(make_task, 2)
    arguments = (batches_of(8, 3)[0], {})
    cluster.train_step(arguments)
    with pytest.raises(OwnershipError, match=f"lives on worker 1, not here .asked for by {asked}"):
        for worker in cluster.workers:
            use(worker.task.network)
        cluster.train_step(arguments)


def test_a_number_that_lives_elsewhere_is_none_here() -> None:
    """PyTorch reads a tensor that is given as a number without asking its class."""
    cluster = SimulatedCluster(make_task, 2)
    cluster.train_step((batches_of(8, 3)[0], {}))
    net, ones = cluster.workers[1].task.network, torch.ones(2)
    assert torch.add(ones, ones, alpha=net.early).isnan().all()
    assert torch.full((2,), cluster.workers[0].task.network.late[0]).isnan().all()
    assert torch.full((2,), cluster.workers[0].task.network.bn.num_batches_tracked)[0] < -(2**62)


def test_an_owner_may_write_alone_to_what_lives_there() -> None:
    cluster = SimulatedCluster(make_task, 2)
    arguments = (batches_of(8, 3)[0], {})
    cluster.train_step(arguments)
    for worker in cluster.workers:
        for name, parameter in worker.task.network.named_parameters():
            if worker is cluster.owner_of(name):
                parameter.detach().clamp_(-0.1, 0.1)
    cluster.train_step(arguments)


def test_a_hook_that_writes_to_what_lives_elsewhere_is_refused() -> None:
    """It runs on one worker alone, in the middle of a step."""
    cluster = SimulatedCluster(make_task, 2)
    for worker in cluster.workers:
        net: Any = worker.task.network
        net.first.weight.register_hook(lambda gradient, net=net: (net.late.mul_(0.9), None)[1])
    with pytest.raises(OwnershipError, match=r"'late' lives on worker 1.*within a step"):
        cluster.train_step((batches_of(8, 3)[0], {}))


class Thrice(nn.Module):
    """Only worker 0 reads batches; what lives on worker 1, and what evaluation reads, decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.early: torch.Tensor
        self.late: torch.Tensor
        self.register_buffer("early", torch.tensor(0.5))
        self.register_buffer("late", torch.ones(4))
        self.gain = self.gain_of_eval = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(torch.relu(self.first(x * self.early))) * self.late * self.gain
        made: torch.Tensor = self.third(h if self.training else h * self.gain_of_eval)
        return made


class LastLoss(Metric):
    needs_loss = True

    def reset(self) -> None:
        self.last = 0.0

    def update(self, *, outputs: Any, target: Any, loss: Any, num_samples: int) -> None:
        self.last = float(loss)

    def compute(self) -> float:
        return self.last


class Weighted:
    """A loss whose attributes only evaluation reads."""

    def __init__(self) -> None:
        self.weight, self.settings = 1.0, SimpleNamespace(power=[1])

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = rows_against_target(outputs, target)
        if not torch.is_grad_enabled():
            made = self.weight * made ** self.settings.power[0]
        return made


class Counting(Writing):
    """A loader that counts its epochs, and writes before, at, or after its batches."""

    def __init__(self, net: Any, loss_fn: Any, write: Change, when: str) -> None:
        super().__init__(net, write)
        self.loss_fn, self.when, self.num_read = loss_fn, when, 0

    def __iter__(self) -> Iterator[Any]:
        self._call("before", self.num_read)
        for step, batch in enumerate(batches_of(8, 3, num=3)):
            self._call("at", 3 * self.num_read + step)
            yield copy.deepcopy(batch)
        self._call("after", self.num_read)
        self.num_read += 1

    def _call(self, when: str, count: int) -> None:
        if when == self.when:
            self.write(count, self.net, self.loss_fn)


def _by_turns(count: int, net: Any, loss_fn: Any) -> None:
    (net.late if count % 2 else net.early).mul_(0.9)


def _in_the_second_epoch(count: int, net: Any, loss_fn: Any) -> None:
    if count == 5:
        net.late.mul_(0.9)


LEFT: dict[str, tuple[Change, str]] = {
    "by turns": (_by_turns, "at"),
    "in the second epoch": (_in_the_second_epoch, "at"),
    "before": (CHANGES["a number, scaled"], "before"),
    "after": (CHANGES["a number, scaled"], "after"),
    "an attribute before": (lambda n, net, loss: setattr(net, "gain", 1 / (n + 2)), "before"),
    "an attribute after": (lambda n, net, loss: setattr(net, "gain", 1 / (n + 2)), "after"),
    "of evaluation": (lambda n, net, loss: setattr(net, "gain_of_eval", 1 / (n + 2)), "at"),
    "of evaluation, after": (lambda n, net, loss: setattr(net, "gain_of_eval", n + 2.0), "after"),
    "of the loss": (lambda n, net, loss: setattr(loss, "weight", 1 / (n + 2)), "at"),
    "of the loss, after": (lambda n, net, loss: setattr(loss, "weight", 1 / (n + 2)), "after"),
    "within the loss": (lambda n, net, loss: loss.settings.power.__setitem__(0, n % 3), "at"),
}


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", LEFT)
def test_what_a_loader_leaves_is_known_to_those_that_have_not_read_it(
    name: str, is_known: bool
) -> None:
    """Evaluation may be recorded before the loader is read, or after it."""
    change, when = LEFT[name]
    torch.manual_seed(0)
    net, loss_fn = Thrice(), Weighted()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = Counting(net, loss_fn, change, when)
    example = batches_of(8, 3)[0]

    def evaluated() -> list[Any]:
        with torch.no_grad():
            outputs = net.eval()(example[0])
            return [float(loss_fn(outputs, example[1])), outputs]

    expected: list[Any] = evaluated() if is_known else []
    for _ in range(3):
        net.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            optimizer.step()
            expected.append(loss.detach())
        expected += evaluated()

    def make() -> Task:
        net: Any = Thrice()
        for module, rank in ((net.first, 0), (net.second, 1), (net.third, 0)):
            module.place("MS_WORKER", rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        return Task(net, Weighted(), optimizer, unplaced="affinity", with_loss=True)

    def run(worker: Any) -> list[Any]:
        task, engine, metric = worker.task, worker.engine, LastLoss()
        loader = Counting(task.network, task.loss_fn, change, when)

        def evaluated() -> list[Any]:
            loss = engine.eval_epoch([example], {"last": metric})["last"]
            return [loss, engine.predict(((example[0],), {}))]

        found = evaluated() if is_known else []
        for _ in range(3):
            found += [*engine.train_epoch(loader), *evaluated()]
        return found

    torch.manual_seed(0)
    for found in SimulatedCluster(make, 2).run(run):
        assert difference(expected, found) is None


@pytest.mark.parametrize("is_new", [False, True])
def test_a_worker_that_alone_changes_a_number_that_is_lifted_now_is_named(is_new: bool) -> None:
    """Both record the step again, find the same graph, and would compute with other numbers."""

    def make() -> Task:
        net: Any = Thrice()
        for module, rank in ((net.first, 0), (net.second, 1), (net.third, 0)):
            module.place("MS_WORKER", rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        return Task(net, rows_against_target, optimizer, unplaced="affinity", with_loss=True)

    cluster, arguments = SimulatedCluster(make, 2), (batches_of(8, 3)[0], {})
    cluster.train_step(arguments)
    if not is_new:
        for worker in cluster.workers:
            worker.task.network.gain = 0.5
        cluster.train_step(arguments)
    for worker in cluster.workers:
        worker.task.network.gain = 0.25 + worker.rank
    with pytest.raises(PlanMismatchError, match=r"(?s)net\.gain is.*0\.25.*1\.25|1\.25.*0\.25"):
        cluster.train_step(arguments)
