"""A call as users write it looks up the names that capture replaces."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import graph

from graphsplit.torch_ext import replaced as patches
from graphsplit.torch_ext.replaced import Patch, replaced


class _Reached(Exception):
    """The call came to what stands in the place."""


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def _value() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def _inside(block: Any) -> Callable[[], None]:
    def run() -> None:
        with block:
            pass

    return run


def _annotated() -> None:
    with torch.fx.traceback.annotate({}):
        pass


CALLS: dict[Patch, Callable[[], Any]] = {
    (torch.Tensor, "backward"): lambda: _value().sum().backward(),
    (torch.autograd, "backward"): lambda: torch.autograd.backward(_value().sum()),
    patches.REGISTER_ACCUMULATED_HOOK: lambda: nn.Parameter(
        torch.ones(1)
    ).register_post_accumulate_grad_hook(print),
    patches.REGISTER_MULTI_GRAD_HOOK: lambda: graph.register_multi_grad_hook([_value()], print),
    patches.SAVED_TENSORS_HOOKS: _inside(graph.saved_tensors_hooks(abs, abs)),
    (torch, "manual_seed"): lambda: torch.manual_seed(0),
    (torch, "seed"): lambda: torch.seed(),
    (torch, "set_rng_state"): lambda: torch.set_rng_state(torch.get_rng_state()),
    (torch.random, "manual_seed"): lambda: torch.random.manual_seed(0),
    (torch.random, "seed"): lambda: torch.random.seed(),
    (torch.random, "set_rng_state"): lambda: torch.random.set_rng_state(torch.get_rng_state()),
    patches.GRAD: lambda: torch.autograd.grad(_value().sum(), [_value()]),
    patches.REGISTER_HOOK: lambda: _value().register_hook(print),
    patches.MARK_TRAINED: lambda: nn.Parameter(torch.ones(1)).requires_grad_(False),
    patches.APPLY_FUNCTION: lambda: _Twice.apply(_value()),
    patches.BATCH_NORM: lambda: nn.BatchNorm1d(1)(torch.ones(2, 1)),
    patches.DRAW_SOBOL: lambda: torch.quasirandom.SobolEngine(1).draw(1),
    (torch, "cov"): lambda: torch.cov(torch.ones(2, 2)),
    (torch, "corrcoef"): lambda: torch.corrcoef(torch.ones(2, 2)),
    (torch.Tensor, "cov"): lambda: torch.ones(2, 2).cov(),
    (torch.Tensor, "corrcoef"): lambda: torch.ones(2, 2).corrcoef(),
    patches.ENTER_INFERENCE: _inside(torch.inference_mode(False)),
    patches.LEAVE_INFERENCE: _inside(torch.inference_mode(False)),
    patches.READ_LOADER: lambda: iter(torch.utils.data.DataLoader(range(2))),
    patches.HASH: lambda: {torch.ones(1)},
    patches.EQUAL: lambda: torch.ones(1) == torch.ones(1),
    patches.FORMAT: lambda: f"{torch.ones(())}",
    patches.TEXT: lambda: str([torch.ones(1)]),
    patches.ANNOTATE: _annotated,
}


def _all() -> list[Patch]:
    found: list[Patch] = []
    for name, one in vars(patches).items():
        if name.isupper() and isinstance(one, tuple) and not isinstance(one[0], FunctionType):
            found += one if isinstance(one[0], tuple) else [one]
    return found


def test_every_patch_has_a_call_here() -> None:
    assert set(_all()) == set(CALLS) and len(_all()) == len(CALLS)


@pytest.mark.parametrize("patch", _all(), ids=lambda patch: f"{patch[0].__name__}.{patch[1]}")
def test_a_call_comes_to_what_stands_in_the_place(patch: Patch) -> None:
    def reached(*args: Any, **kwargs: Any) -> Any:
        raise _Reached

    before = torch.get_rng_state()
    with replaced(*patch, reached), pytest.raises(_Reached):
        CALLS[patch]()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.is_inference_mode_enabled()
