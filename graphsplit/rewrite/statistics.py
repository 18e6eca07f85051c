"""Running statistics from the statistics of a batch, in the bits of ``batch_norm``.

A norm whose momentum is 1, and whose running statistics are zeros, leaves the mean and the variance
of its input there, as it would have added them to others. So these need not be computed again::

    mean  = momentum * m + (1 - momentum) * mean       all in the dtype of the input
    var   = momentum * v + (1 - momentum) * var        the product and the sum in float64

That is how torch 2 computes it on CPU for an input without gaps. Other inputs are gone through
once more, and so are all where a try shows that this torch, on this machine, does it otherwise.
"""

from __future__ import annotations

import functools

import torch

_DTYPES = (torch.float32, torch.float64)
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_MOMENTA = (0.1, 0.3, 1 / 7)


def fold_statistics(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    own_mean: torch.Tensor,
    own_var: torch.Tensor,
    momentum: float,
) -> None:
    """Do to running statistics what a norm of ``x`` would have done.

    Args:
        x: Its input, (rows, channels, ...).
        mean: The running mean, (channels,).
        var: The running variance, (channels,).
        own_mean: What the norm has left with a momentum of 1, (channels,).
        own_var: The same of the variance, (channels,).
        momentum: The momentum of the norm.
    """
    has_no_gaps = any(x.is_contiguous(memory_format=one) for one in _FORMATS)
    if has_no_gaps and x.is_cpu and x.dtype is mean.dtype and adds_so(x.dtype):
        _add(mean, var, own_mean, own_var, momentum)
    else:
        torch.ops.aten.batch_norm_update_stats.default(x, mean, var, momentum)


def _add(
    mean: torch.Tensor,
    var: torch.Tensor,
    own_mean: torch.Tensor,
    own_var: torch.Tensor,
    momentum: float,
) -> None:
    share, kept = _shares(momentum, mean.dtype)
    mean.mul_(kept).add_(own_mean * share)
    var.copy_(own_var.double().mul_(share).add_(var.mul_(kept)))


@functools.lru_cache(maxsize=64)  # a momentum may be another one at each step
def _shares(momentum: float, dtype: torch.dtype) -> tuple[float, float]:
    """A momentum and 1 - momentum, rounded to a dtype."""
    share = torch.tensor(momentum, dtype=dtype)
    return float(share), float(1 - share)


@functools.cache
def adds_so(dtype: torch.dtype) -> bool:
    """Whether this torch adds statistics as it is done here: tried once, with random numbers."""
    if dtype not in _DTYPES:
        return False
    generator = torch.Generator().manual_seed(0)
    norm, is_equal = torch.ops.aten.batch_norm.default, True
    with torch.no_grad():
        for momentum in _MOMENTA:
            for memory_format in _FORMATS[:2]:
                x = torch.randn(3, 67, 3, 5, generator=generator, dtype=dtype) * 3 + 1
                x = x.contiguous(memory_format=memory_format)
                mean, var = torch.rand(2, 67, generator=generator, dtype=dtype).unbind()
                own_mean, own_var = torch.zeros(2, 67, dtype=dtype).unbind()
                found_mean, found_var = mean.clone(), var.clone()
                norm(x, None, None, mean, var, True, momentum, 1e-5, False)
                norm(x, None, None, own_mean, own_var, True, 1.0, 1e-5, False)
                _add(found_mean, found_var, own_mean, own_var, momentum)
                is_equal &= torch.equal(mean, found_mean) and torch.equal(var, found_var)
    return is_equal
