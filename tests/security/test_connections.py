"""Connections that prove nothing: how many, for how long, and how much they may say."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from graphsplit.security import strangers
from graphsplit.security.connections import ConnectionWatch, set_filter
from graphsplit.security.strangers import (
    MOST_BYTES,
    MOST_S,
    NEAR_LOOK_S,
    QUIET_LOOK_S,
    WARY_LOOK_S,
    Strangers,
    UnprovenConnection,
    syn_filter,
)

DEADLINE_S = 20.0
HERE = "127.0.0.1"


def several(
    count: int, machine: str = HERE, *, first: int = 0, received: int = 0
) -> list[UnprovenConnection]:
    return [UnprovenConnection(first + n, machine, received) for n in range(count)]


def test_who_says_too_much_or_is_there_for_too_long_is_closed() -> None:
    followed = Strangers(2)
    quiet, loud = (
        UnprovenConnection(1, HERE, MOST_BYTES),
        UnprovenConnection(2, HERE, MOST_BYTES + 1),
    )
    assert followed.look([quiet, loud], 0.0).close == {2: "sent more than 64 KiB"}
    assert followed.look([quiet], MOST_S).close == {}
    assert followed.look([quiet], MOST_S + 0.1).close == {1: "was there for 30 s"}


def test_a_machine_has_few_places_and_the_newest_stay() -> None:
    followed = Strangers(2)
    assert followed.look(several(10), 0.0).close == {}
    ruling = followed.look(several(30), 1.0)
    assert len(ruling.close) == 20 and set(ruling.close.values()) == {
        "was one of too many from there"
    }
    assert set(range(10)) <= set(ruling.close)
    other = several(1, "10.0.0.2", first=50)
    assert followed.look([*several(10, first=20), *other], 1.1).close == {}


def test_all_machines_together_have_a_bound() -> None:
    many = [UnprovenConnection(n, f"10.0.0.{n}", 0) for n in range(50)]
    ruling = Strangers(2).look(many, 0.0)
    assert len(ruling.close) == 30 and set(ruling.close.values()) == {"was one of too many"}


def test_who_always_comes_again_is_heard_more_and_more_rarely_and_then_forgotten() -> None:
    followed = Strangers(2)
    levels, number = [], 0
    for tenth in range(30):
        ruling = followed.look(several(12, first=number), tenth / 10)
        levels.append(ruling.slowed.get(HERE, 0))
        number += 12
    assert levels[:6] == [0] * 6 and levels == sorted(levels) and levels[-1] == 8
    assert (ruling.everybody, ruling.look_s) == (0, NEAR_LOOK_S)
    assert followed.look([], 10.0).look_s == WARY_LOOK_S
    for second in range(11, 30):
        ruling = followed.look([], float(second))
    assert ruling.slowed == {} and ruling.look_s == QUIET_LOOK_S


def test_workers_that_all_come_at_once_are_not_slowed() -> None:
    followed = Strangers(500)
    assert followed.look(several(500), 0.0).close == {}
    for second in range(1, 5):
        assert followed.look([], float(second)).slowed == {}


def test_many_machines_that_come_again_take_a_fixed_amount_of_memory() -> None:
    followed = Strangers(2)
    for n in range(3_000):
        name = f"10.0.{n // 256}.{n % 256}"
        ruling = followed.look(several(100, name, first=100 * n), n / 1_000)
    assert len(followed._machines) == 1_024 and len(ruling.slowed) <= 16
    assert ruling.everybody > 0


def dials(source: str, port: int, wait_s: float) -> bool:
    try:
        socket.create_connection((HERE, port), wait_s, (source, 0)).close()
    except TimeoutError:
        return False
    return True


def test_the_kernel_drops_the_first_packets_of_who_is_slowed_and_of_nobody_else() -> None:
    """At level 16 one of 65,536 is heard: none, in a test."""
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
        before = socket.create_connection((HERE, port), DEADLINE_S)
        set_filter(listener, syn_filter({"127.0.0.2": 16, "127.0.0.3": 0, "2001:db8::/64": 3}, 0))
        assert [dials(f"127.0.0.{n}", port, 0.2) for n in (1, 2, 3)] == [True, False, True]
        inside, _ = listener.accept()
        before.sendall(b"still heard")
        assert inside.recv(100) == b"still heard"
        set_filter(listener, syn_filter({HERE: 0}, 16))
        assert [dials(f"127.0.0.{n}", port, 0.2) for n in (1, 2)] == [True, False]
        after = socket.create_connection((HERE, port), DEADLINE_S)
        set_filter(listener, [])
        set_filter(listener, [])
        assert dials("127.0.0.2", port, DEADLINE_S)
        for one in (before, after, inside):
            one.close()


def test_the_kernel_drops_packets_of_ipv6_too() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"there is no IPv6 here: {error}")
    with listener:
        target = listener.getsockname()[:2]
        set_filter(listener, syn_filter({"2001:db8::/64": 16, HERE: 16}, 0))
        socket.create_connection(target, DEADLINE_S).close()
        set_filter(listener, syn_filter({"2001:db8::/64": 0, "::/64": 16}, 0))
        with pytest.raises(TimeoutError):
            socket.create_connection(target, 0.2)


@pytest.fixture
def served() -> Iterator[tuple[socket.socket, ConnectionWatch, list[str]]]:
    lines: list[str] = []
    with socket.create_server((HERE, 0), backlog=100) as listener:
        keeper = ConnectionWatch(listener.getsockname()[1], 1, lines.append)
        yield listener, keeper, lines
        keeper.close()


def is_closed(one: socket.socket) -> bool:
    one.settimeout(DEADLINE_S)
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_loud_stranger_is_cut_off_and_a_member_is_not(
    served: tuple[socket.socket, ConnectionWatch, list[str]],
) -> None:
    listener, keeper, lines = served
    address = listener.getsockname()
    member, stranger = (socket.create_connection(address, DEADLINE_S) for _ in range(2))
    accepted = [listener.accept()[0] for _ in range(2)]
    host, port = member.getsockname()
    keeper.prove(f"ipv4:{host}:{port}")
    for one in (member, stranger):
        one.sendall(bytes(MOST_BYTES + 1))
    assert is_closed(stranger)
    member.sendall(b"x")
    got = b""
    while not got.endswith(b"x"):
        got = accepted[0].recv(1 << 20)
    accepted[0].sendall(b"answer")
    assert member.recv(10) == b"answer"
    give_up_at = time.monotonic() + DEADLINE_S
    while not lines and time.monotonic() < give_up_at:  # it is told once the connection is gone
        time.sleep(0.01)
    assert lines == [
        "closed a connection from 127.0.0.1 that proved nothing: it sent more than 64 KiB"
    ]
    for one in (*accepted, member, stranger):
        one.close()


def test_a_quiet_stranger_goes_after_a_while_and_a_quiet_member_stays(
    monkeypatch: pytest.MonkeyPatch, served: tuple[socket.socket, ConnectionWatch, list[str]]
) -> None:
    monkeypatch.setattr(strangers, "MOST_S", 0.2)
    listener, keeper, lines = served
    address = listener.getsockname()
    member, stranger = (socket.create_connection(address, DEADLINE_S) for _ in range(2))
    accepted = [listener.accept()[0] for _ in range(2)]
    host, port = member.getsockname()
    keeper.prove(f"ipv4:{host}:{port}")
    assert is_closed(stranger)
    time.sleep(1.5)  # several looks
    accepted[0].sendall(b"answer")
    assert member.recv(10) == b"answer" and len(lines) == 1
    for one in (*accepted, member, stranger):
        one.close()


def test_places_are_kept_free_of_idle_strangers(
    served: tuple[socket.socket, ConnectionWatch, list[str]],
) -> None:
    listener, _, lines = served
    idle = [socket.create_connection(listener.getsockname(), DEADLINE_S) for _ in range(60)]
    accepted = [listener.accept()[0] for _ in range(60)]
    end_s = time.monotonic() + DEADLINE_S
    left = accepted
    while len(left) > 9:
        assert time.monotonic() < end_s
        left = [one for one in accepted if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                and _is_there(one)]  # fmt: skip
    assert len(left) == 9 and len(lines) == 20, "and the others are counted"
    for one in (*idle, *accepted):
        one.close()


def _is_there(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True
