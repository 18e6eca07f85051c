"""The kinds of values that random programs have: as what they begin, what code does with them."""

from __future__ import annotations

from dataclasses import dataclass

BEGINNING = """
import collections, contextlib, copy, dataclasses, types
import torch
import torch.nn.functional as F
from torch import nn


class State:
    def __init__(self, n=0):
        self.n, self.rate, self.items = n, 0.5, []

    def step(self):
        self.n += 1
        self.rate *= 0.9
        return self

    def total(self):
        return self.n + sum(self.items)


class Slotted:
    __slots__ = ("n", "rate", "items")
    __init__, step, total = State.__init__, State.step, State.total


@dataclasses.dataclass
class Data:
    n: int = 0
    rate: float = 0.5
    items: list = dataclasses.field(default_factory=list)
    step, total = State.step, State.total


class Counted(State):
    @property
    def n(self):
        return self._n

    @n.setter
    def n(self, value):
        self._n = value
        self.writes = vars(self).get("writes", 0) + 1


class Space(types.SimpleNamespace):
    def __init__(self, n=0):
        super().__init__(n=n, rate=0.5, items=[])

    step, total = State.step, State.total


class Chained(State):
    def __init__(self, n=0):
        super().__init__(n)
        self.before = None

    def step(self):
        self.before = State(self.n)
        return super().step()

    def total(self):
        return self.n + (0 if self.before is None else self.before.n) + sum(self.items)


class Holder:
    pass


@contextlib.contextmanager
def counted(holder, name):
    try:
        yield
    finally:
        setattr(holder, name, getattr(holder, name) + 1)


G, TABLE, KEPT = types.SimpleNamespace(), {}, types.SimpleNamespace()
"""

CLASSES = ("State", "Slotted", "Data", "Counted", "Space", "Chained")


@dataclass(frozen=True)
class Kind:
    """A kind of value. ``@`` stands for where it hangs, and ``%`` for a class.

    Attributes:
        first: What it may be at first.
        reads: Numbers that are made of it.
        writes: Statements that change it.
        is_container: Whether it is no value, and no object of a class of the program's.
        computes: Statements that compute with tensors in it.
    """

    first: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_container: bool = True
    computes: tuple[str, ...] = ()


