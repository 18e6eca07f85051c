"""Looks at everything that a small cluster can do while two things go wrong. Takes a while.

    python tests/cluster/membership_check.py [--rules NAME] [--kinds kill,break] [--jobs 2]

One process per set of rules, and a line about each now and then: see membership.md in
docs/explanation.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file

from membership_exploration import Explored, explore, prove_ends, prove_good_ends
from membership_failures import KINDS, Budget
from membership_head import RULES
from membership_model import Model

PROGRESS_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore one set of rules here, or each in a process of its own."""
    options = _options(arguments)
    kinds = options.kinds.split(",")
    if options.rules is not None:
        return _check(options.rules, options.failures, kinds)
    same = ["--kinds", options.kinds, "--failures", str(options.failures)]
    commands = [[sys.executable, __file__, "--rules", name, *same] for name in RULES]
    with ThreadPoolExecutor(options.jobs) as pool:
        return max(pool.map(subprocess.call, commands))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", choices=list(RULES), help="one set of rules; else all of them")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of what may go wrong")
    parser.add_argument("--failures", type=int, default=2, help="how many things go wrong")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    return parser.parse_args(arguments)


def _check(name: str, failures: int, kinds: list[str]) -> int:
    began, said = time.monotonic(), time.monotonic()

    def tell(found: Explored) -> None:
        nonlocal said
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            print(f"{name}: {_so_far(found, began)}", flush=True)

    found = Explored(Model(RULES[name], Budget(failures, frozenset(kinds))))
    try:
        explore(found, progress=tell)
        prove_ends(found)
        if failures == 1:
            prove_good_ends(found)
    except AssertionError as error:
        print(f"{name}: {error}", flush=True)
        return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    line = f"{_so_far(found, began)}, {peak:.1f} GiB: nothing is wrong"
    print(f"{name}: {failures} of {', '.join(kinds)}: {line}", flush=True)
    return 0


def _so_far(found: Explored, began: float) -> str:
    waiting = len(found.worlds) - len(found.ends_at)
    rest = f" ({waiting:,} to be looked at)" if waiting else ""
    took = time.monotonic() - began
    return f"{len(found.worlds):,} worlds{rest}, {len(found.edges):,} steps, {took:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
