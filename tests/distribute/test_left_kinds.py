"""Values of many kinds that code kept whole leaves: the script finds them on every worker.

Also where code that runs on one worker alone has made them, and holds one of them in two places.
"""

from __future__ import annotations

import copy
import enum
import math
import re
import threading
import weakref
from collections import ChainMap, Counter, OrderedDict, UserList, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, placed
from numpy.polynomial import Polynomial
from recovery_helpers import threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import OwnershipError
from graphsplit.feeding.left_there import LeftThere

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

Pair = namedtuple("Pair", "n mean")


class Rows(list[Any]):
    note = ""


class Table(dict[str, Any]):
    pass


class Asked(dict[str, Any]):
    """Asked for what it has not, it raises what nobody expects of an attribute."""

    __getattr__ = dict.__getitem__


class Row(tuple[Any, ...]):
    pass


class Step(int):
    pass


class Slotted:
    __slots__ = ("mean", "n")

    def __init__(self, n: int, mean: torch.Tensor) -> None:
        self.n = n
        if n > 1:
            self.mean = mean


class Called:
    def __init__(self, n: int) -> None:
        self.n, self.itself, self.rows = n, self, [self]

    def __call__(self) -> int:
        return self.n


class Key:
    pass


KEY = Key()


def _mode() -> Any:
    class Mode(enum.Enum):
        COLD, WARM = 1, 2

    return Mode


def _added(n: int, more: int = 0) -> int:
    return n + more


def _defaults(n: int) -> Any:
    made: Any = defaultdict(list)
    made["n"].append(n)
    return made


def _noted(n: int) -> Rows:
    made = Rows([n, [n]])
    made.note = "a" * n
    return made


def _with_history(own: Any, n: int) -> Any:
    """Containers that stood there before and change, which get what is new in other places, too."""
    own.rows[0].append(n)
    own.rows[1]["n"] = [n]
    own.history.append(copy.deepcopy(own.rows))
    own.history = own.history[-2:]
    return [own.history[0], own.rows, own.rows[1]["n"]]


def _with_modules(own: Any, n: int) -> Any:
    if n == 1:
        own.act = nn.Dropout(n / 10)
    return [own.act, {"norm": nn.LayerNorm(n, elementwise_affine=False)}, [*own.children()][-1]]


ZONES = (timezone(timedelta(hours=1)), ZoneInfo("Asia/Tokyo"))
# What each step leaves: of its number, a tensor, and what is the network's own.
KINDS: dict[str, Callable[[int, torch.Tensor, Any], Any]] = {
    "size": lambda n, mean, own: (mean.expand(n, -1).shape, slice(0, n), range(n)),
    "numbers": lambda n, mean, own: [Fraction(n, 3), Decimal(n) / 7, timedelta(n), Step(n)],
    "times": lambda n, mean, own: [datetime(2026, 1, n, tzinfo=ZONES[n % 2]), ZONES[n % 2]],
    "texts": lambda n, mean, own: [{Path("a") / str(n): re.compile("a" * n)}, np.str_("a" * n)],
    "dtypes": lambda n, mean, own: [np.dtype(("f4", "i8")[n % 2]), np.ones((n, 2), order="F")],
    "functions": lambda n, mean, own: {"f": (torch.tanh, math.sin)[n % 2], "class": Key},
    "library": lambda n, mean, own: {torch.special.erf: (np.mean, len)[n % 2], Path: Fraction},
    "results": lambda n, mean, own: [torch.topk(mean, 2), mean.sort(), {"n": mean.max(dim=0)}],
    "weak": lambda n, mean, own: [
        weakref.ref(own.inner),
        own.inner.forward,
        MappingProxyType({n: 1}),
    ],
    "objects": lambda n, mean, own: [UserList([n]), ChainMap({"n": [n]}), Polynomial([n, 2])],
    "errors": lambda n, mean, own: [ValueError(n, "x"), defaultdict(list, n=[n])],
    "partial": lambda n, mean, own: partial(_added, n, more=n),
    "lists": lambda n, mean, own: _noted(n),
    "mappings": lambda n, mean, own: Table(n=n, mean=mean),
    "asked": lambda n, mean, own: Asked(n=n, inner=Asked(n=[n])),
    "history": lambda n, mean, own: _with_history(own, n),
    "tuples": lambda n, mean, own: [Row((n, mean)), Pair(n, mean)],
    "ordered": lambda n, mean, own: OrderedDict(mean=mean, n=[n]),
    "counted": lambda n, mean, own: SimpleNamespace(counts=Counter(a=n), mean=mean),
    "modules": lambda n, mean, own: _with_modules(own, n),
    "slots": lambda n, mean, own: Slotted(n, mean),
    "called": lambda n, mean, own: Called(n),
    "mode": lambda n, mean, own: {own.modes.WARM: n, KEY: n, "now": [*own.modes][n % 2]},
    "two places": lambda n, mean, own: [(one := [n]), {"again": one, "both": (mean, mean)}],
    "two objects": lambda n, mean, own: [(one := Called(n)), {"again": one}, [one.rows]],
}


