"""Classes and settings that change, and what hangs on libraries: forward reads all as they are."""

from __future__ import annotations

import abc
import ctypes
import gc
import locale
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sized
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads")
library: Any = F
numbers: Any = np


class Low:
    rate = 1.5

    def __call__(self) -> float:
        return 1.0


class High:
    rate = 2.5

    def __call__(self) -> float:
        return 2.0


class Own(Low):
    pass


class Pair:
    __match_args__: Any = ("x", "y")

    def __init__(self) -> None:
        self.x, self.y = 1.0, 2.0


class Shape(abc.ABC):  # noqa: B024
    pass


class Base:
    pass


def _named() -> None:
    pass


OWN, PAIR, PLAIN = Own(), Pair(), SimpleNamespace()
MADE: list[Any] = []


def _hang(step: int) -> None:
    library.gs_list, numbers.gs_table = [0.0, step], {"rate": step}
    library.gs_object = SimpleNamespace(inner=(step, 1))
    Linear: Any = nn.Linear
    Linear.gs_rate, Linear.gs_rates = float(step), [step]
    library.relu.gs_rate = 1.0 + step
    library.gs_own = Own
    Own.note = step  # type: ignore[attr-defined]


def _rebase(step: int) -> None:
    Own.__bases__ = (Low, High)[step % 2 : step % 2 + 1]


def _derive(step: int) -> None:
    del MADE[:]
    MADE.extend(type(f"Made{n}", (Base,), {"rate": step}) for n in range(step))


def _rename(step: int) -> None:
    Own.__name__ = Own.__qualname__ = _named.__name__ = "a" * (1 + step)


def _register(step: int) -> None:
    global PLAIN
    if step == 0:
        PLAIN = type("Plain", (), {})()
    if step >= 3:
        Shape.register(type(PLAIN))


def _rate_of_pair() -> float:
    match PAIR:
        case Pair(rate, _):
            return float(rate)
    raise AssertionError


Case = tuple[Callable[[int], object], Callable[[], float]]
CASES: dict[str, Case] = {
    "attribute of a base": (_rebase, lambda: OWN.rate),
    "attribute of its class": (_rebase, lambda: Own.rate),
    "method of a base": (_rebase, lambda: OWN()),
    "made anew": (_rebase, lambda: Own()()),
    "isinstance": (_rebase, lambda: 1.5 if isinstance(OWN, High) else 2.5),
    "issubclass": (_rebase, lambda: 1.5 if issubclass(Own, High) else 2.5),
    "bases": (_rebase, lambda: Own.__bases__[0].rate),
    "names": (_rename, lambda: len(Own.__name__) + 0.5 * len(Own.__qualname__)),
    "name of a function": (_rename, lambda: 1.0 + len(_named.__name__)),
    "match": (
        lambda step: setattr(Pair, "__match_args__", (("x", "y"), ("y", "x"))[step % 2]),
        _rate_of_pair,
    ),
    "registered": (_register, lambda: 1.5 if isinstance(PLAIN, Shape) else 2.5),
    "subclasses": (_derive, lambda: 1.0 + sum(k.rate for k in Base.__subclasses__() if k in MADE)),  # type: ignore[attr-defined]
    "list": (_hang, lambda: 1.0 + library.gs_list[-1]),
    "list by name": (_hang, lambda: 1.0 + getattr(library, "gs_list")[1]),  # noqa: B009
    "dictionary": (_hang, lambda: 1.0 + numbers.gs_table["rate"]),
    "namespace": (_hang, lambda: 1.0 + library.gs_object.inner[0]),
    "number of a class": (_hang, lambda: 1.0 + nn.Linear.gs_rate),  # type: ignore[attr-defined]
    "list of a class": (_hang, lambda: 1.0 + nn.Linear.gs_rates[-1]),  # type: ignore[attr-defined]
    "number of a function": (_hang, lambda: 1.0 + F.relu.gs_rate),  # type: ignore[attr-defined]
    "class": (_hang, lambda: 1.0 + library.gs_own.note),
    "list of math": (
        lambda step: setattr(math, "gs_list", [step]),
        lambda: 1.0 + math.gs_list[0],  # type: ignore[attr-defined]
    ),
}


