"""Nested values become JSON and named tensors, and come back bit for bit."""

from __future__ import annotations

import math
import random
import re
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Flag, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from simulated.compare import difference

from graphsplit.checkpoint.generators import process_generators, set_process_generators
from graphsplit.encoding.values import (
    Encoder,
    Fixed,
    decode,
    encode,
    from_text,
    tensor_names,
    to_text,
)
from graphsplit.errors import CheckpointError, StateError


class Color(IntEnum):
    RED = 1


class Style(Flag):
    BOLD = 1
    WIDE = 2


class Names(set[str]):
    pass


class Own(tzinfo):
    pass


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = to_text(encode(value, tensors, path="extra"))
    node = from_text(f'{{"value":{text}}}', what="a test")["value"]
    assert sorted(tensor_names(node)) == sorted(tensors)
    return decode(node, lambda name: tensors[name].contiguous())


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
)
KEYS = st.one_of(st.text(max_size=5), st.integers(-5, 5), st.just("$tensor"), st.just("a/b"))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_any_nested_value_comes_back(value: Any) -> None:
    # NaN equals nothing, so the texts are compared; they tell types and signs of zeros apart.
    assert repr(there_and_back(value)) == repr(value)


@settings(max_examples=100, deadline=None)
@given(st.lists(VALUES, min_size=2, max_size=4))
def test_an_encoder_that_has_seen_other_values_says_what_encode_says(values: list[Any]) -> None:
    encoder = Encoder()
    for value in [*values, *values, values[-1]]:
        assert repr(encoder(value, {}, path="x")) == repr(encode(value, {}, path="x"))


def test_an_encoder_notices_what_was_changed_in_place_and_types_that_compare_equal() -> None:
    encoder = Encoder()
    value: list[Any] = [1, [2]]
    assert encoder(value, {}, path="x") == [1, [2]]
    value[1].append(3)
    assert encoder(value, {}, path="x") == [1, [2, 3]]
    for other in (1, True, 1.0, [1], (1,), {"1": 1}, {1: 1}):
        assert repr(encoder(other, {}, path="x")) == repr(encode(other, {}, path="x"))


def test_an_encoder_tells_values_apart_that_have_the_same_bytes() -> None:
    encoder = Encoder()
    for value in (np.float64(0.0), np.int64(0), np.zeros(1), bytearray(8), 0.0, bytes(8)):
        assert encoder([value], {}, path="x") == encode([value], {}, path="x")


def test_an_encoder_looks_at_tensors_anew() -> None:
    encoder = Encoder()
    for size in (1, 2):
        tensors: dict[str, torch.Tensor] = {}
        assert encoder([torch.ones(size)], tensors, path="x") == [{"$tensor": "x/0"}]
        assert tensors["x/0"].shape == (size,)


def test_a_fixed_mapping_is_encoded_as_any_other_even_where_its_names_are_taken() -> None:
    plain = {"a": torch.ones(2), "b": [1, (2.5, None)]}
    fixed = Fixed(plain)
    for nested in (lambda value: value, lambda value: {"x": value}, lambda value: [value, value]):
        found: list[tuple[Any, list[str]]] = []
        for value in (plain, fixed, fixed):
            tensors = {"p/a": torch.zeros(1)}
            found.append((encode(nested(value), tensors, path="p"), list(tensors)))
        assert found[0] == found[1] == found[2]


def test_the_generators_of_the_process_are_the_same_until_somebody_draws() -> None:
    before = random.getstate(), np.random.get_state()
    try:
        known = process_generators()
        draws: list[Callable[[], object]] = [
            random.random,
            lambda: random.gauss(0, 1),
            lambda: random.gauss(0, 1),  # takes what the one before has left
            np.random.rand,
            np.random.standard_normal,
            np.random.standard_normal,
        ]
        for draw in draws:
            assert process_generators() is known
            draw()
            assert process_generators() is not known
            known = process_generators()
        expected = random.random(), np.random.rand()
        set_process_generators(known)
        assert (random.random(), np.random.rand()) == expected
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def test_tensors_come_back_with_every_bit_and_their_strides() -> None:
    value = {
        "plain": torch.randn(3, 4),
        "turned": torch.randn(4, 3).t(),
        "image": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "part": torch.randn(6)[::2],
        "spread": torch.randn(1, 3).expand(4, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(float("nan")),
        "half": [torch.randn(3).bfloat16(), (torch.tensor([True, False]),)],
    }
    found = there_and_back(value)
    assert difference(value, found) is None
    assert found["turned"].stride() == value["turned"].stride()
    assert found["image"].stride() == value["image"].stride()


def test_tensors_whose_paths_look_alike_keep_apart() -> None:
    value = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.ones(2), "1": torch.ones(3)}
    assert difference(value, there_and_back(value)) is None


