"""Several hosts: what ``run -H`` adds to a start, and steps over links that are shaped.

    python benchmarks/bench_hosts.py [--rounds 7] [--only start gpt lenet] [--rates 1000 100]

``start``: a job of two workers that does nothing, from launch to exit, by ``graphsplit run -n 2``
and by ``graphsplit run -H a,b``, in turns. The figure is the difference of the medians.

``gpt`` and ``lenet``: two hosts with a worker each, joined by a cable that ``tc`` shapes (tbf).
``graphsplit doctor`` measures it, ``model.explain(*batch, links=...)`` predicts a step before
anything is trained, and then steps are measured; and the same on a cable that is not shaped. The
GPT-like one has the schedule "auto", which is for slow links.

Hosts are those of the tests: daemons of openssh-server on addresses of loopback, and network
namespaces, for which this must be root. Nothing of both is left.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "launchers"))

from common import Row, Samples, checked, parser, timed, words_of
from common_cluster import Report, report, run
from common_models import CASES, Case, place_all
from ssh_hosts import ROOT, Cluster, cluster, networked, of_the_test, run_command

import graphsplit as gs

WITHIN, AT_MOST_S, FAST = 0.15, 1.5, "not shaped"
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
NOTHING = "import graphsplit as gs\n\ngs.init()\n"


def place_lenet_on_two(net: Any) -> None:
    """Convolutions here, what follows there."""
    place_all([(net.conv1, net.conv2), (net.fc1, net.fc2, net.fc3)])


HERE: Mapping[str, Case] = {
    "gpt": replace(CASES["gpt"], options={"schedule": "auto"}),
    "lenet": replace(CASES["lenet"], place=place_lenet_on_two, num_workers=2, num_steps=20),
}


def work(arguments: Namespace) -> None:
    """One worker's part."""
    case = HERE[arguments.only[0]]
    model, batches = case.model(), case.batches(case.num_steps)
    predicted = ""
    if gs.get_rank() == 0:
        predicted = str(model.explain(*batches[0], links=arguments.links))
    gs.barrier()
    model.train(1, batches)  # plans, and warms up
    seconds = []
    for _ in range(arguments.rounds):
        gs.barrier()
        seconds.append(timed(lambda: model.train(1, batches))[0] / case.num_steps)
    report({"seconds": seconds, "predicted": predicted})


