"""Batches that a worker consumes and does not read: another worker sends them.

The ticket has told what the batch and its microbatches look like; what is left are the bytes of
their tensors, in order, and where each begins in memory, on which bits of small products depend.
So nothing that comes is believed for a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from graphsplit.batches.microbatches import BatchDescription, Division
from graphsplit.batches.signature import Arguments, Signature, leaves, targets_of
from graphsplit.job.control import ControlChannels
from graphsplit.tensor_meta import TensorMeta


def send_batch(control: ControlChannels, division: Division, *, destination: int) -> None:
    """Send a batch to a worker, which calls ``receive_batch`` meanwhile."""
    for arguments in _wholes(division):
        for leaf in leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                control.send_laid_out(leaf, to=(destination,))


def receive_batch(control: ControlChannels, shape: BatchDescription, *, source: int) -> Division:
    """Take a batch of a known look from a worker."""
    signatures = [shape.whole]
    for signature, count in shape.parts:
        signatures += [signature] * count
    found = [_receive(control, signature, source) for signature in signatures]
    if not shape.weights:
        return Division(found[0], (found[0],))
    return Division(found[0], tuple(found[1:]), shape.weights)


def targets_home(
    control: ControlChannels,
    division: Division | None,
    look: Signature,
    senders: Sequence[int | None],
    home: int,
    *,
    has_loss_fn: bool,
) -> tuple[Arguments, ...]:
    """Have the worker that shows metrics take the targets of batches that others have read.

    Args:
        control: The workers' channels.
        division: The batches of a step; None where they are not here.
        look: What each of them looks like.
        senders: For each, who sends its target; None: nobody.
        home: The worker that takes them.
        has_loss_fn: As for ``split_batch``.

    Returns:
        The batches that are here; of one whose target was sent, nothing else is.
    """
    found = [] if division is None else [*division.microbatches]
    for index, sender in enumerate(senders):
        if sender is not None and control.rank == sender:
            for leaf in leaves((targets_of(found[index], has_loss_fn=has_loss_fn), {})):
                control.send_laid_out(leaf, to=(home,))
        elif sender is not None and control.rank == home:
            found[index] = look.example()
            _fill(control, (targets_of(found[index], has_loss_fn=has_loss_fn), {}), sender)
    return tuple(found)


def _wholes(division: Division) -> Iterator[Arguments]:
    yield division.arguments
    if division.weights:
        yield from division.microbatches


def _receive(control: ControlChannels, signature: Signature, source: int) -> Arguments:
    """Arguments with a signature; every tensor lies in memory as the sender's does."""
    arguments = signature.example()
    _fill(control, arguments, source)
    return arguments


def _fill(control: ControlChannels, arguments: Arguments, source: int) -> None:
    """Let the tensors of some arguments be those that come."""
    for leaf in leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            came = control.receive_laid_out(TensorMeta.of(leaf), source=source)
            with torch.no_grad():
                leaf.set_(came.untyped_storage(), came.storage_offset(), came.shape, came.stride())
