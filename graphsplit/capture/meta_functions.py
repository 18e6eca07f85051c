"""Let fake tensors take what real kernels take.

Capture runs operations on fake tensors, by functions that tell the result's shape and refuse what
the kernel would refuse. Where such a function refuses more than the kernel does, a network that
runs in eager mode could not be captured:

    _grouped_mm   knows the kernel for bfloat16 on CUDA alone; that for the CPU takes other dtypes
                  too. Mixtures of experts are made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._meta_registrations as registrations


@contextmanager
def as_kernels_accept() -> Iterator[None]:
    """Replace the functions above while a network is captured."""
    original = registrations._meta_grouped_mm_common

    def grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **options: Any) -> Any:
        is_scaled = bool(args) or options.get("scale_a") is not None
        is_known = mat_a.dtype is torch.bfloat16 and torch.version.cuda is not None
        if is_scaled or is_known or mat_a.dtype != mat_b.dtype:
            return original(mat_a, mat_b, *args, **options)
        return registrations._create_grouped_mm_output_tensor(
            mat_a, mat_b, options.get("offs"), options.get("out_dtype")
        )

    registrations._meta_grouped_mm_common = grouped_mm
    try:
        yield
    finally:
        registrations._meta_grouped_mm_common = original
