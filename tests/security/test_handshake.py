"""Two ends prove that they know a secret; every other pair of ends finds out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsplit.security.handshake import NONCE_KEY, PROOF_KEY, Dialer, Listener

SECRET, PURPOSE = b"correct horse battery staple", b"control plane"


def test_both_ends_know_the_secret() -> None:
    dialer = Dialer(SECRET, PURPOSE)
    listener = Listener(SECRET, PURPOSE, dialer.metadata())
    answer = dialer.answer(listener.metadata())
    assert answer is not None and listener.accepts(answer)
    told = b"".join(value for _, value in (*dialer.metadata(), *listener.metadata())) + answer
    assert SECRET not in told


@pytest.mark.parametrize(("secret", "purpose"), [(b"another one", PURPOSE), (SECRET, b"other")])
def test_another_secret_or_purpose_is_noticed_by_both(secret: bytes, purpose: bytes) -> None:
    dialer = Dialer(SECRET, PURPOSE)
    listener = Listener(secret, purpose, dialer.metadata())
    assert dialer.answer(listener.metadata()) is None
    stubborn = Dialer(secret, purpose, dialer.nonce).answer(listener.metadata())
    assert stubborn is not None
    assert not Listener(SECRET, PURPOSE, dialer.metadata()).accepts(stubborn)


def test_an_answer_is_worth_nothing_on_another_connection() -> None:
    dialer = Dialer(SECRET, PURPOSE)
    first = Listener(SECRET, PURPOSE, dialer.metadata())
    answer = dialer.answer(first.metadata())
    assert answer is not None
    assert not Listener(SECRET, PURPOSE, dialer.metadata()).accepts(answer)


def test_a_proof_sent_back_proves_nothing() -> None:
    dialer = Dialer(SECRET, PURPOSE)
    listener = Listener(SECRET, PURPOSE, dialer.metadata())
    assert not listener.accepts(dict(listener.metadata())[PROOF_KEY])
    mirror = ((NONCE_KEY, dialer.nonce), (PROOF_KEY, b""))
    assert dialer.answer(mirror) is None


def test_a_dialer_without_a_nonce_never_gets_in() -> None:
    listener = Listener(SECRET, PURPOSE, ())
    assert not listener.is_asked
    assert not any(listener.accepts(answer) for answer in (b"", bytes(32)))
    # Not even with what would be right for an empty nonce.
    answer = Dialer(SECRET, PURPOSE, b"").answer(listener.metadata())
    assert answer is not None and not listener.accepts(answer)


@given(st.lists(st.tuples(st.sampled_from([NONCE_KEY, PROOF_KEY, "x"]), st.binary(max_size=80))))
def test_noise_is_no_proof(metadata: list[tuple[str, bytes]]) -> None:
    assert Dialer(SECRET, PURPOSE).answer(metadata) is None
    listener = Listener(SECRET, PURPOSE, metadata)
    assert not any(listener.accepts(value) for _, value in metadata)


def test_a_secret_is_not_shown() -> None:
    assert SECRET.decode() not in repr(Dialer(SECRET, PURPOSE))
