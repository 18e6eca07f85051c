"""Certificates for tests: of the job's authority, of another one, and expired ones."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from functools import cache
from unittest import mock

from graphsplit.security import issue
from graphsplit.security.issue import Authority
from graphsplit.security.names import SCHEDULER, WORKER, CertifiedName
from graphsplit.security.protection import Protection, TlsIdentity

SCHEDULER_NAME = CertifiedName(SCHEDULER)


@cache
def _authority(which: str) -> Authority:
    return Authority.create(days=2)


def authority(which: str = "ours") -> Authority:
    """One authority for each word."""
    return _authority(which)


def worker_name(rank: int | None) -> CertifiedName:
    return CertifiedName(WORKER, rank)


def protection(
    name: CertifiedName, *, signed_by: str = "ours", trusts: str = "ours", token: bytes = b""
) -> Protection:
    """What a process of this name has, as if its files had been read."""
    pem, key = authority(signed_by).issue(name, days=1)
    return Protection(TlsIdentity(authority(trusts).pem, pem, key, name), token)


def expired(name: CertifiedName) -> Protection:
    """A certificate of our authority whose last day was yesterday."""

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) - timedelta(days=9)

    authority()  # of today, whichever test comes first
    with mock.patch.object(issue, "datetime", Earlier):
        old = protection(name)
    return old
