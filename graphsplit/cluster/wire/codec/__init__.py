"""Messages to bytes and back. Everything that arrives is checked here, before any state sees it.

A message is refused, with a reason, when it is not one, lacks a field, has a field this version
does not know, or breaks a bound of ``limits``. Nothing is cut to fit, and nothing is unpickled.

From what knows least to what knows most:

- ``readers``: one value that arrived, within its bound.
- ``parts``: what messages of both sides contain.
- ``worker``, ``scheduler``: what each side says.

A job's status, which visitors ask for, has ``status.codec``, of the same readers and parts.
"""

from graphsplit.cluster.wire.codec.readers import MessageError
from graphsplit.cluster.wire.codec.scheduler import (
    decode_scheduler,
    encode_plan,
    encode_scheduler,
    encode_scheduler_fence,
    open_scheduler,
)
from graphsplit.cluster.wire.codec.worker import (
    decode_worker,
    encode_worker,
    encode_worker_fence,
    open_worker,
)

__all__ = [
    "MessageError",
    "decode_scheduler",
    "decode_worker",
    "encode_plan",
    "encode_scheduler",
    "encode_scheduler_fence",
    "encode_worker",
    "encode_worker_fence",
    "open_scheduler",
    "open_worker",
]
