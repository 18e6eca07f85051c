"""Code that asks for the values of tensors: in losses, in torch itself, and behind an except."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit.errors import CaptureError

Loss = Callable[..., torch.Tensor]


class Net(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: nn.Module | None = None, *, width: int = 4) -> None:
        super().__init__()
        self.w, self.between, self.u = nn.Linear(3, 4), between or nn.ReLU(), nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.u(self.between(self.w(x)))
        return made


def same(
    make: Callable[[], nn.Module],
    batches: Sequence[Any] | None = None,
    *,
    loss_fn: Loss | None = rows_against_target,
    microbatches: int = 1,
    apart: Sequence[str] = ("w", "u"),
) -> None:
    def place(net: Any) -> None:
        for rank, name in enumerate(apart):
            net.get_submodule(name).place("MS_WORKER", rank)

    assert_same_bits(
        make,
        batches or batches_of(8, 3, num=3),
        num_workers=2,
        place=place,
        loss_fn=loss_fn,
        microbatches=microbatches,
        evaluate_after=(0, 2),
    )


def spoken() -> list[Any]:
    """Batches of sequences, labels, and the lengths of both."""
    found = []
    for x, _ in batches_of(4, 8, 3, num=3):
        lengths = torch.full((4,), 8), torch.tensor([3, 2, 3, 1])
        found.append((x, (torch.randint(1, 5, (4, 3)), *lengths)))
    return found


def ctc_of_tensors(outputs: torch.Tensor, target: Any) -> torch.Tensor:
    made: torch.Tensor = nn.CTCLoss(zero_infinity=True)(
        outputs.log_softmax(-1).transpose(0, 1), *target
    )
    return made


def ctc_of_numbers(outputs: torch.Tensor, target: Any) -> torch.Tensor:
    rows = outputs.shape[0]
    scores = outputs.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, target[0], [8] * rows, (2,) * rows, reduction="sum")


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("loss_fn", [ctc_of_tensors, ctc_of_numbers])
def test_ctc_is_captured(loss_fn: Loss, microbatches: int) -> None:
    same(lambda: Net(width=5), spoken(), loss_fn=loss_fn, microbatches=microbatches)


class Encoding(nn.Module):
    """An encoder that packs what is padded, in eval mode."""

    def __init__(self, *, checks_mask: bool, layers: int = 1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.w, self.u = nn.Linear(3, 8), nn.Linear(8, 4)
        self.encoder = nn.TransformerEncoder(layer, layers, mask_check=checks_mask)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.u(self.encoder(self.w(x), src_key_padding_mask=mask))
        return made.mean(1)


def padded(*, at_the_left: bool) -> list[Any]:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0, 4:] = mask[2, 5:] = True
    mask = mask.flip(1) if at_the_left else mask
    return [(x, mask, torch.randn(4, 4)) for x, _ in batches_of(4, 6, 3, num=3)]


def squared(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((outputs - target) ** 2).mean()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("checks_mask", "at_the_left", "microbatches"),
    [(True, False, 1), (True, False, 2), (True, True, 1), (False, False, 1)],
)
def test_an_encoder_with_a_padding_mask_is_evaluated_as_in_eager_mode(
    checks_mask: bool, at_the_left: bool, microbatches: int
) -> None:
    same(
        lambda: Encoding(checks_mask=checks_mask),
        padded(at_the_left=at_the_left),
        loss_fn=squared,
        microbatches=microbatches,
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("checks_mask", "at_the_left", "microbatches"),
    [(True, False, 1), (True, False, 4), (True, True, 1), (False, False, 1)],
)
def test_the_layers_of_an_encoder_may_lie_apart(
    checks_mask: bool, at_the_left: bool, microbatches: int
) -> None:
    same(
        lambda: Encoding(checks_mask=checks_mask, layers=2),
        padded(at_the_left=at_the_left),
        loss_fn=squared,
        microbatches=microbatches,
        apart=("encoder.layers.0", "encoder.layers.1"),
    )


def test_a_part_of_a_layer_that_packs_padded_rows_cannot_lie_apart() -> None:
    with pytest.raises(CaptureError, match=r"'linear1', inside 'encoder.layers.0', is placed"):
        same(
            lambda: Encoding(checks_mask=True, layers=2),
            padded(at_the_left=False),
            loss_fn=squared,
            apart=("w", "encoder.layers.0.linear1"),
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_encoder_may_be_the_whole_network(microbatches: int) -> None:
    def encoder() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    mask = padded(at_the_left=False)[0][1]
    batches = [(torch.randn(4, 6, 8), None, mask, torch.randn(4, 6, 8)) for _ in range(2)]
    assert_same_bits(
        encoder,
        batches,
        num_workers=2,
        place=lambda net: net.place("MS_WORKER", 1),  # type: ignore[operator]
        loss_fn=squared,
        microbatches=microbatches,
        evaluate_after=(0, 1),
    )


class Covariance(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cov(x.T) + torch.corrcoef(x.T).sum()


def test_cov_is_captured() -> None:
    same(lambda: Net(Covariance()))


class Counter:
    """How often something was called."""

    calls = 0


class Counting(torch.autograd.Function):
    """Counts its calls where it is run, also where autograd asks nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counter: Counter) -> torch.Tensor:
        counter.calls += 1
        return x * counter.calls

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * 2, None


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Counting.apply(x, self.counter)
        return made