def _set(step: int) -> None:
    sys.setrecursionlimit(3000 + step)
    gc.set_threshold(700 + step)
    np.set_printoptions(precision=2 + step)
    np.seterr(divide="raise" if step % 2 else "warn")
    torch.autograd.set_detect_anomaly(step == 3)


class _Pointing(ctypes.Structure):
    _fields_ = (("rate", ctypes.POINTER(ctypes.c_double)),)


class _Counted:
    """Becomes one of those that have a length."""


RATE = ctypes.c_double()
POINTER, POINTING, COUNTED = ctypes.pointer(RATE), _Pointing(ctypes.pointer(RATE)), _Counted()
LOGGER = logging.getLogger("graphsplit.tests.changed")


def _name(step: int) -> None:
    RATE.value = 1.0 + step
    library.gs_number = float(step)
    if step == 2:
        library.gs_late, sys.modules["gs_late"] = 2.0, ModuleType("gs_late")
        Sized.register(_Counted)
    elif step == 4:
        vars(library).pop("gs_late", None)
        sys.modules.pop("gs_late", None)
    logging.disable(logging.CRITICAL if step % 2 else logging.NOTSET)
    locale.setlocale(locale.LC_ALL, "C" if step % 2 else "C.UTF-8")


CASES |= {
    "number by name": (_name, lambda: 1.0 + getattr(library, "gs_number")),  # noqa: B009
    "number in a table": (_name, lambda: 1.0 + vars(library)["gs_number"]),
    "number in its dictionary": (_name, lambda: 1.0 + library.__dict__["gs_number"]),
    "number that comes later": (_name, lambda: getattr(library, "gs_late", 1.0)),
    "asked for later": (_name, lambda: library.gs_late if hasattr(library, "gs_late") else 3.0),
    "module": (_name, lambda: 2.0 if "gs_late" in sys.modules else 1.0),
    "known to a library": (_name, lambda: 2.0 if isinstance(COUNTED, Sized) else 1.0),
    "logging": (_name, lambda: 2.0 if LOGGER.isEnabledFor(logging.ERROR) else 1.0),
    "locale": (_name, lambda: float(len(locale.setlocale(locale.LC_ALL)))),
    "pointer": (_name, lambda: POINTER.contents.value),
    "pointer in a structure": (_name, lambda: POINTING.rate[0]),
    "recursion": (_set, lambda: sys.getrecursionlimit() - 2999.0),
    "collector": (_set, lambda: gc.get_threshold()[0] - 699.0),
    "printing": (_set, lambda: float(len(str(np.array([1 / 3]))))),
    "options": (_set, lambda: float(np.get_printoptions()["precision"])),
    "errors": (_set, lambda: 2.0 if np.geterr()["divide"] == "raise" else 1.0),
    "anomalies": (_set, lambda: 2.0 if torch.is_anomaly_enabled() else 1.0),
}


@pytest.fixture(autouse=True)
def _set_back() -> Iterator[None]:
    before = sys.getrecursionlimit(), gc.get_threshold(), torch.is_anomaly_enabled()
    of_locale = locale.setlocale(locale.LC_ALL)
    with np.printoptions(), np.errstate():
        yield
    logging.disable(logging.NOTSET)
    locale.setlocale(locale.LC_ALL, of_locale)
    sys.setrecursionlimit(before[0])
    gc.set_threshold(*before[1])
    torch.autograd.set_detect_anomaly(before[2])


class Net(nn.Module):
    def __init__(self, use: Callable[[], float]) -> None:
        super().__init__()
        self.inner, self.use = nn.Linear(3, 4), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.use()
        return found


@pytest.mark.parametrize("case", CASES)
def test_what_a_script_changes_is_read_as_it_is(case: str) -> None:
    change, use = CASES[case]
    assert_same_bits(
        lambda: Net(use),
        batches_of(4, 3),
        steps=6,
        num_workers=1,
        loss_fn=rows_against_target,
        before_step=lambda step, net, loss: change(step),
        plan_everywhere=True,
        evaluate_after=(),
    )
