"""Python's and NumPy's generators: told when they were drawn from, put back bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from graphsplit.errors import ConfigurationError
from graphsplit.job.process_generators import (
    NOTHING_DRAWN,
    GeneratorWatch,
    ProcessStates,
    is_state,
)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    yield
    random.setstate(python)
    np.random.set_state(numpy)


PYTHON: list[Callable[[], object]] = [random.random, lambda: random.gauss(0, 1)]
NUMPY: list[Callable[[], object]] = [np.random.random, np.random.randn]


@pytest.mark.parametrize("draw", PYTHON + NUMPY)
def test_every_draw_is_noticed_and_nothing_else(draw: Callable[[], object]) -> None:
    watch = GeneratorWatch()
    assert all(map(is_state, watch.look()))
    for _ in range(3):  # every other Gaussian was kept, and moves nothing but a flag
        assert watch.look() == NOTHING_DRAWN
        draw()
        told = watch.look()
        assert [bool(state) for state in told] == [draw in PYTHON, draw in NUMPY]


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_as_many_draws_as_there_are_words_are_noticed(draw: Callable[[], object]) -> None:
    watch = GeneratorWatch()
    watch.look()
    for _ in range(312):  # of two words each: the position is the same again
        draw()
    assert any(watch.look())


def test_a_gaussian_that_is_put_back_is_noticed() -> None:
    watch = GeneratorWatch()
    np.random.seed(0)
    np.random.randn()
    watch.look()
    kept = np.random.get_state()
    np.random.randn()
    assert watch.look().numpy
    np.random.set_state(kept)  # the memory of the generator is the same all the time
    assert watch.look().numpy
    np.random.randn()
    assert watch.look().numpy


@pytest.mark.parametrize("draw", PYTHON + NUMPY)
@pytest.mark.parametrize("num_before", [0, 1, 400])
def test_what_was_told_gives_the_same_numbers(draw: Callable[[], object], num_before: int) -> None:
    for _ in range(num_before):
        draw()
    states = ProcessStates.now()
    expected = [draw() for _ in range(5)]
    random.seed(1)
    np.random.seed(1)
    states.put()
    assert [draw() for _ in range(5)] == expected


def test_another_generator_in_numpys_place_is_refused_once_it_is_drawn_from() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        watch = GeneratorWatch()
        watch.look()
        assert watch.look() == NOTHING_DRAWN and ProcessStates.now().numpy == b""
        np.random.random()
        with pytest.raises(ConfigurationError, match=r"draws from a PCG64; expected MT19937"):
            watch.look()
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