def test_counters_stay_counters_and_ordered_dictionaries_keep_their_order() -> None:
    found = there_and_back({"milestones": Counter({30: 1, 80: 2}), "o": OrderedDict(b=1, a=2)})
    assert isinstance(found["milestones"], Counter)
    assert isinstance(found["o"], OrderedDict)
    assert sorted(found["milestones"].elements()) == [30, 80, 80]
    assert list(found["o"]) == ["b", "a"]


def test_plain_values_that_json_has_no_word_for_come_back() -> None:
    values = [
        {1, "a"}, frozenset({2.5}), b"\0\xff", complex(float("inf"), -0.0), torch.float16,
        torch.device("cpu"), SimpleNamespace(a=(1,), b=None), Color.RED, {Color.RED: {Color.RED}},
        Style.WIDE, Style.BOLD | Style.WIDE, Style(0), bytearray(b"\0\xff"),
        deque([1, 2.5], maxlen=3), deque([(1,)]),
        array("d", [0.1, -0.0]), array("b"),
        range(1, 9, 2), slice(None, 3), torch.Size([2, 3]), Decimal("0.10"), Fraction(-1, 3),
        date(2026, 11, 30), time(1, 2, 3, 4, fold=1), datetime(2026, 11, 30, 1, fold=1),
        timedelta(-1, 2, 3), UUID(int=1 << 90), timezone.utc, timezone(timedelta(hours=-2), "X"),
        ZoneInfo("Asia/Tokyo"), datetime(2026, 11, 30, tzinfo=timezone(timedelta(hours=1))),
        time(1, tzinfo=timezone.utc), datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo")),
        re.compile("a+"), re.compile(b"a", re.I | re.S), PurePosixPath("/a/b"), Path("a"),
        PureWindowsPath("c:/a"), np.dtype("f4"), np.dtype([("a", "<i4"), ("b", "f8", (2,))]),
        np.dtype("<U3"), torch.channels_last, torch.sparse_coo, torch.per_tensor_affine,
    ]  # fmt: skip
    assert repr(there_and_back(values)) == repr(values)
    assert there_and_back(Names("a")) == {"a"}


