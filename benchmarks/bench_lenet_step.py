"""Step time of LeNet on five workers against a plain eager loop in one process.

    python benchmarks/bench_lenet_step.py [--rounds 9] [--steps 50] [--json FILE]

Starts a scheduler and five workers of this very script. Four times in every round worker 0 first
runs the plain loop while the others wait at a barrier, then all five run the same batches through
the Model: A B A B ..., in one run, with the same threads and malloc settings. Prints medians, the
ratio's spread, minor page faults per step, and where the time of a step goes on each worker.

In a second job five processes that are written by hand for this one network take turns as well,
and both once more with every process bound to a core, layer by layer the other one.

Where TensorFlow is installed (``pip install tensorflow-cpu``), a third job has its distributed
graphs take turns, on five tasks and on one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow_lenet
import torch
from by_hand import LAYERS, LeNetByHand, digest, is_possible, on_core, shared_file
from common import Row, compared, malloc_variables, parser, ratios
from common_cluster import (
    Report,
    agreed,
    breakdown,
    breakdowns,
    free_port,
    launch,
    report,
    run,
    same_training,
    slowest,
    take_turns,
)
from common_models import CASES, LENET, Batch, LastLoss, lenet, made, plain_loop

import graphsplit as gs

REACH, TURNS = 1.20, 4
ROOM = (LeNetByHand.NUM_CHANNELS, LeNetByHand.CHANNEL_BYTES)
TENSORFLOW = {
    "TensorFlow's distributed graph": LENET,
    "TensorFlow in one process": dict.fromkeys(LENET, 0),
}
BY_HAND, BOUND = "five processes by hand", ", each on one core"


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    case = CASES["lenet"]
    batches = case.batches(arguments.steps)
    plain, plain_optimizer = made(lenet)
    model, keep = case.model(schedule=arguments.schedule), LastLoss()
    models, parts, losses = [model], [], []

    def one_process() -> None:
        losses[:] = [plain_loop(plain, plain_optimizer, batches)]

    sides: dict[str, Callable[[], None] | None] = {
        "one process": one_process if gs.get_rank() == 0 else None,
        "graphsplit": lambda: model.train(1, batches, callbacks=[keep]),
    }
    layer = {rank: name for name, rank in LENET.items()}[gs.get_rank()]
    if arguments.by_hand:
        models.append(case.model(schedule=arguments.schedule))
        parts = [LeNetByHand(made(lenet)[0], layer, batches, path) for path in arguments.by_hand]
        sides |= sides_by_hand(parts, models[1], layer, batches)
    others: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        if arguments.beside_tensorflow:
            sides |= tensorflow_sides(stack, plain, batches, others)
        turns = take_turns(sides, rounds=arguments.rounds, steps=arguments.steps, turns=TURNS)
    same = "equal"
    if gs.get_rank() == 0:
        check_losses(others, losses[0])
        same = same_training(model, plain, [float(keep.loss), *losses])
    trained = [*(getattr(one.network, layer) for one in models), *(part.layer for part in parts)]
    report(
        {
            "turns": turns,
            "bits": same,
            "plain": {name: digest(getattr(plain, name)) for name in LAYERS},
            "trained": (layer, [digest(one) for one in trained]),
            "breakdown": breakdown(model, batches),
        }
    )


def sides_by_hand(
    parts: Sequence[LeNetByHand], model: gs.Model, layer: str, batches: Sequence[Batch]
) -> dict[str, Callable[[], None]]:
    """The sides by hand; and they, as well as graphsplit, with this worker bound to a core."""
    free, bound = parts
    keep = LastLoss()

    def on_its_core(train: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with on_core(LAYERS.index(layer)):
                train()

        return run

    return {
        BY_HAND: lambda: free.train(batches),
        BY_HAND + BOUND: on_its_core(lambda: bound.train(batches)),
        "graphsplit" + BOUND: on_its_core(lambda: model.train(1, batches, callbacks=[keep])),
    }


def tensorflow_sides(
    stack: contextlib.ExitStack,
    net: torch.nn.Module,
    batches: Sequence[Batch],
    losses: dict[str, float],
) -> dict[str, Callable[[], None] | None]:
    """TensorFlow's sides, which worker 0 leads; the last loss of each goes into ``losses``."""
    if gs.get_rank() != 0:
        return dict.fromkeys(TENSORFLOW)
    parameters = {name: value.detach().numpy() for name, value in net.named_parameters()}
    arrays = [(images.numpy(), labels.numpy()) for images, labels in batches]

    def side(name: str, placement: Mapping[str, int]) -> Callable[[], None]:
        ports = [free_port() for _ in set(placement.values())]
        cluster = tensorflow_lenet.Cluster(ports, placement, parameters, arrays, malloc_variables())
        stack.callback(cluster.close)
        return lambda: losses.update({name: cluster.train()})

    return {name: side(name, placement) for name, placement in TENSORFLOW.items()}


