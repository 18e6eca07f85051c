"""From what all workers measured to costs, and to the timeline of a typical step.

Computing costs CPU time, as wall time also counts what others did on the same core meanwhile. A
message is seen at both ends::

    sender      |--- send ---|
    receiver  ......... waits .......|-- goes on        lag: from the end of the send

Where its receiver waited for it, the link took the send and the lag; where it came early, its
receipt shows what taking it costs by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.errors import ConfigurationError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.profiling.measurements import Measurements
from graphsplit.profiling.recorder import TimedRun
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram
from graphsplit.schedule.costs import Costs, Host, LinkCost
from graphsplit.schedule.simulation.timeline import Span, Timeline, peak_bytes

_NS = 1e-9
MIN_RUNS = 2  # timed, to estimate from
# What has a field of its own in Costs.
_KNOWN = frozenset(
    {
        Opcode.FORWARD,
        Opcode.BACKWARD,
        Opcode.BACKWARD_INPUT,
        Opcode.BACKWARD_WEIGHT,
        Opcode.SEND,
        Opcode.RECEIVE,
        Opcode.OPTIMIZER,
    }
)
_Key = tuple[int, Opcode, int]  # worker, opcode, operand
_Message = tuple[int, int, int]  # step, edge, microbatch


@dataclass(frozen=True)
class _Moment:
    """One instruction of one run, by worker 0's clock."""

    begin_ns: int
    end_ns: int
    cpu_ns: int


class _Measured:
    """All workers' runs of the steps that all of them measured."""

    def __init__(self, programs: Sequence[WorkerProgram], measured: Sequence[Measurements]) -> None:
        self.programs = programs
        self.measured = measured
        clock = measured[0].clock
        self.offsets = [0 if m.clock == clock else m.offset_ns for m in measured]
        common = set.intersection(*({run.step for run in m.runs} for m in measured))
        self.steps = sorted(common)
        self.runs = [{run.step: run for run in m.runs if run.step in common} for m in measured]
        if len(self.steps) < MIN_RUNS:
            raise ConfigurationError(
                f"{len(self.steps)} training step(s) were measured, after those that warm up; "
                f"expected {MIN_RUNS} or more of one plan\n"
                "  Fix: train ten or more steps with batches of one size."
            )

    def moments(self, worker: int, step: int) -> list[tuple[Instruction, _Moment]]:
        run, offset = self.runs[worker][step], self.offsets[worker]
        begin, begin_cpu = run.begin_ns, run.begin_cpu_ns
        found = []
        ends = zip(self.programs[worker].instructions, run.ends_ns, run.ends_cpu_ns, strict=True)
        for instruction, end, end_cpu in ends:
            found.append((instruction, _Moment(begin + offset, end + offset, end_cpu - begin_cpu)))
            begin, begin_cpu = end, end_cpu
        return found

    def end_of(self, step: int) -> int:
        """When the last worker was done with a step."""
        return max(
            runs[step].ends_ns[-1] + offset if runs[step].ends_ns else 0
            for runs, offset in zip(self.runs, self.offsets, strict=True)
        )

    def begin_of(self, step: int) -> int:
        """When the first worker began with a step."""
        return min(
            runs[step].begin_ns + offset
            for runs, offset in zip(self.runs, self.offsets, strict=True)
        )

    def periods(self) -> dict[int, int]:
        """How long each step took, from the end of the one before.

        Those that followed another; if there is none, as with an evaluation after every step or
        plans that take turns, all of them, from their own beginning.
        """
        following = {
            step: self.end_of(step) - self.end_of(before)
            for before, step in zip(self.steps, self.steps[1:], strict=False)
            if step == before + 1
        }
        alone = {step: self.end_of(step) - self.begin_of(step) for step in self.steps}
        return following or alone


