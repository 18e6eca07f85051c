"""Batch norms whose running statistics are the averages of all batches, recorded as operations.

``BatchNorm(momentum=None)`` asks its counter for the momentum, and a recorded graph knows no
numbers of buffers. So the norm is recorded without statistics, which it does not look at in
training; what updates them is an operation behind it, that asks the counter when it runs. Nothing
but such updates looks at them, so replicas make it later, in the order of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from graphsplit.torch_ext.attributes import CHECK_INPUT
from graphsplit.torch_ext.replaced import BATCH_NORM, replaced


@torch.library.custom_op("graphsplit::average_statistics", mutates_args=("mean", "var"))
def _average(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
    torch.ops.aten.batch_norm_update_stats.default(x, mean, var, 1.0 / float(count))


_average.register_fake(lambda x, mean, var, count: None)


@contextmanager
def averages_in_parts(is_on: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Have batch norms without a momentum ask for no number of their counter.

    Args:
        is_on: Whether a norm that is called now shall.
    """
    original = getattr(*BATCH_NORM)

    # The names of torch's own: a network may call it by them.
    def forward(self: Any, input: torch.Tensor) -> Any:
        is_asking = self.momentum is None and self.training and self.track_running_stats
        if is_asking and is_on() and _is_as_without(self, input):
            return _normalized(self, input)
        return original(self, input)

    with replaced(*BATCH_NORM, forward):
        yield


def _normalized(norm: Any, x: torch.Tensor) -> torch.Tensor:
    getattr(norm, CHECK_INPUT)(x)
    norm.num_batches_tracked.add_(1)
    made = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    _average(x.detach(), norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return made


def _is_as_without(norm: Any, x: torch.Tensor) -> bool:
    """Whether a norm computes the same without its statistics, and their update by itself.

    One without weights looks at the dtype of its statistics. Kernels on a GPU were not compared.
    """
    if norm.num_batches_tracked is None or x.device.type != "cpu":
        return False
    return norm.weight is not None or x.dtype is norm.running_mean.dtype
