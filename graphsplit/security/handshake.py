"""Both ends of a connection prove that they know a secret, and neither one tells it.

::

    dialer                                          listener
    nonce, first proof (metadata of the call)    ->
                                                 <- nonce, proof (metadata of the answer)
    proof (the first message)                    ->
    ... the protocol begins ...

A proof is HMAC-SHA256 under the secret, over who proves, what the connection is for, and both
nonces, so it is worth nothing on another connection or in the other direction. The listener proves
itself first, so a dialer shows nothing to somebody who only took over the address. The dialer's
first proof is over its own nonce alone: whoever heard it can say it again, and gets no further. It
lets a listener send others away before they cost anything, and says nothing to who does not know
the secret: not even which job this is.

Over the same two nonces both can prove themselves once more, for one call in the other direction:
see ``Recall``.

This keeps out who does not know the secret. It does not encrypt: who can change packets on their
way can go on after the proofs. Against that there is TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

NONCE_KEY = "graphsplit-nonce-bin"
PROOF_KEY = "graphsplit-proof-bin"
NONCE_BYTES = 32

Metadata = tuple[tuple[str, bytes], ...]


def _proof(secret: bytes, side: bytes, purpose: bytes, dialer: bytes, listener: bytes) -> bytes:
    parts = (b"graphsplit handshake 1", side, purpose, dialer, listener)
    # Each part with its length, so that no two lists of parts give the same bytes.
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).digest()


def entry_of(metadata: Iterable[tuple[str, str | bytes]], key: str) -> bytes:
    """One entry of a call's metadata; empty if it is not there."""
    for name, value in metadata:
        if name == key:
            return value if isinstance(value, bytes) else value.encode()
    return b""


@dataclass(frozen=True)
class Recall:
    """Proofs for one more call between two that have met: the listener dials, the dialer listens.

    Attributes:
        listener: What the one who listened before says first.
        dialer: What the one who dialled before answers.
    """

    listener: bytes = field(repr=False)
    dialer: bytes = field(repr=False)


def _recall(secret: bytes, purpose: bytes, dialer: bytes, listener: bytes) -> Recall:
    sides = b"listener, again", b"dialer, again"
    return Recall(*(_proof(secret, side, purpose, dialer, listener) for side in sides))


@dataclass(frozen=True)
class Dialer:
    """The end that connects.

    Attributes:
        secret: What both ends know.
        purpose: What the connection is for; the listener must say the same.
        nonce: Random for every connection.
    """

    secret: bytes = field(repr=False)
    purpose: bytes
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    def metadata(self) -> Metadata:
        """The dialer's metadata, sent with the call."""
        first = _proof(self.secret, b"dialer, first", self.purpose, self.nonce, b"")
        return ((NONCE_KEY, self.nonce), (PROOF_KEY, first))

    def answer(self, metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
        """The first message, given the listener's metadata; None if that proves nothing."""
        metadata = tuple(metadata)
        nonce, proof = entry_of(metadata, NONCE_KEY), entry_of(metadata, PROOF_KEY)
        if len(nonce) != NONCE_BYTES:
            return None
        expected = _proof(self.secret, b"listener", self.purpose, self.nonce, nonce)
        if not hmac.compare_digest(proof, expected):
            return None
        return _proof(self.secret, b"dialer", self.purpose, self.nonce, nonce)

    def recall(self, metadata: Iterable[tuple[str, str | bytes]]) -> Recall:
        """Proofs for a call of the listener's, given the metadata that proved it."""
        nonce = entry_of(metadata, NONCE_KEY)
        return _recall(self.secret, self.purpose, self.nonce, nonce)


class Listener:
    """The end that was connected to.

    Args:
        secret: What both ends know.
        purpose: What the connection is for.
        metadata: What the dialer said with its call.

    Attributes:
        is_asked: Whether the dialer takes part in the handshake.
        is_met: Whether it has said what somebody said who knows the secret, now or before.
    """

    def __init__(
        self, secret: bytes, purpose: bytes, metadata: Iterable[tuple[str, str | bytes]]
    ) -> None:
        self._secret = secret
        self._purpose = purpose
        metadata = tuple(metadata)
        self._theirs = entry_of(metadata, NONCE_KEY)
        self._mine = secrets.token_bytes(NONCE_BYTES)
        self.is_asked = len(self._theirs) == NONCE_BYTES
        first = _proof(secret, b"dialer, first", purpose, self._theirs, b"")
        self.is_met = hmac.compare_digest(entry_of(metadata, PROOF_KEY), first)

    def metadata(self) -> Metadata:
        """The listener's answer."""
        proof = _proof(self._secret, b"listener", self._purpose, self._theirs, self._mine)
        return ((NONCE_KEY, self._mine), (PROOF_KEY, proof))

    def accepts(self, answer: bytes) -> bool:
        """Whether the dialer's first message proves that it knows the secret."""
        expected = _proof(self._secret, b"dialer", self._purpose, self._theirs, self._mine)
        return self.is_asked and hmac.compare_digest(answer, expected)

    def recall(self) -> Recall:
        """Proofs for a call to the dialer, once it has proved itself."""
        return _recall(self._secret, self._purpose, self._theirs, self._mine)