def estimate(
    plan: PartitionPlan,
    programs: Sequence[WorkerProgram],
    measurements: Sequence[Measurements],
    *,
    leader: int,
) -> tuple[Costs, Timeline]:
    """Costs, and the measured timeline of the step whose time is the median.

    Args:
        plan: The plan.
        programs: All workers' programs.
        measurements: What each worker measured, by worker.
        leader: The worker that announces each step.

    Raises:
        ConfigurationError: Too few steps were measured.
    """
    measured = _Measured(programs, measurements)
    costs = _costs(plan, measured, leader)
    return costs, _timeline(plan, measured, costs)


def _costs(plan: PartitionPlan, measured: _Measured, leader: int) -> Costs:
    seconds = _cpu_seconds(measured)
    sends = {key[2]: s for key, s in seconds.items() if key[1] is Opcode.SEND}
    receives, links = _moving(plan, measured, sends)
    between = {
        worker: _between(measured, worker, is_leader=worker == leader)
        for worker in range(len(measured.programs))
    }

    def of(opcode: Opcode) -> dict[int, float]:
        return {key[2]: s for key, s in seconds.items() if key[1] is opcode}

    whole, first, second = map(of, (Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT))
    return Costs(
        forward=of(Opcode.FORWARD),
        # Of a backward that was never run in two parts only the whole is known.
        backward_input={**whole, **first},
        backward_weight=second,
        backward_whole={s: seconds for s, seconds in whole.items() if s in second},
        activations={s: n for m in measured.measured for s, n in m.activations.items()},
        links=links,
        optimizer={key[0]: s for key, s in seconds.items() if key[1] is Opcode.OPTIMIZER},
        send=sends,
        receive=receives,
        others={key: s for key, s in seconds.items() if key[1] not in _KNOWN},
        between=between,
        hosts=_hosts(measured.measured),
        num_threads=max(m.num_threads for m in measured.measured),
        source=f"measured over {len(measured.steps)} steps",
    )


def _cpu_seconds(measured: _Measured) -> dict[_Key, float]:
    """CPU seconds of each instruction: of a typical step, the mean over its microbatches."""
    samples: dict[tuple[int, Instruction], list[int]] = {}
    for worker in range(len(measured.programs)):
        for step in measured.steps:
            for instruction, moment in measured.moments(worker, step):
                samples.setdefault((worker, instruction), []).append(moment.cpu_ns)
    typical: dict[_Key, list[float]] = {}
    for (worker, instruction), found in samples.items():
        key = (worker, instruction.opcode, instruction.operand)
        typical.setdefault(key, []).append(_middle_mean(found) * _NS)
    return {key: statistics.fmean(found) for key, found in typical.items()}


def _middle_mean(samples: Sequence[float]) -> float:
    """The mean of the middle half.

    Medians of the parts add up to less than the median of the whole, as times have long tails.
    """
    cut = len(samples) // 4
    return statistics.fmean(sorted(samples)[cut : len(samples) - cut])


def _moving(
    plan: PartitionPlan, measured: _Measured, sends: Mapping[int, float]
) -> tuple[dict[int, float], dict[tuple[int, int], LinkCost]]:
    """The costs of receiving, by edge, and the links."""
    sent: dict[_Message, int] = {}
    received: dict[_Message, _Moment] = {}
    for worker in range(len(measured.programs)):
        for step in measured.steps:
            for instruction, moment in measured.moments(worker, step):
                message = (step, instruction.operand, instruction.microbatch)
                if instruction.opcode is Opcode.SEND:
                    sent[message] = moment.end_ns
                elif instruction.opcode is Opcode.RECEIVE:
                    received[message] = moment
    early: dict[int, list[float]] = {}  # CPU seconds of messages that were there already
    waited: dict[int, list[tuple[float, float]]] = {}  # lag and CPU seconds of the others
    for (step, edge, microbatch), moment in received.items():
        end = sent.get((step, edge, microbatch))
        if end is None:
            continue
        if moment.begin_ns >= end:
            early.setdefault(edge, []).append(moment.cpu_ns * _NS)
        else:
            lag = max(0, moment.end_ns - end) * _NS
            waited.setdefault(edge, []).append((lag, moment.cpu_ns * _NS))
    receives = {edge: _middle_mean(found) for edge, found in early.items()}
    for edge, found in waited.items():
        # A receiver that looks for its value burns CPU before it comes; the lag is the most.
        receives.setdefault(edge, _middle_mean([min(pair) for pair in found]))
    return receives, _links(plan, measured.measured, sends, waited)


