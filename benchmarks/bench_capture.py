"""How long a capture takes, here and in another checkout of graphsplit.

    python benchmarks/bench_capture.py CHECKOUT [--rounds 5] [--json FILE]

LeNet, and an encoder of four layers. A round is a fresh process of each side, in turn; a process
captures several times, and its figure is the median of their thread times, the first left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import Row, Samples, checked, compared, environment, parser, write
from torch import nn

REACH, CAPTURES = 1.5, 6
HERE, OTHER = "this checkout", "the other one"
ROOT = Path(__file__).resolve().parent.parent


class Encoder(nn.Module):
    """Four layers of torch's encoder, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 4), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, length, 32) to (rows, 10)."""
        found: torch.Tensor = self.head(self.layers(x).mean(1))
        return found


def networks() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Each network with an input."""
    from common_models import lenet

    torch.manual_seed(0)
    return {
        "LeNet": (lenet(), torch.randn(32, 1, 32, 32)),
        "an encoder of four layers": (Encoder(), torch.randn(32, 12, 32)),
    }


def capture_all() -> dict[str, float]:
    """Thread seconds of a capture of each network, by the graphsplit that Python finds."""
    from graphsplit.capture.export import CaptureRequest, capture
    from graphsplit.capture.graph import Mode

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found, run = {}, _run_of_graphsplit()
    for name, (network, x) in networks().items():
        batch = x, torch.randint(0, 10, (32,))
        request = CaptureRequest(network, nn.CrossEntropyLoss(), run, Mode.TRAIN, 0, batch, {})
        seconds = []
        for _ in range(CAPTURES):
            began = time.thread_time()
            capture(request)
            seconds.append(time.thread_time() - began)
        found[name] = statistics.median(seconds[1:])
    return found


def _run_of_graphsplit() -> Callable[..., Any]:
    """The function that runs a training step: a Model captures its own, not a script's."""
    try:
        from graphsplit.batches.step_functions import run_train
    except ImportError:  # an older checkout
        from graphsplit.train.batch import run_train
    return run_train


def captured_by(checkout: Path) -> dict[str, float]:
    """The same, in a fresh process, by a checkout's graphsplit."""
    variables = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = checked([sys.executable, __file__, "--job", str(checkout)], env=variables)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row for each network."""
    sides = {HERE: ROOT, OTHER: Path(arguments.checkout).resolve()}
    found: dict[str, dict[str, Samples]] = {}
    for _ in range(arguments.rounds):
        for side, checkout in sides.items():
            for name, seconds in captured_by(checkout).items():
                samples = found.setdefault(name, {HERE: Samples(), OTHER: Samples()})
                samples[side].seconds.append(seconds)
    for name, samples in found.items():
        both = ((side, samples[side]) for side in sides)
        yield compared(f"capture of {name}, thread time", *both, reach=REACH)


def main() -> None:
    """Read the command line."""
    options = parser(__doc__, rounds=5)
    options.add_argument("checkout", help="where the other checkout is")
    options.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.job:
        import graphsplit

        if not Path(graphsplit.__file__).is_relative_to(Path(arguments.checkout).resolve()):
            raise SystemExit(f"{graphsplit.__file__} is not of {arguments.checkout}")
        print(json.dumps(capture_all()))
        return
    write(arguments, rows(arguments), environment())


if __name__ == "__main__":
    main()
