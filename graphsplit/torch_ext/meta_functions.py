"""Let fake tensors take what real kernels take.

Capture runs operations on fake tensors, by functions that tell the result's shape and refuse what
the kernel would refuse. Where such a function refuses more than the kernel does, a network that
runs in eager mode could not be captured:

    _grouped_mm   knows the kernel for bfloat16 on CUDA alone; that for the CPU takes other dtypes
                  too. Mixtures of experts are made of it.
    _ctc_loss     has none: what it saves for backward is as large as the longest target. Nobody
                  but its backward sees that, so any size will do.
    ctc_loss      makes a tensor of lengths that are Python's numbers, in C++, where fake tensors
                  have no memory. The kernel is the same for lengths that are tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._meta_registrations as registrations
from torch._subclasses import fake_impls

from graphsplit.torch_ext.replaced import replaced

_CTC_LOSSES = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)


@contextmanager
def as_kernels_accept() -> Iterator[None]:
    """Replace the functions above while a network is captured."""
    with _grouped_mm_of_any_dtype(), _ctc_loss_of_some_size(), _ctc_loss_of_numbers():
        yield


@contextmanager
def _ctc_loss_of_numbers() -> Iterator[None]:
    original: Any = torch.ctc_loss

    def ctc_loss(
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        lengths = [
            given if isinstance(given, torch.Tensor) else torch.tensor(given)
            for given in (input_lengths, target_lengths)
        ]
        return original(log_probs, targets, *lengths, *args, **options)

    with replaced(torch, "ctc_loss", ctc_loss):
        yield


@contextmanager
def _ctc_loss_of_some_size() -> Iterator[None]:
    known = (_CTC_LOSSES.__contains__, _ctc_loss)
    checks: list[Any] = fake_impls.op_implementations_checks
    checks.insert(0, known)  # before the one that refuses sizes that depend on values
    try:
        yield
    finally:
        checks.remove(known)


def _ctc_loss(
    mode: Any, func: Any, log_probs: torch.Tensor, targets: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of a batch, and what is saved for backward, as if every target were as long."""
    num_steps, num_rows = log_probs.shape[:2]
    length = 2 * targets.shape[-1] + 1
    return log_probs.new_empty((num_rows,)), log_probs.new_empty((num_rows, num_steps, length))


@contextmanager
def _grouped_mm_of_any_dtype() -> Iterator[None]:
    original = registrations._meta_grouped_mm_common

    def grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **options: Any) -> Any:
        is_scaled = bool(args) or options.get("scale_a") is not None
        is_known = mat_a.dtype is torch.bfloat16 and torch.version.cuda is not None
        if is_scaled or is_known or mat_a.dtype != mat_b.dtype:
            return original(mat_a, mat_b, *args, **options)
        return registrations._create_grouped_mm_output_tensor(
            mat_a, mat_b, options.get("offs"), options.get("out_dtype")
        )

    with replaced(registrations, "_meta_grouped_mm_common", grouped_mm):
        yield