def check_losses(found: Mapping[str, float], loss: float) -> None:
    """TensorFlow has done the same work, if its losses are those of PyTorch's kernels."""
    for name, other in found.items():
        if not math.isclose(other, loss, rel_tol=tensorflow_lenet.LOSS_TOLERANCE):
            raise SystemExit(f"the loss of {name} is {other!r}, and that of PyTorch {loss!r}")


def critical_path(reports: list[Report]) -> str:
    """LeNet's layers run one after the other, so what they compute adds up."""
    compute = sum(
        r["breakdown"].get(kind, 0.0) for r in reports for kind in ("FORWARD", "BACKWARD")
    )
    sends = sum(r["breakdown"].get("SEND", 0.0) for r in reports)
    step = sum(reports[0]["breakdown"].values())
    return (
        f"in a round with timers, on the critical path: {compute:.2f} ms of forward and backward, "
        f"{sends:.2f} ms of sends, {step - compute - sends:.2f} ms of wake-ups, receives, tickets "
        f"and one optimizer step"
    )


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """The row, and where it is installed that of TensorFlow."""
    work = f"LeNet on 5 workers, batch 32, {arguments.schedule}"
    reports = launch(__file__, 5, arguments)
    yield compared(
        work,
        ("graphsplit", slowest(reports, "graphsplit")),
        ("one process", slowest(reports, "one process")),
        reach=REACH,
        bits=bits_of(reports),
        breakdown=breakdowns(reports),
        notes=critical_path(reports),
    )
    if is_possible():
        with shared_file(*ROOM) as free, shared_file(*ROOM) as bound:
            yield beside_by_hand(work, launch(__file__, 5, arguments, by_hand=[free, bound]))
    else:
        print("this is no Linux on x86, and the row of processes by hand left out")
    if tensorflow_lenet.is_installed():
        yield beside_tensorflow(work, launch(__file__, 5, arguments, beside_tensorflow=True))
    else:
        print("TensorFlow is not installed, and its row left out: pip install tensorflow-cpu")


def beside_by_hand(work: str, reports: Sequence[Report]) -> Row:
    """The row of a job in which processes written by hand took turns."""
    names = ("graphsplit", BY_HAND, "graphsplit" + BOUND, BY_HAND + BOUND, "one process")
    samples = {name: slowest(reports, name) for name in names}
    plain = samples["one process"]
    to_plain = {name: statistics.median(ratios(samples[name], plain)) for name in names[:-1]}
    return compared(
        work,
        ("graphsplit", samples["graphsplit"]),
        (BY_HAND, samples[BY_HAND]),
        reach=None,
        bits=bits_of(reports),
        further_sides={name: samples[name].summary() for name in names[2:]},
        notes="÷ one process: " + ", ".join(f"{n} {ratio:.2f}" for n, ratio in to_plain.items()),
    )


def bits_of(reports: Sequence[Report]) -> str:
    """Whether each worker has trained its layer, on every side, as the plain loop has."""
    plain = reports[0]["plain"]
    trained = [worker["trained"] for worker in reports]
    layers = [
        "equal" if set(found) == {plain[layer]} else f"{layer} differs" for layer, found in trained
    ]
    return agreed([*(worker["bits"] for worker in reports), *layers])


def beside_tensorflow(work: str, reports: Sequence[Report]) -> Row:
    """The row of a job in which TensorFlow's sides took turns."""
    samples = {side: slowest(reports, side) for side in ("graphsplit", "one process", *TENSORFLOW)}
    distributed, alone = TENSORFLOW
    its_own = statistics.median(ratios(samples[distributed], samples[alone]))
    ours = statistics.median(ratios(samples["graphsplit"], samples["one process"]))
    return compared(
        work,
        ("graphsplit", samples["graphsplit"]),
        (distributed, samples[distributed]),
        reach=None,
        bits=bits_of(reports),
        further_sides={name: samples[name].summary() for name in ("one process", alone)},
        notes=(
            f"{tensorflow_lenet.version()}; five processes ÷ one: TensorFlow {its_own:.2f}, "
            f"graphsplit {ours:.2f} here; TensorFlow's loss is PyTorch's to "
            f"{tensorflow_lenet.LOSS_TOLERANCE:g}, bits not compared, its page faults not counted"
        ),
    )


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__, rounds=9, steps=50)
    made_parser.add_argument("--schedule", default="zero_bubble")
    made_parser.add_argument("--by-hand", nargs=2, help=argparse.SUPPRESS)
    made_parser.add_argument("--beside-tensorflow", action="store_true", help=argparse.SUPPRESS)
    run(made_parser, work, rows)


if __name__ == "__main__":
    main()
