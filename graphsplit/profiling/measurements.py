"""One worker's measurements, and what follows from them, as text between workers.

The text is JSON of a fixed shape. It is read strictly: what is not a number of the right kind, of
the expected count and within bounds, is refused by name. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphsplit.errors import FrameError
from graphsplit.profiling.recorder import Run
from graphsplit.program.instruction import Opcode
from graphsplit.program.lower import WorkerProgram
from graphsplit.schedule.costs import Costs, Host, Link
from graphsplit.schedule.simulation.timeline import Span, Timeline

_MAX_NS = 1 << 62
_MAX_TEXT = 256
_MAX_WORKERS = 1 << 16


@dataclass(frozen=True)
class Measurements:
    """One worker's measurements.

    Attributes:
        worker: Its rank.
        clock: Whose clock its times are of: equal for workers of one machine.
        host: Whose cores it shares: equal for workers that may use the same ones.
        cores: How many they are.
        num_threads: How many threads an operation uses.
        offset_ns: What to add to its times to get those of worker 0's clock.
        runs: Its runs of the program.
        activations: Bytes that each of its segments saves for backward.
        pings: What an empty message to a worker takes, and how many bytes a second follow.
        resident_bytes: The most memory that its process has held.
    """

    worker: int
    clock: str
    host: str
    cores: int
    num_threads: int
    offset_ns: int
    runs: tuple[Run, ...]
    activations: Mapping[int, int] = field(default_factory=dict)
    pings: Mapping[int, Link] = field(default_factory=dict)
    resident_bytes: int = 0

    def to_text(self) -> str:
        """As JSON."""
        content = {
            "worker": self.worker,
            "clock": self.clock,
            "host": self.host,
            "cores": self.cores,
            "num_threads": self.num_threads,
            "offset_ns": self.offset_ns,
            "resident_bytes": self.resident_bytes,
            "activations": [[s, size] for s, size in self.activations.items()],
            "pings": [[p, link.latency_s, link.bytes_per_s] for p, link in self.pings.items()],
            "runs": [
                [
                    [r.step, r.before_ns, r.before_cpu_ns, r.begin_ns, r.begin_cpu_ns],
                    list(r.ends_ns),
                    list(r.ends_cpu_ns),
                ]
                for r in self.runs
            ],
        }
        return json.dumps(content)

    @classmethod
    def from_text(cls, text: str, *, worker: int, num_instructions: int) -> Measurements:
        """Read what a worker sent.

        Args:
            text: The text.
            worker: The worker that sent it.
            num_instructions: How many instructions its program has.

        Raises:
            FrameError: It is malformed; names the field.
        """
        read = _Reader(text, f"what worker {worker} measured")
        found = cls(
            worker=read.integer("worker", worker, worker),
            clock=read.text("clock"),
            host=read.text("host"),
            cores=read.integer("cores", 1, 1 << 20),
            num_threads=read.integer("num_threads", 1, 1 << 20),
            offset_ns=read.integer("offset_ns", -_MAX_NS, _MAX_NS),
            resident_bytes=read.integer("resident_bytes", 0, _MAX_NS),
            activations={int(row[0]): int(row[1]) for row in read.rows("activations", (int, int))},
            pings={
                int(row[0]): Link(row[1], row[2])
                for row in read.rows("pings", (int, float, float), least=1e-12)
            },
            runs=tuple(read.run(row, num_instructions) for row in read.items("runs")),
        )
        read.finish()
        return found


def costs_to_text(costs: Costs) -> str:
    """Costs as JSON."""
    content: dict[str, Any] = {
        name: [[key, value] for key, value in getattr(costs, name).items()] for name in _MAPPINGS
    }
    content["links"] = [[*pair, k.latency_s, k.bytes_per_s] for pair, k in costs.links.items()]
    content["others"] = [[w, o.value, a, s] for (w, o, a), s in costs.others.items()]
    content["hosts"] = [[list(host.workers), host.cores] for host in costs.hosts]
    content["num_threads"], content["source"] = costs.num_threads, costs.source
    return json.dumps(content)


_SECONDS = ("forward", "backward_input", "backward_weight", "backward_whole", "optimizer",
            "send", "receive", "between")  # fmt: skip
_MAPPINGS = (*_SECONDS, "activations")


def costs_from_text(text: str) -> Costs:
    """Read costs that a worker sent.

    Raises:
        FrameError: They are malformed; names the field.
    """
    read = _Reader(text, "the costs that worker 0 sent")
    seconds = {
        name: {int(row[0]): float(row[1]) for row in read.rows(name, (int, float))}
        for name in _SECONDS
    }
    links = read.rows("links", (int, int, float, float), least=0.0)
    others = read.rows("others", (int, str, int, float), least=-1)
    hosts = []
    for row in read.items("hosts"):
        if not _is_list(row, 2) or not isinstance(row[0], list):
            raise read.error("hosts", "workers and cores", row)
        workers = tuple(read.number("hosts", w, int, 0, _MAX_WORKERS) for w in row[0])
        hosts.append(Host(workers, read.number("hosts", row[1], int, 1, 1 << 20)))
    found = Costs(
        **seconds,
        activations={int(k): int(v) for k, v in read.rows("activations", (int, int))},
        links={(int(a), int(b)): Link(latency, rate) for a, b, latency, rate in links},
        others={(w, read.opcode("others", o), a): s for w, o, a, s in others},
        hosts=tuple(hosts),
        num_threads=read.integer("num_threads", 1, 1 << 20),
        source=read.text("source"),
    )
    read.finish()
    return found


def timeline_to_text(timeline: Timeline, programs: Sequence[WorkerProgram]) -> str:
    """A timeline as JSON; instructions by their place in the program."""
    workers = []
    for spans, program in zip(timeline.workers, programs, strict=True):
        places = {instruction: place for place, instruction in enumerate(program.instructions)}
        workers.append(
            [
                [-1 if s.instruction is None else places[s.instruction],
                 s.begin_s, s.start_s, s.end_s]
                for s in spans
            ]
        )  # fmt: skip
    content = {
        "workers": workers,
        "step_s": timeline.step_s,
        "peak_bytes": list(timeline.peak_bytes),
    }
    return json.dumps(content)


def timeline_from_text(text: str, programs: Sequence[WorkerProgram]) -> Timeline:
    """Read a timeline that a worker sent.

    Raises:
        FrameError: It is malformed; names the field.
    """
    read = _Reader(text, "the timeline that worker 0 sent")
    workers = read.items("workers")
    if len(workers) != len(programs):
        raise read.error("workers", f"{len(programs)} of them", len(workers))
    found = []
    for rows, program in zip(workers, programs, strict=True):
        spans = []
        for place, begin, start, end in read.checked("workers", rows, (int, float, float, float)):
            if not -1 <= place < len(program.instructions) or not begin <= start <= end:
                raise read.error("workers", "spans of the program", [place, begin, start, end])
            instruction = program.instructions[place] if place >= 0 else None
            spans.append(Span(instruction, begin, start, end))
        found.append(tuple(spans))
    step_s = read.number("step_s", read.take("step_s"), float, 0, math.inf)
    peaks = [read.number("peak_bytes", n, int, 0, _MAX_NS) for n in read.items("peak_bytes")]
    read.finish()
    return Timeline(tuple(found), step_s, tuple(peaks))


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


class _Reader:
    """Reads the fields of a JSON object, each once, and refuses what is not as expected."""

    def __init__(self, text: str, what: str) -> None:
        self._what = what
        try:
            self._fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"{what} is no JSON: {error}") from None
        if not isinstance(self._fields, dict):
            raise self.error("it", "an object", self._fields)

    def error(self, name: str, expected: str, found: Any) -> FrameError:
        return FrameError(f"{self._what}: {name} should be {expected}, and is {found!r:.80}")

    def take(self, name: str) -> Any:
        if name not in self._fields:
            raise FrameError(f"{self._what}: {name} is missing")
        return self._fields.pop(name)

    def finish(self) -> None:
        if self._fields:
            raise FrameError(f"{self._what}: {sorted(self._fields)[0]!r:.80} is not expected")

    def number(self, name: str, value: Any, kind: type, least: float, most: float) -> Any:
        is_number = isinstance(value, (int, float) if kind is float else int)
        if not is_number or isinstance(value, bool) or not least <= value <= most:
            raise self.error(name, f"a number from {least:g} to {most:g}", value)
        return kind(value)

    def integer(self, name: str, least: int, most: int) -> int:
        return int(self.number(name, self.take(name), int, least, most))

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise self.error(name, f"a text of at most {_MAX_TEXT} characters", value)
        return value

    def items(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise self.error(name, "a list", value)
        return value

    def rows(self, name: str, kinds: tuple[type, ...], *, least: float = 0.0) -> list[list[Any]]:
        """A list of lists, each of as many values of these kinds."""
        return self.checked(name, self.items(name), kinds, least=least)

    def checked(
        self, name: str, rows: Any, kinds: tuple[type, ...], *, least: float = -math.inf
    ) -> list[list[Any]]:
        if not isinstance(rows, list):
            raise self.error(name, "a list", rows)
        for row in rows:
            if not _is_list(row, len(kinds)):
                raise self.error(name, f"lists of {len(kinds)} values", row)
            for value, kind in zip(row, kinds, strict=True):
                if kind is str:
                    self.opcode(name, value)
                else:
                    low = -1 if kind is int else least
                    self.number(name, value, kind, low, _MAX_NS if kind is int else math.inf)
        return rows

    def opcode(self, name: str, value: Any) -> Opcode:
        if not isinstance(value, str) or value not in Opcode.__members__:
            raise self.error(name, "an opcode", value)
        return Opcode[value]

    def run(self, row: Any, num_instructions: int) -> Run:
        if not _is_list(row, 3) or not _is_list(row[0], 5):
            raise self.error("runs", "a run of three lists", row)
        head = [self.number("runs", value, int, -1, _MAX_NS) for value in row[0]]
        ends = []
        for values, begin in zip(row[1:], (head[3], head[4]), strict=True):
            if not _is_list(values, num_instructions):
                raise self.error("runs", f"times of {num_instructions} instructions", values)
            before = begin
            for value in values:
                before = self.number("runs", value, int, before, _MAX_NS)
            ends.append(tuple(values))
        return Run(*head, *ends)
