"""All workers save together: each its own files, or everything in files of worker 0.

::

    worker 0     choose names ─┬─ write files ──┬─ all are durable: write manifest ─┬─ old files go
    worker 1 ..  ──────────────┴─ write files ──┴───────────────────────────────────┴─ old files go

Whatever goes wrong on any disk is told to all before anybody goes on; all then remove what they
wrote and raise the same error, and the save that was there before is still there. The workers
stay in step, so a script may catch the error and train on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from graphsplit.checkpoint.contents import CheckpointContents, merge
from graphsplit.checkpoint.disk import folder as folders
from graphsplit.checkpoint.disk.files import (
    FileRecord,
    TensorFileWriter,
    write_file,
)
from graphsplit.checkpoint.disk.layout import FileInfo, FileLayout
from graphsplit.checkpoint.disk.manifest import MANIFEST, Manifest, expected_names, file_name
from graphsplit.encoding.values import meta_from_json, meta_to_json, to_text
from graphsplit.errors import CheckpointError, StateError
from graphsplit.job.group import WorkerGroup, read_message
from graphsplit.security.private_files import replace_file
from graphsplit.tensor_meta import TensorMeta, octets_of, plain_meta
from graphsplit.version import __version__

Make = Callable[[], CheckpointContents]


def save_folder(folder: Path, make: Make, group: WorkerGroup, *, gather: bool) -> None:
    """Save a whole training state. Collective.

    Args:
        folder: Where to. A complete save in it is replaced once the new one is complete.
        make: Gives what this worker saves.
        group: All workers.
        gather: Whether worker 0 writes all of it.

    Raises:
        CheckpointError: Some worker could not save its part; the same on all workers.
    """
    problems: list[str] = []
    contents, slot = CheckpointContents(), 0
    with _noting(problems, f"cannot save to {folder}"):
        contents = make()
        if not gather or group.rank == 0:
            _make_folder(folder)
        if group.rank == 0:
            slot = folders.next_slot(folder)
    slot = 1 if group.share(str(slot)) == "1" else 0
    group.agree_none(problems)
    if gather:
        _write_gathered(folder, contents, group, slot, problems)
    else:
        _write_shards(folder, contents, group, slot, problems)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(
            f"{folder} is a file, and no folder\n"
            f"  Fix: give a save a folder of its own; model.state_dict(to=path) writes one file."
        ) from None


def _write_shards(
    folder: Path, contents: CheckpointContents, group: WorkerGroup, slot: int, problems: list[str]
) -> None:
    records: list[FileRecord] = []
    with _noting(problems, f"cannot write into {folder}"):
        rank, num_workers = group.rank, group.num_workers
        for record in write_shard(folder, contents, slot, rank, num_workers, group.tick):
            records.append(record)
    mine = {"files": [vars(r) for r in records], "sections": contents.sections}
    _commit(folder, mine, group, slot, group.num_workers, problems)


def write_shard(
    folder: Path,
    contents: CheckpointContents,
    slot: int,
    shard: int,
    num_shards: int,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[FileRecord]:
    """Write one worker's files of a save; each is told of when it is there.

    Raises:
        OSError: The write failed.
    """
    for holds, tensors, info in (
        ("weights", contents.weights, FileInfo(aliases=contents.aliases)),
        ("training", contents.tensors, FileInfo()),
    ):
        layout = FileLayout.of({name: plain_meta(t) for name, t in tensors.items()}, info)
        name = file_name(holds, slot=slot, shard=shard, num_shards=num_shards)
        yield write_file(folder / name, tensors, layout, tick)


def _write_gathered(
    folder: Path, contents: CheckpointContents, group: WorkerGroup, slot: int, problems: list[str]
) -> None:
    weights, training = expected_names(slot, 1)
    aliases = _all_aliases(contents, group)
    streamed = [
        stream_file(folder / weights, contents.weights, FileInfo(aliases), group, problems),
        stream_file(folder / training, contents.tensors, FileInfo(), group, problems),
    ]
    records = [record for record in streamed if record is not None]
    mine = {"files": [vars(r) for r in records], "sections": contents.sections}
    _commit(folder, mine, group, slot, 1, problems)


def _all_aliases(contents: CheckpointContents, group: WorkerGroup) -> dict[str, str]:
    """The aliases of all workers, on worker 0."""
    told = group.gather(to_text(contents.aliases))
    return {k: v for text in told for k, v in read_message(text).items()}


def _commit(
    folder: Path,
    mine: Mapping[str, Any],
    group: WorkerGroup,
    slot: int,
    num_shards: int,
    problems: list[str],
) -> None:
    """Everybody's files are durable, or not: write the manifest, or take everything back."""
    told = [read_message(text) for text in group.gather(to_text({**mine, "problems": problems}))]
    faults = [
        f"worker {rank}: {problem}" if group.num_workers > 1 else problem
        for rank, report in enumerate(told)
        for problem in report["problems"]
    ]
    if group.rank == 0 and not faults:
        late: list[str] = []
        with _noting(late, f"cannot write into {folder}"):
            write_manifest(folder, told, slot, num_shards)
        faults = [f"worker 0: {problem}" if group.num_workers > 1 else problem for problem in late]
    outcome = group.share("\n".join(faults))
    if not outcome:
        folders.remove_other_slot(folder, slot, num_shards)
        return
    for record in mine["files"]:
        with contextlib.suppress(OSError):
            (folder / record["name"]).unlink()
    raise CheckpointError(
        f"nothing was saved to {folder}; what was there before is still there\n  {outcome}"
        + _way_out(outcome)
    )


