"""Models that no pipeline of stages takes: long skips, and an encoder that feeds every layer.

    python benchmarks/bench_skips.py [--rounds 5] [--steps 5] [--only U-Net-2] [--json FILE]

The bound is the simulator's ideal: the same programs with the costs that the profiler measures in
the same job, if moving values took no time. Beside it stands what the busiest worker computes, with
nobody ever waiting. Bits are compared with a plain loop in one process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import Row, Samples, compared, environment, equal_conditions, parser, write
from common_cluster import (
    ComputeClock,
    Report,
    agreed,
    breakdown,
    breakdowns,
    busiest,
    is_worker,
    launch,
    report,
    same_parameters,
    simulated_ideal_s,
    slowest,
    take_turns,
)
from common_models import (
    EncoderDecoder,
    LastLoss,
    UNet,
    image_batches,
    made,
    plain_loop,
    token_batches,
)
from torch.nn import functional as F

STEPS, MICROBATCHES = 5, 8
REACH = 0.8


def _place_unet_on_two(net: Any) -> None:
    """Down here, up there: every skip crosses."""
    for module in (net.down, net.bottom):
        module.place("MS_WORKER", 0)
    for module in (net.widen, net.up, net.head):
        module.place("MS_WORKER", 1)


def _place_unet_on_three(net: Any) -> None:
    """Down, the small images below, and up."""
    _place_unet_on_two(net)
    net.down.place("MS_WORKER", 0)
    net.up.place("MS_WORKER", 2)
    net.head.place("MS_WORKER", 2)
    net.widen.place("MS_WORKER", 1)
    for module in (net.bottom, net.down[2], net.up[2]):
        module.place("MS_WORKER", 1)


def _place_encoder_decoder(net: Any) -> None:
    """Encoder here, decoder there."""
    for module in (net.source, net.encoder):
        module.place("MS_WORKER", 0)
    for module in (net.target, net.decoder, net.head):
        module.place("MS_WORKER", 1)


def _place_encoder_decoder_on_three(net: Any) -> None:
    """What the encoder makes goes to two workers, past the first."""
    _place_encoder_decoder(net)
    for module in (*net.decoder[2:], net.head):
        module.place("MS_WORKER", 2)


@dataclass(frozen=True)
class Case:
    """One network on some workers."""

    build: Callable[[], torch.nn.Module]
    place: Callable[[Any], None]
    num_workers: int
    batches: Callable[[int], list[Any]]


CASES = {
    "U-Net-2": Case(UNet, _place_unet_on_two, 2, image_batches),
    "U-Net-3": Case(UNet, _place_unet_on_three, 3, image_batches),
    "encoder-decoder-2": Case(EncoderDecoder, _place_encoder_decoder, 2, token_batches),
    "encoder-decoder-3": Case(EncoderDecoder, _place_encoder_decoder_on_three, 3, token_batches),
}


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    equal_conditions()
    import graphsplit as gs

    gs.init()
    rank, case = gs.get_rank(), CASES[arguments.only[0]]
    batches = case.batches(arguments.steps)
    whole, whole_optimizer = made(case.build)
    net, optimizer = made(case.build)
    case.place(net)
    model = gs.Model(
        net,
        F.cross_entropy,
        optimizer,
        microbatches=MICROBATCHES,
        schedule=arguments.schedule,
    )
    keep = LastLoss()
    losses = []

    def one_process() -> None:
        losses[:] = [plain_loop(whole, whole_optimizer, batches, microbatches=MICROBATCHES)]

    clock = ComputeClock(model, arguments.steps)
    turns = take_turns(
        {
            "one process": one_process if rank == 0 else None,
            "graphsplit": lambda: clock.run(lambda: model.train(1, batches, callbacks=[keep])),
        },
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    same = "equal"
    if rank == 0:
        same = same_parameters(net, whole)
        if losses != [float(keep.loss)]:
            same = f"losses differ: {float(keep.loss)!r} and {losses}"
    found: Report = {"turns": turns, "bits": same, "compute": clock.seconds}
    found["ideal_s"] = simulated_ideal_s(model, batches)
    report({**found, "breakdown": breakdown(model, batches)})


def rows(arguments: argparse.Namespace) -> list[Row]:
    """One row for each case."""
    found = []
    for name in arguments.only:
        options = ["--rounds", str(arguments.rounds), "--only", name]
        options += ["--schedule", arguments.schedule, "--steps", str(arguments.steps)]
        reports = launch(os.path.abspath(__file__), CASES[name].num_workers, options)
        ours, one = slowest(reports, "graphsplit"), slowest(reports, "one process")
        ideal = Samples([reports[0]["ideal_s"]] * len(ours.seconds))
        found.append(
            compared(
                f"{name.replace('-', ' ')} workers, {MICROBATCHES} microbatches, "
                f"{arguments.schedule}, {arguments.steps} steps in a row",
                ("graphsplit", ours),
                ("ideal", ideal),
                reach=REACH,
                inverse=True,
                bits=agreed([report["bits"] for report in reports]),
                breakdown=breakdowns(reports),
                further_sides={
                    "busiest worker's compute": busiest(reports).summary(),
                    "one process": one.summary(),
                },
                notes=f"{one.median_s / ours.median_s:.2f} times one process",
            )
        )
    return found


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__, steps=STEPS)
    made_parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    made_parser.add_argument("--schedule", default="1f1b")
    arguments = made_parser.parse_args()
    if is_worker():
        work(arguments)
    else:
        conditions = environment()
        write(arguments, rows(arguments), conditions)


if __name__ == "__main__":
    main()