def launched(hosts: Cluster, *words: str, inside: Sequence[str] = (), **variables: str) -> float:
    """Seconds of a job on these hosts, from launch to exit."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    begun_s = time.monotonic()
    checked([*inside, *run_command(hosts, *words)], env=own)
    return time.monotonic() - begun_s


def start_row(rounds: int) -> Row:
    """By SSH, and on this machine."""
    there, here = Samples(), Samples()
    with tempfile.TemporaryDirectory() as name:
        folder, own = Path(name), of_the_test(Path(name))
        script = folder / "nothing.py"
        script.write_text(NOTHING)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        local = [sys.executable, "-m", "graphsplit", "run", "-n", "2", str(script)]
        with cluster(folder, a=own, b=own) as hosts:
            for number in range(rounds + 1):
                begun_s = time.monotonic()
                checked(local, env=environment)
                alone_s = time.monotonic() - begun_s
                by_ssh_s = launched(hosts, "-H", "a,b", str(script))
                if number:  # the first round warms up
                    here.seconds.append(alone_s)
                    there.seconds.append(by_ssh_s)
    later = [a - b for a, b in zip(there.seconds, here.seconds, strict=True)]
    return Row(
        work="a job of two workers on two hosts, from launch to exit",
        against="the same on this machine",
        figure="run -H minus run -n, seconds",
        ratio=there.median_s - here.median_s,
        spread=(min(later), max(later)),
        reach=AT_MOST_S,
        at_most=True,
        sides={"run -H a,b": there.summary(), "run -n 2": here.summary()},
    )


@contextmanager
def shaped(folder: Path, rate: str) -> Iterator[tuple[Cluster, list[str]]]:
    """Two hosts, and the command that runs another one beside the first of them."""
    own = of_the_test(folder)
    with networked(folder, a=own, b=own) as (hosts, names):
        for name in names if rate != FAST else ():
            # What a wire holds back must not pass at once: no more than it carries in 0.1 ms.
            burst = max(3000, int(rate) * 1_000_000 // 8 // 10_000)
            shape = f"qdisc add dev eth0 root tbf rate {rate}mbit burst {burst} latency 50ms"
            subprocess.run(["tc", "-n", name, *shape.split()], check=True)
        yield hosts, ["ip", "netns", "exec", names[0]]


def on_cable(script: str, rate: str, arguments: Namespace, **changed: Any) -> list[Report]:
    """As ``launch``, each of two workers on a host of its own."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        more = {"json": None, "notes": None, "address": "10.118.0.1", **changed}
        given = words_of({**vars(arguments), **more})
        own = {"MS_NODE_TIMEOUT": "600", "GS_BENCH_REPORT": made}
        with shaped(folder, rate) as (hosts, inside):
            launched(hosts, "-H", "a,b", "--", script, *given, inside=inside, **own)
        return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def measured(name: str, rate: str, arguments: Namespace) -> tuple[list[float], float, str]:
    """The step of each round, the predicted one, and what was predicted in words."""
    with tempfile.TemporaryDirectory() as made:
        folder, links = Path(made), str(Path(made) / "links.json")
        with shaped(folder, rate) as (hosts, inside):
            doctor = [sys.executable, "-m", "graphsplit", "doctor", "--ssh", hosts.ssh]
            own = {**os.environ, "PYTHONPATH": str(ROOT)}
            checked([*inside, *doctor, "-H", "a,b", "--save-links", links], env=own)
            changed = {"only": [name], "links": links, "json": None, "notes": None, "rates": None}
            given = words_of({**vars(arguments), **changed})
            own = {"MS_NODE_TIMEOUT": "600", "GS_BENCH_REPORT": made}
            launched(hosts, "-H", "a,b", "--", __file__, *given, inside=inside, **own)
        reports = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
        plain = [max(times) for times in zip(*(one["seconds"] for one in reports), strict=True)]
    text = reports[0]["predicted"]
    found = re.search(r"predicted ([\d.]+) (\S+?);", text)
    assert found is not None, text
    return plain, float(found[1]) * UNITS[found[2]], text


def link_rows(name: str, arguments: Namespace) -> Iterator[Row]:
    """A row for each rate, and one for the cable as it is."""
    case = HERE[name]
    fast_s = 0.0
    for rate in (FAST, *arguments.rates):
        plain, predicted_s, text = measured(name, rate, arguments)
        print(text.partition("Compute, per step")[2], end="\n\n")
        found = [predicted_s / one for one in plain]
        ratio = predicted_s / statistics.median(plain)
        fast_s = fast_s or predicted_s
        yield Row(
            work=f"{case.title}, {case.microbatches} microbatches, 2 hosts, cable: {rate}",
            against="the step as it was measured",
            figure="predicted ÷ measured",
            ratio=ratio,
            spread=(min(found), max(found)),
            reach=None,
            at_most=True,
            sides={
                "measured": Samples(plain).summary(),
                "predicted": Samples([predicted_s]).summary(),
                f"within {WITHIN:.0%}": "yes" if abs(ratio - 1) <= WITHIN else "NO",
                "speed, of that of the fast cable": f"{fast_s / predicted_s:.2f} (predicted)",
                "load average": f"{os.getloadavg()[0]:.1f}",
            },
        )


def rows(arguments: Namespace) -> Iterator[Row]:
    """The rows."""
    for name in arguments.only:
        if name == "start":
            yield start_row(arguments.rounds)
        else:
            yield from link_rows(name, arguments)


def main() -> None:
    """Read the command line."""
    options = parser(__doc__, rounds=7)
    names = ["start", *HERE]
    options.add_argument("--only", nargs="+", choices=names, default=names)
    options.add_argument("--rates", nargs="+", default=["1000", "100"], help="Mbit/s")
    options.add_argument("--links", help="the file of measured links, for workers")
    run(options, work, rows)


if __name__ == "__main__":
    main()
