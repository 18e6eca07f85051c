"""The cost of mutual TLS for a step of LeNet on five workers over gRPC.

    python benchmarks/bench_tls.py [--rounds 3] [--steps 150] [--json FILE]

The sides are jobs of their own, which alternate: a figure is the median step. What a single value
takes under TLS is measured by ``bench_hop.py --only TLS``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from common import Row, Samples, compared, parser, timed
from common_cluster import launch, report, run
from common_models import CASES

from graphsplit.security.issue import fill_folder

WARM_UP = 20
SIDES = ("TLS", "plain")


def work(arguments: Namespace) -> None:
    """One worker's part."""
    model = CASES["lenet"].model()
    batches = CASES["lenet"].batches(arguments.steps)
    times = [timed(lambda batch=batch: model.train_step(*batch))[0] for batch in batches]
    report({"step_s": statistics.median(times[WARM_UP:])})


def rows(arguments: Namespace) -> Iterator[Row]:
    """Jobs with and without TLS, in turn."""
    os.environ["GS_TRANSPORT"] = "grpc"
    found = {side: Samples() for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        fill_folder(Path(folder), num_workers=5, hosts=[], days=1)
        for _ in range(arguments.rounds):
            for side in SIDES:
                certificates = ["--certs", folder] if side == "TLS" else []
                reports = launch(__file__, 5, arguments, launcher=certificates)
                found[side].seconds.append(reports[0]["step_s"])
    sides = [(side, samples) for side, samples in found.items()]
    yield compared("a step of LeNet on 5 workers over gRPC, batch 32", *sides, reach=None)


def main() -> None:
    """Read the command line."""
    run(parser(__doc__, rounds=3, steps=150), work, rows)


if __name__ == "__main__":
    main()
