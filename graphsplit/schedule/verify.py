"""Proof, before step 0, that a job's programs cannot deadlock.

Every instruction of every worker is a vertex. It waits for the instruction before it, a RECEIVE
also for its SEND, and a SEND also for the RECEIVE that frees its place in the channel (the k-th
message of a channel of depth d needs the (k-d)-th to be taken). If that graph has no cycle, every
instruction gets its turn, whatever the timing.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from graphsplit.errors import ScheduleError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Opcode
from graphsplit.program.lower import WorkerProgram

Vertex = tuple[int, int]  # (worker, position in its program)


def verify_programs(
    plan: PartitionPlan, programs: Sequence[WorkerProgram], *, depth: int = 2
) -> None:
    """Check that sends and receives match one to one and that no cycle of waits exists.

    Raises:
        ScheduleError: Names the message, or prints the cycle of waits.
    """
    sends, receives = (
        _messages(plan, programs, Opcode.SEND),
        _messages(plan, programs, Opcode.RECEIVE),
    )
    if missing := [edge.index for edge in plan.edges if edge.index not in sends]:
        raise ScheduleError(f"edge{missing[0]} is never sent")
    for edge, messages in sends.items():
        order = [microbatch for microbatch, _ in messages]
        other = [microbatch for microbatch, _ in receives.get(edge, [])]
        if order != other:
            raise ScheduleError(
                f"edge{edge}: worker {plan.edges[edge].source} sends microbatches {order}, worker "
                f"{plan.edges[edge].destination} receives {other}"
            )
    if extra := sorted(set(receives) - set(sends)):
        raise ScheduleError(f"edge{extra[0]} is received but never sent")
    graph = _wait_graph(programs)
    for edge, messages in sends.items():
        for k, ((_, send), (_, receive)) in enumerate(zip(messages, receives[edge], strict=True)):
            graph.add_edge(send, receive)
            if k + depth < len(messages):
                graph.add_edge(receive, messages[k + depth][1])
    if not nx.is_directed_acyclic_graph(graph):
        raise ScheduleError(_describe_cycle(graph, programs))


def _messages(
    plan: PartitionPlan, programs: Sequence[WorkerProgram], opcode: Opcode
) -> dict[int, list[tuple[int, Vertex]]]:
    found: dict[int, list[tuple[int, Vertex]]] = {}
    for program in programs:
        for position, instruction in enumerate(program.instructions):
            if instruction.opcode is not opcode:
                continue
            edge = plan.edges[instruction.operand]
            end = edge.source if opcode is Opcode.SEND else edge.destination
            if end != program.worker:
                raise ScheduleError(
                    f"worker {program.worker} runs '{instruction}', but that edge goes from "
                    f"worker {edge.source} to worker {edge.destination}"
                )
            found.setdefault(edge.index, []).append(
                (instruction.microbatch, (program.worker, position))
            )
    return found


def _wait_graph(programs: Sequence[WorkerProgram]) -> nx.DiGraph:
    graph = nx.DiGraph()
    for program in programs:
        nx.add_path(graph, [(program.worker, i) for i in range(len(program.instructions))])
    return graph


def _describe_cycle(graph: nx.DiGraph, programs: Sequence[WorkerProgram]) -> str:
    by_worker = {program.worker: program for program in programs}
    lines = ["the programs wait for each other in a circle:"]
    for (worker, position), (next_worker, _) in nx.find_cycle(graph):
        instruction = by_worker[worker].instructions[position]
        arrow = "then" if next_worker == worker else f"is waited for by worker {next_worker}"
        lines.append(f"  worker {worker} #{position}: {instruction}  ({arrow})")
    return "\n".join(lines)
