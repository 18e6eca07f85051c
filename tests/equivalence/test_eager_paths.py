"""Code that takes another way while it is exported takes here the way of eager mode."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import assert_same_wherever_placed, batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.scattered import Scattered
from simulated.simulate import Captures
from torch import nn

from graphsplit.errors import GraphsplitError, StepFailedError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "exporting": lambda h: torch.compiler.is_exporting(),
    "compiling": lambda h: torch.compiler.is_compiling(),
    "compiling by dynamo": lambda h: torch.compiler.is_dynamo_compiling(),
    "by its older name": lambda h: torch._dynamo.is_compiling(),
    "by its oldest name": lambda h: torch._utils.is_compiling(),
    "without MKL-DNN": lambda h: not torch.backends.mkldnn.enabled,
    "without cuDNN": lambda h: not torch.backends.cudnn.enabled,
    "without NNPACK": lambda h: not torch.backends.nnpack.set_flags(True)[0],
}


@pytest.mark.filterwarnings("ignore:`torch._utils.is_compiling` is deprecated")
@pytest.mark.parametrize("question", QUESTIONS)
def test_networks_are_told_that_nothing_is_compiled(question: str) -> None:
    # transformers made attention masks that it leaves out in eager mode; gradients had other bits.
    class Asking(Layer):
        def forward(self, x):
            h = self.linear(x)
            return h * 3 if QUESTIONS[question](h) else h * 2

    assert_same_wherever_placed(Asking, batches_of(4, 8), placements=range(3))


def test_a_module_that_forward_imports_first_keeps_pythons_own_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "kind = type\nclass Meta(type): pass\ndef gain(): return getattr(Meta, 'late', 2.0)\n"
    (tmp_path / "imported_by_forward.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found: list[ModuleType] = []

    class Importing(Layer):
        def forward(self, x):
            import imported_by_forward as found_here  # type: ignore[import-not-found]

            kinds: type[Any] | type[int] = type[int]
            found[:] = [found_here]
            return self.linear(x) * found_here.gain() * (kinds == type[int])

    assert_same_wherever_placed(Importing, batches_of(4, 8), placements=range(3))
    assert found[0].kind is type
    assert found[0].Meta.__bases__ == (type,)


def masked(*masks: torch.Tensor) -> list[Any]:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    return [(x, mask, torch.arange(3.0)) for mask in masks]


def test_a_branch_on_a_mask_of_ones_is_taken() -> None:
    class Branching(Layer):
        def forward(self, x, mask):
            h = self.linear(x)
            if mask.sum() == mask.numel() and not (mask == 0).any():
                return h.sum((1, 2))
            return (h * mask[..., None]).mean((1, 2))

    ones = torch.ones(3, 5, dtype=torch.int64)
    assert_same_bits(
        Branching,
        masked(ones, ones.clone()),
        num_workers=2,
        place=lambda net: net.linear.place("MS_WORKER", 1),
        loss_fn=F.mse_loss,
    )


def test_masks_of_ones_and_others_are_two_plans() -> None:
    class Multiplied(Layer):
        def forward(self, x, mask):
            return (self.linear(x) * mask[..., None]).mean((1, 2))

    ones = torch.ones(3, 5, dtype=torch.int64)
    padded = ones.clone()
    padded[1, 3:] = 0
    captures = Captures()
    assert_same_bits(
        Multiplied,
        masked(ones, padded, ones, padded),
        num_workers=2,
        place=lambda net: net.linear.place("MS_WORKER", 1),
        loss_fn=F.mse_loss,
        evaluate_after=(),
        captures=captures,
    )
    assert len(captures._graphs) == 2


def test_a_branch_on_what_follows_from_shapes_is_taken() -> None:
    class Positions(Layer):
        def forward(self, x):
            positions = torch.arange(x.shape[1]).unsqueeze(0)
            packed = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
            h = self.linear(x)
            return h * 2 if (packed[:, -1] == 0).all() else h * 3

    assert_same_wherever_placed(Positions, batches_of(3, 5, 8), placements=range(3))


def test_shapes_that_follow_from_known_values_are_known() -> None:
    # The crops of DINO's MultiCropWrapper: as many passes as there are sizes among them.
    class Crops(Layer):
        def forward(self, x):
            crops = [x, x[:, ::2].repeat(1, 2), x[:2], x[:1]]
            sizes = torch.tensor([len(crop) for crop in crops])
            ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
            start, found = 0, torch.empty(0, 8)
            for end in ends:
                found = torch.cat((found, self.linear(torch.cat(crops[start:end]))))
                start = end
            few = sizes[sizes < 4]
            few += 1
            none = torch.nonzero(sizes == 9)
            return (
                found[: int(few[0]) + 1] * few.sum() + len(torch.nonzero(sizes == 4)) + none.dim()
            )

    assert_same_bits(Crops, batches_of(4, 8), num_workers=2, loss_fn=lambda h, _: h.sum())


def test_what_was_written_into_is_known_no_longer() -> None:
    class Written(Layer):
        def forward(self, x):
            positions = torch.arange(8)
            view = positions[2:]
            positions[3] = (x.sum() * 0).long()
            # A question about `view` has no answer now; the branch is left to torch.where.
            return torch.where(view.min() > 1, 2.0, 3.0) * self.linear(x)

    assert_same_bits(Written, batches_of(4, 8), num_workers=1, loss_fn=lambda o, t: o.sum())


def test_what_known_values_are_written_into_stays_known() -> None:
    class Written(Layer):
        def forward(self, x):
            positions = torch.arange(8)
            view = positions[2:]
            positions[3] = torch.arange(20)[19]
            view.masked_fill_(view == 4, 30)
            return self.linear(x) * (2 if positions.max() == 30 and view[1] == 19 else 3)

    assert_same_wherever_placed(Written, batches_of(4, 8), placements=range(2))


def test_functions_that_keep_their_results_keep_no_fake_ones() -> None:
    # The second capture was handed a tensor of the first.
    @functools.lru_cache(maxsize=4)
    def frequencies(size: int) -> torch.Tensor:
        return torch.arange(float(size)) * 0.1

    class Cached(Layer):
        def forward(self, x):
            return self.linear(x) * frequencies(x.shape[-1])

    assert_same_wherever_placed(Cached, batches_of(4, 8), placements=range(3))
    assert type(frequencies(8)) is torch.Tensor


def test_a_module_that_has_its_dtype_already_is_left_alone() -> None:
    # The router of Switch Transformers does so; its parameters could not be replaced.
    class Converted(Layer):
        def forward(self, x):
            self.linear = self.linear.to(torch.float32)
            return self.linear.float()(x)

    assert_same_wherever_placed(Converted, batches_of(4, 8), placements=range(2))


def test_a_mixture_of_experts_is_captured_with_its_grouped_product() -> None:
    # The function that tells the shape of the product knew bfloat16 alone, as on CUDA.
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 3)
            self.weights = nn.Parameter(torch.randn(3, 8, 8) * 0.3)

        def forward(self, x):
            chosen = self.gate(x).argmax(-1)
            order = chosen.argsort()
            ends = F.one_hot(chosen, 3).sum(0).cumsum(0).to(torch.int32)
            found = F.grouped_mm(x[order], self.weights, offs=ends)
            return found * self.gate(x)[order].softmax(-1).amax(-1, keepdim=True)

    assert_same_wherever_placed(Experts, batches_of(6, 8), placements=range(4))


class Images(nn.Module):
    """Puts features in the places of one token, and checks that there are as many, as LLaVA."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.features = nn.Linear(4, 4)

    def forward(self, ids, features):
        x, found = self.embedding(ids), self.features(features)
        place = (ids == 7)[..., None].expand_as(x)
        torch._check(x[place].numel() == found.numel(), lambda: "sizes differ")
        torch._check((ids < 8).all().item(), lambda: "no such token")
        return x.masked_scatter(place, found).square().sum()


