"""Two hosts that send to each other use both directions of their cable at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matrix.network.namespaces import Hosts, why_not

TESTS = Path(__file__).parents[1]
DEADLINE_S = 100.0
SHAPE = "qdisc add dev eth0 root tbf rate 20mbit burst 3000 latency 50ms"
WHY_NOT = why_not() or ("" if shutil.which("tc") else "cables are shaped by the command tc")


def wire(hosts: Hosts) -> None:
    """Join the ends of the cables, and let each carry 20 Mbit/s."""
    lines = ["link add wires type bridge", "link set wires up"]
    lines += [f"link set p{host} master wires" for host in range(len(hosts.names))]
    for line in lines:
        subprocess.run(["ip", "-n", hosts.switch, *line.split()], check=True)
    for name in hosts.names:
        subprocess.run(["tc", "-n", name, *SHAPE.split()], check=True)


def both_ends(*words: str) -> list[bytes]:
    """What the two workers on a cable print."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("cable_end.py"))
    with Hosts(2) as hosts:
        wire(hosts)
        ends = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, script, str(rank), *words],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank, name in enumerate(hosts.names)
        ]
        try:
            said = [end.communicate(timeout=DEADLINE_S)[0] for end in ends]
        finally:
            for end in ends:
                end.kill()
                end.wait()
    assert [end.returncode for end in ends] == [0, 0]
    return said


@pytest.mark.real_processes
@pytest.mark.timeout(240)
@pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
@pytest.mark.parametrize("size", [200_000, 500_000, 1_200_000], ids=["small", "a piece", "pieces"])
def test_values_in_both_directions_do_not_take_turns(size: int) -> None:
    took = json.loads(both_ends(str(size))[0])
    # In turns they would take 1.8 times as long, and did.
    assert took["both ways"] < 1.5 * took["one way"], took


@pytest.mark.real_processes
@pytest.mark.timeout(240)
@pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)
@pytest.mark.parametrize("kind", ["gloo", "grpc"])
def test_what_is_on_its_way_arrives_though_the_script_that_sent_it_has_ended(kind: str) -> None:
    both_ends(str(10_000_000), kind)
