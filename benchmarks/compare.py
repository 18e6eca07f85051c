"""Compare two JSON files of benchmarks, row by row.

    python benchmarks/compare.py before.json after.json [--worse-by 0.05]

A row has got worse where its ratio has moved to the wrong side by more than that, and the rounds of
the two runs do not even overlap. Ratios are compared, not seconds: both sides of a row ran on the
same machine in the same minutes. Ends with status 1 where a row has got worse.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

File = Mapping[str, Any]
Key = tuple[str, str, str]


def rows_of(content: File) -> dict[Key, File]:
    """The rows of a file, by what they say they are."""
    return {(row["work"], row["against"], row["figure"]): row for row in content.get("rows", ())}


def differences(before: File, after: File) -> list[str]:
    """The differences between two files in hardware, versions and conditions."""
    found = []
    for part in ("hardware", "versions", "conditions"):
        a, b = before.get(part, {}), after.get(part, {})
        found += [
            f"{part}: {name} {a.get(name)!r} and {b.get(name)!r}"
            for name in sorted({*a, *b} - {"load_average_before"})
            if a.get(name) != b.get(name)
        ]
    return found


def has_worsened(before: File, after: File, worse_by: float) -> bool:
    """Whether a row is worse by more than chance."""
    sign = 1 if before["at_most"] else -1
    moved = sign * (after["ratio"] - before["ratio"]) / before["ratio"]
    low, high = (after, before) if before["at_most"] else (before, after)
    return moved > worse_by and low["spread"][0] > high["spread"][1]


def line(key: Key, before: File, after: File, *, is_worse: bool) -> str:
    """One row of both files."""
    change = after["ratio"] / before["ratio"]
    bits = {before.get("bits", ""), after.get("bits", "")} - {"", "equal"}
    return (
        f"{key[0]}, against {key[1]}\n    {key[2]}: {before['ratio']:.3f} -> {after['ratio']:.3f} "
        f"(x{change:.3f}; spread {before['spread'][0]:.3f} to {before['spread'][1]:.3f}, then "
        f"{after['spread'][0]:.3f} to {after['spread'][1]:.3f})"
        + ("  WORSE" if is_worse else "")
        + (f"  BITS: {', '.join(sorted(bits))}" if bits else "")
    )


def compare(before: File, after: File, worse_by: float) -> tuple[list[str], bool]:
    """The comparison as lines, and whether anything has got worse."""
    lines = [f"not the same: {text}" for text in differences(before, after)]
    old, new = rows_of(before), rows_of(after)
    any_worse = False
    for key in [key for key in old if key in new]:
        is_worse = has_worsened(old[key], new[key], worse_by)
        any_worse |= is_worse
        lines.append(line(key, old[key], new[key], is_worse=is_worse))
    lines += [f"only in the first: {key[0]}, against {key[1]}" for key in old if key not in new]
    lines += [f"only in the second: {key[0]}, against {key[1]}" for key in new if key not in old]
    return lines, any_worse


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--worse-by", type=float, default=0.05, help="part of a ratio to ignore")
    arguments = parser.parse_args()
    files = [json.loads(path.read_text()) for path in (arguments.before, arguments.after)]
    lines, any_worse = compare(*files, arguments.worse_by)
    print("\n".join(lines))
    sys.exit(any_worse)


if __name__ == "__main__":
    main()
