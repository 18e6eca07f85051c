"""What graphsplit relies on of torch's private names, beyond that they are there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental import symbolic_shapes
from torch.utils import checkpoint

from graphsplit.torch_ext import private
from graphsplit.torch_ext.exporting import only_what_is_read


class _Blocks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            return x @ y


def _operators(module: nn.Module) -> list[Any]:
    """Targets of what ``torch.export`` records of a module."""
    program = torch.export.export(module, (torch.ones(2, 2),), strict=False)
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def test_the_version_of_a_tensor_counts_writes() -> None:
    value = torch.zeros(2)
    before = value._version
    value.add_(1)
    value.data.add_(1)  # behind autograd's back, and the counter's

    assert value._version == before + 1


def test_views_share_a_storage_and_others_do_not() -> None:
    value = torch.zeros(4)

    assert value[1:].untyped_storage()._cdata == value.untyped_storage()._cdata
    assert value.clone().untyped_storage()._cdata != value.untyped_storage()._cdata


def test_modules_are_called_through_call_impl() -> None:
    seen = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import sys

            caller = sys._getframe(1)
            while caller.f_code is not nn.Module._call_impl.__code__:
                assert caller.f_back is not None
                caller = caller.f_back
            seen.append(caller.f_locals["self"])
            return super().forward(x)

    module = Watched(1, 1)
    module(torch.zeros(1, 1))

    assert seen == [module]


def test_a_module_keeps_what_is_assigned_in_its_tables() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(1))
    module.register_buffer("count", torch.zeros(1), persistent=False)
    module.child = nn.Identity()

    assert list(module._parameters) == ["weight"]
    assert list(module._buffers) == ["count"]
    assert list(module._modules) == ["child"]
    assert module._non_persistent_buffers_set == {"count"}


def test_fakes_say_when_a_value_is_asked_for() -> None:
    with private.FakeTensorMode(), pytest.raises(private.DataDependentOutputException):
        torch.zeros(1).item()


def test_fakes_say_when_a_shape_depends_on_values() -> None:
    with private.FakeTensorMode(), pytest.raises(private.DynamicOutputShapeException):
        torch.zeros(3).nonzero()


def test_the_active_fake_mode_is_found() -> None:
    assert private.active_fake_mode() is None
    with private.FakeTensorMode() as mode:
        assert private.active_fake_mode() is mode


def test_operators_say_what_they_write() -> None:
    assert torch.ops.aten.add_.Tensor._schema.is_mutable
    assert not torch.ops.aten.add.Tensor._schema.is_mutable
    assert torch.ops.aten.add_.Tensor._overloadname == "Tensor"


def test_composites_are_known() -> None:
    composite = "CompositeImplicitAutograd"

    assert private.has_kernel("aten::linear", composite)
    assert not private.has_kernel("aten::mm", composite)


@pytest.fixture
def blocks_kept() -> Iterator[None]:
    from graphsplit.capture.operations.regions import blocks_kept_flat

    with blocks_kept_flat():
        yield


def test_export_marks_blocks_where_its_passes_are_left_out(blocks_kept: None) -> None:
    targets = _operators(_Blocks())

    for mark in (private.set_grad_enabled, private.enter_autocast, private.exit_autocast):
        assert mark in targets


def test_export_packs_blocks_otherwise() -> None:
    targets = _operators(_Blocks())

    assert private.set_grad_enabled not in targets


class _Sizes(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] > 1)
        h = x.reshape(-1, x.shape[1]) * x.shape[0]
        return torch.cond(h.sum() > 0, lambda: h + 1, lambda: h - 1) @ y


@pytest.mark.parametrize("sizes", [None, torch.export.Dim("rows", min=2, max=8)])
def test_export_records_the_same_where_it_leaves_out_what_nobody_reads(sizes: Any) -> None:
    arguments = (torch.ones(3, 4), torch.ones(4, 2))
    shapes = None if sizes is None else ({0: sizes}, None)
    whole = torch.export.export(_Sizes(), arguments, dynamic_shapes=shapes, strict=False)
    with only_what_is_read():
        program = torch.export.export(_Sizes(), arguments, dynamic_shapes=shapes, strict=False)

    assert str(program.graph) == str(whole.graph)
    assert program.graph_signature == whole.graph_signature
    assert torch.equal(program.module()(*arguments), whole.module()(*arguments))


def test_export_makes_no_code_and_no_second_description_of_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("code was made of a graph")

    looked: list[str] = []
    for name in ("_free_unbacked_symbols_with_path", "free_unbacked_symbols"):
        monkeypatch.setattr(symbolic_shapes, name, lambda *_, name=name, **__: looked.append(name))
    monkeypatch.setattr(torch.fx.Graph, "python_code", make)
    with only_what_is_read():
        program = torch.export.export(nn.Linear(2, 2), (torch.ones(2, 2),), strict=False)

    assert looked == []
    assert {node.meta.get("tensor_meta") for node in program.graph.nodes} == {None}


def test_a_checkpoint_that_is_not_reentrant_is_one_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    original = checkpoint._checkpoint_without_reentrant_generator

    def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(function)
        return original(function, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "_checkpoint_without_reentrant_generator", generator)
    checkpoint.checkpoint(torch.relu, torch.ones(1, requires_grad=True), use_reentrant=False)

    assert asked == [torch.relu]


def test_backward_accumulates_or_returns() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * torch.tensor([2.0, 3.0])
    (given,) = private.run_backward(
        (y,), (torch.ones(2),), True, False, (x,), True, accumulate_grad=False
    )

    assert torch.equal(given, torch.tensor([2.0, 3.0]))
    assert x.grad is None

    private.run_backward((y,), (torch.ones(2),), False, False, (x,), True, accumulate_grad=True)

    assert torch.equal(x.grad, torch.tensor([2.0, 3.0]))


def test_clipping_asks_for_the_norm_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.utils import clip_grad

    asked = []
    original = clip_grad._get_total_norm  # type: ignore[attr-defined]

    def total(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(args)
        result: torch.Tensor = original(*args, **kwargs)
        return result

    monkeypatch.setattr(clip_grad, "_get_total_norm", total)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)

    assert len(asked) == 1


def test_the_switches_say_what_was_chosen() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        inside = [switch() for switch in private.SWITCHES]
    outside = [switch() for switch in private.SWITCHES]

    assert inside != outside


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def test_a_kept_apply_of_a_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts write ``f = STE.apply`` once; capture has to see the calls of ``f``."""
    seen = []
    kept = _Doubled.apply
    owner = private.SingleLevelFunction
    original = super(owner, _Doubled).apply

    def apply(cls: Any, *args: Any) -> Any:
        seen.append(cls)
        return original(*args)

    monkeypatch.setattr(owner, "apply", classmethod(apply), raising=False)
    kept(torch.ones(1, requires_grad=True))

    assert seen == [_Doubled]


def test_the_apply_of_functions_is_a_class_method_of_python() -> None:
    """A block of capture that replaces it calls what it has replaced."""
    assert callable(torch.autograd.Function.__dict__["apply"].__func__)
