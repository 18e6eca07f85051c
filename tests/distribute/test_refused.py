"""What own loops are refused, alike on all workers, with the way out; never another number."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, Loop, assert_same_bits, placed, plain, raised
from loops import small
from recovery_helpers import ThreadCluster, threads_as_workers
from several_networks import Twice
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


def input_used_beside(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """An input that the network uses several times, and the script too."""
    net = Twice()
    net = distribute(placed(net, [net.first, net.second, net.last], ranks))
    x = torch.randn(6, 8) * torch.ones(8, requires_grad=True)
    (net(x, torch.ones(8))[0].sum() + x.sum()).backward()
    yield None


def written_into_a_tensor(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A backward that begins at an ordinary tensor which values were written into."""
    net = distribute(small(ranks))
    losses = torch.zeros(2)
    losses[0], losses[1] = net(torch.randn(6, 8)).sum(), net(torch.randn(6, 8)).sum()
    losses.sum().backward()
    yield None


def hook_and_penalty(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A hook on a parameter that the script uses as well."""
    net = distribute(small(ranks))
    net.last.weight.register_hook(lambda gradient: gradient * 2)
    (net(torch.randn(6, 8)).sum() + net.last.weight.sum()).backward()
    yield None


def second_derivative(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A gradient penalty outside of the network."""
    net = distribute(small(ranks))
    x = torch.randn(6, 8, requires_grad=True)
    yield torch.autograd.grad(net(x).sum(), x, create_graph=True)


def penalty_at_first(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A penalty that the script computes before the first call."""
    net = distribute(small(ranks))
    penalty = sum(p.square().sum() for p in net.parameters())
    (net(torch.randn(6, 8)).sum() + penalty).backward()
    yield None


def backward_twice(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A backward through a call whose graph the one before it has freed."""
    loss = distribute(small(ranks))(torch.randn(6, 8)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    loss.backward()
    yield None


def checkpointed_once_more(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A checkpoint whose backward would run operations of the script on one worker alone."""
    found = distribute(small(ranks))(torch.randn(6, 8))
    yield checkpoint(torch.tanh, found, use_reentrant=True)


def hidden_in_a_function(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A function with a backward of its own that takes a value by another way."""
    found = distribute(small(ranks))(torch.randn(6, 8))

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return found * 2

    yield Hidden.apply(torch.ones(1))


def backward_while_casting(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A backward inside the block."""
    net = distribute(small(ranks))
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(6, 8)).sum().backward()
    yield None


def calls_while_casting(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Two calls that share casts in eager, under one backward."""
    net = distribute(small(ranks))
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(6, 8)).sum() + net(torch.randn(6, 8)).sum()
    loss.backward()
    yield None


def parameter_while_casting(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A parameter that the script uses inside the block."""
    net = distribute(small(ranks))
    with torch.autocast("cpu", torch.bfloat16):
        yield (net(torch.randn(6, 8)) @ net.last.weight).sum()


def functional(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A call with other parameters; the transforms end alike, and a loop afterwards is as ever."""
    net = distribute(small(ranks))
    x = torch.randn(6, 8)
    forms: list[Any] = [
        lambda: torch.vmap(net)(x),
        lambda: torch.func.grad(lambda x: net(x).sum())(x),
    ]
    for form in forms:
        with pytest.raises(gs.errors.ConfigurationError, match=r"torch\.func"):
            form()
    net(x).sum().backward()
    assert net.first.weight.grad.norm().item() > 0
    yield torch.func.functional_call(net, dict(small(ranks).named_parameters()), (x,))


def normalized_at_first(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A weight of which one operation makes two uses, before the network's own."""
    net = distribute(small(ranks))
    net(torch.randn(6, 8))
    weight = normalize(net.second.weight)
    yield (net(torch.randn(6, 8)).sum() + weight.sum()).backward()


def compiled(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A distributed network that is compiled."""
    net = torch.compile(distribute(small(ranks)), backend="eager")
    yield net(torch.randn(6, 8)).sum()


def compiled_later(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """One that is compiled after its first call."""
    net = distribute(small(ranks))
    net(torch.randn(6, 8)).sum().backward()
    yield torch.compile(net, backend="eager")(torch.randn(6, 8)).sum()


def watched_for_nan(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A backward that looks for NaN where there are no values."""
    loss = distribute(small(ranks))(torch.randn(6, 8)).sum()
    with torch.autograd.set_detect_anomaly(True):
        loss.backward()
    yield None


def data_of_another_form(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Gradients that are given another dtype."""
    net = distribute(small(ranks))
    net(torch.randn(6, 8)).sum().backward()
    net.first.weight.grad.data = net.first.weight.grad.double()
    yield None


def data_of_a_plain_tensor(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A tensor of the script is to share the memory of a parameter, which others have not."""
    net, held = distribute(small(ranks)), torch.zeros(16, 8)
    net(torch.randn(6, 8)).sum().backward()
    held.data = net.first.weight
    yield held


def data_of_a_value(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Likewise, of a value."""
    net, held = distribute(small(ranks)), torch.zeros(16, 8)
    net(torch.randn(6, 8)).sum().backward()
    held.data = net.first.weight.data
    yield held


def data_of_another_worker(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A target network is to share the memory of another one, whose parts live elsewhere."""
    net, target = distribute(small(ranks)), distribute(small(ranks[1:]))
    (net(torch.randn(6, 8)) - target(torch.randn(6, 8))).sum().backward()
    for p, value in zip(target.parameters(), net.parameters(), strict=True):
        p.data = value.data * 0.5
        p.data = value.data
    yield None


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (normalized_at_first, "pass weight.clone() to that operation"),
        (compiled, "torch.compile around a distributed network"),
        (compiled_later, "torch.compile around a distributed network"),
        (watched_for_nan, "check_nan=False"),
        (data_of_another_form, "data of a value of (16, 8)"),
        (data_of_another_worker, "both would have one memory from now on"),
        (data_of_a_plain_tensor, "data of a plain tensor, or of a network before its first call"),
        (data_of_a_value, "data of a plain tensor, or of a network before its first call"),
        (input_used_beside, "uses an input several times"),
        (written_into_a_tensor, "from an ordinary tensor"),
        (hook_and_penalty, "has a hook"),
        (penalty_at_first, "before the network's first call"),
        (backward_twice, "pass retain_graph=True to the one before"),
        (second_derivative, "create_graph=True"),
        (checkpointed_once_more, "use_reentrant=True around values"),
        (hidden_in_a_function, "and is none of its arguments"),
        (functional, "torch.func (functional_call"),
        (backward_while_casting, "backward under torch.autocast"),
        (calls_while_casting, "by several calls under one backward()"),
        (parameter_while_casting, "casts it once for the whole block"),
    ],
)
def test_a_loop_is_refused_with_the_way_out(loop: Loop, text: str) -> None:
    assert text in raised(loop)


class Around(torch.optim.SGD):
    """It never calls ``__init__`` of its base class; it has the hooks that timm's has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = OrderedDict()


def test_an_optimizer_without_what_torch_makes_of_it_is_refused() -> None:
    def stepping(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        (net := distribute(small(ranks)))(torch.randn(6, 8)).sum().backward()
        yield gs.per_parameter(Around(torch.optim.SGD(net.parameters(), 0.1))).step()

    assert "Around is a torch.optim.Optimizer whose __init__ was not called" in raised(stepping)


def test_a_job_that_waits_for_lost_workers_refuses_other_loops_than_those_of_gs_loop() -> None:
    def run(rank: int) -> None:
        net = gs.distribute(small([0, 1, 0]))
        net(torch.ones(6, 8)).sum().backward()

    with pytest.raises(gs.errors.ConfigurationError, match=r"outside of gs\.loop") as caught:
        ThreadCluster(run, 2, is_recoverable=True).run()
    assert "Fix: for batch in gs.loop(loader" in str(caught.value)


def of_each(rank: int, kind: str) -> Any:
    """Two steps in which each worker has another learning rate, other targets or another weight."""
    torch.manual_seed(3)
    net = small([0, 1, 0])
    rate = 0.1 + (kind == "rate") * rank / 100
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=rate)
    if kind not in ("rate", "targets", "weight"):
        betas = (0.9, 0.99 + (kind == "beta") * rank / 200)
        optimizer = torch.optim.Adam(net.parameters(), betas=betas)
    net, losses = gs.distribute(net), []
    for _ in range(2):
        labels = torch.arange(6) % 4 if kind != "targets" else (torch.arange(6) + rank) % 4
        loss = torch.nn.functional.cross_entropy(net(torch.randn(6, 8)), labels)
        if kind == "weight":
            loss = loss * (1 + rank / 10)
        optimizer.zero_grad()
        loss.backward()
        if kind == "emptied" and rank:
            optimizer.zero_grad()
        if kind == "zeroed" and not rank:
            net.zero_grad(set_to_none=False)
        if kind == "no gradient" and rank:
            next(net.parameters()).grad = None
        if kind == "gradients":
            first = next(net.parameters())
            first.grad = torch.full(first.shape, rank + 1.0)
        optimizer.step()
        if kind == "loaded":
            state = copy.deepcopy(optimizer.state_dict())
            state["state"][1]["exp_avg"] *= 1 + rank
            optimizer.load_state_dict(state)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "kind",
    [
        *("rate", "beta", "targets", "weight", "loaded"),
        *("emptied", "zeroed", "no gradient", "gradients"),
    ],
)
def test_numbers_and_tensors_that_differ_between_workers_end_the_job(kind: str) -> None:
    with pytest.raises(gs.errors.LoaderMismatchError, match="on different numbers or tensors") as e:
        ThreadCluster(lambda rank: of_each(rank, kind), 2, is_recoverable=False).run()

    told = {
        "rate": r": lr of the optimizer's group 0 is 0.1\d? on worker \d, 0.1\d? on worker \d\n",
        "beta": r": betas\[1\] of the optimizer's group 0 is 0.99\d? on worker \d, 0.99\d? on w",
        "targets": r"cross_entropy\(tensor of \(6,\)",
        "weight": r"mul\(1",
        "loaded": r"Adam\.state\(tensor of",
    }
    usual = r"on worker \d they were, latest last: "
    assert re.search(told.get(kind, usual), str(e.value)), str(e.value)
    assert "Fix: give every worker the same targets" in str(e.value)


def test_workers_that_agree_are_not_disturbed() -> None:
    found = ThreadCluster(lambda rank: of_each(rank, "none"), 2, is_recoverable=False).run()
    assert found[0] == found[1]


SHARES: dict[str, Any] = {
    "a sampler": lambda data, half: DataLoader(data, 3, sampler=half),
    "a batch sampler": lambda data, half: DataLoader(
        data, batch_sampler=BatchSampler(half, 3, True)
    ),
}


@pytest.mark.parametrize("kind", SHARES)
def test_a_loader_that_gives_shares_is_refused_in_an_own_loop(kind: str) -> None:
    data = TensorDataset(torch.randn(12, 8), torch.arange(12) % 4)

    def training(rank: int) -> None:
        net = gs.distribute(small([0, 1, 0]))
        sampler = DistributedSampler(data, 2, rank)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in SHARES[kind](data, sampler):
                torch.nn.functional.cross_entropy(net(x), y).backward()

    with pytest.raises(gs.errors.ConfigurationError, match="DistributedSampler of num_r") as caught:
        ThreadCluster(training, 2, is_recoverable=False).run()

    assert "1/2 of the data" in str(caught.value) and "Fix: pass the whole" in str(caught.value)


def test_a_sampler_of_one_share_is_told_its_epochs() -> None:
    data = TensorDataset(torch.randn(12, 8), torch.arange(12) % 4)

    def orders(distribute: Distribute) -> list[Any]:
        net = distribute(small([0, 1, 0]))
        sampler, seen = DistributedSampler(data, 1, 0), []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, _ in DataLoader(data, 3, sampler=sampler):
                net(x).sum().backward()
                seen.append(x.tolist())
        return seen

    found = ThreadCluster(lambda rank: orders(gs.distribute), 2, is_recoverable=False).run()
    expected = orders(plain)
    assert found == [expected, expected] and expected[:4] != expected[4:]


def test_a_value_of_the_script_that_the_network_holds_is_refused() -> None:
    def scaling(rank: int) -> None:
        net = gs.distribute(small([0, 1, 0]))
        scale = net(torch.ones(6, 8)).mean().detach()
        net.second.register_forward_hook(lambda m, i, output: output * scale)
        net.kind = "scaled"  # simulated workers share captures of networks that look alike
        net(torch.ones(6, 8))

    with pytest.raises(gs.errors.ConfigurationError, match="inside a call of a network") as caught:
        ThreadCluster(scaling, 2, is_recoverable=False).run()

    assert "Fix: hold it in a buffer" in str(caught.value)


def normed(prepare: Callable[[torch.nn.Linear], None]) -> Loop:
    """A layer with normed weights from the second step on."""

    def norming(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net = distribute(small(ranks))
        for step in range(3):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(torch.ones(6, 8)).square().sum().backward()
            optimizer.step()
            if step == 0:
                prepare(net.second)
                torch.nn.utils.parametrizations.weight_norm(net.second)
        yield from net.state_dict().items()

    return norming


def test_weights_that_are_normed_after_a_step_have_to_be_the_layers_own() -> None:
    def renew(layer: torch.nn.Linear) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())

    assert "a.weight = nn.Parameter(a.weight.detach().clone())" in raised(normed(lambda _: None))
    assert_same_bits(normed(renew), 2)


def of_another_worker(kind: str) -> Loop:
    """A gradient or data that is set to a value of another worker; one of the two is written to."""

    def setting(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net = Three()
        net = distribute(placed(net, [net.a, net.b, net.c], ranks))
        (net(torch.ones(6, 8)).square().sum()).backward()
        a, b = net.a.weight, net.b.weight
        value = b.detach() * 2 if kind == "data" else a.grad * 2
        if kind == "data":
            with torch.no_grad():
                a.data = value
                a.mul_(2)
            yield value.sum()
        elif kind == "data of a gradient":
            b.data = a.grad
        elif kind == "buffer":
            net.factor = value = net.factor * 2
            net(torch.ones(6, 8))
            yield value.sum()
        elif kind == "gradient":
            b.grad = a.grad
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        elif kind == "part":
            b.grad = a.grad[:]
        else:
            b.grad = value
            if kind == "value":
                value.mul_(2)
            elif kind == "copy":
                b.grad.mul_(2)
            elif kind == "backward":
                net(torch.ones(6, 8)).sum().backward()
            else:
                net.zero_grad(set_to_none=False)
            yield value.sum()

    return setting


class Three(torch.nn.Module):
    """Three layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("factor", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        self.factor.mul_(0.5)
        found: torch.Tensor = self.c(self.b(self.a(x))) * self.factor
        return found


OTHERS = [
    "gradient",
    "part",
    "value",
    "copy",
    "backward",
    "zeros",
    "data",
    "data of a gradient",
    "buffer",
]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_value_of_another_worker_is_not_what_was_set(kind: str) -> None:
    assert ".clone()" in raised(of_another_worker(kind))


@pytest.mark.parametrize("kind", ["parameter", "data", "value written to", "data written to"])
def test_data_of_a_network_that_has_made_no_call_has_no_memory_of_others(kind: str) -> None:
    def averaging(rank: int) -> None:
        net, slow = gs.distribute(small([0, 1, 0])), gs.distribute(small([0, 1, 0]))
        net(torch.ones(6, 8))
        p, of_net = slow.last.weight, net.last.weight
        value = of_net.data * 2 if "written" in kind else of_net.data
        p.data = of_net if kind == "parameter" else value
        with torch.no_grad():
            (value if kind == "value written to" else p).mul_(2)
        value.sum()

    with pytest.raises(gs.errors.ConfigurationError, match="have one memory") as caught:
        ThreadCluster(averaging, 2, is_recoverable=False).run()

    assert "Fix: " in str(caught.value) and (
        "p.data" in str(caught.value) or "clone()" in str(caught.value)
    )


class Graph(torch.nn.Module):
    """Two convolutions of a graph, whose matrix of neighbours is sparse."""

    def __init__(self, kind: str, near: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second, self.kind = Convolution(), Convolution(), kind
        if kind == "attribute":
            self.near = near

    def forward(self, x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        """Values of the nodes."""
        near: Any = given
        if self.kind == "attribute":
            near = self.near
        elif self.kind == "sent":
            near = torch.sparse_coo_tensor(*given, (6, 6))  # type: ignore[call-overload]
        elif self.kind == "batch":
            (near,) = given
        found: torch.Tensor = self.second(self.first(x, near), near)
        return found


class Convolution(torch.nn.Linear):
    """One of them; it builds the matrix where it is given its parts."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor, near: Any) -> torch.Tensor:
        """Values of the nodes."""
        matrix = torch.sparse_coo_tensor(*near, (6, 6)) if isinstance(near, tuple) else near
        return torch.sparse.mm(matrix, super().forward(x))


def of_graph(kind: str, distribute: Distribute) -> Any:
    torch.manual_seed(3)
    near = (torch.rand(6, 6) > 0.5).float().to_sparse().coalesce()
    net = Graph(kind, near)
    net = distribute(placed(net, [net.first, net.second], [0, 1]))
    parts = {"attribute": (), "batch": (near,)}.get(kind, (near.indices(), near.values()))
    net(torch.randn(6, 4), *parts).square().sum().backward()
    return [p.grad.tolist() for p in net.parameters()]


@pytest.mark.parametrize("kind", ["attribute", "sent", "batch"])
def test_sparse_tensors_are_refused_where_they_would_travel(kind: str) -> None:
    run = ThreadCluster(lambda rank: of_graph(kind, gs.distribute), 2, is_recoverable=False).run
    with pytest.raises(gs.errors.GraphsplitError, match=r"torch\.sparse_coo") as caught:
        run()

    assert "Fix: give its indices and values" in str(caught.value)


def test_sparse_tensors_that_are_built_where_they_are_used_are_right() -> None:
    expected = of_graph("parts", plain)
    run = ThreadCluster(lambda rank: of_graph("parts", gs.distribute), 2, is_recoverable=False).run
    assert run() == [expected, expected]


def test_a_state_that_is_no_dictionary_is_pytorchs_own_error() -> None:
    def run(rank: int) -> str:
        net: Any = gs.distribute(small([0, 1, 1]))
        with pytest.raises(TypeError, match="Expected state_dict to be dict-like") as caught:
            net.load_state_dict("weights.pt")
        return str(caught.value)

    assert len(set(ThreadCluster(run, 2, is_recoverable=False).run())) == 1


@pytest.mark.parametrize("what", ["network", "within", "module"])
def test_a_network_that_is_saved_whole_is_refused_before_a_file_is_opened(what: str) -> None:
    """Once it has been called; the fix is one for own loops."""

    def saved(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        plain = small(ranks)
        net = distribute(plain)
        net(torch.randn(6, 8)).sum().backward()
        whole = {"network": net, "within": {"net": net, "epoch": 3}, "module": plain}[what]
        torch.save(whole, "/nowhere/net.pt")
        yield None

    assert re.search(r"was pickled.*\n.*Fix: torch.save\(net.state_dict\(\), path\)", raised(saved))


@pytest.mark.parametrize("target", [torch.zeros(6), torch.zeros(4, dtype=torch.int64)])
def test_a_wrong_target_is_told_on_all_workers_as_in_one_process(target: torch.Tensor) -> None:
    def told(_: int) -> str:
        outputs = gs.distribute(small([0, 1]))(torch.randn(6, 8))
        try:
            torch.nn.functional.cross_entropy(outputs, target)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    alone = told(0)
    assert alone
    assert ThreadCluster(told, 2, is_recoverable=False).run() == [alone, alone]
