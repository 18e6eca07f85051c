"""Sessions that nobody should open, chosen by hypothesis, against a live scheduler.

    python tests/fuzz/session_fuzzer.py --examples 200

Each example starts a scheduler with a job token, lets strangers do what the rules below say, in any
order, and then lets the real workers form the job and finish it. Nobody else may ever be accepted,
and threads and file descriptors must be back where they were.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from graphsplit.cluster.member.member import Member, NodeIdentity
from graphsplit.cluster.scheduler.server import serve
from graphsplit.cluster.wire.codec import encode_worker, open_scheduler
from graphsplit.cluster.wire.messages import Arrive, Heartbeat, MeetingKind, Refused, Register
from graphsplit.cluster.wire.rpc import METHOD, PURPOSE, SERVICE
from graphsplit.failure import AbortSignal
from graphsplit.security.handshake import Dialer
from graphsplit.security.options import SecurityOptions
from graphsplit.settings import ClusterSettings

TOKEN = "a token that strangers do not know"
NUM_WORKERS = 2
DEADLINE_S = 30.0
_PARTS = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
REGISTER = Register("x", "life", "MS_WORKER", NUM_WORKERS, 0, "host", 1, versions={"torch": "1"})

# Stands for a message beyond all bounds: hypothesis should not have to print it.
LARGE = b"large"

# What a member of the job may not say first, or not so.
BAD_FIRST = [
    b"",
    b"\xff" * 64,
    encode_worker(Heartbeat(1)),
    encode_worker(Arrive(MeetingKind.FINISH)),
    encode_worker(replace(REGISTER, num_workers=NUM_WORKERS + 1)),
    encode_worker(replace(REGISTER, wished_rank=NUM_WORKERS)),
    encode_worker(replace(REGISTER, wished_rank=-1)),
    encode_worker(replace(REGISTER, role="MS_SCHED")),
    encode_worker(replace(REGISTER, host="h" * 1000)),
    encode_worker(replace(REGISTER, endpoints={f"e{n}": "x" for n in range(100)})),
]
NOISE = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([*BAD_FIRST, encode_worker(REGISTER), bytes(32), LARGE]),
)


class Strangers(RuleBasedStateMachine):
    """What strangers do to one scheduler.

    Attributes:
        held: What the process holds between examples, once there was one: gRPC keeps a thread.
    """

    held: dict[str, int] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(NUM_WORKERS + 1)
        self.log: list[str] = []
        self.settings = ClusterSettings(
            *("MS_SCHED", NUM_WORKERS, 0),
            topo_timeout_s=600.0,
            retry_lower_s=0.1,
            retry_upper_s=0.3,
            security=SecurityOptions(job_token=TOKEN),
        )
        ports: queue.Queue[int] = queue.Queue()
        self.status: Future[int] = self.pool.submit(
            serve,
            self.settings,
            on_listening=lambda host, port: ports.put(port),
            log=self.log.append,
        )
        self.port = ports.get(timeout=DEADLINE_S)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.links: list[socket.socket] = []
        self.overheard: list[bytes] = []

    def _say(self, messages: list[bytes], metadata: Any = None, *, wait: bool = True) -> None:
        session = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        sent = [bytes(5 << 20) if one is LARGE else one for one in messages]
        call = session(iter(sent), metadata=metadata, timeout=DEADLINE_S)
        try:
            for answer in call if wait else ():
                assert isinstance(open_scheduler(answer)[1], Refused)
        except grpc.RpcError:
            pass
        finally:
            call.cancel()

    @rule(messages=st.lists(NOISE, max_size=4))
    def speak_without_a_token(self, messages: list[bytes]) -> None:
        self._say(messages)

    @rule(messages=st.lists(NOISE, max_size=4), guess=st.binary(min_size=1, max_size=40))
    def guess_the_token(self, messages: list[bytes], guess: bytes) -> None:
        dialer = Dialer(guess, PURPOSE)
        forged = dialer.answer(()) or bytes(32)
        self.overheard.append(forged)
        self._say([forged, *messages], dialer.metadata())

    @rule(entries=st.lists(st.tuples(st.sampled_from(["a", "b-bin"]), st.binary(max_size=300))))
    def send_strange_metadata(self, entries: list[tuple[str, bytes]]) -> None:
        metadata = [(k, v if k.endswith("bin") else v.hex()) for k, v in entries]
        self._say([encode_worker(REGISTER)], metadata)

    @rule(size=st.integers(4, 64))
    def send_large_metadata(self, size: int) -> None:
        self._say([b""], [("x-bin", bytes(size << 10))])

    @rule(first=st.sampled_from(BAD_FIRST))
    def know_the_token_and_register_wrongly(self, first: bytes) -> None:
        dialer = Dialer(TOKEN.encode(), PURPOSE)
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        session = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        call = session(iter(outgoing.get, None), metadata=dialer.metadata(), timeout=DEADLINE_S)
        try:
            answer = dialer.answer(call.initial_metadata() or ())
            if answer is not None:
                self.overheard.append(answer)
                outgoing.put(answer)
                outgoing.put(first)
                for reply in call:
                    assert isinstance(open_scheduler(reply)[1], Refused)
        except grpc.RpcError:
            pass
        finally:
            outgoing.put(None)
            call.cancel()

    @rule(number=st.integers(0, 50))
    def replay_what_was_overheard(self, number: int) -> None:
        if self.overheard:
            answer = self.overheard[number % len(self.overheard)]
            nonce = Dialer(b"?", PURPOSE).metadata()
            self._say([answer, encode_worker(REGISTER)], nonce)

    @rule(number=st.integers(1, 40))
    def flood(self, number: int) -> None:
        for _ in range(number):
            self._say([encode_worker(REGISTER)], wait=False)

    @rule(noise=st.one_of(st.binary(max_size=100), st.just(PREFACE), st.just(PREFACE + SETTINGS)))
    def hold_a_connection(self, noise: bytes) -> None:
        if len(self.links) < 6:
            link = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
            self.links.append(link)
            link.sendall(noise)

    @invariant()
    def nobody_is_accepted(self) -> None:
        assert not self.status.done()
        accepted = [one for one in self.log if one.endswith(" registered")]
        assert all(one.startswith("refused") for one in accepted), accepted

    def teardown(self) -> None:
        """The real workers come, and the job is formed and finished as if nothing had been."""
        self.nobody_is_accepted()
        joining = [self.pool.submit(self._join, rank) for rank in range(NUM_WORKERS)]
        members = [future.result(DEADLINE_S) for future in joining]
        finishing = [self.pool.submit(member.finish) for member in members]
        for future in finishing:
            future.result(DEADLINE_S)
        for member in members:
            member.close()
        assert self.status.result(DEADLINE_S) == 0
        assert TOKEN not in "".join(self.log)
        self.channel.close()
        for link in self.links:
            link.close()
        self.pool.shutdown()
        if self.held is not None:
            wait_released(self.held)

    def _join(self, rank: int) -> Member:
        mine = replace(self.settings, role="MS_WORKER", scheduler_port=self.port, wished_rank=rank)
        return Member.join(
            mine, endpoints={}, identity=NodeIdentity(), abort=AbortSignal(), log=self.log.append
        )


def held() -> dict[str, int]:
    """Threads and file descriptors, without those that gRPC keeps for its own polling."""
    descriptors = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        descriptors += "eventpoll" not in target and "eventfd" not in target
    return {"threads": threading.active_count(), "descriptors": descriptors}


def wait_released(before: dict[str, int]) -> None:
    """Everything that was taken since is given back, within a deadline."""
    deadline, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while any(count > before[name] for name, count in held().items()):
        assert time.monotonic() < deadline, f"left behind: {held()}, before {before}"
        pause.wait(0.02)
        # gRPC's poller lives as long as any of its objects, and some of them lie in cycles.
        gc.collect()


def fuzz(*, examples: int, steps: int) -> None:
    """Run this many examples of this many steps."""
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=examples < 20,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    if Strangers.held is None:
        Strangers().teardown()
        Strangers.held = held()
    run_state_machine_as_test(Strangers, settings=profile)


def main() -> None:
    """The command."""
    from frame_fuzzer import resident_bytes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    started, grown = time.monotonic(), 0
    before = resident_bytes()
    # The allocator keeps what the largest messages took, up to a bound that it reaches early.
    for part in range(1, _PARTS + 1):
        fuzz(examples=max(20, arguments.examples // _PARTS), steps=arguments.steps)
        grown, before = resident_bytes() - before, resident_bytes()
        took_s = time.monotonic() - started
        print(
            f"part {part} of {_PARTS} after {took_s:.0f} s; resident memory {grown:+d} bytes",
            flush=True,
        )
    assert grown < 32 << 20, "memory grows"


if __name__ == "__main__":
    main()
