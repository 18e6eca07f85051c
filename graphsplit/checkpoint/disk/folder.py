"""A save's folder on this machine's disk, and a folder of such folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from graphsplit.checkpoint.disk.files import TensorFile
from graphsplit.checkpoint.disk.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    expected_names,
    is_file_of_a_save,
)
from graphsplit.errors import CheckpointError
from graphsplit.security.private_files import open_to_read


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete save.

    Raises:
        CheckpointError: There is none, and why.
    """
    return Manifest.read(read_manifest_text(folder), what=str(folder / MANIFEST))


def read_manifest_text(folder: Path) -> str:
    """The text of a save's manifest.

    Raises:
        CheckpointError: There is none, and why.
    """
    path = folder / MANIFEST
    try:
        with open_to_read(path) as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} holds no complete save: {_why_none(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no text: {error}") from None


def _why_none(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "it is no folder\n  Fix: a file of weights is loaded by model.load_state_dict(path)."
    if any(is_file_of_a_save(name) for name in os.listdir(folder)):
        return "it was not finished: its manifest is written last, and is not there"
    below = newest(folder)
    hint = f"\n  Fix: it holds saves, the newest is {below}." if below is not None else ""
    return f"there is no {MANIFEST}{hint}"


def next_slot(folder: Path) -> int:
    """The set of names that the complete save in a folder, if there is one, does not use."""
    try:
        return 1 - read_manifest(folder).slot
    except CheckpointError:
        return 0


def remove_other_slot(folder: Path, slot: int, num_shards: int) -> None:
    """Remove what the save before left, and what was never finished."""
    _remove_files(folder, keep=expected_names(slot, num_shards))


def remove_save(folder: Path) -> None:
    """Remove a save; the manifest first, so that none half removed could be loaded."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
    _remove_files(folder, keep=())
    with contextlib.suppress(OSError):  # somebody else's files are in it
        folder.rmdir()


def _remove_files(folder: Path, keep: Collection[str]) -> None:
    with contextlib.suppress(OSError):  # another worker may have been quicker
        for name in os.listdir(folder):
            if is_file_of_a_save(name) and name not in keep:
                with contextlib.suppress(OSError):
                    (folder / name).unlink()


def open_whole(folder: Path, manifest: Manifest) -> tuple[dict[str, TensorFile], list[str]]:
    """Open those files of a save that are here, and as they were written.

    Returns:
        Open files by name, and what is wrong with those that are here but are not as written.
    """
    found, problems = {}, []
    for record in manifest.files:
        path = folder / record.name
        try:
            file = TensorFile(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        except OSError as error:
            if path.exists():
                problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        if file.record != record:
            file.close()
            problems.append(
                f"{path} is not the file that its manifest lists: it has "
                f"{file.record.size_bytes} bytes and a header with SHA-256 "
                f"{file.record.header_sha256[:12]}; expected {record.size_bytes} and "
                f"{record.header_sha256[:12]}"
            )
            continue
        found[record.name] = file
    return found, problems


def complete_saves(folder: Path) -> list[Path]:
    """The complete saves in a folder, in the order in which they were saved."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(CheckpointError):
                found.append((read_manifest(path).saved_at_s, path.name, path))
    return [path for *_, path in sorted(found)]


def newest(folder: Path) -> Path | None:
    """The newest complete save in a folder."""
    saves = complete_saves(folder)
    return saves[-1] if saves else None
