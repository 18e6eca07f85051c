"""A bounded part of the fuzzing of frames; ``make fuzz`` runs the whole."""

from __future__ import annotations

import pytest
from frame_fuzzer import Target


@pytest.mark.parametrize("seed", [1, 2])
def test_frames_that_nobody_should_send_are_refused_or_harmless(seed: int) -> None:
    target = Target(seed)
    target.run(20_000, report=lambda line: None)
    tally = target.tally
    assert tally.frames == tally.accepted + tally.refused >= 20_000
    assert tally.refused > tally.accepted > 1_000
    assert tally.kinds["nothing"] > 500
    assert {"noise", "of_another_generation", "cut_or_extend"}.isdisjoint(tally.kinds)
