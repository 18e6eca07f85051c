"""Asks a scheduler what is going on. Imports no torch."""

from __future__ import annotations

import os
import queue
from typing import Any

from graphsplit.cluster.status.job_status import JobStatus, StatusRequest
from graphsplit.cluster.wire.rpc import (
    PURPOSE,
    SERVICE,
    STATUS_METHOD,
    channel_options,
    format_address,
)
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.errors import ClusterError
from graphsplit.security.grpc_ports import first_metadata, open_channel, tls_hint
from graphsplit.security.handshake import Dialer
from graphsplit.security.names import SCHEDULER, CertifiedName
from graphsplit.security.protection import Protection


def fetch_status(host: str, port: int, protection: Protection, *, timeout_s: float) -> JobStatus:
    """The status of the job that a scheduler serves.

    Args:
        host: Where the scheduler listens.
        port: Its port.
        protection: The job's token, and a certificate of its authority, where it has them.
        timeout_s: How long to wait for the answer.

    Raises:
        ClusterError: Nobody answers, or refuses to, or with something else.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    import grpc

    address = format_address(host, port)
    expected = CertifiedName(SCHEDULER).dns
    options = channel_options(silence_s=timeout_s)
    channel = open_channel(address, protection, expected=expected, options=options)
    try:
        answer = _ask(channel, protection, timeout_s)
        return records.from_text(JobStatus, answer, what="the status")
    except grpc.RpcError as error:
        detail = f"{error.code().name}: {error.details() or ''}"
        hint = tls_hint(detail, protection)
        raise ClusterError(
            f"no status from {address}: {detail}{hint}\n  Fix: give the address of a scheduler "
            f"that runs, and the job's GS_JOB_TOKEN or certificates if it has any"
        ) from None
    except MessageError as error:
        raise ClusterError(f"{address} answered, but not as a scheduler does: {error}") from None
    finally:
        channel.close()


def _ask(channel: Any, protection: Protection, timeout_s: float) -> bytes:
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    dialer = Dialer(protection.token, PURPOSE) if protection.token else None
    metadata = None if dialer is None else dialer.metadata()
    ask = channel.stream_stream(f"/{SERVICE}/{STATUS_METHOD}")
    call = ask(iter(requests.get, None), metadata=metadata, timeout=timeout_s)
    try:
        if dialer is not None:
            answer = dialer.answer(first_metadata(call))
            if answer is not None:
                requests.put(answer)
            elif call.is_active():
                raise MessageError("it does not know the job's token")
        requests.put(records.to_text(StatusRequest()).encode())
        for data in call:
            return bytes(data)
        raise MessageError("it said nothing")
    finally:
        requests.put(None)
        call.cancel()
