"""Batch norms whose running statistics are the averages of all batches, recorded as operations.

``BatchNorm(momentum=None)`` asks its counter for the momentum, and a recorded graph knows no
numbers of buffers. So the norm is recorded without statistics, which it does not look at in
training; what updates them is an operation behind it, that asks the counter when it runs. Nothing
but such updates looks at them, so replicas make it later, in the order of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from graphsplit.torch_ext.attributes import CHECK_INPUT
from graphsplit.torch_ext.replaced import BATCH_NORM, Patch


@torch.library.custom_op("graphsplit::average_statistics", mutates_args=("mean", "var"))
def _average(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
    torch.ops.aten.batch_norm_update_stats.default(x, mean, var, 1.0 / float(count))


_average.register_fake(lambda x, mean, var, count: None)


def averages_recorded(
    instead: Callable[[Patch, Callable[..., Any]], AbstractContextManager[None]],
) -> AbstractContextManager[None]:
    """Record batch norms without a momentum in parts.

    Args:
        instead: Has a function of torch be another one where all is recorded.
    """
    return instead(BATCH_NORM, _normalized)


def _normalized(original: Callable[..., Any], norm: Any, input: torch.Tensor) -> Any:
    is_average = norm.momentum is None and norm.training and norm.track_running_stats
    if not is_average or norm.num_batches_tracked is None or not _is_as_without(norm, input):
        return original(norm, input)
    getattr(norm, CHECK_INPUT)(input)
    norm.num_batches_tracked.add_(1)
    made = F.batch_norm(input, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    _average(input.detach(), norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return made


def _is_as_without(norm: Any, x: torch.Tensor) -> bool:
    """Whether a norm computes the same without its statistics, and their update by itself.

    One without weights looks at the dtype of its statistics. Kernels on a GPU were not compared.
    """
    is_known = norm.weight is not None or x.dtype is norm.running_mean.dtype
    return is_known and x.device.type == "cpu"
