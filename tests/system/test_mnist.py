"""The main job on the real MNIST: every epoch ends in the bits of a plain loop, on all workers.

On a quarter of the images, 468 steps; ``MNIST_IMAGES=60000 MNIST_EPOCHS=10`` trains on all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from system.helpers import JOBS, run_job

EPOCHS = int(os.environ.get("MNIST_EPOCHS", "1"))
IMAGES = os.environ.get("MNIST_IMAGES", "15000")


@pytest.mark.real_processes
@pytest.mark.timeout(240 * max(EPOCHS, 1))
def test_every_epoch_ends_in_the_bits_of_a_plain_loop(mnist_path: Path):
    arguments = ["--data", str(mnist_path), "--epochs", str(EPOCHS), "--images", IMAGES]
    with subprocess.Popen(
        [sys.executable, str(JOBS / "mnist_epochs.py"), "--plain", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as plain:
        try:
            job = run_job("mnist_epochs.py", *arguments, workers=5, timeout_s=200 * EPOCHS)
            reference = plain.communicate(timeout=60 * EPOCHS)[0].splitlines()
        finally:
            plain.kill()

    assert (job.status, plain.returncode) == (0, 0), job.output[-4000:]
    assert len(reference) == EPOCHS
    for rank in range(5):
        said = [line for line in job.lines_of(f"worker {rank}") if line.startswith("epoch ")]
        assert said == reference
    print("\n".join(reference))
