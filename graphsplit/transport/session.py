"""The members of a job's data plane, and a newcomer's proof that it is one."""

from __future__ import annotations

import hmac
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from graphsplit.errors import TransportError
from graphsplit.security.handshake import Dialer, Listener
from graphsplit.transport.wait import WaitPolicy

TICK_S = 0.05
"""Longest sleep of any wait: a lost wake-up costs at most this."""

LAST_WORDS_S = 1.0
"""The time that a closed link waits for the last words of the peer."""


@dataclass(frozen=True)
class Hello:
    """The first words of a link's source.

    Attributes:
        job: Id of the job; empty where it is proved and not told.
        generation: Generation of the job's membership.
        source: Rank of the worker that connects.
        destination: Rank of the worker that it wants to reach.
        token: The source's secret, which only members of the job have been told; empty where it
            is proved and not told.
    """

    job: str
    generation: int
    source: int
    destination: int
    token: str = ""


@dataclass(frozen=True)
class Session:
    """A worker's place in its job, once all members are known.

    Attributes:
        job: Id of the job.
        generation: Generation of the job's membership.
        rank: This worker.
        tokens: The secret of each worker, by rank.
    """

    job: str
    generation: int
    rank: int
    tokens: tuple[str, ...]

    def hello_to(self, destination: int) -> Hello:
        """The first words of this worker to a peer."""
        return Hello(
            self.job, self.generation, self.rank, destination, token=self.tokens[self.rank]
        )

    def dialer_to(self, destination: int) -> Dialer:
        """Proves to a peer that this worker is who it says it is."""
        return Dialer(*self._shared(self.rank, destination))

    def listener_to(self, source: int, metadata: Iterable[tuple[str, str | bytes]]) -> Listener:
        """Asks a newcomer, whose place is right, to prove that it is that worker."""
        return Listener(*self._shared(source, self.rank), metadata)

    def _shared(self, source: int, destination: int) -> tuple[bytes, bytes]:
        """The secret of a link's two ends, and the purpose of the link."""
        secret = f"{self.tokens[source]}:{self.tokens[destination]}"
        purpose = f"data plane: {source} to {destination}, generation {self.generation}, {self.job}"
        return secret.encode(), purpose.encode()

    def misplacement_of(self, hello: Hello) -> str | None:
        """The mistake in where a newcomer says that it belongs, or None."""
        if hello.generation != self.generation:
            return f"generation: expected {self.generation}, got {hello.generation}"
        if hello.destination != self.rank:
            return f"destination: this is worker {self.rank}, not worker {hello.destination}"
        if not 0 <= hello.source < len(self.tokens):
            return f"source: expected a rank below {len(self.tokens)}, got {hello.source}"
        return None

    def refusal_of(self, hello: Hello) -> str | None:
        """The reason to refuse a newcomer, or None if it told its secret and is who it says it is.

        For links that stay within one user's processes; others prove the secret.
        """
        reason = self.misplacement_of(hello)
        if reason is not None:
            return reason
        if hello.job != self.job:
            return "job: this worker belongs to another one"
        if not hmac.compare_digest(hello.token.encode(), self.tokens[hello.source].encode()):
            return f"source: this is not worker {hello.source}, its token is another one"
        return None


class AbortWatch:
    """Hears of the job's abort, and lets broken links report it rather than themselves."""

    def __init__(self, policy: WaitPolicy) -> None:
        self.policy = policy
        self.aborted = threading.Event()
        self.call(self.aborted.set)

    def call(self, method: Callable[[], None]) -> None:
        """Call a bound method at the abort, as long as its object lives."""
        weak = weakref.WeakMethod(method)

        def wake() -> None:
            alive = weak()
            if alive is not None:
                alive()

        self.policy.abort.add_waker(wake)

    def raise_broken(self, message: str) -> NoReturn:
        """Raise the job's root cause if it is known, else ``TransportError``.

        Whoever hears of that tells the scheduler at once, which knows best what it means.
        """
        self.policy.abort.raise_if_set()
        raise TransportError(
            f"{message}\n  Fix: look at the output of that worker; it ended or lost its network"
        )