def _links(
    plan: PartitionPlan,
    measurements: Sequence[Measurements],
    sends: Mapping[int, float],
    waited: Mapping[int, Sequence[tuple[float, float]]],
) -> dict[tuple[int, int], LinkCost]:
    pairs = dict.fromkeys((edge.source, edge.destination) for edge in plan.edges)
    samples: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    links: dict[tuple[int, int], LinkCost] = {}
    for pair in pairs:
        low, high = sorted(pair)
        links[pair] = measurements[low].pings.get(high, LinkCost(0.0, float("inf")))
    for index, found in waited.items():
        edge = plan.edges[index]
        pair = (edge.source, edge.destination)
        on_the_wire = edge.meta.size_bytes / links[pair].bytes_per_s
        busy = sends.get(index, 0.0)
        samples[pair] += [max(0.0, busy + lag - on_the_wire) for lag, _ in found]
    for pair, found_latencies in samples.items():
        if found_latencies:
            latency = _middle_mean(found_latencies)
            links[pair] = LinkCost(latency, links[pair].bytes_per_s)
    return links


def _between(measured: _Measured, worker: int, *, is_leader: bool) -> float:
    """Seconds between two programs. The leader's waiting for its loader is a cost as well."""
    runs = [run for run in measured.runs[worker].values() if run.before_ns >= 0]
    if not runs:
        return 0.0
    cpu = _middle_mean([run.begin_cpu_ns - run.before_cpu_ns for run in runs]) * _NS
    if not is_leader:
        return cpu
    return max(cpu, min(run.begin_ns - run.before_ns for run in runs) * _NS)


def _hosts(measurements: Sequence[Measurements]) -> tuple[Host, ...]:
    workers: dict[str, list[int]] = {}
    for found in measurements:
        workers.setdefault(found.host, []).append(found.worker)
    return tuple(
        Host(tuple(ranks), min(measurements[rank].cores for rank in ranks))
        for ranks in workers.values()
    )


def _timeline(plan: PartitionPlan, measured: _Measured, costs: Costs) -> Timeline:
    periods = measured.periods()
    median = statistics.median(periods.values())
    shown = min(periods, key=lambda step: abs(periods[step] - median))
    begin = min(
        _before(runs[shown]) + offset
        for runs, offset in zip(measured.runs, measured.offsets, strict=True)
    )
    workers = tuple(
        tuple(_spans(measured, worker, shown, begin, costs))
        for worker in range(len(measured.programs))
    )
    return Timeline(workers, median * _NS, peak_bytes(plan, workers, costs))


def _before(run: TimedRun) -> int:
    return run.before_ns if run.before_ns >= 0 else run.begin_ns


def _spans(
    measured: _Measured, worker: int, step: int, begin_ns: int, costs: Costs
) -> Iterable[Span]:
    run, offset = measured.runs[worker][step], measured.offsets[worker]
    if run.before_ns >= 0:
        before, begin = run.before_ns + offset - begin_ns, run.begin_ns + offset - begin_ns
        cpu = run.begin_cpu_ns - run.before_cpu_ns
        yield Span(None, before * _NS, max(before, begin - cpu) * _NS, begin * _NS)
    for instruction, moment in measured.moments(worker, step):
        begin_s, end_s = (moment.begin_ns - begin_ns) * _NS, (moment.end_ns - begin_ns) * _NS
        start_s = begin_s
        if instruction.opcode is Opcode.RECEIVE:
            start_s = max(begin_s, end_s - costs.receive.get(instruction.operand, 0.0))
        elif instruction.opcode is Opcode.SEND:
            start_s = max(begin_s, end_s - moment.cpu_ns * _NS)
        yield Span(instruction, begin_s, min(start_s, end_s), end_s)
