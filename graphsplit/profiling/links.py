"""The cost of messages on known links: of each edge of a plan, and the costliest one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from graphsplit.encoding.links import MeasuredLinks, read_links
from graphsplit.errors import ConfigurationError
from graphsplit.partition.dump import human_bytes
from graphsplit.partition.explain.operations import values_read, what_crosses
from graphsplit.partition.plan import Edge, PartitionPlan
from graphsplit.program.instruction import Opcode
from graphsplit.program.lower import WorkerProgram
from graphsplit.schedule.costs import Costs, Host, LinkCost
from graphsplit.text import align, need
from graphsplit.viz.report import seconds_in_words

Links = str | os.PathLike[str] | Mapping[tuple[int, int], tuple[float, float]]
"""A file of ``graphsplit doctor --save-links``; or seconds that a message takes from one rank to
another, and bytes that follow in a second."""
_MOST_EDGES = 12
_VALUE_S = 150e-6
"""What a value takes beyond the wire, which is all that is measured between hosts: two wake-ups,
its header and credit. It is 70 µs where its receiver has just been busy
(`benchmarks/bench_hop.py --only gloo`, 1 KiB), 110 to 200 in a profile of LeNet over a cable,
whose workers wait."""


def with_links(costs: Costs, links: Links, num_workers: int) -> Costs:
    """Costs with these links in place of those that were assumed.

    Args:
        costs: What is known already; of workers of one host it goes on to hold.
        links: The links.
        num_workers: How many workers the plan has.

    Raises:
        ConfigurationError: The file cannot be read, or it has fewer workers; or a link is none.
    """
    if isinstance(links, Mapping):
        return replace(costs, links={**costs.links, **dict(_given(links, num_workers))})
    is_file = isinstance(links, (str, os.PathLike))
    need("explain", "links", links, is_file, "a file of doctor --save-links, or a dict")
    measured = read_links(Path(links))
    host_of = {rank: host.name for host in measured.hosts for rank in host.workers}
    missing = [rank for rank in range(num_workers) if rank not in host_of]
    if missing:
        raise ConfigurationError(
            f"links={os.fspath(links)!r} has {len(host_of)} workers, and the plan {num_workers}\n"
            f"  Fix: measure the hosts with as many slots: graphsplit doctor -H a:2,b:3 "
            f"--save-links FILE"
        )
    hosts = (
        Host(tuple(rank for rank in host.workers if rank < num_workers), host.cores)
        for host in measured.hosts
    )
    found = dict(_between_hosts(measured, host_of, num_workers))
    own = tuple(host for host in hosts if host.workers)
    return replace(costs, links={**costs.links, **found}, hosts=own)


def _given(
    links: Mapping[tuple[int, int], tuple[float, float]], num_workers: int
) -> Iterator[tuple[tuple[int, int], LinkCost]]:
    for pair, (latency_s, bytes_per_s) in links.items():
        is_pair = len(set(pair)) == 2 and all(0 <= rank < num_workers for rank in pair)
        if not is_pair or latency_s < 0 or not bytes_per_s > 0:
            raise ConfigurationError(
                f"links[{pair}] = ({latency_s}, {bytes_per_s}); expected two different ranks below "
                f"{num_workers}, then seconds and bytes per second"
            )
        yield pair, LinkCost(latency_s, bytes_per_s)


def _between_hosts(
    measured: MeasuredLinks, host_of: Mapping[int, str], num_workers: int
) -> Iterator[tuple[tuple[int, int], LinkCost]]:
    known = {(link.source, link.destination): link for link in measured.links}
    for source in range(num_workers):
        for destination in range(num_workers):
            pair = host_of[source], host_of[destination]
            if pair[0] == pair[1]:
                continue
            if pair not in known:
                raise ConfigurationError(
                    f"the link from host {pair[0]} to host {pair[1]} was not measured\n"
                    f"  Fix: `graphsplit doctor` says why; measure again when it is mended"
                )
            link = known[pair]
            latency_s = link.there_and_back_s / 2 + _VALUE_S
            yield (source, destination), LinkCost(latency_s, link.bytes_per_s)


def message_lines(
    plan: PartitionPlan, programs: Sequence[WorkerProgram], costs: Costs, step_s: float
) -> list[str]:
    """Seconds that each edge's messages take in a step, the costliest first; and what that is.

    Args:
        plan: The plan.
        programs: All workers' programs.
        costs: Has the links.
        step_s: Seconds of the step that was predicted.
    """
    sent = Counter(
        instruction.operand
        for program in programs
        for instruction in program.instructions
        if instruction.opcode is Opcode.SEND
    )
    taken = {
        edge.index: sent[edge.index]
        * costs.links[edge.source, edge.destination].seconds(edge.meta.size_bytes)
        for edge in plan.edges
        if sent[edge.index]
    }
    if not taken:
        return []
    read = values_read(plan)
    dearest = sorted(taken, key=lambda index: -taken[index])
    rows = [
        ("edge", "what", "from", "to", "messages", "bytes of each", "seconds"),
        *(
            _row(plan.edges[i], what_crosses(plan, plan.edges[i], read), sent[i], taken[i])
            for i in dearest[:_MOST_EDGES]
        ),
    ]
    lines = align(rows, right=frozenset({4, 5, 6}))
    if rest := dearest[_MOST_EDGES:]:
        lines.append(f"... and {len(rest)} more, {seconds_in_words(sum(taken[i] for i in rest))}")
    first = plan.edges[dearest[0]]
    lines.append(
        f"the costliest is edge{first.index}, from worker {first.source} to {first.destination}: "
        f"{seconds_in_words(taken[first.index])} of messages, in a step of "
        f"{seconds_in_words(step_s)}; all edges: {seconds_in_words(sum(taken.values()))}"
    )
    return lines


def _row(edge: Edge, what: str, count: int, seconds: float) -> tuple[str, ...]:
    ends = str(edge.source), str(edge.destination)
    size = human_bytes(edge.meta.size_bytes)
    return f"edge{edge.index}", what, *ends, str(count), size, seconds_in_words(seconds)