def test_a_function_counts_on_in_eval_mode() -> None:
    same(lambda: Net(Counts()))


class Quasirandom(nn.Module):
    def __init__(self, num: int, *, is_scrambled: bool) -> None:
        super().__init__()
        self.num = num
        self.engine = torch.quasirandom.SobolEngine(4, scramble=is_scrambled, seed=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.engine.draw(self.num).sum(0)


@pytest.mark.parametrize(("num", "is_scrambled"), [(1, False), (3, True)])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_sobol_engine_goes_on_where_it_was(
    num: int, is_scrambled: bool, microbatches: int
) -> None:
    same(lambda: Net(Quasirandom(num, is_scrambled=is_scrambled)), microbatches=microbatches)


class Smoothed:
    """Divides by what losses were so far."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        value = loss.item()
        self.mean = value if self.mean is None else 0.9 * self.mean + 0.1 * value
        return loss / (1e-3 + self.mean)


class Listed:
    """Counts the losses that it keeps."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        self.seen.append(loss.item())
        return loss * (1 + len(self.seen) / 10)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", [Smoothed, Listed])
def test_a_loss_keeps_what_losses_were_as_numbers(
    kind: Callable[[], Loss], microbatches: int
) -> None:
    same(Net, loss_fn=kind(), microbatches=microbatches)


class Fitting(nn.Module):
    """Catches torch's own errors: what raised them is no part of the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = x.view(3, -1).sum() + x
        except RuntimeError:
            x = x * 0.5
        with contextlib.suppress(IndexError):
            return x.sum(7)
        return x


@pytest.mark.parametrize("microbatches", [1, 4])
def test_an_operation_that_raised_an_error_is_no_part_of_the_step(microbatches: int) -> None:
    same(lambda: Net(Fitting()), microbatches=microbatches)


@torch.library.custom_op("tests::lenient", mutates_args=())
def lenient(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@lenient.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such shape")


def by_a_stricter_fake(x: torch.Tensor) -> torch.Tensor:
    try:
        made: torch.Tensor = lenient(x.detach())
    except RuntimeError:
        made = x * 7
    return made + x


def branching(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = rows_against_target(outputs, target)
    return loss * 3 if loss > 1 else loss


def masking(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    rows = outputs.sum(1)
    return (rows - target)[rows.abs() > 0.1].pow(2).mean()


def catching(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = rows_against_target(outputs, target)
    try:
        return loss * float(loss.detach())
    except RuntimeError:
        return loss


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("loss_fn", [branching, masking, catching])
def test_a_loss_that_is_a_function_is_kept_whole(loss_fn: Loss, microbatches: int) -> None:
    same(Net, loss_fn=loss_fn, microbatches=microbatches)


def by_exception(x: torch.Tensor) -> torch.Tensor:
    try:
        scale = float(x.detach().sum())
    except Exception:
        scale = 5.0
    return x * scale


def by_nothing(x: torch.Tensor) -> torch.Tensor:
    number = x.detach().sum().item()
    try:
        return x * 2 if number > 0 else x * 3
    except:  # noqa: E722
        return x * 4


def by_finally(x: torch.Tensor) -> torch.Tensor:
    try:
        x = x * 2 if x.sum() > 0 else x * 3
    finally:
        return x * 4  # noqa: B012


def by_suppress(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        return x * x.detach().numpy().sum().item()
    return x * 3


def by_hasattr(x: torch.Tensor) -> torch.Tensor:
    class Scale:
        @property
        def value(self) -> float:
            try:
                return float(x.detach().sum())
            except RuntimeError:
                raise AttributeError from None

    return x * Scale().value if hasattr(Scale(), "value") else x * 5


CATCHING = (by_exception, by_nothing, by_finally, by_suppress, by_hasattr)


class Calls(nn.Module):
    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Itself(Net):
    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(super().forward(x))


@pytest.mark.parametrize("function", [by_exception, by_nothing, by_finally, by_a_stricter_fake])
def test_a_module_that_catches_what_capture_raises_is_kept_whole(function: Loss) -> None:
    same(lambda: Net(Calls(function)))


@pytest.mark.parametrize("function", CATCHING)
def test_a_network_that_catches_what_capture_raises_is_refused(function: Loss) -> None:
    with pytest.raises(CaptureError, match=r"values of a tensor|leaves PyTorch") as caught:
        same(lambda: Itself(function))
    assert "test_values_asked_for.py" in str(caught.value)


def test_a_refusal_that_the_script_catches_is_one_all_the_same() -> None:
    def seeds(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(Exception):
            torch.manual_seed(0)
        return x + torch.randn_like(x)

    with pytest.raises(CaptureError, match="sets the random generator") as caught:
        same(lambda: Net(Calls(seeds)))
    assert "torch.manual_seed(0)" in str(caught.value)
