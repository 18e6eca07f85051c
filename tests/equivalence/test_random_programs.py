"""Random programs, cut in two: the plain loop's bits, and all Python state as it leaves that.

The programs are drawn by random_programs.py. A few run with the other tests, hundreds with
`make fuzz-changes`, or::

    python -m pytest -m fuzz tests/equivalence/test_random_programs.py -k "[17]"
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from random_programs import Program
from recovery_helpers import threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import GraphsplitError
from graphsplit.planning import planner
from graphsplit.planning.passes import capture_graph

assert threads_as_workers
pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads")
SHORT = (31, 40, 78)
NUM_SEEDS = 300
NAME = "random_program"  # of all their modules: workers agree on the files of places


def _seeds() -> list[Any]:
    others = (seed for seed in range(NUM_SEEDS) if seed not in SHORT)
    return [*SHORT, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in others)]


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("seed", _seeds())
def test_a_random_program_is_as_alone(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each worker captures for itself: it has globals and classes of its own.
    monkeypatch.setattr(planner, "capture_graph", capture_graph)
    monkeypatch.delenv("GS_RECAPTURE_EVERY")
    program = Program(seed)
    path = tmp_path / f"{NAME}.py"
    path.write_text(program.text())
    code = compile(path.read_text(), str(path), "exec")

    def run(make: Callable[..., Any], place: Callable[[Any], None]) -> list[Any]:
        module = ModuleType(NAME)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, NAME, module)
        exec(code, vars(module))
        return [copy.deepcopy(one) for one in module.main(make, place, _look)]

    try:
        run(_plain, lambda net: None)
    except (TypeError, AttributeError, IndexError) as error:
        pytest.skip(f"no program: {error}")
    try:
        place = partial(_place, keeps_whole=program.keeps_whole)
        assert_as_alone(lambda: run(_plain, lambda net: None), lambda: run(_cut, place))
    except GraphsplitError as error:  # by name; all else is wrong
        print(f"refused: {error}")
    except BaseException:
        print(path.read_text())
        raise


def _place(net: Any, *, keeps_whole: bool) -> None:
    if keeps_whole:
        gs.opaque(net.part)
    net.a.place("MS_WORKER", 0)
    net.b.place("MS_WORKER", 1)
    net.part.place("MS_WORKER", 1)


def _cut(net: Any, loss_fn: Any = None, optimizer: Any = None, microbatches: int = 1) -> Any:
    if optimizer is None:
        return gs.distribute(net)
    return gs.Model(net, loss_fn, optimizer, microbatches=microbatches)


def _plain(net: Any, loss_fn: Any = None, optimizer: Any = None, microbatches: int = 1) -> Any:
    return (
        net if optimizer is None else PlainModel(net, loss_fn, optimizer, microbatches=microbatches)
    )


def _look(roots: Iterable[Any]) -> list[str]:
    """All that the script could see of some objects: values, and what is one and the same."""
    numbers: dict[int, int] = {}
    held: list[Any] = []  # so that no other takes its place in memory

    def shown(value: Any) -> str:
        if isinstance(value, (bool, int, str, float, type(None))):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return "a tensor"
        if isinstance(value, tuple):
            return f"({', '.join(map(shown, value))})"
        if id(value) in numbers:
            return f"#{numbers[id(value)]}"
        held.append(value)
        numbers[id(value)] = len(numbers)
        inside: Iterable[Any] = value
        if isinstance(value, set):
            inside = sorted(value)
        elif isinstance(value, dict):
            inside = [one for pair in value.items() for one in pair]
        elif not isinstance(value, (list, deque)):
            names = ("n", "rate", "items", "before", "writes")
            inside = [getattr(value, name) for name in names if hasattr(value, name)]
        return f"#{numbers[id(value)]} {type(value).__name__}({', '.join(map(shown, inside))})"

    found = []
    for root in roots:
        attributes = root if isinstance(root, dict) else vars(root)
        if isinstance(root, nn.Module):  # a tensor there may have become a buffer
            attributes = {**attributes, **attributes["_buffers"]}
        cells = inspect.getclosurevars(root).nonlocals if inspect.isfunction(root) else {}
        for name, value in sorted(_own({**attributes, **cells})):
            found.append(f"{name} = {shown(value)}")
        if isinstance(root, nn.Module):
            found += [str(module.training) for module in root.modules()]
    return found


def _own(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that the programs have put there."""
    for name, value in attributes.items():
        if name == "st" or (name[0] == "s" and name[1:].isdigit()):
            yield name, value
