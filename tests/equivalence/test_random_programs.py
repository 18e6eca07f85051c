"""Random programs, cut in two: the plain loop's bits, and all Python state as it leaves that.

The programs are drawn by random_programs.py. A few run with the other tests, hundreds with
`make fuzz-changes`, or::

    python -m pytest -m fuzz tests/equivalence/test_random_programs.py -k "[17]"
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from random_programs import Program
from recovery_helpers import Generators, ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import GraphsplitError
from graphsplit.planning import planner
from graphsplit.planning.passes import capture_graph
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = [
    pytest.mark.filterwarnings("ignore:network or loss reads"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]
SHORT, OTHERWISE, LOSSES = (31, 40, 78), (2, 9), (51, 82)
NUM_SEEDS = 300
RANKS = {"a": 0, "b": 1, "part": 1}
OPTIONS: tuple[tuple[float, str, tuple[Any, ...]], ...] = (
    (0.5, "schedule", ("gpipe", "zero_bubble", "interleaved_1f1b", "auto")),
    (0.35, "recompute", (True, ["part"], ["a", "b"])),
    (0.3, "unplaced", ("worker0",)),
    (0.3, "dynamic_dims", ({0: 8},)),
    (0.2, "keep_outputs", (True,)),
)
Run = Callable[[Callable[..., Any], Callable[[Any], None]], list[Any]]
NAME = "random_program"  # of all their modules: workers agree on the files of places


def _seeds(short: tuple[int, ...]) -> list[Any]:
    others = (seed for seed in range(NUM_SEEDS) if seed not in short)
    return [*short, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in others)]


@pytest.fixture
def prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads_as_workers: None
) -> Callable[[Program], Run]:
    """Gives the function that runs a program anew, with globals and classes of its own."""
    # Each worker captures for itself.
    monkeypatch.setattr(planner, "capture_graph", capture_graph)
    monkeypatch.delenv("GS_RECAPTURE_EVERY")
    path = tmp_path / f"{NAME}.py"

    def prepare(program: Program) -> Run:
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
        return run

    return prepare


@contextmanager
def _refused_by_name(program: Program) -> Iterator[None]:
    """Let a program be refused; all else than that is wrong, and shows it."""
    try:
        yield
    except GraphsplitError as error:
        print(f"refused: {error}")
    except BaseException:
        print(program.text())
        raise


@pytest.mark.parametrize("seed", _seeds(SHORT))
def test_a_random_program_is_as_alone(seed: int, prepared: Callable[[Program], Run]) -> None:
    program = Program(seed)
    run = prepared(program)
    place = partial(_place, RANKS, keeps_whole=program.keeps_whole)
    with _refused_by_name(program):
        assert_as_alone(lambda: run(_plain, lambda net: None), lambda: run(_cut, place))


@pytest.mark.parametrize("seed", _seeds(OTHERWISE))
def test_a_random_program_is_as_alone_however_it_is_cut(
    seed: int, prepared: Callable[[Program], Run]
) -> None:
    """On two or three workers, with replicas, and with options that change no bits."""
    program, draw = Program(seed), random.Random(7 * seed + 1)
    run = prepared(program)
    workers = draw.choice((2, 3, 3))
    may_replicate = program.microbatches == 4 and not program.has_own_loop and draw.random() < 0.5
    ranks: dict[str, Any] = {name: draw.randrange(workers) for name in RANKS}
    for name in ranks:
        if may_replicate and draw.random() < 0.6:
            ranks[name] = sorted(draw.sample(range(workers), 2))
    if draw.random() < 0.3:
        del ranks[draw.choice(list(RANKS))]
    options: dict[str, Any] = {}
    for chance, name, values in OPTIONS:
        if draw.random() < chance:
            options[name] = draw.choice(values)
    place = partial(_place, ranks, keeps_whole=program.keeps_whole)
    print(f"{workers} workers, {ranks}, {options}")
    with _refused_by_name(program):
        assert_as_alone(
            lambda: run(_plain, lambda net: None),
            lambda: run(partial(_cut, **options), place),
            workers,
        )


@pytest.mark.parametrize("seed", _seeds(LOSSES))
def test_a_random_program_goes_on_as_alone_without_a_worker(
    seed: int, prepared: Callable[[Program], Run]
) -> None:
    """Its worker is killed anywhere, and comes back.

    What it has of its own, outside of network and loss, is as the script has made it anew; and
    Python state is compared behind the last step there.
    """
    program, draw = Program(seed), random.Random(seed)
    program.keep_to_the_network()
    if program.has_own_loop:
        pytest.skip("recovery asks more of own loops: tests/recovery/test_loops.py")
    run, before = prepared(program), Generators.now()
    expected = run(_plain, lambda net: None)
    last = max(at for at, (kind, _) in enumerate(expected) if kind == "state")
    place = partial(_place, RANKS, keeps_whole=program.keeps_whole)

    def cluster(kills: dict[int, list[int]]) -> ThreadCluster:
        before.put_back()
        settings = SnapshotSettings(every=draw.choice((1, 2, 3)))
        return ThreadCluster(lambda rank: run(_cut, place), 2, settings, kills=kills)

    def kept(rank: int, found: list[Any], killed: int) -> list[Any]:
        if rank != killed:
            return found
        return [
            (kind, [line for line in value if not line.startswith("s9")] if at == last else value)
            for at, (kind, value) in enumerate(found)
            if kind != "state" or at == last
        ]

    with _refused_by_name(program):
        undisturbed = cluster({})
        undisturbed.run()
        for _ in range(3):
            killed = draw.randrange(2)
            at = draw.randrange(undisturbed.lengths[killed])
            disturbed = cluster({killed: [at]})
            print(f"worker {killed} is killed at {at}")
            for rank, found in enumerate(disturbed.run()):
                differing = difference(kept(rank, expected, killed), kept(rank, found, killed))
                assert differing is None, f"worker {rank}: {differing}"
            assert disturbed.num_killed == 1


def _place(ranks: dict[str, Any], net: Any, *, keeps_whole: bool) -> None:
    if keeps_whole:
        gs.opaque(net.part)
    for name, rank in ranks.items():
        getattr(net, name).place("MS_WORKER", rank)


def _cut(
    net: Any, loss_fn: Any = None, optimizer: Any = None, microbatches: int = 1, **options: Any
) -> Any:
    if optimizer is None:
        return gs.distribute(net)
    return gs.Model(net, loss_fn, optimizer, microbatches=microbatches, **options)


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
