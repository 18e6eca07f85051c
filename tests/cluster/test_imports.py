from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import graphsplit.settings

PACKAGE = Path(graphsplit.settings.__file__).parent

# The package's own __init__ is left out: what it imports is not the cluster's doing.
SCRIPT = """
import sys, types
package = types.ModuleType("graphsplit")
package.__path__ = [{package!r}]
sys.modules["graphsplit"] = package
import {module}
print(*[name for name in {forbidden!r} if name in sys.modules])
"""

PURE = ["torch", "numpy", "grpc", "google.protobuf", "asyncio", "socket", "threading"]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("graphsplit.settings", PURE),
        (
            "graphsplit.cluster.scheduler.state_machine",
            ["torch", "numpy", "grpc", "google.protobuf"],
        ),
        ("graphsplit.cluster.member.state_machine", ["torch", "numpy", "grpc", "google.protobuf"]),
        ("graphsplit.cluster.scheduler.server", ["torch", "numpy", "grpc"]),
        ("graphsplit.cluster.member.member", ["torch", "numpy", "grpc"]),
    ],
)
def test_what_a_module_does_not_import(module, forbidden):
    script = SCRIPT.format(package=str(PACKAGE), module=module, forbidden=forbidden)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == []
