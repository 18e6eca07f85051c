"""Admission of streams: what one must show before the scheduler's state machine hears of it.

In this order, and each only after the one before::

    a place in the queue      limiter      else RESOURCE_EXHAUSTED: come back later
    a worker's certificate    under TLS    checked by the TLS library, then its role
    the job's token           if it has one; both sides prove that they know it
    a registration            the first message, within REGISTER_TIMEOUT_S
    the certificate's rank    is the rank that the registration asks for
    its address               is the one that it came from, or in GS_WORKER_NETWORKS

Before the token is proved, nothing that came is parsed, and nothing is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from graphsplit.cluster.scheduler.limiter import AdmissionLimiter
from graphsplit.cluster.status.job_status import StatusRequest
from graphsplit.cluster.wire.codec import encode_fence, encode_scheduler, open_worker
from graphsplit.cluster.wire.limits import REGISTER_TIMEOUT_S
from graphsplit.cluster.wire.messages import (
    Fence,
    Refused,
    Register,
    Rejoin,
    WorkerMessage,
)
from graphsplit.cluster.wire.rpc import PURPOSE
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.logs import LogLine
from graphsplit.security.addresses import machine_of, why_not_dialed
from graphsplit.security.grpc_ports import caller_of
from graphsplit.security.handshake import Listener
from graphsplit.security.names import DOMAIN, CertifiedName, why_not_worker
from graphsplit.security.protection import Protection

_SAME_TOKEN = "  Fix: give every process of the job the same GS_JOB_TOKEN or GS_JOB_TOKEN_FILE"
_Shown = TypeVar("_Shown")


class NotAdmitted(Exception):
    """A stranger may not come in; the text is for them and for the log."""


class Admission:
    """Looks at every new stream. Runs on the scheduler's event loop.

    Args:
        num_workers: How many workers the job has.
        protection: The token and certificate that a stranger must show.
        log: Takes lines for the person who watches.
        prove: Told of each peer that has proved itself, as gRPC names it.

    Attributes:
        limiter: Limits strangers.
        num_refused: How many connections were not let in.
    """

    def __init__(
        self,
        num_workers: int,
        protection: Protection,
        log: LogLine,
        prove: Callable[[str], None],
    ) -> None:
        self._protection = protection
        self._log = log
        self._prove = prove
        self.limiter = AdmissionLimiter(num_workers, time.monotonic())
        self.num_refused = 0

    async def admit(self, requests: AsyncIterator[bytes], context: Any) -> Register | None:
        """The registration of a stream that may take part; None for any other, which is told."""
        new, reason = await self._look_at(context, self._examine(requests, context))
        if reason:
            fence = encode_fence(Fence(number=1))
            await context.write(encode_scheduler(Refused(reason)) + fence)
        return new

    async def admit_visitor(self, requests: AsyncIterator[bytes], context: Any) -> bool:
        """Whether somebody who takes no part, and only asks, may be answered.

        The same must be shown as by a worker, except for the role: whoever holds a certificate of
        the job's authority may ask.
        """
        import grpc

        has_asked, reason = await self._look_at(context, self._hear_visitor(requests, context))
        if reason:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        return has_asked is not None

    async def _look_at(
        self, context: Any, examination: Coroutine[Any, Any, _Shown]
    ) -> tuple[_Shown | None, str]:
        """The result of an examination; or None, and a reason if there is somebody to tell."""
        import grpc

        address = machine_of(context.peer())
        come_back = self.limiter.enter(address, time.monotonic())
        if come_back is not None:
            examination.close()
            self.num_refused += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, come_back)
        shown: _Shown | None = None
        reason = ""
        try:
            shown = await asyncio.wait_for(examination, REGISTER_TIMEOUT_S)
            self._prove(context.peer())
        except NotAdmitted as error:
            reason = str(error)
        except StopAsyncIteration:
            return None, ""
        except asyncio.TimeoutError:
            reason = f"it did not register within {REGISTER_TIMEOUT_S:g} s"
        finally:
            self.limiter.leave(address, time.monotonic(), has_failed=shown is None)
        if reason:
            self.num_refused += 1
            line = f"refused a connection from {address}: {reason}"
            logged = self.limiter.lines.logged(line, time.monotonic())
            if logged is not None:
                self._log(logged, event="refused", level="warning")
        return shown, reason

    async def _hear_visitor(self, requests: AsyncIterator[bytes], context: Any) -> bool:
        if self._protection.tls is not None and caller_of(context) is None:
            raise NotAdmitted(f"its certificate does not name one role of {DOMAIN}")
        await self._shake_hands(requests, context)
        try:
            records.from_text(StatusRequest, await _next(requests), what="the request")
        except MessageError as error:
            raise NotAdmitted(f"sent a malformed message: {error}") from None
        return True

    async def _examine(self, requests: AsyncIterator[bytes], context: Any) -> Register:
        caller = None
        if self._protection.tls is not None:
            caller = caller_of(context)
            reason = why_not_worker(caller, None)
            if reason is not None:
                raise NotAdmitted(reason)
        await self._shake_hands(requests, context)
        try:
            _, message = open_worker(await _next(requests))
        except MessageError as error:
            raise NotAdmitted(f"sent a malformed message: {error}") from None
        if not isinstance(message, Register):
            raise NotAdmitted(f"sent {type(message).__name__} before it was registered")
        new = _bound(message, caller)
        reason = self.why_not_dialed(new, context.peer())
        if reason is not None:
            raise NotAdmitted(f"{new.who}: {reason}")
        return new

    def why_not_dialed(self, message: WorkerMessage, peer: str) -> str | None:
        """Why members are not to dial what a message of this peer offers; None if they may."""
        if not isinstance(message, (Register, Rejoin)) or "grpc" not in message.endpoints:
            return None
        return why_not_dialed(message.endpoints["grpc"], peer, self._protection.networks)

    async def _shake_hands(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Both sides prove that they know the job's token."""
        listener = Listener(self._protection.token, PURPOSE, context.invocation_metadata() or ())
        if not self._protection.token:
            if listener.is_asked:
                raise NotAdmitted(f"it has a job token, and the scheduler has none\n{_SAME_TOKEN}")
            return
        if not listener.is_asked:
            raise NotAdmitted(f"it has no job token, and the scheduler has one\n{_SAME_TOKEN}")
        await context.send_initial_metadata(listener.metadata())
        if not listener.accepts(await _next(requests)):
            raise NotAdmitted(f"it does not know the job's token\n{_SAME_TOKEN}")
        self._prove(context.peer())  # what follows may be large


async def _next(requests: AsyncIterator[bytes]) -> bytes:
    return await requests.__anext__()


def _bound(new: Register, caller: CertifiedName | None) -> Register:
    """The registration with the rank of its certificate; refuses one that asks for another."""
    if caller is None or caller.rank is None:
        return new
    if new.wished_rank is None:
        return replace(new, wished_rank=caller.rank)
    reason = why_not_worker(caller, new.wished_rank)
    if reason is not None:
        raise NotAdmitted(
            f"{reason} (MS_NODE_ID)\n  Fix: give every worker the certificate of its own rank"
        )
    return new
