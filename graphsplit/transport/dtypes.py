"""The number that stands for each dtype in a message.

The numbers are part of the protocol: append to the list, never reorder it. Names that this
torch does not know are left out of the tables, so a peer that sends one is refused.
"""

from __future__ import annotations

import torch

_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
)

CODE_OF: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_NAMES, start=1) if hasattr(torch, name)
}
DTYPE_OF: dict[int, torch.dtype] = {code: dtype for dtype, code in CODE_OF.items()}

# torch has no copy kernel for these; they are moved as the bytes that hold them.
_SUB_BYTE = {
    getattr(torch, f"{kind}{bits}", None) for kind in ("uint", "int") for bits in range(1, 8)
} - {None}


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype under which values of ``dtype`` are copied: the same, or bytes."""
    return torch.uint8 if dtype in _SUB_BYTE else dtype


def name_of(code: int) -> str:
    """The dtype of a code in words, for errors; also for codes nobody knows."""
    return str(DTYPE_OF.get(code, f"unknown dtype code {code}"))
