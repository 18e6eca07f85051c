"""Which holder a certificate names, and what that allows."""

from __future__ import annotations

import pytest

from graphsplit.security.names import CertifiedName, holder_of, read_name, why_not_worker

WORKER_3, ANY, SCHEDULER = (
    CertifiedName("worker", 3),
    CertifiedName("worker"),
    CertifiedName("scheduler"),
)


@pytest.mark.parametrize("name", [WORKER_3, ANY, SCHEDULER, CertifiedName("worker", 1023)])
def test_a_name_is_read_back(name: CertifiedName) -> None:
    assert read_name(name.dns) == name


@pytest.mark.parametrize(
    "dns",
    [
        *("worker-03.graphsplit.internal", "worker--3.graphsplit.internal", "worker-3.graphsplit"),
        *("worker-3.graphsplit.internal.example.com", "xworker-3.graphsplit.internal", ""),
        *("scheduler-1.graphsplit.internal", "worker-99999.graphsplit.internal", "*"),
        *("*.graphsplit.internal", "worker-3.graphsplit.internal\n", "WORKER.graphsplit.internal"),
    ],
)
def test_other_names_name_nobody(dns: str) -> None:
    assert read_name(dns) is None


def test_a_certificate_names_one_holder_or_none() -> None:
    assert holder_of(["alpha.example", WORKER_3.dns, "10.0.0.7"]) == WORKER_3
    assert holder_of(["alpha.example"]) is None
    assert holder_of([WORKER_3.dns, CertifiedName("worker", 2).dns]) is None
    assert holder_of([WORKER_3.dns, SCHEDULER.dns]) is None


@pytest.mark.parametrize(
    ("holder", "rank", "reason"),
    [
        (WORKER_3, 3, None),
        (WORKER_3, None, None),
        (ANY, 7, None),
        (WORKER_3, 2, "its certificate is for worker 3, and it says that it is worker 2"),
        (SCHEDULER, 2, "its certificate is for the scheduler, and it says that it is a worker"),
        (None, 2, "its certificate does not name one role of graphsplit.internal"),
    ],
)
def test_a_right_certificate_with_another_rank_is_no_good(
    holder: CertifiedName | None, rank: int | None, reason: str | None
) -> None:
    assert why_not_worker(holder, rank) == reason
