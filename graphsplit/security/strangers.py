"""Decides which connections that have proved nothing are closed, and who is kept from more. Pure.

gRPC answers pings, settings and headers before anybody has proved anything, and bounds neither how
many there are nor who takes all places. So an unproven connection may say little, for a short time;
a machine may have few of them; and one that always comes again is let in more and more rarely,
before it costs anything: see ``syn_filter``.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphsplit.security.rates import TokenBucket

# A registration with certificates takes some 10 KB; its large messages follow the proof.
MOST_BYTES = 64 << 10
MOST_S = 30.0
# Honest workers come in a burst, and again after a failure; these come beside them.
_COMING, _COMING_PER_S = 64.0, 16.0
_MACHINES_IN_ALL = 4  # that may come as fast as that at a time
_MAX_LEVEL = 8
_MORE_S, _LESS_S = 0.25, 2.0  # after this time a level more, or less
_MAX_MACHINES = 1024
MOST_SLOWED = 16
# How often to look: while all are members, after a stranger has gone, and while one is there.
QUIET_LOOK_S, WARY_LOOK_S, NEAR_LOOK_S = 0.5, 0.05, 0.01


@dataclass(frozen=True)
class UnprovenConnection:
    """A connection to this process's port, as the kernel describes it.

    Attributes:
        number: Its own, never given twice.
        machine: Where it comes from: see ``addresses.machine_of``.
        received: How many bytes came.
    """

    number: int
    machine: str
    received: int


@dataclass(frozen=True)
class Ruling:
    """The measures against strangers.

    Attributes:
        close: The connections to close, by their numbers, with the reason.
        slowed: By machine, of how many new connections one is let in: 2 to this power.
        everybody: The same for all machines that are not named.
        look_s: When to look again.
    """

    close: Mapping[int, str]
    slowed: Mapping[str, int]
    everybody: int
    look_s: float


@dataclass
class _Machine:
    """A machine of which strangers come."""

    coming: TokenBucket
    level: int = 0
    changed_s: float = 0.0

    def note(self, count: int, now: float) -> None:
        left = self.coming.refill(now)
        self.coming.left = max(0.0, left - count)
        since_s = now - self.changed_s
        if self.coming.left < 1 and since_s >= _MORE_S:
            self.level, self.changed_s = min(_MAX_LEVEL, self.level + 1), now
        elif self.level and self.coming.left > self.coming.capacity / 2 and since_s >= _LESS_S:
            self.level, self.changed_s = self.level - 1, now


class Strangers:
    """Follows unproven connections, in a fixed amount of memory.

    Args:
        num_workers: How many workers the job has: they may all come at once, from one machine.
    """

    def __init__(self, num_workers: int) -> None:
        self._most = 2 * num_workers + 16
        self._most_of_machine = num_workers + 8
        self._since: dict[int, float] = {}
        self._burst = _COMING + 2 * num_workers
        in_all = self._burst * _MACHINES_IN_ALL, _COMING_PER_S * _MACHINES_IN_ALL
        self._all = _Machine(TokenBucket.full(*in_all, 0.0))
        self._machines: OrderedDict[str, _Machine] = OrderedDict()

    def look(self, unproven: Sequence[UnprovenConnection], now: float) -> Ruling:
        """Rule on the connections that are there and have proved nothing."""
        new = Counter(one.machine for one in unproven if one.number not in self._since)
        self._since = {one.number: self._since.get(one.number, now) for one in unproven}
        self._note(new, now)
        slowed = {name: one.level for name, one in self._machines.items() if one.level}
        worst = sorted(slowed, key=lambda name: -slowed[name])[:MOST_SLOWED]
        is_wary = self._machines or self._all.level
        return Ruling(
            self._to_close(unproven, now),
            {name: slowed[name] for name in worst},
            self._all.level,
            NEAR_LOOK_S if unproven else WARY_LOOK_S if is_wary else QUIET_LOOK_S,
        )

    def _note(self, new: Counter[str], now: float) -> None:
        for name in new:
            if name not in self._machines:
                full = TokenBucket.full(self._burst, _COMING_PER_S, now)
                self._machines[name] = _Machine(full, changed_s=now)
            self._machines.move_to_end(name)
        for name, machine in list(self._machines.items()):
            machine.note(new[name], now)
            if not machine.level and machine.coming.left >= self._burst:
                del self._machines[name]
        self._all.note(new.total(), now)
        while len(self._machines) > _MAX_MACHINES:
            self._machines.popitem(last=False)

    def _to_close(self, unproven: Sequence[UnprovenConnection], now: float) -> dict[int, str]:
        found: dict[int, str] = {}
        for one in unproven:
            if one.received > MOST_BYTES:
                found[one.number] = f"sent more than {MOST_BYTES >> 10} KiB"
            elif now - self._since[one.number] > MOST_S:
                found[one.number] = f"was there for {MOST_S:g} s"
        # The newest stay: a member needs a moment to prove itself, and they take no time at all.
        of_machine: Counter[str] = Counter()
        staying = [one for one in unproven if one.number not in found]
        staying.sort(key=lambda one: -self._since[one.number])
        for place, one in enumerate(staying):
            of_machine[one.machine] += 1
            if of_machine[one.machine] > self._most_of_machine:
                found[one.number] = "was one of too many from there"
            elif place >= self._most:
                found[one.number] = "was one of too many"
        return found


# Instructions of the kernel's filters: code, jump if true, jump if not, operand.
Instruction = tuple[int, int, int, int]
_LOAD_WORD, _LOAD_BYTE, _AND, _SHIFT_RIGHT = 0x20, 0x30, 0x54, 0x74
_IF_EQUAL, _IF_ANY, _RETURN = 0x15, 0x45, 0x06
_NETWORK, _RANDOM = 0x1_0000_0000 - 0x100000, 0x1_0000_0000 - 0x1000 + 56
_FLAGS, _SYN, _SYN_ACK = 13, 0x02, 0x12
_ALL_BYTES = 0xFFFF_FFFF


def syn_filter(slowed: Mapping[str, int], everybody: int) -> list[Instruction]:
    """A filter of the kernel for a listening socket: who asks for a connection, and is not heard.

    Only the first packet of a connection is ever dropped, at random: its sender's kernel tries
    again after a second. (Connections inherit the filter.)

    Args:
        slowed: By machine (``10.0.0.7``, ``2001:db8::/64``), of how many one is heard: 2 to this.
        everybody: The same for all others.
    """
    networks = [(ipaddress.ip_network(name), level) for name, level in slowed.items()]
    of_four = [_of_four(int(n.network_address), k) for n, k in networks if n.version == 4]
    of_six = [_of_six(int(n.network_address) >> 64, k) for n, k in networks if n.version == 6]
    four = [(_LOAD_WORD, 0, 0, _NETWORK + 12), *(step for block in of_four for step in block)]
    six = [step for block in of_six for step in block]
    return [
        (_LOAD_BYTE, 0, 0, _FLAGS),
        (_AND, 0, 0, _SYN_ACK),
        (_IF_EQUAL, 1, 0, _SYN),
        (_RETURN, 0, 0, _ALL_BYTES),
        (_LOAD_BYTE, 0, 0, _NETWORK),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_IF_EQUAL, len(six) + len(_heard(everybody)), 0, 4),
        *six,
        *_heard(everybody),
        *four,
        *_heard(everybody),
    ]


def _of_four(address: int, level: int) -> list[Instruction]:
    return [(_IF_EQUAL, 0, len(_heard(level)), address), *_heard(level)]


def _of_six(network: int, level: int) -> list[Instruction]:
    heard = _heard(level)
    return [
        (_LOAD_WORD, 0, 0, _NETWORK + 8),
        (_IF_EQUAL, 0, len(heard) + 2, network >> 32),
        (_LOAD_WORD, 0, 0, _NETWORK + 12),
        (_IF_EQUAL, 0, len(heard), network & 0xFFFF_FFFF),
        *heard,
    ]


def _heard(level: int) -> list[Instruction]:
    """The end of the filter: one in ``2 ** level`` passes."""
    return [
        (_LOAD_WORD, 0, 0, _RANDOM),
        (_AND, 0, 0, (1 << level) - 1),
        (_IF_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALL_BYTES),
        (_RETURN, 0, 0, 0),
    ]
