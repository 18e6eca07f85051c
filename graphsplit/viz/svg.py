"""Timelines as one SVG picture: side by side, on one scale, one row per worker.

In a row the upper part is compute, coloured by microbatch, forward light and backward dark; the
strip below it is sends and receives. Grey stripes are waits. A browser shows what a bar is when the
pointer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.schedule.simulation.timeline import Span, Timeline
from graphsplit.viz.names import initials, is_move, is_of_segment, title

_PANEL, _GAP, _LEFT, _TOP, _ROW, _STRIP, _FOOT = 760, 50, 70, 64, 46, 10, 86
_LETTER = 6.5  # width of a letter
_THINNEST = 0.02  # what is thinner is left out
_GOLDEN = 137.508  # degrees: neighbours get colours far apart
_STYLE = """
text { font: 11px sans-serif; fill: #222 } .small { font-size: 10px } .title { font-size: 14px }
.bar { stroke: #fff; stroke-width: 0.4 } .axis { stroke: #bbb; stroke-width: 0.5 }
""".strip()
_STRIPES = (
    '<pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="5" height="5" fill="#f1f1f1"/>'
    '<line x1="0" y1="0" x2="0" y2="5" stroke="#c8c8c8" stroke-width="2"/></pattern>'
)


def draw_timelines(plan: PartitionPlan, timelines: Mapping[str, Timeline]) -> str:
    """The picture, as the text of an SVG file.

    Args:
        plan: The plan, for names.
        timelines: The timelines, by name, from left to right; all begin at 0.
    """
    longest = max((_end(t) for t in timelines.values()), default=0.0) or 1.0
    width = _LEFT + len(timelines) * (_PANEL + _GAP)
    bottom = _TOP + plan.num_workers * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + _FOOT}" '
        f'viewBox="0 0 {width} {bottom + _FOOT}">',
        f"<style>{_STYLE}</style><defs>{_STRIPES}</defs>",
        f'<rect width="{width}" height="{bottom + _FOOT}" fill="#fff"/>',
    ]
    for worker in range(plan.num_workers):
        parts.append(_text(8, _TOP + worker * _ROW + 20, f"worker {worker}"))
    for index, (name, timeline) in enumerate(timelines.items()):
        left = _LEFT + index * (_PANEL + _GAP)
        head = f"{name}: {_time(timeline.step_s)} a step"
        parts.append(_text(left, 22, head, style="title"))
        parts += _axis(left, bottom, longest)
        for worker, spans in enumerate(timeline.workers):
            idle = f"idle {timeline.idle_share(worker):.0%}"
            parts.append(_text(left + _PANEL + 4, _TOP + worker * _ROW + 20, idle, style="small"))
            for span in spans:
                parts += _bars(plan, span, left, _TOP + worker * _ROW, _PANEL / longest)
    parts += _legend(bottom + 40, timelines.values())
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _end(timeline: Timeline) -> float:
    return max((spans[-1].end_s for spans in timeline.workers if spans), default=0.0)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _text(x: float, y: float, content: str, *, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(content)}</text>'


def _axis(left: float, bottom: float, longest: float) -> Iterable[str]:
    """Ticks at round times."""
    step = 10 ** math.floor(math.log10(longest / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if longest / (step * factor) <= 8)
    for number in range(int(longest / step) + 1):
        x = left + number * step * _PANEL / longest
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>'
        yield _text(x, _TOP - 12, _time(number * step) if number else "0", style="small")


def _bars(plan: PartitionPlan, span: Span, left: float, top: float, scale: float) -> Iterable[str]:
    move = is_move(span.instruction)
    high = _STRIP if move else _ROW - _STRIP - 10
    y = top + (_ROW - _STRIP - 8 if move else 0)
    what = title(plan, span.instruction)
    if span.wait_s * scale > _THINNEST:
        waits = f"waits {_time(span.wait_s)}: {what}"
        # A wait takes the whole row: nothing else happens meanwhile.
        x = left + span.begin_s * scale
        yield _bar(x, top, span.wait_s * scale, _ROW - 8, "url(#wait)", waits)
    if span.busy_s * scale > _THINNEST:
        x, width = left + span.start_s * scale, span.busy_s * scale
        yield _bar(x, y, width, high, colour(span.instruction), f"{what}, {_time(span.busy_s)}")
        label = initials(span.instruction)
        if not move and label and width > _LETTER * len(label) + 2:
            yield _text(x + 2, y + 19, label, style="small")


def _bar(x: float, y: float, width: float, height: float, fill: str, about: str) -> str:
    return (
        f'<rect class="bar" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}" '
        f'fill="{fill}"><title>{escape(about)}</title></rect>'
    )


def colour(instruction: Instruction | None) -> str:
    """Hue by microbatch, lightness by what is done."""
    if instruction is None:
        return "#8a8a8a"
    if instruction.opcode is Opcode.SEND:
        return "#c0392b"
    if instruction.opcode is Opcode.RECEIVE:
        return "#2471a3"
    if not is_of_segment(instruction):
        return "#555555"
    hue = (210 + instruction.microbatch * _GOLDEN) % 360
    lightness = 78 if instruction.opcode is Opcode.FORWARD else 56
    if instruction.opcode is Opcode.BACKWARD_WEIGHT:
        lightness = 40
    return f"hsl({hue:.0f},62%,{lightness}%)"


def _legend(y: float, timelines: Iterable[Timeline]) -> Iterable[str]:
    kinds: dict[str, Instruction | None] = {}
    for timeline in timelines:
        for spans in timeline.workers:
            for span in spans:
                name = "between steps"
                if span.instruction is not None:
                    name = span.instruction.opcode.value.lower().replace("_", " ")
                kinds.setdefault(name, span.instruction)
    x = float(_LEFT)
    for name, instruction in [*kinds.items(), ("waits", None)]:
        fill = "url(#wait)" if name == "waits" else colour(instruction)
        yield f'<rect x="{x:.1f}" y="{y}" width="14" height="12" fill="{fill}"/>'
        yield _text(x + 18, y + 10, name, style="small")
        x += 34 + _LETTER * len(name)
    note = "Bars: compute above, its microbatch as colour and number; sends and receives below."
    yield _text(_LEFT, y + 30, note, style="small")
