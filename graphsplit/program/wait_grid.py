"""A circle of waits as a grid: who stands where, and for whom each waits.

time      now                 then                then
worker 0  RECEIVE mb0 edge1   FORWARD mb0 seg2    SEND mb0 edge0 --> 1
worker 1  RECEIVE mb0 edge0   SEND mb0 edge1 --> 0
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.program.instruction import Instruction

_SHOWN = 2  # instructions at each end of a row
_MAX_ROWS = 8


def draw_circle(rows: Sequence[tuple[int, Sequence[Instruction]]]) -> list[str]:
    """The grid, as lines of text.

    Args:
        rows: The workers of the circle, in the order in which they wait: each with its instructions
            from the one at which it is stopped to the one that the next worker waits for.
    """
    cells: list[list[str]] = []
    for index, (worker, instructions) in enumerate(rows):
        follower = rows[(index + 1) % len(rows)][0]
        texts = [str(i) for i in instructions]
        if len(texts) > 2 * _SHOWN:
            left_out = len(texts) - 2 * _SHOWN
            texts[_SHOWN:-_SHOWN] = [f"... {left_out} more"]
        texts[-1] += f" --> {follower}"
        cells.append([f"worker {worker}", *texts])
    if len(cells) > _MAX_ROWS:
        cells[_MAX_ROWS - 1 : -1] = [[f"... {len(cells) - _MAX_ROWS} more workers"]]
    num_columns = max(map(len, cells))
    header = ["time", "now", *["then"] * (num_columns - 2)]
    table = [header, *cells]
    widths = [max((len(r[c]) for r in table if len(r) > c), default=0) for c in range(num_columns)]
    lines = ["each is stopped at its first instruction; '--> n' is what worker n waits for:"]
    for row in table:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append("  " + "  ".join(padded).rstrip())
    return lines