def write_manifest(folder: Path, told: list[dict[str, Any]], slot: int, num_shards: int) -> None:
    """Everybody's files are durable: write what makes them one save.

    Args:
        folder: The save's folder.
        told: For each worker its ``"files"`` and its ``"sections"``.
        slot: Which of the two sets of names the files have.
        num_shards: How many workers wrote files.

    Raises:
        OSError: The write failed.
    """
    by_name = {f["name"]: FileRecord(**f) for report in told for f in report["files"]}
    manifest = Manifest(
        slot=slot,
        num_shards=num_shards,
        files=tuple(by_name[name] for name in expected_names(slot, num_shards)),
        training=merge([report["sections"] for report in told]),
        written_by={"graphsplit": __version__, "torch": torch.__version__},
        saved_at_s=time.time(),
    )
    replace_file(folder / MANIFEST, to_text(manifest.to_json()).encode())


def save_file(path: Path, make: Make, group: WorkerGroup, *, holds: str) -> None:
    """Stream all workers' tensors into one file, on worker 0's disk. Collective.

    Args:
        path: The file. One that is there is replaced once the new one is whole.
        make: Gives what this worker saves.
        group: All workers.
        holds: ``"weights"`` or ``"tensors"``: which part of the contents.

    Raises:
        CheckpointError: It could not be written; the same on all workers.
    """
    problems: list[str] = []
    contents = CheckpointContents()
    with _noting(problems, f"cannot save to {path}"):
        contents = make()
        if group.rank == 0:
            _make_folder(path.parent)
    group.agree_none(problems)
    told = group.gather(to_text(contents.sections))
    sections = merge([read_message(text) for text in told])
    info = FileInfo(_all_aliases(contents, group), sections)
    tensors = contents.weights if holds == "weights" else contents.tensors
    stream_file(path, tensors, info, group, problems)
    group.agree_none([f"{problem}{_way_out(problem)}" for problem in problems])


def stream_file(
    path: Path,
    mine: Mapping[str, torch.Tensor],
    info: FileInfo,
    group: WorkerGroup,
    problems: list[str],
) -> FileRecord | None:
    """Write tensors of all workers into one file of worker 0, which never holds a whole one.

    Args:
        path: The file, on worker 0's disk.
        mine: The tensors that this worker adds.
        info: What else the file says; only worker 0's counts.
        group: All workers.
        problems: What the disk did not want is added here; the workers stay in step.
    """
    metas = {name: plain_meta(tensor) for name, tensor in mine.items()}
    told = group.gather(to_text({name: meta_to_json(meta) for name, meta in metas.items()}))
    if group.rank != 0:
        for name in FileLayout.of(metas).metas:
            group.send(mine[name], to=(0,))
        return None
    sources: dict[str, int] = {}
    whole: dict[str, TensorMeta] = {}
    for rank, text in enumerate(told):
        for name, node in read_message(text).items():
            whole[name] = meta_from_json(node, what=f"{name!r} of worker {rank}")
            sources[name] = rank
    return _write_streamed(path, FileLayout.of(whole, info), mine, sources, group, problems)


def _write_streamed(
    path: Path,
    layout: FileLayout,
    mine: Mapping[str, torch.Tensor],
    sources: Mapping[str, int],
    group: WorkerGroup,
    problems: list[str],
) -> FileRecord | None:
    writer: TensorFileWriter | None = None
    try:
        if not problems:
            with _noting(problems, f"cannot write {path}"):
                writer = TensorFileWriter(path, layout, group.tick)
        for name, meta in layout.metas.items():
            source = sources[name]
            pieces = (
                iter([octets_of(mine[name])])
                if source == 0
                else group.receive(meta.size_bytes, source=source)
            )
            if writer is not None and not problems:
                with _noting(problems, f"cannot write {path}"):
                    writer.write(name, pieces)
            for _ in pieces:  # nobody wants the rest any more, but it is under way
                pass
        if writer is not None and not problems:
            with _noting(problems, f"cannot write {path}"):
                return writer.finish()
    except BaseException:
        problems.append("broken off")
        raise
    finally:
        if writer is not None and problems:
            writer.abandon()
    return None


def _way_out(told: str) -> str:
    """The way out where a disk was full."""
    is_full = os.strerror(errno.ENOSPC) in told
    return "\n  Fix: free space there, or save to a folder that has it." if is_full else ""


@contextlib.contextmanager
def _noting(problems: list[str], what: str) -> Iterator[None]:
    """Note what a disk, or an unfit value, is to blame for; anything else is raised."""
    try:
        yield
    except OSError as error:
        problems.append(f"{what}: {error.strerror or error}")
    except (CheckpointError, StateError) as error:
        problems.append(f"{what}: {error}")
