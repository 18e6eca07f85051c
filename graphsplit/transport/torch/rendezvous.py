"""Makes process groups of two workers, without a store that anybody could use.

``torch.distributed`` wants a store to swap addresses in. Its ``TCPStore`` listens on every
interface, asks nobody who he is, and believes the sizes it is told. The two ends of a link need
only tell each other some hundred bytes, so they do it over the gRPC stream between them, which
lets members of the job in and nobody else::

    worker 0                                  worker 1
    set("nonce", ...)      -- channel 0 -->   get("nonce")
    get("nonce")           <-- channel 1 --   set("nonce", ...)
    ProcessGroupGloo(store, 0, 2), twice      ProcessGroupGloo(store, 1, 2), twice
    proof of both nonces   ==== link ====>    compared, before anything else is read

Gloo itself takes whoever connects first. The proof shows that the link leads where the stream
does: only who was told the nonces can make it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphsplit.errors import FrameError
from graphsplit.torch_ext.private import gloo_group
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.session import Session

MEETING_PLAN = -2
CONNECT_S = 30.0
"""The time that the two have to connect, once each has told the other its address."""

_MAX_BYTES = 1 << 16
_MAX_MESSAGES = 32


def _spec(source: int, destination: int, num_workers: int) -> ChannelSpec:
    return ChannelSpec(
        plan=MEETING_PLAN,
        edge=source * num_workers + destination,
        source=source,
        destination=destination,
        dtype=torch.uint8,
        shape=(None,),
        max_bytes=_MAX_BYTES,
        depth=_MAX_MESSAGES,
        label=f"meeting of workers {source} and {destination}",
    )


class MeetingStore(dist.Store):  # type: ignore[misc, name-defined]  # missing in torch's stubs
    """The messages of two workers: each ``set`` sends one, each ``get`` may wait for one.

    Used by one thread at a time. Waits end as those of the stream do: by deadline or abort.
    """

    def __init__(self, sender: Sender, receiver: Receiver) -> None:
        super().__init__()
        self._sender = sender
        self._receiver = receiver
        self._known: dict[str, bytes] = {}
        self._num_sent = self._num_received = 0

    def set(self, key: str, value: str | bytes) -> None:
        """Tell the other."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = value
        message = bytearray(len(key).to_bytes(2, "little") + key.encode() + value)
        octets = torch.frombuffer(message, dtype=torch.uint8)
        self._sender.send(octets, step=self._num_sent, microbatch=0)
        self._num_sent += 1

    def get(self, key: str) -> bytes:
        """The value that this worker or the other one has set; waits for the other."""
        while key not in self._known:
            if self._num_received == _MAX_MESSAGES:
                raise FrameError(f"the peer has told {_MAX_MESSAGES} things, and not {key!r}")
            octets = self._receiver.receive(step=self._num_received, microbatch=0)
            self._num_received += 1
            message = b"" if octets is None else octets.numpy().tobytes()
            end = 2 + int.from_bytes(message[:2], "little")
            self._known[message[2:end].decode(errors="replace")] = message[end:]
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of them are known."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are known already."""
        return all(key in self._known for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: how long a wait may last is the stream's affair."""

    def has_extended_api(self) -> bool:
        """No: ``set``, ``get`` and ``wait`` are all there is."""
        return False


class Rendezvous:
    """Two workers that know each other, and what each has to say to prove it on another link.

    Args:
        transport: Reaches the peer, and lets only members of the job in.
        session: The job and this worker's place in it.
        peer: The other worker.
        num_workers: How many workers the job has.

    Attributes:
        store: What they tell each other.
        rank: 0 for the one with the lower rank in the job, 1 for the other.
    """

    def __init__(
        self, transport: Transport, *, session: Session, peer: int, num_workers: int
    ) -> None:
        mine = session.rank
        sender = transport.open_sender(_spec(mine, peer, num_workers))
        receiver = transport.open_receiver(_spec(peer, mine, num_workers))
        self.store = MeetingStore(sender, receiver)
        self.rank = int(mine > peer)
        self._about = f"{session.job} {session.generation}"
        self._ranks = mine, peer
        self._key = b""

    def swap_nonces(self) -> None:
        """Tell each other what only the two of them know from then on."""
        mine, peer = self._ranks
        nonce = secrets.token_hex(32)
        self.store.set(f"nonce {mine}", nonce)
        self.store.get(f"nonce {peer}")
        nonces = [self.store.get(f"nonce {rank}") for rank in sorted((mine, peer))]
        self._key = b"".join(nonces)

    def proof(self, source: int, destination: int) -> bytes:
        """The first words of a source on a link to a destination; after ``swap_nonces``."""
        about = f"{self._about} {source} {destination}".encode()
        return hmac.new(self._key, about, hashlib.sha256).digest()

    def gloo_groups(self, device: Any) -> tuple[Any, Any]:
        """Process groups of the two, to send by and to receive by; waits for the other's halves.

        Raises:
            RuntimeError: They could not connect.
        """
        groups = []
        for direction in ("up", "down"):
            store = dist.distributed_c10d.PrefixStore(direction, self.store)
            groups.append(gloo_group(store, self.rank, device, timedelta(seconds=CONNECT_S)))
        return groups[self.rank], groups[1 - self.rank]
