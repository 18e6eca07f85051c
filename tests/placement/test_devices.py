"""Networks on devices, as far as can be seen without one; ``test_cuda.py`` needs one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pass_helpers import captured, placed
from torch import nn

from graphsplit.batches.signature import Signature
from graphsplit.batches.signature_text import check_signature_text
from graphsplit.capture.graph import CapturedGraph
from graphsplit.errors import FrameError, PlacementError
from graphsplit.optimizers import optimizer as optimizers
from graphsplit.optimizers.clip import GlobalNorm
from graphsplit.partition.checks.redrawn import refuse_draws_on_devices
from graphsplit.partition.checks.replicated import refuse_unreplicable
from graphsplit.partition.edges import partition
from graphsplit.runtime.channels import channel_specs
from graphsplit.tensor_meta import TensorMeta
from graphsplit.torch_ext import private


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(nn.functional.dropout(self.one(x), 0.5, self.training)).sum()


def on_cuda(graph: CapturedGraph) -> CapturedGraph:
    """The graph as if all its tensors were on a GPU."""
    moved = [
        replace(node, meta=replace(node.meta, device="cuda:0")) if node.meta else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(moved))


def cut() -> Net:
    net = Net()
    net.one.place("MS_WORKER", 0)
    net.other.place("MS_WORKER", 1)
    return net


def test_a_description_names_a_device_that_is_no_cpu() -> None:
    meta = TensorMeta(torch.float32, (2, 3), (3, 1), "cuda:0")
    assert str(meta) == "float32[2, 3] on cuda:0"
    assert TensorMeta.of(torch.zeros(2, 3)).device == "cpu"
    assert TensorMeta.of(torch.zeros(2, 3, device="meta")).device == "cpu"


def test_the_channels_of_a_cut_know_where_values_are() -> None:
    net = cut()
    graph = on_cuda(captured(net.eval(), torch.zeros(2, 3)))
    for shown, expected in ((graph, {"cuda:0"}), (captured(net, torch.zeros(2, 3)), {"cpu"})):
        plan = partition(placed(net, shown, num_workers=2))
        values = [e.index for e in plan.edges if e.meta.dtype is torch.float32]
        specs = channel_specs(plan, 0, worker=0, depths={})
        assert values and {specs[index].device for index in values} == expected


def test_draws_from_the_generator_of_a_device_are_refused_over_several_workers() -> None:
    net = cut()
    graph = captured(net, torch.zeros(2, 3))
    refuse_draws_on_devices(placed(net, graph))
    with pytest.raises(PlacementError) as caught:
        refuse_draws_on_devices(placed(net, on_cuda(graph)))
    message = str(caught.value)
    assert "draws random numbers on cuda:0" in message and "Fix: draw on the CPU" in message
    assert __file__ in message
    refuse_draws_on_devices(placed(Net(), on_cuda(graph), num_workers=1))


def test_replicas_of_a_network_on_a_device_are_refused() -> None:
    graph = captured(Net(), torch.zeros(2, 3))
    refuse_unreplicable(graph, {}, 2)
    with pytest.raises(PlacementError, match="tensors on cuda:0, and replicas add up on CPUs"):
        refuse_unreplicable(on_cuda(graph), {}, 2)


def test_signatures_tell_devices_apart() -> None:
    on_cpu = Signature.of(((torch.zeros(2, 3),), {}))
    on_gpu = Signature.read(on_cpu.text.replace("[3, 1]]", '[3, 1], "cuda:0"]'))
    assert on_gpu.text != on_cpu.text and on_gpu.structure() != on_cpu.structure()
    larger = Signature.read(on_gpu.text.replace("[2, 3]", "[5, 3]"))
    assert larger.structure() == on_gpu.structure()
    ((made,), _) = on_gpu.example("meta")
    assert made.shape == (2, 3)
    if not torch.accelerator.is_available():
        with pytest.raises(FrameError, match=r"on what this worker has \(no devices but CPUs\)"):
            check_signature_text(on_gpu.text, what="a ticket")


class TestOptimizers:
    """Torch steps a group in one kernel where all of its parameters are on some devices."""

    @pytest.fixture(autouse=True)
    def _as_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optimizers, "foreach_devices", lambda: ["meta"])

    @staticmethod
    def stepped(*parameters: torch.Tensor, **options: object) -> list[object]:
        """The form in which a worker that has what is on a device steps a group."""
        adam = torch.optim.Adam(parameters, **options)  # type: ignore[arg-type]
        owned = [[p for p in parameters if p.is_meta]]
        found: list[object] = []
        with optimizers._Narrowed(adam.param_groups, owned, [0], None):
            found.append(adam.param_groups[0]["foreach"])
            assert adam.param_groups[0]["params"] == owned[0]
        found.append(adam.param_groups[0]["foreach"])
        return found

    on_device = staticmethod(lambda: nn.Parameter(torch.zeros(2, device="meta")))

    def test_all_on_the_device(self) -> None:
        assert self.stepped(self.on_device(), self.on_device()) == [True, None]

    def test_some_on_a_cpu(self) -> None:
        assert self.stepped(self.on_device(), nn.Parameter(torch.zeros(2))) == [False, None]

    def test_a_frozen_one_on_a_cpu(self) -> None:
        frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        assert self.stepped(self.on_device(), frozen) == [True, None]

    def test_a_rate_that_is_a_tensor(self) -> None:
        found = self.stepped(self.on_device(), lr=torch.tensor(0.1))
        assert found == [False, None]

    @pytest.mark.parametrize("chosen", [True, False])
    def test_the_users_own_choice_stays(self, chosen: bool) -> None:
        frozen = nn.Parameter(torch.zeros(2))
        assert self.stepped(self.on_device(), frozen, foreach=chosen) == [chosen, chosen]

    @pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "Adafactor"])
    def test_only_optimizers_that_ask_torch_are_told_a_form(self, name: str) -> None:
        owned = optimizers.OwnedOptimizer(getattr(torch.optim, name)([self.on_device()], lr=0.1))
        owned._refresh()
        assert owned._on_devices == ([] if name == "Adafactor" else [0])

    def test_a_class_of_the_users_own_asks_as_torchs_does(self) -> None:
        mine = type("Mine", (torch.optim.Adam,), {})
        assert optimizers._asks_torch(mine([self.on_device()]))


def test_the_norm_of_all_gradients_is_added_up_on_the_device_of_the_first() -> None:
    cpu, meta = ((torch.float32, torch.device(name)) for name in ("cpu", "meta"))
    clip = GlobalNorm(1.0)
    assert clip.total([3.0, 4.0], [cpu, cpu]) == 5.0
    assert clip.total([3.0, 4.0, 12.0], [cpu, meta, meta]) == 13.0
    assert clip.total([3.0, 4.0], [meta, cpu]).is_meta


def test_the_order_of_attention_that_torch_sets_itself_is_set_before_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    look = private._get_sdp_priority_order
    monkeypatch.setattr(private, "_has_chosen", False)
    monkeypatch.setattr(private, "_choose_attention", lambda: asked.append(True))
    expected = torch._C._get_sdp_priority_order()
    assert look() == expected and not asked, "no GPU is in use"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert look() == expected and look() == expected and asked == [True]
