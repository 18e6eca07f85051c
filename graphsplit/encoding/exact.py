"""Values that never change, and are written by their parts: dates, paths, patterns, dtypes.

Who sent one is not trusted: none may take much memory for little text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch

from graphsplit.guards.values import OF_TORCH
from graphsplit.text import PATHS, is_told_by_text

NUMBERS = "biufcmMSU"  # kinds of NumPy's dtypes whose bytes are all that there is


def _a(kind: type, part: Any) -> Any:
    if type(part) is not kind:  # Fraction("1e999999999") would take all memory
        raise TypeError(f"expected {kind.__name__}, got {type(part).__name__}")
    return part


def _path(kind: Callable[[str], Any], text: Any) -> Any:
    return kind(_a(str, text))


def _of_torch(kind: type, text: str) -> Any:
    found = getattr(torch, text.removeprefix("torch."), None)
    return _a(kind, found)


def dtype_of(descr: Any) -> np.dtype[Any]:
    """The dtype of NumPy that was written.

    Raises:
        TypeError: It has objects, or no size.
    """
    made = np.lib.format.descr_to_dtype(descr)
    if made.hasobject or not made.itemsize:
        raise TypeError("its bytes do not tell all")
    return made


def _at(kind: Any, parts: list[Any], fold: Any, zone: tzinfo | None = None) -> Any:
    return kind(*parts, fold=fold, tzinfo=zone)  # older ones were written without a zone


# Classes of values that never change, of which subclasses are something else.
EXACT: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    range: ("$range", lambda v: [v.start, v.stop, v.step], lambda parts: range(*parts)),
    slice: ("$slice", lambda v: [v.start, v.stop, v.step], lambda parts: slice(*parts)),
    torch.Size: ("$size", list, torch.Size),
    Decimal: ("$decimal", str, lambda text: Decimal(_a(str, text))),
    UUID: ("$uuid", str, lambda text: UUID(_a(str, text))),
    Fraction: (
        "$fraction",
        lambda v: [v.numerator, v.denominator],
        lambda parts: Fraction(*(_a(int, part) for part in parts)),
    ),
    date: ("$date", lambda v: [v.year, v.month, v.day], lambda parts: date(*parts)),
    timedelta: (
        "$timedelta",
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda parts: timedelta(*parts),
    ),
    time: (
        "$time",
        lambda v: [v.hour, v.minute, v.second, v.microsecond, v.fold, v.tzinfo],
        lambda parts: _at(time, parts[:4], *parts[4:]),
    ),
    datetime: (
        "$datetime",
        lambda v: [*v.timetuple()[:6], v.microsecond, v.fold, v.tzinfo],
        lambda parts: _at(datetime, parts[:7], *parts[7:]),
    ),
    timezone: (
        "$timezone",
        lambda v: [*v.__getinitargs__()],
        lambda parts: timezone(*parts),
    ),
    ZoneInfo: ("$zone", lambda v: v.key, lambda key: ZoneInfo(_a(str, key))),
    re.Pattern: (
        "$pattern",
        lambda v: [v.pattern, v.flags],
        lambda parts: re.compile(parts[0], parts[1] & ~re.DEBUG),
    ),
    np.dtype: ("$npdtype", np.lib.format.dtype_to_descr, dtype_of),
    **{kind: (f"${kind.__name__}", str, partial(_path, kind)) for kind in PATHS},
    **{kind: (f"${kind.__name__}", str, partial(_of_torch, kind)) for kind in OF_TORCH},
}


def is_exact(value: Any) -> bool:
    """Whether a value that never changes is all in what is written of it."""
    kinds = (range, slice, torch.Size, re.Pattern, *OF_TORCH)
    return type(value) in kinds or is_told_by_text(value) or is_written(value)


def is_written(dtype: Any) -> bool:
    """Whether this is a dtype of NumPy that comes back as it was."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not dtype.itemsize or dtype.metadata:
        return False
    if dtype.kind in NUMBERS and np.dtype(dtype.str) is dtype:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype))
    return bool(again == dtype) and again.char == dtype.char
