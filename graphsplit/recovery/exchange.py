"""The exchange between workers before they go on together after a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphsplit.checkpoint.group import ControlGroup, Group, read_message
from graphsplit.checkpoint.values import to_text
from graphsplit.errors import CheckpointError, FrameError
from graphsplit.job.job import Job
from graphsplit.recovery.agreement import Target
from graphsplit.recovery.results import MAX_RESULTS_BYTES
from graphsplit.recovery.snapshot.disk import SnapshotFolder, parse, text_of
from graphsplit.recovery.snapshot.part import SnapshotShard

Pieces = Sequence[torch.Tensor]
_MAX_PART_BYTES = 1 << 40  # memory is taken for what has come, not for what is announced


def group_of(job: Job) -> Group:
    """All workers of the present generation."""
    position = job.member.position

    def tick() -> None:
        position.progress += 1

    return ControlGroup(job.control, tick)


def exchange_parts(
    group: Group, target: Target, held: Pieces, log: Pieces
) -> tuple[SnapshotShard, list[str]] | None:
    """Give every worker that has just started the part of the one whose place it takes.

    Args:
        group: All workers.
        target: Where all go on.
        held: The part of the worker before this one, if this one holds it.
        log: Its lines, likewise.

    Returns:
        The part and the lines that this worker was given; None if it has its own.
    """
    given = None
    for rank in target.fresh:
        holder = (rank + 1) % group.num_workers
        if group.rank == holder:
            for pieces in (held, log):
                group.send_text(to_text({"sizes": _sizes(pieces)}), destination=rank)
                for piece in pieces:
                    group.send(piece, destination=rank)
        elif group.rank == rank:
            part = SnapshotShard.read(
                _receive(group, holder, _MAX_PART_BYTES), what=f"the part held by worker {holder}"
            )
            lines = _lines(_receive(group, holder, 2 * MAX_RESULTS_BYTES))
            if part.number != target.number:
                raise FrameError(
                    f"worker {holder} holds snapshot {part.number}; expected {target.number}"
                )
            given = part, lines
    return given


def _sizes(pieces: Pieces) -> list[int]:
    return [piece.numel() for piece in pieces]


def _receive(group: Group, source: int, limit_bytes: int) -> list[torch.Tensor]:
    told = read_message(group.receive_text(source=source)).get("sizes")
    sizes = [s for s in told if type(s) is int and s >= 0] if isinstance(told, list) else []
    if sizes != told or sum(sizes) > limit_bytes:
        raise FrameError(
            f"worker {source} announces pieces of {str(told)[:100]} bytes; at most {limit_bytes} "
            f"are taken"
        )
    return [chunk for size in sizes for chunk in group.receive(size, source=source)]


def pieces_of(lines: Sequence[str]) -> list[torch.Tensor]:
    """Lines as bytes."""
    content = bytearray("".join(f"{line}\n" for line in lines).encode())
    return [torch.frombuffer(content, dtype=torch.uint8)] if content else []


def _lines(pieces: Pieces) -> list[str]:
    content = b"".join(piece.numpy().tobytes() for piece in pieces)
    try:
        return content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise FrameError(f"remembered calls are no text: {error}") from None


def share_script(group: Group, folder: SnapshotFolder | None, number: int) -> dict[str, Any]:
    """The place in the script that a snapshot on disk has, from the first who sees it.

    Raises:
        CheckpointError: Nobody can read it; the same on all workers.
    """
    text, problem = "", ""
    if folder is not None and number in folder.numbers():
        try:
            text = text_of(number, folder.read(number))
        except CheckpointError as error:
            problem = str(error)
    seen = group.exchange("1" if text else "")
    if "1" not in seen:
        told = [found for found in group.exchange(problem) if found]
        raise CheckpointError(told[0] if told else f"nobody sees snapshot {number} any more")
    return parse(group.share(text, source=seen.index("1")), what=f"snapshot {number}")