def images(num_places: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(6).repeat(2, 1)
    ids[:, :num_places] = 7
    return {"ids": ids, "features": torch.randn(4, 4, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("seed", range(3))
def test_checks_of_what_values_decide_are_kept(seed: int) -> None:
    # They ended in KeyError: 'ge'.
    captures = Scattered(Captures(), seed=seed, num_workers=3)
    assert_same_bits(Images, [images(2)] * 2, num_workers=3, captures=captures)
    for num_places in (1, 3):
        # The size is checked on its worker, or where the tensor is sent to that worker.
        with pytest.raises(GraphsplitError, match=r"xpected:? [\[(]16"):
            cluster = assert_same_bits(Images, [images(2)], num_workers=3, captures=captures)
            cluster.train_step(((), images(num_places)))


def test_a_check_of_a_value_fails_for_a_batch_for_which_it_does_not_hold() -> None:
    class Positive(Layer):
        def forward(self, x):
            torch._check((x > 0).all().item(), lambda: "not positive")
            return self.linear(x).sum()

    cluster = assert_same_bits(Positive, [{"x": torch.ones(3, 8)}], num_workers=2)
    with pytest.raises(StepFailedError, match="the code checks that a value is True"):
        cluster.train_step(((), {"x": torch.zeros(3, 8)}))


class Normal(Layer):
    def forward(self, x):
        mean = self.linear(x)
        return -torch.distributions.Normal(mean, mean.exp()).log_prob(x).mean()


def test_distributions_check_their_arguments_in_the_graph() -> None:
    # They were refused: the check branches on values, if only to raise.
    batches = [{"x": x} for x, _ in batches_of(4, 8)]
    assert_same_wherever_placed(Normal, batches, loss_fn=None, placements=range(4))
    cluster = assert_same_bits(Normal, batches, num_workers=2)
    with pytest.raises(StepFailedError):
        cluster.train_step(((), {"x": torch.full((4, 8), torch.inf)}))


def _least(h: torch.Tensor) -> torch.Tensor:
    norms = [row.sum() for row in h[:3]] + [max(h[0])]
    return h * (
        min(norms[0], norms[0].detach())
        + max([norms[1].detach(), norms[1], norms[2] - 9])
        + norms[3]
    )


def _not_a_number(h: torch.Tensor) -> torch.Tensor:
    unknown, mean = h.sum() * float("nan"), h.mean()
    return h * max(mean, unknown) + min(mean, unknown, key=torch.Tensor.dim)


def _powers(h: torch.Tensor) -> torch.Tensor:
    return h + torch.full((8,), math.pow(2, 3)) / 3 * (2 if type(math.pow(2, 2)) is float else 1)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("compute", [_least, _not_a_number, _powers])
def test_max_min_and_pow_are_pythons_own(compute: Any, *, inside: bool) -> None:
    """Of two equal tensors the first has all the gradient; what is not a number is no greater."""

    class Computing(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(compute(self.linear(x)))

    class Around(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Computing() if inside else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(self.linear(x).tanh())
            return torch.as_tensor(h if inside else compute(h))

    assert_same_bits(
        Around,
        batches_of(8, 8),
        num_workers=2,
        place=lambda net: (net.linear.place("MS_WORKER", 0), net.inner.place("MS_WORKER", 1)),
        loss_fn=rows_against_target,
        microbatches=2,
        plan_everywhere=True,
    )


@functools.singledispatch
def _scale_of(given: Any) -> float:
    return 1.5


@_scale_of.register
def _(given: torch.Tensor) -> float:
    return 2.0


@_scale_of.register
def _(given: nn.Parameter) -> float:
    return 3.0


class Dispatching(Layer):
    @functools.singledispatchmethod
    def scale(self, given: Any) -> float:
        return 1.5

    @scale.register
    def _(self, given: nn.Parameter) -> float:
        return 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, weight = self.linear(x), self.linear.weight
        scale = self.scale(weight) * self.scale(h) * self.scale(2)
        return torch.as_tensor(h * scale * _scale_of(weight) * _scale_of(h) * _scale_of("a"))


def test_functions_are_dispatched_by_the_classes_of_eager_mode() -> None:
    assert_same_wherever_placed(Dispatching, batches_of(4, 8), placements=range(2))


@torch.fx.wrap
def marked(h: torch.Tensor) -> torch.Tensor:
    return h.tanh()


def test_a_function_that_is_marked_for_torch_fx_stands_in_its_place() -> None:
    # Libraries of vision mark theirs; each step was captured anew, as another function stood there.
    kept = marked

    class Marked(Layer):
        def forward(self, x):
            h = marked(self.linear(x))
            return h if marked is kept else h * 2

    cluster = assert_same_bits(
        Marked, batches_of(8, 8, num=4), num_workers=2, loss_fn=rows_against_target
    )
    for worker in cluster.workers:
        trained = [one for one in worker.planner.recordings if one.mode.records_gradients]
        assert len(trained) == 1
