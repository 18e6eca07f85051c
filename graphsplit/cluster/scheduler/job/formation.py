"""Admission and ranks: pure functions over registrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphsplit.cluster.scheduler.job.rules import JobRules
from graphsplit.cluster.wire.messages import Register
from graphsplit.security.addresses import read_address
from graphsplit.settings import WORKER_ROLE
from graphsplit.version import different_versions

_MAX_SHOWN = 32


def assign_ranks(wishes: Sequence[int | None], num_workers: int) -> list[int]:
    """One rank per registration, given in the order of arrival.

    A wished rank is kept; the others get the lowest free ranks in the order they arrived::

        wishes  None  0     None  3          (five workers)
        ranks   1     0     2     3
    """
    taken = {wish for wish in wishes if wish is not None}
    free = (rank for rank in range(num_workers) if rank not in taken)
    return [next(free) if wish is None else wish for wish in wishes]


def missing_ranks(registered: Sequence[Register], num_workers: int) -> list[int]:
    """The ranks that nobody would have if all the registered workers were all there are."""
    held = set(assign_ranks([one.wished_rank for one in registered], num_workers))
    return [rank for rank in range(num_workers) if rank not in held]


@dataclass(frozen=True)
class Holders:
    """The registered workers that a newcomer is compared with.

    Attributes:
        of_rank: Who holds the rank that it wishes.
        of_name: Who holds its name.
        first: The first to register: all must fit each other.
        num_registered: How many have registered.
    """

    of_rank: Register | None = None
    of_name: Register | None = None
    first: Register | None = None
    num_registered: int = 0


def misfit(new: Register, first: Register | None, *, rules: JobRules) -> str | None:
    """Why this worker can never take part, whoever else does; None if it can."""
    return (
        _role_refusal(new)
        or _size_refusal(new, rules.num_workers)
        or _policy_refusal(new, rules.recovery)
        or (_difference_refusal(new, first) if first is not None else None)
    )


def refusal(new: Register, holders: Holders, *, rules: JobRules) -> str | None:
    """Why this worker may not take part, or None. The most telling reason comes first."""
    return (
        misfit(new, None, rules=rules)
        or _duplicate_refusal(new, holders)
        or _surplus_refusal(holders.num_registered, rules.num_workers)
        or (_difference_refusal(new, holders.first) if holders.first is not None else None)
    )


def _role_refusal(new: Register) -> str | None:
    if new.role == WORKER_ROLE:
        return None
    return (
        f"its role is {new.role!r}, but only {WORKER_ROLE} may register\n"
        f"  Fix: start it with MS_ROLE={WORKER_ROLE}"
    )


def _size_refusal(new: Register, num_workers: int) -> str | None:
    rank = new.wished_rank
    if rank is not None and not 0 <= rank < num_workers:
        return (
            f"it asks for rank {rank} (MS_NODE_ID), but the job has workers 0 to "
            f"{num_workers - 1}\n"
            f"  Fix: start with MS_WORKER_NUM={max(rank + 1, 1)} everywhere, or choose a rank from "
            f"0 to {num_workers - 1}"
        )
    if new.num_workers != num_workers:
        return (
            f"it was started with MS_WORKER_NUM={new.num_workers}, the scheduler with "
            f"MS_WORKER_NUM={num_workers}\n"
            f"  Fix: set the same MS_WORKER_NUM in every process of the job"
        )
    return None


def _policy_refusal(new: Register, recovery: str) -> str | None:
    if new.recovery == recovery:
        return None
    return (
        f"it was started with the recovery policy {new.recovery}, the scheduler with {recovery}\n"
        f"  Fix: set the same GS_RECOVERY (or MS_ENABLE_RECOVERY) in every process of the job"
    )


def _duplicate_refusal(new: Register, holders: Holders) -> str | None:
    if holders.of_rank is not None:
        return (
            f"rank {new.wished_rank} is already held by the worker at {holders.of_rank.process}\n"
            f"  Fix: give every worker an MS_NODE_ID of its own; if that one is left over from "
            f"an earlier run, end it first"
        )
    if holders.of_name is not None:
        return (
            f"the name {new.node_id!r} (MS_NODE_ID) is already held by the worker at "
            f"{holders.of_name.process}\n"
            f"  Fix: give every worker an MS_NODE_ID of its own, or unset it everywhere"
        )
    return None


def _surplus_refusal(num_registered: int, num_workers: int) -> str | None:
    if num_registered < num_workers:
        return None
    return (
        f"the job has {num_workers} workers, and all of them have registered\n"
        f"  Fix: start with a larger MS_WORKER_NUM everywhere, or start fewer workers"
    )


def _difference_refusal(new: Register, first: Register) -> str | None:
    for name in sorted(set(new.versions) | set(first.versions)):
        mine, theirs = new.versions.get(name, "none"), first.versions.get(name, "none")
        if mine != theirs:
            return different_versions(name, new.who, mine, first.who, theirs)
    if new.script_digest != first.script_digest:
        return (
            f"{new.who} runs another script than {first.who}: digest "
            f"{new.script_digest or 'none'} against {first.script_digest or 'none'}\n"
            f"  Fix: start every worker with the same file"
        )
    return _loopback_refusal(new, first)


def _loopback_refusal(new: Register, first: Register) -> str | None:
    """A worker that listens on loopback can be dialed by those of its own host alone."""
    mine, theirs = _listens_on_loopback(new), _listens_on_loopback(first)
    if mine is None or theirs is None or mine == theirs:
        return None
    there, other = (new, first) if mine else (first, new)
    return (
        f"{there.who} listens on {there.endpoints['grpc']}, its own host's loopback, and "
        f"{other.who} on {other.endpoints['grpc']}\n"
        f"  Fix: set MS_WORKER_IP for {there.who} to an address that the others reach"
    )


def _listens_on_loopback(one: Register) -> bool | None:
    """None for a worker that has no port of its own."""
    endpoint = one.endpoints.get("grpc")
    if endpoint is None:
        return None
    host = endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]")
    address = read_address(host)
    return address is not None and address.is_loopback


def bit_warnings(by_rank: Sequence[Register]) -> tuple[str, ...]:
    """Differences that do not stop the job but change its bits, in the order of ranks."""
    warnings = []
    threads = [str(one.num_threads) for one in by_rank]
    if len(set(threads)) > 1:
        warnings.append(
            f"thread counts differ ({_by_rank(threads)}): results may not be those of one process "
            f"bit for bit. Fix: set the same OMP_NUM_THREADS for every worker"
        )
    capabilities = [one.cpu_capability or "unknown" for one in by_rank]
    if len(set(capabilities)) > 1:
        warnings.append(
            f"CPU capabilities differ ({_by_rank(capabilities)}): results may not be those of one "
            f"process bit for bit. Fix: set the same ATEN_CPU_CAPABILITY for every worker"
        )
    seeds = [str(one.seed) for one in by_rank]
    if len({seed for seed in seeds if seed != "None"}) > 1:
        warnings.append(
            f"the workers' scripts set different seeds ({_by_rank(seeds)}): all of them go on with "
            f"the first. Fix: set the same seed on every worker, or none"
        )
    return tuple(warnings)


def choose_seed(by_rank: Sequence[Register], random_seed: int) -> int:
    """One seed for all: that of the lowest rank whose script set one, else the random one."""
    return next((one.seed for one in by_rank if one.seed is not None), random_seed)


def _by_rank(values: Sequence[str]) -> str:
    shown = [f"worker {rank}: {value}" for rank, value in enumerate(values[:_MAX_SHOWN])]
    return ", ".join(shown) + (", ..." if len(values) > _MAX_SHOWN else "")
