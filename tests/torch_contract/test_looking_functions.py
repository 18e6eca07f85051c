"""Functions of torch whose code is replaced: whoever holds one comes to what stands there."""

import copy
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from graphsplit.torch_ext.contract import CONTRACT
from graphsplit.torch_ext.replaced import FILLING, LOOKING, call_instead, deep_copy

FUNCTIONS = {f"{f.__module__}.{f.__qualname__}": f for f in (*LOOKING, *FILLING)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_by_any_name_comes_to_what_stands_in_the_place(name: str) -> None:
    function: Any = FUNCTIONS[name]
    assert type(function) is FunctionType
    assert function.__code__.co_freevars == ()  # code with a closure fits into no other function
    held: Any = FunctionType(function.__code__, function.__globals__, function.__name__)

    call_instead(held, lambda original, args, kwargs: (original.__name__, args, kwargs))

    assert held(1, option=2) == (function.__name__, (1,), {"option": 2})


def test_each_is_in_the_contract() -> None:
    paths = tuple(entry.path for entry in CONTRACT)
    missing = {
        f.__qualname__
        for f in FUNCTIONS.values()
        if not any(p.endswith(f".{f.__qualname__}") for p in paths)
    }
    assert missing == set()


def test_a_copy_of_a_module_comes_to_what_stands_in_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = vars(nn.Module).get("__deepcopy__")  # torch has none of its own
    assert present is None or present.__module__.startswith("graphsplit.")
    monkeypatch.setattr(nn.Module, "__deepcopy__", lambda module, memo: "copied", raising=False)
    assert copy.deepcopy(nn.Linear(1, 1)) == "copied"


def test_a_copy_by_itself_is_that_of_torch() -> None:
    layer, memo = nn.Linear(2, 2), dict[int, Any]()
    made = deep_copy(layer, memo)
    assert made is not layer
    assert made.weight is not layer.weight
    assert torch.equal(made.weight, layer.weight)
