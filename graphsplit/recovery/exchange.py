"""The exchange between workers before they go on together after a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphsplit.errors import CheckpointError, FrameError
from graphsplit.job.group import WorkerGroup
from graphsplit.recovery.agreement import Target
from graphsplit.recovery.snapshot.disk import SnapshotFolder, parse, text_of
from graphsplit.recovery.snapshot.replicator import MOST_PART_BYTES, HeldCopies
from graphsplit.recovery.snapshot.shard import SnapshotShard


def exchange_parts(
    group: WorkerGroup, target: Target, own: Mapping[int, SnapshotShard], held: HeldCopies
) -> tuple[SnapshotShard, list[str] | None]:
    """Give every worker that has just started the part of the one whose place it takes.

    Args:
        group: All workers.
        target: Where all go on.
        own: The parts that this worker has taken, by number.
        held: What it holds of the worker before it.

    Returns:
        This worker's part; and the lines that it was given, None if it has its own.
    """
    given = None
    for rank in target.fresh:
        holder = (rank + 1) % group.num_workers
        if group.rank == holder:
            for pieces in (held.parts.get(target.number, ()), held.lines()):
                group.send(*pieces, to=(rank,))
        elif group.rank == rank:
            part = _receive_part(group, holder)
            lines = group.receive_text(source=holder).splitlines()
            if part.number != target.number:
                raise FrameError(
                    f"worker {holder} holds snapshot {part.number}; expected {target.number}"
                )
            given = part, lines
    return given or (own[target.number], None)


def gather_parts(
    group: WorkerGroup, target: Target, mine: Sequence[SnapshotShard]
) -> list[SnapshotShard]:
    """Give every worker all parts of the snapshot that was agreed on.

    Args:
        group: All workers.
        target: Where all go on.
        mine: The parts that this worker is to bring.

    Returns:
        All parts, by the ranks of those who took them.
    """
    parts = list(mine)
    givers = sorted(set(target.givers))
    counts = group.exchange(str(len(mine)))
    for giver in givers:
        if group.rank == giver:
            for part in mine:
                group.send(*part.pieces(), to=group.others(giver))
            continue
        for _ in range(int(counts[giver])):
            parts.append(_receive_part(group, giver))
    if any(part.number != target.number for part in parts):
        raise FrameError(f"a part of another snapshot than {target.number} was brought")
    return sorted(parts, key=lambda part: part.rank)


def _receive_part(group: WorkerGroup, source: int) -> SnapshotShard:
    pieces = list(group.receive(MOST_PART_BYTES, source=source, is_exact=False))
    return SnapshotShard.read(pieces, what=f"the part held by worker {source}")


def give_lines(group: WorkerGroup, target: Target, lines: Sequence[str]) -> list[str]:
    """The lines of a worker that was there before, for those who have just started."""
    giver = next(rank for rank in range(group.num_workers) if rank not in target.fresh)
    if group.rank == giver and target.fresh:
        group.send(*pieces_of(lines), to=target.fresh)
    elif group.rank in target.fresh:
        return group.receive_text(source=giver).splitlines()
    return list(lines)


def pieces_of(lines: Sequence[str]) -> list[torch.Tensor]:
    """Lines as bytes."""
    content = bytearray("".join(f"{line}\n" for line in lines).encode())
    return [torch.frombuffer(content, dtype=torch.uint8)] if content else []


def share_script(group: WorkerGroup, folder: SnapshotFolder | None, number: int) -> dict[str, Any]:
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
    what = f"snapshot {number}"
    return parse(group.share_first(text, problem, what=what), what=what)
