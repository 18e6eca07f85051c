"""What forward reads from outside and the graph would not read again is refused by name."""

from __future__ import annotations

import contextlib
import cProfile
import datetime
import functools
import hashlib
import io
import itertools
import logging
import os
import random
import resource
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from pass_helpers import captured
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import graphsplit as gs
from graphsplit.capture.python.iterators import _state_of
from graphsplit.errors import CaptureError

X = torch.zeros(2, 4)
OWN, CYCLE, DEFAULT = random.Random(1), itertools.cycle([1.0, 2.0]), itertools.count(2.0)
NUMPY, OLD_NUMPY = np.random.default_rng(0), np.random.RandomState(0)
Run = Callable[[Any, torch.Tensor], torch.Tensor]


class Held:
    def __init__(self) -> None:
        self.items = [itertools.count(4.0), itertools.count(5.0)]


HELD, NEXT = Held(), functools.partial(next, itertools.count(3.0))


def numbers() -> Iterator[float]:
    yield from itertools.count(1.0)


def first_of(x: torch.Tensor, numbers: Iterator[float]) -> torch.Tensor:
    return x * next(numbers)


class Net(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.fc, self.run = nn.Linear(4, 4), run
        self.kept = {"own": random.Random(2), "numpy": np.random.default_rng(1)}
        self.count, self.fresh, self.begun = itertools.count(1.0), numbers(), numbers()
        self.further = itertools.count(1.0).__next__
        next(self.begun)
        self.draw, self.rand = np.random.default_rng().random, np.random.RandomState(0).rand
        self.uniform, self.generator = random.Random().uniform, torch.Generator()
        self.seeded_with = self.generator.initial_seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.fc(x)).sum()


DRAWS: dict[str, Run] = {
    "a random.Random": lambda net, x: x * OWN.random(),
    "one of the network's": lambda net, x: x * net.kept["own"].uniform(1, 2),
    "the module random": lambda net, x: x * random.randint(1, 5),
    "the system": lambda net, x: x * random.SystemRandom().random(),
    "secrets": lambda net, x: x * secrets.randbelow(5),
    "a uuid": lambda net, x: x * float(uuid.uuid4().int),
    "numpy": lambda net, x: x * float(NUMPY.normal()),
    "numpy in a dictionary": lambda net, x: x * float(net.kept["numpy"].random()),
    "numpy by its method": lambda net, x: x * float(net.draw()),
    "random.Random by its method": lambda net, x: x * net.uniform(1, 2),
    "numpy's old generator by its method": lambda net, x: x * float(net.rand()),
    "a uuid of the time": lambda net, x: x * float(uuid.uuid1().int),
    "getrandom": lambda net, x: x * os.getrandom(1)[0],
    "torch's, a seed": lambda net, x: x * (net.generator.seed() % 5),
    "torch's, the first seed by its method": lambda net, x: x * net.seeded_with(),
    "torch's, set": lambda net, x: x if net.generator.manual_seed(1) else x * 2,
    "torch's default": lambda net, x: x * (torch.initial_seed() % 5),
    "torch's state": lambda net, x: x * torch.get_rng_state()[0],
    "numpy's old generator": lambda net, x: x * float(OLD_NUMPY.rand()),
}
READS: dict[str, tuple[Run, str]] = {
    "time": (lambda net, x: x * time.time(), "reads a clock"),
    "a counter": (lambda net, x: x * time.perf_counter(), "reads a clock"),
    "a date": (lambda net, x: x * datetime.datetime.now().second, "reads a clock"),
    "the day": (lambda net, x: x * datetime.date.today().day, "reads a clock"),
    "a zone's": (lambda net, x: x * datetime.datetime.now(datetime.UTC).second, "reads a clock"),
    "of a kind": (lambda net, x: x * time.clock_gettime(time.CLOCK_MONOTONIC), "reads a clock"),
    "in ns": (lambda net, x: x * time.clock_gettime_ns(time.CLOCK_REALTIME), "reads a clock"),
    "the thread's": (lambda net, x: x * time.thread_time_ns(), "reads a clock"),
    "strftime": (lambda net, x: x * float(time.strftime("%S")), "reads a clock"),
    "asctime": (lambda net, x: x * len(time.asctime()), "reads a clock"),
    "times": (lambda net, x: x * os.times().elapsed, "reads a clock"),
    "the load": (lambda net, x: x * os.getloadavg()[0], "reads a clock"),
    "usage": (lambda net, x: x * resource.getrusage(0).ru_utime, "reads a clock"),
    "stat": (lambda net, x: x * os.stat(os.devnull).st_mtime, "asks for files"),
    "exists": (lambda net, x: x if Path("here").exists() else x * 2, "asks for files"),
    "getmtime": (lambda net, x: x * os.path.getmtime(os.devnull), "asks for files"),
    "another process": (lambda net, x: x * len(subprocess.check_output("true")), "starts another"),
    "a shell": (lambda net, x: x * os.system("true"), "starts another"),
    "environ": (lambda net, x: x if "A" in os.environ else x * 2, "reads the environment"),
    "getenv": (lambda net, x: x * float(os.getenv("A", "2")), "reads the environment"),
    "open": (lambda net, x: x * len(Path(os.devnull).read_bytes()), "opens a file"),
}
WAITING: SimpleQueue[int] = SimpleQueue()
for number in range(99):
    WAITING.put(number)