@pytest.mark.parametrize(
    "value",
    [
        *(np.float64(-0.0), np.float32(0.1), np.float16("nan"), np.int8(-3), np.uint64(2**64 - 1)),
        *(np.bool_(True), np.complex64(1 - 0j), np.datetime64("2026-11-27", "D"), np.longdouble(1)),
        *(np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.int16), np.array(2.5, ">f4")),
        *(np.str_("ab"), np.bytes_(b"ab"), np.array(["ab", "c"]), np.arange(6.0).reshape(2, 3).T),
        np.array([(1, 2.5)], [("a", "i4"), ("b", "f4")]),
    ],
)
def test_numbers_of_numpy_come_back_with_their_type_and_bits(value: Any) -> None:
    found = there_and_back(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert found.strides == value.strides
    assert found.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"scheduler": {"fn": math.sqrt}}, r"extra/scheduler/fn is a builtins\.builtin_function"),
        ({"seen": [1, {math.sin}]}, r"extra/seen/1/0 is a builtins\.builtin_function"),
        (datetime(2026, 11, 30, tzinfo=Own()), r"extra is a datetime\.datetime"),
        ({"w": torch.ones(2).to_sparse()}, r"extra/w is a torch\.sparse_coo tensor"),
        (np.array([None]), r"extra is a numpy\.ndarray"),
        (np.zeros((2, 3))[:, 1:], r"extra is a numpy\.ndarray"),
        (np.dtype("q"), r"extra is a numpy\.dtypes\.LongLong"),
        (np.dtype("f4", metadata={"a": 1}), r"extra is a numpy\.dtypes\.Float32"),
        (np.longlong(3), r"extra is a numpy\.longlong"),
    ],
)
def test_what_cannot_be_written_is_named(value: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        encode(value, {}, path="extra")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(StateError, match="extra cannot be saved: it is nested too deeply"):
        encode(value, {}, path="extra")


@pytest.mark.parametrize(
    "node",
    [
        {"$pickle": "gASVBQ"},
        {"$tensor": 3},
        {"$float": "1e3"},
        {"$map": [[1, 2, 3]]},
        {"$map": [[{"$map": []}, 2]]},
        {"$tuple": "ab"},
        {"$set": [[1]]},
        {"$bytes": "0x"},
        {"$complex": [1]},
        {"$dtype": "load"},
        {"$device": "the moon"},
        {"$namespace": {"$map": [[1, 2]]}},
        {"$enum": ["os:system", "true"]},
        {"$enum": [f"{__name__}:Style", 1 << 40]},
        {"$enum": [f"{__name__}:Color", 1]},
        {"$bytearray": 1 << 40},
        {"$fraction": ["1e999999999"]},
        {"$fraction": [1, 0]},
        {"$decimal": "one"},
        {"$decimal": 0.5},
        {"$range": [1 << 40, "2"]},
        {"$size": ["a"]},
        {"$date": [2026, 13, 1]},
        {"$time": [1, 2, 3]},
        {"$timedelta": [1 << 60]},
        {"$uuid": "0"},
        {"$deque": [[1]]},
        {"$array": ["d", 1 << 40]},
        {"$array": ["x", {"$bytes": ""}]},
        {"$numpy": ["|O8", "0000000000000000"]},
        {"$numpy": ["<U3", ""]},
        {"$numpy": ["<f8", "00"]},
        {"$ndarray": ["<f8", [1 << 40], {"$tensor": "t"}]},
        {"$ndarray": ["|O8", [3], {"$tensor": "t"}]},
        {"$npdtype": [["a", "|O8"]]},
        {"$layout": "load"},
        {"$zone": "../../etc/passwd"},
        {"$pattern": ["(", 32]},
        {"$PosixPath": 1},
        {"$tensor": "t", "strides": [1]},
        {"$tensor": "t", "strides": [1, 1 << 40]},
        {"$tensor": "t", "strides": [-3, 1]},
        {"$tensor": "t", "strides": ["3", 1]},
    ],
)
def test_json_that_nobody_writes_is_refused(node: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(node, lambda name: torch.ones(2, 3))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": NaN}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_a_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="the manifest is"):
        from_text(text, what="the manifest")


LR = torch.optim.lr_scheduler
SCHEDULERS = {
    "step": lambda o: LR.StepLR(o, 2, 0.5),
    "multi step": lambda o: LR.MultiStepLR(o, [2, 3], 0.5),
    "exponential": lambda o: LR.ExponentialLR(o, 0.9),
    "cosine": lambda o: LR.CosineAnnealingLR(o, 5),
    "cosine with restarts": lambda o: LR.CosineAnnealingWarmRestarts(o, 3, 2),
    "one cycle": lambda o: LR.OneCycleLR(o, 0.3, total_steps=20),
    "cyclic": lambda o: LR.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "constant": lambda o: LR.ConstantLR(o, 0.5, 3),
    "linear": lambda o: LR.LinearLR(o, 0.5, total_iters=3),
    "polynomial": lambda o: LR.PolynomialLR(o, 5),
    "lambda": lambda o: LR.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: LR.MultiplicativeLR(o, lambda epoch: 0.9),
    "sequential": lambda o: LR.SequentialLR(
        o, [LR.ConstantLR(o, 0.1, 2), LR.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chained": lambda o: LR.ChainedScheduler([LR.ConstantLR(o, 0.1, 2), LR.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_after_its_state_was_written(name: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def steps(optimizer: torch.optim.Optimizer, scheduler: Any, number: int) -> list[float]:
        seen = []
        for _ in range(number):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    optimizer, scheduler = made()
    steps(optimizer, scheduler, 2)
    resumed_optimizer, resumed = made()
    resumed_optimizer.load_state_dict(there_and_back(optimizer.state_dict()))
    resumed.load_state_dict(there_and_back(scheduler.state_dict()))
    resumed_optimizer._step_count = 1  # or PyTorch warns that no step was done
    assert steps(resumed_optimizer, resumed, 5) == steps(optimizer, scheduler, 5)


def test_reduce_on_plateau_goes_on_with_an_infinite_best_value() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    state = LR.ReduceLROnPlateau(optimizer).state_dict()
    assert there_and_back(state)["best"] == math.inf
    assert repr(there_and_back(state)) == repr(state)
