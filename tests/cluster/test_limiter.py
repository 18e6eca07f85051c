"""How many strangers may wait at once: a fixed amount of memory, whoever comes."""

from __future__ import annotations

import pytest

from graphsplit.cluster.scheduler.limiter import AdmissionLimiter
from graphsplit.security.addresses import machine_of


def test_all_workers_may_come_at_once_from_one_machine() -> None:
    limiter = AdmissionLimiter(500, 0.0)
    assert all(limiter.enter("127.0.0.1", 0.0) is None for _ in range(500))


def test_one_address_cannot_take_all_places() -> None:
    limiter = AdmissionLimiter(2, 0.0)
    answers = [limiter.enter("10.0.0.1", 0.0) for _ in range(100)]
    assert answers.count(None) == 10
    assert answers[-1] == "too many connections of 10.0.0.1 wait to register; try again later"
    assert limiter.enter("10.0.0.2", 0.0) is None


def test_all_addresses_together_have_a_bound() -> None:
    limiter = AdmissionLimiter(2, 0.0)
    answers = [limiter.enter(f"10.0.{n // 256}.{n % 256}", 0.0) for n in range(5000)]
    assert answers.count(None) == 20
    assert answers[-1] == "too many connections wait to register; try again later"


def test_a_place_is_free_again_when_a_stranger_goes() -> None:
    limiter = AdmissionLimiter(1, 0.0)
    for step in range(1000):
        assert limiter.enter("10.0.0.1", step) is None
        limiter.leave("10.0.0.1", step, has_failed=False)
    assert not limiter._waiting and not limiter._failures


def test_failures_come_in_a_burst_and_then_at_a_rate() -> None:
    limiter = AdmissionLimiter(1, 0.0)

    def attempts(number: int, now: float) -> int:
        made = 0
        for _ in range(number):
            if limiter.enter("10.0.0.1", now) is None:
                limiter.leave("10.0.0.1", now, has_failed=True)
                made += 1
        return made

    #   now      0    0.1   1.0         100
    #   made    32      0     4  (rate)  32  (all forgotten)
    assert [attempts(100, now) for now in (0.0, 0.1, 1.0, 100.0)] == [32, 0, 4, 32]
    assert limiter.enter("10.0.0.1", 100.1) is not None
    assert limiter.enter("10.0.0.2", 100.1) is None


def test_failures_of_many_addresses_take_a_fixed_amount_of_memory() -> None:
    limiter = AdmissionLimiter(1, 0.0)
    for n in range(20_000):
        address = f"10.{n // 65536}.{n // 256 % 256}.{n % 256}"
        assert limiter.enter(address, 0.0) is None
        limiter.leave(address, 0.0, has_failed=True)
    assert (len(limiter._waiting), len(limiter._failures)) == (0, 1024)


def test_the_log_says_how_many_lines_it_left_out() -> None:
    limiter = AdmissionLimiter(1, 0.0)
    lines = [limiter.lines.logged("refused", 0.0) for _ in range(1000)]
    assert lines[:20] == ["refused"] * 20 and set(lines[20:]) == {None}
    assert limiter.lines.logged("refused", 2.0) == "refused (and 980 more before it)"
    assert limiter.lines.logged("refused", 4.0) == "refused"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:50012", "10.0.0.7"),
        ("ipv6:%5B::1%5D:50012", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:50012", "2001:db8:1:2::/64"),
        ("unix:whatever", "unix:whatever"),
    ],
)
def test_a_peer_counts_as_its_machine(peer: str, address: str) -> None:
    assert machine_of(peer) == address