class Leaving(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.n = nn.Linear(8, 4), kind, 0
        self.modes, self.classes = (
            _mode(),
            (Row, Pair, Step, Rows, Table, Asked, Slotted, Called, Key),
        )
        self.rows: list[Any] = [[1], {"n": 2}]
        self.history: list[Any] = []
        self.left: Any = None
        self.again: Any = None
        self.kept = _defaults(0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(values)
        self.n += 1
        self.left = KINDS[self.kind](self.n, made.detach().mean(0), self)
        self.again = self.left
        self.kept = defaultdict(list, self.kept)
        self.kept[self.n].append(self.n)
        return made * (1 + 0.1 * self.n)


def look(*values: Any) -> list[Any]:
    """All that a script could see: classes, numbers, tensors, and what is one and the same."""
    numbers: dict[int, int] = {}

    def shown(value: Any) -> Any:
        if id(value) in numbers:
            return numbers[id(value)]
        if isinstance(value, torch.Tensor) or hasattr(value, "__dict__") or type(value) is list:
            numbers[id(value)] = len(numbers)
        if isinstance(value, torch.Tensor):
            return value.tolist()
        inside: list[Any] = []
        if isinstance(value, dict):
            inside = [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            inside = [*value]
        if isinstance(value, Slotted):
            inside = [getattr(value, name, None) for name in ("n", "mean")]
        elif isinstance(value, weakref.ReferenceType):
            inside = [type(value()).__name__]
        elif isinstance(value, partial):
            inside = [value.func, value.args, value.keywords]
        elif not isinstance(value, (enum.Enum, type, FunctionType)):
            inside += (
                [one for pair in vars(value).items() for one in pair]
                if hasattr(value, "__dict__")
                else []
            )
        name = repr(value) if not inside and " at 0x" not in repr(value) else ""
        return [type(value).__name__, name, *map(shown, inside)]

    return [shown(value) for value in values]


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_leaves_is_found_on_every_worker(kind: str) -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        leaving = Leaving(kind)
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(leaving))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        net = distribute(net)
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            yield look(leaving.left, leaving.again, leaving.kept, leaving.history)
            if kind == "mode":
                yield [one in leaving.modes for one in leaving.left if isinstance(one, enum.Enum)]
            with torch.no_grad():
                yield net(torch.ones(2, 6)).tolist()
            yield look(leaving.left, leaving.again)
        yield net.state_dict()

    assert_same_bits(loop, 2)


class Unsendable(nn.Module):
    """Leaves what cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.left, self.rows = nn.Linear(8, 4), None, list[Any]()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.rows.append(self.left)
        self.left = re.match("a", "a")
        made: torch.Tensor = self.inner(values)
        return made


class Deleting(Unsendable):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(values)
        if "left" in vars(self):
            del self.left
        return made


# What the script does with a match that another worker has left.
USES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda left: left.pos,
    "a method": lambda left: left.group(0),
    "an item": lambda left: left[0],
    "truth": bool,
    "a comparison": lambda left: left == 1,
    "text": str,
    "its class": lambda left: isinstance(left, re.Match),
    "an iterator": list,
    "arithmetic": lambda left: 1 + left,
    "a call": lambda left: left(),
}


@pytest.mark.parametrize("use", USES)
def test_what_cannot_be_sent_is_no_other_value(use: str) -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        leaving = Unsendable()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(leaving))
        net = distribute(placed(net, list(net), ranks))
        for _ in range(2):
            net(torch.randn(5, 6)).mean().backward()
            yield [leaving.left is None, len(leaving.rows), copy.copy(leaving.rows) == leaving.rows]
        with suppress(TypeError):  # of the match itself
            USES[use](leaving.left)
        yield None

    with pytest.raises(
        OwnershipError, match=r"left 'left', a Match, in an attribute of Unsendable"
    ):
        assert_same_bits(loop, 2)


def test_a_library_that_trains_may_look_at_all_attributes() -> None:
    """It asks each for its class; all else is refused, and so is what other libraries ask."""
    code = "def is_one(v): return isinstance(v, dict)\ndef first(v): return v.first"
    left = LeftThere("'left', a Match", "an attribute of Unsendable, on worker 1")
    for library in ("transformers", "users"):
        scope: dict[str, Any] = {}
        exec(compile(code, f"/lib/site-packages/{library}/models.py", "exec"), scope)
        if library == "transformers":
            assert not scope["is_one"](left)
        else:
            with pytest.raises(OwnershipError, match="asked for by __class__"):
                scope["is_one"](left)
        with pytest.raises(OwnershipError, match=r"not on this worker \(asked for by first\)"):
            scope["first"](left)
    assert copy.deepcopy([left])[0] is left


class Held:
    def __init__(self, n: int) -> None:
        self.n, self.lock, self.match = n, threading.Lock(), [re.match("a", "a"), n]


class InParts(nn.Module):
    """Leaves values of which some parts cannot be sent, under keys that cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.n, self.held = nn.Linear(8, 4), 0, [Held(0)]
        self.by_match: dict[Any, Any] = {re.match("a", "a"): 0, 1: 1}
        self.names: dict[str, Any] = {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.n += 1
        first, *_ = self.by_match
        self.by_match[first] = self.n
        if self.n == 2:
            self.by_match[re.match("b", "b")] = self.n
        if self.n == 4:
            del self.by_match[first]
        self.held = [*self.held, Held(self.n)][-2:]
        self.names = {"f": lambda: 1, "n": self.n}
        made: torch.Tensor = self.inner(values)
        return made


def test_parts_that_can_be_sent_are() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        leaving = InParts()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(leaving))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        net = distribute(net)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            yield [*leaving.by_match.values()]
            yield [(one.n, one.match[1], len(one.match)) for one in leaving.held]
            yield [leaving.names["n"], *leaving.names]

    assert_same_bits(loop, 2)


class WithParameters(Unsendable):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.rows = [*self.rows, nn.Linear(1, 1)]
        made: torch.Tensor = self.inner(values)
        return made


def test_modules_with_parameters_stay_where_they_are() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        leaving = WithParameters()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(leaving))
        net = distribute(placed(net, list(net), ranks))
        for _ in range(3):
            net(torch.randn(5, 6)).square().mean().backward()
            yield len(leaving.rows)

    assert_same_bits(loop, 2)


class Signalling(nn.Module):
    """Turns a lock and an event on and off, counts with a semaphore, and holds another lock."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.held = nn.Linear(8, 4), threading.Lock()
        self.lock, self.event, self.free = (
            threading.Lock(),
            threading.Event(),
            threading.Semaphore(9),
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with self.held:
            self.free.acquire()
        if self.event.is_set():
            self.event.clear()
            self.lock.release()
        else:
            self.event.set()
            self.lock.acquire()
        made: torch.Tensor = self.inner(values)
        return made


def test_locks_events_and_semaphores_are_left_as_they_are() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        one = Signalling()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(one))
        net = distribute(placed(net, list(net), ranks))
        for _ in range(4):
            net(torch.randn(5, 6)).square().mean().backward()
            yield [one.lock.locked(), one.held.locked(), one.event.is_set(), one.free._value]

    assert_same_bits(loop, 2)


def test_an_attribute_that_is_deleted_is_gone_everywhere() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        leaving = Deleting()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(leaving))
        placed(net, list(net), ranks)
        distribute(net)(torch.randn(5, 6))
        yield hasattr(leaving, "left")

    assert_same_bits(loop, 2)
