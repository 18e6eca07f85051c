"""How the soak judges whether something grows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from soak_samples import Life, Sample, children, look, slope

sys.path.pop(0)


def life(*, seconds: int, rss: float = 0.0, threads: float = 0.0, files: float = 0.0) -> Life:
    """A process that grows by so much in all, and is busy for a moment now and then."""
    made = Life("worker 1", 1, 0.0)
    for at in range(0, seconds, 5):
        part, busy = at / seconds, 6 * (at % 50 == 0)
        made.samples.append(
            Sample(at, 300 + rss * part, round(9 + threads * part) + busy, 40 + round(files * part))
        )
    return made


def test_outliers_do_not_move_the_slope():
    points = [(float(x), 2.0 * x) for x in range(30)]
    points[7] = (7.0, 900.0)
    assert slope(points) == pytest.approx(2.0)
    assert slope(points[:1]) == 0.0


def test_what_does_not_grow_is_flat_though_it_is_busy_at_times():
    found = life(seconds=900)
    assert found.is_flat
    assert found.growth() == {"rss_mib": 0.0, "threads": 0.0, "descriptors": 0.0}


@pytest.mark.parametrize("grown", [{"rss": 30.0}, {"threads": 4.0}, {"files": 90.0}])
def test_what_grows_is_not_flat(grown: dict[str, float]):
    assert not life(seconds=900, **grown).is_flat


def test_a_short_life_is_not_judged():
    assert life(seconds=150, rss=100.0).judged() == []
    assert len(life(seconds=900).judged()) == (900 - 60) // 5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_looked_at():
    found = look(os.getpid(), 3.0)
    assert found is not None
    assert found.at_s == 3.0
    assert found.rss_mib > 1
    assert found.threads >= 1
    assert found.descriptors >= 3
    assert dict(children(os.getpid())) == {}