HASH, TEXT = hashlib.sha256(), io.StringIO()
ITEMS: dict[str, Run] = {
    "a counter": lambda net, x: x * next(net.count),
    "a counter by its method": lambda net, x: x * net.further(),
    "a cycle": lambda net, x: x * next(CYCLE),
    "in zip": lambda net, x: x * dict(zip([1], CYCLE, strict=False))[1],
    "a generator": lambda net, x: x * next(net.fresh),
    "a generator that has begun": lambda net, x: x * next(net.begun),
    "a default": lambda net, x, items=DEFAULT: x * next(items),  # type: ignore[misc]
    "what a partial has": lambda net, x: x * NEXT(),
    "of a queue in C": lambda net, x: x * WAITING.get(),
    "put into one": lambda net, x: x if WAITING.put(1) else x * 2,  # type: ignore[func-returns-value]
    "a hash": lambda net, x: x if HASH.update(b"x") else x * 2,  # type: ignore[func-returns-value]
    "a text in memory": lambda net, x: x * TEXT.write("x"),
    "in a list of an object": lambda net, x: x * next(HELD.items[1]),
}
HARMLESS: dict[str, Run] = {
    "the first parameter": lambda net, x: x.to(next(net.parameters()).dtype),
    "of an iterator": lambda net, x: x.to(next(iter(net.fc.parameters())).dtype),
    "a generator made here": lambda net, x: x * next(numbers()),
    "a generator expression": lambda net, x: x * sum(item for item in (1.0, 2.0)),
    "handed on": lambda net, x: first_of(x, iter([3.0])),
    "a seeded generator made here": lambda net, x: x * random.Random(0).random(),
    "numpy made here": lambda net, x: x * float(np.random.default_rng(0).random()),
    "torch's state in a checkpoint": lambda net, x: checkpoint(
        torch.sigmoid, x, use_reentrant=False
    ),
    "a log": lambda net, x: x if logging.getLogger("none").debug("x") is None else x * 2,
}


def refusal(run: Run) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(Net(run), X)
    assert "test_outside_reads.py:" in str(caught.value)
    assert "Fix: " in str(caught.value) and "gs.opaque" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("run", DRAWS.values(), ids=DRAWS.keys())
def test_numbers_drawn_outside_of_torch_are_refused(run: Run) -> None:
    assert "draw with torch from the default generator" in refusal(run)


@pytest.mark.parametrize(("run", "what"), READS.values(), ids=READS.keys())
def test_reads_from_outside_are_refused(run: Run, what: str) -> None:
    assert what in refusal(run)


@pytest.mark.parametrize("run", ITEMS.values(), ids=ITEMS.keys())
def test_items_of_iterators_that_were_there_before_are_refused(run: Run) -> None:
    assert "that was there before" in refusal(run)


@pytest.mark.parametrize("run", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_is_the_same_at_every_step_is_captured(run: Run) -> None:
    captured(Net(run), X)


def test_a_generator_goes_on_after_its_refusal() -> None:
    net = Net(lambda net, x: x * next(net.begun))
    with pytest.raises(CaptureError):
        captured(net, X)
    assert next(net.begun) > 1


def test_a_refusal_that_the_script_catches_counts() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return x * OWN.random()
        except Exception:
            return x * 2

    assert "random.Random" in refusal(run)


def test_what_is_kept_whole_may_read_what_it_likes() -> None:
    def drawn(x: torch.Tensor) -> torch.Tensor:
        return x * OWN.random() * float(NUMPY.random()) * time.time()

    whole = gs.opaque(drawn)
    captured(Net(lambda net, x: whole(x)), X)


@pytest.mark.parametrize("in_c", [True, False])
def test_a_profiler_of_the_scripts_goes_on(in_c: bool) -> None:
    def profile(frame: Any, event: str, called: Any) -> None:
        """Sees everything, and does nothing."""

    profiler = cProfile.Profile()
    if in_c:
        profiler.enable()
    else:
        sys.setprofile(profile)
    try:
        before = sys.getprofile()
        captured(Net(lambda net, x: x), X)
        assert sys.getprofile() is before
    finally:
        profiler.disable()
        sys.setprofile(None)


class _OneKernel(nn.Module):
    def __init__(self, switch: Callable[[], Any]) -> None:
        super().__init__()
        self.switch = switch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.switch():
            return nn.functional.scaled_dot_product_attention(x, x, x).sum()


def test_switches_of_kernels_in_forward_are_refused() -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(CaptureError, match=r"switches how torch computes[\s\S]*in forward"):
        captured(_OneKernel(lambda: sdpa_kernel(SDPBackend.MATH)), x)
    with sdpa_kernel(SDPBackend.MATH):  # around the step
        captured(_OneKernel(contextlib.nullcontext), x)


def test_switches_around_a_layer_of_torch_are_refused() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.backends.cudnn.flags(enabled=False, deterministic=True):
                return self.layer(x).sum()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"switches how torch computes[\s\S]*in forward"):
        captured(Switched(), torch.zeros(1, 4))


def test_states_of_numpy_are_compared_whole_whatever_is_printed() -> None:
    one, other = np.random.RandomState(0), np.random.RandomState(0)
    state: Any = other.get_state()
    words = state[1].copy()
    words[300] += 1
    with np.printoptions(threshold=10):
        assert _state_of(one) == _state_of(other)
        other.set_state((state[0], words, *state[2:]))
        assert repr(one.get_state()) == repr(other.get_state())
        assert _state_of(one) != _state_of(other)
