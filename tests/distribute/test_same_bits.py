"""Scripts' own loops on workers that are threads give the bits of the same loops in one process."""

from __future__ import annotations

import kinds_of_loops
import loops
import pytest
import several_networks
from loop_helpers import Loop, assert_same_bits
from recovery_helpers import threads_as_workers

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


@pytest.mark.parametrize("num_workers", [2, 3, 5])
@pytest.mark.parametrize(
    "loop", [*loops.LOOPS, *several_networks.LOOPS], ids=lambda loop: loop.__name__
)
def test_a_loop_has_the_bits_of_one_process(loop: Loop, num_workers: int) -> None:
    assert_same_bits(loop, num_workers)


@pytest.mark.parametrize("loop", kinds_of_loops.LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_that_does_more_has_them_too(loop: Loop) -> None:
    assert_same_bits(loop, 3)
