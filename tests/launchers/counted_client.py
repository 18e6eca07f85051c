"""An SSH client that notes what goes through it: FOLDER CLIENT ARGUMENTS...

A line for each frame, by its kind: ``>`` before what goes to the host, ``<`` before what comes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

folder, *command = sys.argv[1:]
notes = (Path(folder) / f"{os.getpid()}.client").open("a", buffering=1)


def carry(source: IO[bytes], target: IO[bytes], mark: str) -> None:
    """Lines from one to the other, each noted."""
    with target:
        for line in source:
            if line.strip():
                notes.write(f"{mark}{json.loads(line)['kind']}\n")
            target.write(line)
            target.flush()


with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
    assert client.stdin and client.stdout
    orders = (sys.stdin.buffer.raw, client.stdin, ">")
    threading.Thread(target=carry, args=orders, daemon=True).start()
    carry(client.stdout, sys.stdout.buffer, "<")
sys.stdout = None  # it is closed
os._exit(client.returncode)