KINDS = {
    "int": Kind(
        ("0", "1", "3"), ("@",), ("@ += 1", "@ = (@ + 3) % 5", "@ = @ + 1 if @ < 3 else 0"), False
    ),
    "float": Kind(
        ("0.5", "0.1"), ("@",), ("@ = @ * 0.5 + 0.25", "@ *= 0.9", "@ = round(@ + 0.125, 3)"), False
    ),
    "str": Kind(
        ('""', '"ab"'),
        ("len(@)", '@.count("a")', '(@ == "aa")'),
        ('@ = (@ + "a")[-3:]', '@ += "b"', "@ = @.upper() if len(@) > 2 else @"),
        False,
    ),
    "tuple": Kind(
        ("()", "(1, 0.5)"),
        ("sum(@)", "len(@)"),
        ("@ = (*@, 1)[-3:]", "@ = @[1:] + @[:1]", "@ += (0.5,)"),
        False,
    ),
    "list": Kind(
        ("[]", "[1.0]", "[0.5, 2]"),
        (
            *("sum(@)", "len(@)", "(@[-1] if @ else 0.5)", "max(@, default=0.1)"),
            "sum(v * i for i, v in enumerate(@))",
        ),
        (
            *("@.append(len(@) * 0.5)", "@.append(2)", "@[:] = @[-2:]", "@ = [*@, 1.0][-3:]"),
            *("@.reverse()", "@.insert(0, 0.5)", "@.extend([1, 0.25])", "@ = @ + [0.75]"),
            *("@ += [2]", "@ = sorted(@)[-2:]", "@ and @.pop(0)", "@.clear()", "@ = list(@)"),
            "@ = [v * 0.5 for v in @]",
        ),
    ),
    "dict": Kind(
        ("{}", '{"a": 1}', '{"b": 0.5, "c": 2}'),
        (
            *('@.get("a", 0.25)', "sum(@.values())", "len(@)", '("b" in @)'),
            *("sum(len(str(k)) for k in @)", "(list(@.items())[-1][1] if @ else 0.3)"),
        ),
        (
            *('@["a"] = @.get("a", 0) + 1', '@.setdefault("b", 1.5)', '@.pop("a", None)'),
            *("@.update(c=2)", '@ = {**@, "d": 1}', '@ |= {"e": 0.5}', "@ = dict(@)", "@.clear()"),
            *("@ = {k: v + 1 for k, v in @.items()}", "@[len(@)] = 0.5", "@ and @.popitem()"),
        ),
    ),
    "counter": Kind(
        ("collections.defaultdict(int)", "collections.Counter()", "collections.OrderedDict()"),
        ('@.get("a", 0)', "sum(@.values())", "len(@)"),
        ('@["a"] = @.get("a", 0) + 1', '@["b"] = len(@)', "@ = copy.copy(@)", '@.pop("a", None)'),
    ),
    "nested": Kind(
        ('{"x": [1.0], "y": {"z": 0.5}}', '{"x": [0.5, 1], "y": {}}'),
        ('sum(@["x"])', '@["y"].get("z", 0.2)', 'len(@["y"])', '(@["x"] or [0.5])[0]'),
        (
            *('@["x"].append(0.5)', '@["y"]["z"] = @["y"].get("z", 1) * 0.5', "@ = dict(@)"),
            *('@["x"] = @["x"][-2:]', '@["y"] = {"z": len(@["x"])}', "@ = copy.deepcopy(@)"),
            '@ = {"x": [*@["x"]], "y": @["y"]}',
        ),
    ),
    "set": Kind(
        ("set()", "{1, 2}"),
        ("len(@)", "(2 in @)", "sum(@)"),
        ("@.add(len(@))", "@.discard(1)", "@ = @ | {5}", "@ ^= {2}"),
    ),
    "deque": Kind(
        ("collections.deque([1.0, 0.5], maxlen=3)",),
        ("sum(@)", "(@[0] if @ else 0.5)"),
        ("@.append(len(@) * 0.5)", "@.rotate(1)", "@.appendleft(2)", "@ and @.pop()"),
    ),
    "object": Kind(
        ("%(0)", "%(2)"),
        ("@.n", "@.rate", "len(@.items)", "@.total()", 'getattr(@, "n")'),
        (
            *("@.n += 1", "@.items.append(@.n)", "@ = %(@.n + 1)", "@.step()", "@ = copy.copy(@)"),
            *("@.items = @.items[-2:]", "@ = @.step()", 'setattr(@, "rate", @.rate * 0.5)'),
            "@.rate, @.n = @.rate * 0.5, int(@.rate * 4)",
        ),
        False,
    ),
    "tensor": Kind(
        ("None", "None", "torch.zeros(4)"),
        ("(@ is None)",),
        (
            *("@ = h.detach().mean(0)", "@ = None", "@ = @ if @ is None else @ * 0.5"),
            "if @ is None: @ = h.detach().mean(0)",
            "if @ is not None: @ = @ * 0.5 + h.detach().mean(0)",
        ),
        False,
        ("h = h if @ is None else h + 0.1 * @",),
    ),
    "tensors": Kind(
        ("[]", "[]", "[torch.ones(4)]"),
        ("len(@)", "(not @)"),
        (
            *("@.append(h.detach().mean(0))", "@ = @[-2:]", "@.clear()", "@ and @.pop(0)"),
            *("@ = [*@, h.detach().mean(0)][-2:]", "@[-2:] = [h.detach().mean(0)]"),
            *("@ = [one * 0.5 for one in @]", "@.reverse()"),
        ),
        False,
        ("h = h + 0.1 * sum(@)", "h = h + 0.1 * @[-1] if @ else h"),
    ),
    "tensor table": Kind(
        ("{}", "{}", '{"a": torch.ones(4)}'),
        ("len(@)", '("a" in @)'),
        (
            *('@["a"] = h.detach().mean(0)', '@.pop("a", None)', "@.clear()", "@ = dict(@)"),
            *('@.setdefault("b", h.detach().mean(0))', '@ = {**@, "c": h.detach().mean(0)}'),
            "@ = {k: v * 0.5 for k, v in @.items()}",
        ),
        False,
        ("h = h + 0.1 * sum(@.values())", 'h = h + 0.1 * @.get("a", 0.5)'),
    ),
    "made late": Kind(
        ("None", "None", "%(1)"),
        ("(0.0 if @ is None else @.n)", "(@ is None)", "(@.total() if @ else 0.5)"),
        (
            *("if @ is None: @ = %(1)", "@ = %(2) if @ is None else @.step()", "@ = @ or %(0)"),
            *("if @ is not None and @.n > 2: @ = None", "if @ is not None: @.n += 1"),
            "if @: @.items.append(1)",
        ),
        False,
    ),
}
