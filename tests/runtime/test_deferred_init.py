"""`deferred_init`: plain construction and deferred construction side by side."""

from __future__ import annotations

import copy
import io
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from deferred_networks import NETWORKS, LeNet, OtherGenerators, ReadsValues, Tied
from torch import nn
from torch.nn.modules import module as torch_module

from graphsplit.deferred.calls import DeferredInitError
from graphsplit.deferred.construction import deferred_init, is_deferred, materialize
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.stand_ins import as_ordinary


def tensors_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return dict(
        [
            *net.named_parameters(remove_duplicate=False),
            *net.named_buffers(remove_duplicate=False),
        ]
    )


def build_both(build: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """Returns the plain and the deferred network; checks the generator after each."""
    torch.manual_seed(5)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with deferred_init():
        deferred = build()
    assert torch.equal(torch.get_rng_state(), state)
    return plain, deferred


def assert_same(plain: torch.Tensor, deferred: torch.Tensor) -> None:
    assert torch.equal(plain, deferred)
    assert type(plain) is type(deferred)
    assert plain.stride() == deferred.stride()
    assert plain.requires_grad == deferred.requires_grad


@pytest.mark.parametrize("name", NETWORKS)
def test_materialized_network_equals_plain_construction(name: str) -> None:
    plain, deferred = build_both(NETWORKS[name])
    state = torch.get_rng_state()
    assert is_deferred(deferred)
    objects = [id(tensor) for tensor in deferred.parameters()]

    materialize(deferred)

    assert not is_deferred(deferred)
    assert torch.equal(torch.get_rng_state(), state)
    assert objects == [id(tensor) for tensor in deferred.parameters()]
    assert list(plain.state_dict()) == list(deferred.state_dict())
    expected, found = tensors_of(plain), tensors_of(deferred)
    assert list(expected) == list(found)
    for key in expected:
        assert_same(expected[key], found[key])


@pytest.mark.parametrize("name", NETWORKS)
def test_any_owned_subset_has_the_same_bits_and_the_rest_no_memory(name: str) -> None:
    draw = random.Random(name)
    for _ in range(3 if name in ("lenet", "tied", "raw") else 1):
        plain, deferred = build_both(NETWORKS[name])
        expected, found = tensors_of(plain), tensors_of(deferred)
        owned = {key for key in expected if draw.random() < 0.5}
        kept = {id(found[key]) for key in owned}
        materialize(deferred, owned)
        for key, tensor in found.items():
            if id(tensor) in kept:
                assert_same(expected[key], tensor)
            else:
                assert tensor.untyped_storage().nbytes() == tensor.element_size()
                assert tensor.shape == expected[key].shape
                assert isinstance(tensor, type(expected[key]))


def random_construction(seed: int) -> Any:
    """Returns a module whose tensors went through 30 random operations, and the values it read."""
    draw = random.Random(seed)
    tensors = [torch.randn(4, 6), torch.zeros(4, 6), torch.empty(4, 6).uniform_(-1, 1)]
    net: Any = nn.Module()
    net.log = []
    operations: list[Callable[[Any, Any, int], Any]] = [
        lambda a, b, i: a.normal_(),
        lambda a, b, i: a[i:].uniform_(),
        lambda a, b, i: a.t()[i].fill_(i / 3),
        lambda a, b, i: tensors.append(a + b),
        lambda a, b, i: a.copy_(b),
        lambda a, b, i: a[1:].copy_(b[:-1].clone()),
        lambda a, b, i: tensors.append(a[:, [0, 2, 1, 3, 5, 4]]),
        lambda a, b, i: a.mul_(b).clamp_(-2, 2),
        lambda a, b, i: net.log.append(str(a.sum().item())),
        lambda a, b, i: tensors.append(torch.randn_like(b)),
        lambda a, b, i: a.chunk(2, 1)[i % 2].zero_(),
        lambda a, b, i: tensors.append(torch.from_numpy(a.numpy().copy()) if i else b.clone()),
        lambda a, b, i: a.exponential_() if i else torch.manual_seed(7),
        lambda a, b, i: tensors.append(torch.where(a > 0, a, b)),
        lambda a, b, i: tensors.append(a.t().contiguous().t()),
        lambda a, b, i: tensors.append(torch.linalg.qr(torch.randn(6, 6))[0][:4].contiguous()),
        lambda a, b, i: a.masked_fill_(b > 0.5, 1.5),
        lambda a, b, i: a.__setitem__((i, torch.randperm(6)[:2]), 0),
        lambda a, b, i: a.reshape(-1)[3:9].add_(1) if i else a.set_(b),
    ]
    for _ in range(30):
        draw.choice(operations)(draw.choice(tensors), draw.choice(tensors), draw.randrange(3))
    for index, tensor in enumerate(tensors):
        if index % 3:
            net.register_parameter(f"parameter{index}", nn.Parameter(tensor))
        elif index % 2:
            net.register_buffer(f"buffer{index}", tensor)
        else:
            setattr(net, f"plain{index}", tensor)
    return net


@pytest.mark.parametrize("seed", range(16))
def test_random_constructions_have_the_same_bits(seed: int) -> None:
    def as_bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().view(torch.int32)  # NaN must equal NaN

    plain, deferred = build_both(lambda: random_construction(seed))
    assert plain.log == deferred.log
    names = list(tensors_of(deferred))
    owned = set(names) if seed % 2 else set(random.Random(seed).sample(names, len(names) // 2))
    materialize(deferred, owned)
    for name in [*owned, *(name for name in vars(plain) if name.startswith("plain"))]:
        expected, found = getattr(plain, name), getattr(deferred, name)
        assert torch.equal(as_bits(expected), as_bits(found))
        assert expected.stride() == found.stride()


def test_copying_a_tensor_onto_itself_keeps_its_content() -> None:
    with deferred_init():
        ones = nn.Parameter(torch.ones(3))
        ones.data.copy_(ones.data)
    assert ones.tolist() == [1, 1, 1]


def test_a_read_does_not_keep_contents_that_were_written_to_since() -> None:
    with deferred_init():
        base = nn.Parameter(torch.ones(3))
        double = base.data * 2
        base.data.add_(1)
        assert double.sum().item() == 6
        assert base.data.sum().item() == 6
    assert base.tolist() == [2, 2, 2]


def test_only_what_is_owned_of_a_plain_network_keeps_its_memory() -> None:
    net = nn.Linear(5, 7)
    bias = net.bias.detach().clone()
    materialize(net, ["bias"])
    assert torch.equal(net.bias, bias)
    assert net.weight.untyped_storage().nbytes() == 4


def test_ties_and_views_stay() -> None:
    _, net = build_both(Tied)
    view = net.embedding.weight.data[:2]  # fills it: asking for .data asks for the values
    assert not is_deferred(net)
    assert net.head.weight is net.embedding.weight
    assert view.data_ptr() == net.head.weight.data_ptr()


def test_plain_attributes_are_real_when_the_context_ends() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.tril(torch.randn(4, 4))
            self.layer = nn.Linear(4, 4)
            self.doubled = self.layer.weight * 2
            self.view = self.layer.weight.data[:2]

    plain, deferred = build_both(Net)
    assert type(deferred.noise) is torch.Tensor
    assert torch.equal(deferred.noise, plain.noise)
    assert torch.equal(deferred.doubled, plain.doubled)
    assert is_deferred(deferred)
    materialize(deferred)
    assert torch.equal(deferred.view, plain.view)
    assert deferred.view.data_ptr() == deferred.layer.weight.data_ptr()


def test_python_values_read_under_the_context_are_true() -> None:
    plain, deferred = build_both(ReadsValues)
    assert plain.rates == deferred.rates
    assert np.array_equal(plain.array, deferred.array)
    plain, deferred = build_both(OtherGenerators)
    assert torch.equal(plain.state, deferred.state)


def test_tensors_of_before_the_context_are_used_as_they_were_and_changed_as_they_should() -> None:
    before = torch.arange(12.0).reshape(3, 4)
    counter = torch.zeros(3, 4)
    with deferred_init():
        net = nn.Linear(4, 3)
        net.weight.data.copy_(before)
        nn.init.normal_(net.bias)
        counter += net.weight.detach()
        before.zero_()
    materialize(net)
    assert torch.equal(net.weight, torch.arange(12.0).reshape(3, 4))
    assert torch.equal(counter, net.weight)
    assert torch.equal(before, torch.zeros(3, 4))


def test_default_dtype_of_construction_holds_when_replayed() -> None:
    with deferred_init():
        torch.set_default_dtype(torch.float64)
        try:
            parameter = nn.Parameter(torch.zeros(3) + torch.arange(3) * 0.1)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(parameter, torch.arange(3) * torch.tensor(0.1, dtype=torch.float64))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_optimizer_made_before_materialize_goes_on_working(kind: type) -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        x = torch.ones(2, 5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    plain, deferred = build_both(lambda: nn.Linear(5, 7))
    optimizers = [kind(net.parameters(), lr=0.1) for net in (plain, deferred)]
    assert is_deferred(deferred)
    materialize(deferred)
    train(plain, optimizers[0])
    train(deferred, optimizers[1])
    assert torch.equal(plain.weight, deferred.weight)
    assert torch.equal(plain.bias, deferred.bias)


def test_asking_for_shapes_and_registering_hooks_fills_nothing() -> None:
    with deferred_init():
        net = nn.Linear(5, 7)
    assert sum(p.numel() for p in net.parameters()) == 42
    assert net.weight.shape == (7, 5)
    assert net.weight.device.type == "cpu"
    assert net.weight.grad is None
    net.requires_grad_(False).requires_grad_(True)
    net.zero_grad()
    net.weight.register_hook(lambda gradient: gradient * 2)
    assert isinstance(net.weight, nn.Parameter)
    assert is_deferred(net)


READINGS: dict[str, Callable[[Any], Any]] = {
    "print": lambda net: repr(net.weight),
    "sum": lambda net: net.weight.sum(),
    "numpy": lambda net: net.weight.detach().numpy(),
    "list": lambda net: net.weight.tolist(),
    "in place": lambda net: nn.init.zeros_(net.weight),
    "state_dict": lambda net: torch.save(net.state_dict(), io.BytesIO()),
    "load": lambda net: net.load_state_dict(nn.Linear(16, 16).state_dict()),
    "deepcopy": copy.deepcopy,
    "cast": lambda net: net.double(),
    "foreach": lambda net: torch._foreach_norm([net.weight]),
    "forward": lambda net: net(torch.ones(1, 16)),
    "forward itself": lambda net: net.forward(torch.ones(1, 16)),
}


@pytest.mark.parametrize("reading", READINGS)
def test_reading_before_materialize_gives_the_true_value(reading: str) -> None:
    plain, deferred = build_both(lambda: nn.Linear(16, 16))
    torch.manual_seed(1)
    expected = READINGS[reading](plain)
    torch.manual_seed(1)
    found = READINGS[reading](deferred)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found)
    elif isinstance(expected, str | list):
        assert expected == found
    materialize(deferred)
    assert type(deferred.weight) is nn.Parameter
    assert torch.equal(plain.weight, deferred.weight)
    if isinstance(found, nn.Module):
        assert type(found.weight) is nn.Parameter
        assert torch.equal(found.weight, plain.weight)


def test_forward_pass_before_materialize_takes_the_path_of_plain_construction() -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        return layer.eval()

    plain, deferred = build_both(build)
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        assert torch.equal(plain(x), deferred(x))
        assert torch.equal(plain(x), deferred(x))
    assert not torch_module._global_forward_pre_hooks


def test_taking_much_memory_early_warns_and_names_the_line() -> None:
    with (
        pytest.warns(UserWarning, match=r"1\.0 MB.*\n.*test_deferred_init\.py:\d+"),
        deferred_init(),
    ):
        net = nn.Linear(512, 512, bias=False)
        net.weight.data.numpy()
    with deferred_init():
        net = nn.Linear(512, 512, bias=False)
    with pytest.warns(UserWarning, match="Linear runs"):
        net(torch.ones(1, 512))


def test_stand_ins_let_a_deferred_network_be_captured() -> None:
    plain, deferred = build_both(LeNet)
    x = torch.randn(2, 1, 32, 32)
    net = nn.Sequential(deferred.conv1, nn.ReLU(), deferred.conv2)
    with as_ordinary(net.parameters()):
        assert type(net[0].weight) is nn.Parameter
        assert net[0].weight.stride() == plain.conv1.weight.stride()
        program = torch.export.export(net, (x,))
    assert is_deferred(net)
    materialize(net)
    assert torch.equal(net(x), plain.conv2(plain.conv1(x).relu()))
    expected = torch.export.export(nn.Sequential(plain.conv1, nn.ReLU(), plain.conv2), (x,))
    assert str(program.graph) == str(expected.graph)


def test_a_plain_network_is_looked_at_as_it_is() -> None:
    net = nn.Linear(3, 3)
    net.weight.data = net.weight.data.t()
    before = net.weight.detach()
    with as_ordinary(net.parameters()):
        assert net.weight.data_ptr() == before.data_ptr()
        assert net.weight.stride() == (1, 3)


def test_two_networks_of_one_context_are_materialized_apart() -> None:
    plain, deferred = build_both(lambda: nn.ModuleList([LeNet(), nn.Linear(4, 4)]))
    materialize(deferred[1])
    assert is_deferred(deferred[0])
    assert torch.equal(deferred[1].weight, plain[1].weight)
    materialize(deferred[0], ["fc3.weight"])
    assert torch.equal(deferred[0].fc3.weight, plain[0].fc3.weight)


def test_contexts_nest_and_survive_errors() -> None:
    with pytest.raises(KeyError), deferred_init(), deferred_init():
        net = nn.Linear(3, 3)
        raise KeyError
    assert is_deferred(net)
    assert not torch.zeros(3).any()  # recording has ended


def test_errors_of_construction_are_those_of_plain_construction() -> None:
    with pytest.raises(RuntimeError, match="must match the size"), deferred_init():
        torch.zeros(3).add_(torch.ones(4))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'wieght'.*\n.*\n.*Fix:"):
        materialize(nn.Linear(3, 3), ["wieght"])


def test_replay_that_would_draw_other_numbers_raises() -> None:
    with deferred_init():
        net = nn.Linear(3, 3)
    recording = net.weight._graphsplit_recording
    recording._chains[0]._states[0] = torch.Generator().manual_seed(99).get_state()
    state = torch.get_rng_state()
    with pytest.raises(DeferredInitError, match="other random numbers"):
        materialize(net)
    assert torch.equal(torch.get_rng_state(), state)


def test_construction_on_the_meta_device_is_left_alone() -> None:
    with deferred_init(), torch.device("meta"):
        net = nn.Linear(3, 3)
    assert net.weight.is_meta
    assert not is_deferred(net)


MEMORY_SCRIPT = """
import sys
import torch
from torch import nn
from graphsplit.deferred.construction import deferred_init, materialize

def peak_mb():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024

def build():
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(100)])
    for layer in net:
        nn.init.xavier_normal_(layer.weight)  # initialised twice, as many libraries do
    return net

before = peak_mb()
if sys.argv[1] == "plain":
    build()
else:
    with deferred_init():
        net = build()
    names = [name for name, _ in net.named_parameters()]
    materialize(net, names[:100])
print(peak_mb() - before)
"""


def peak_mb(how: str) -> float:
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, how],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return float(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_what_is_owned_and_little_more() -> None:
    owned_mb = 50 * 1025 * 1024 * 4 / 2**20
    assert peak_mb("deferred") <= owned_mb + 120
    assert peak_mb("plain") > 390


def test_nothing_is_left_behind() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with deferred_init():
            net = nn.Linear(3, 3)
        del net
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert not torch_module._global_forward_pre_hooks
