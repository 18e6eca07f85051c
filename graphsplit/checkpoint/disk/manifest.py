"""The manifest of one save: the text of ``manifest.json``, which is written last.

A save is complete when its manifest is there, and never before. Two sets of names for the files
take turns, so that a save into a folder that holds one already never touches the files of the one
before: the new manifest replaces the old one, and only then the old files go::

    first save     weights.safetensors    training.safetensors    manifest.json
    second save    weights-b.safetensors  training-b.safetensors  manifest.json (replaced)
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from graphsplit.checkpoint.disk.files import FileRecord
from graphsplit.checkpoint.disk.layout import FORMAT_VERSION, check_version
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError, integer
from graphsplit.encoding.values import from_text, to_text
from graphsplit.errors import CheckpointError
from graphsplit.security.private_files import PART

FORMAT = "graphsplit training state"
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
HOLDS = ("weights", "training")
_SLOTS = ("", "-b")
_MAX_SHARDS = 100_000
_FILE_NAME = re.compile(r"(weights|training)(-b)?(-\d{5}-of-\d{5})?\.safetensors")


def file_name(holds: str, *, slot: int, shard: int, num_shards: int) -> str:
    """For example ``weights-00003-of-00005.safetensors``; ``weights.safetensors`` if alone."""
    number = "" if num_shards == 1 else f"-{shard:05d}-of-{num_shards:05d}"
    return f"{holds}{_SLOTS[slot]}{number}.safetensors"


def is_file_of_a_save(name: str) -> bool:
    """Whether a file's name is one that saves use, finished or not."""
    return _FILE_NAME.fullmatch(name.removesuffix(PART)) is not None


@dataclass(frozen=True)
class Manifest:
    """The files and values that belong to one save.

    Attributes:
        slot: Which of the two sets of names the files have.
        num_shards: How many workers wrote files of their own; 1 if all is in one.
        files: Weights and training state of every shard.
        training: Encoded values by section: progress, optimizers, generator, loader and so on.
            Sections that a reader does not know are left alone.
        written_by: Versions of what wrote it, for people.
        saved_at_s: When, in seconds since 1970 by worker 0's clock: tells which save is the latest.
    """

    slot: Annotated[int, integer(0, 1)]
    num_shards: Annotated[int, integer(1, _MAX_SHARDS)]
    files: tuple[FileRecord, ...]
    training: Mapping[str, Any]
    written_by: Mapping[str, str]
    saved_at_s: float

    def to_json(self) -> dict[str, Any]:
        """The text of the file, as an object."""
        node = records.to_node(self)
        head = {"format": FORMAT, "version": FORMAT_VERSION, "checksum": _checksum(node)}
        return {**head, **node}

    @classmethod
    def read(cls, text: str, *, what: str) -> Manifest:
        """Read a manifest that a file or another worker gave.

        No name is believed: which names a save's files have follows from two numbers.

        Raises:
            CheckpointError: It is none, is damaged, or of another version.
        """
        found = from_text(text, what=what)
        if found.pop("format", None) != FORMAT:
            raise CheckpointError(f"{what} is no manifest of a graphsplit training state")
        check_version(found.pop("version", None), what=what)
        # Saves of before have none; a name that is damaged is not expected there.
        is_whole = found.pop("checksum", None) in (_checksum(found), None)
        try:
            manifest = records.from_node(cls, found, what=what)
        except MessageError as error:
            raise CheckpointError(str(error)) from None
        if [f.name for f in manifest.files] != expected_names(manifest.slot, manifest.num_shards):
            raise CheckpointError(f"{what} lists files that no save has")
        if not is_whole:
            raise CheckpointError(f"{what} is damaged: its checksum differs")
        return manifest


def _checksum(node: Mapping[str, Any]) -> int:
    return zlib.crc32(to_text(node).encode())


def expected_names(slot: int, num_shards: int) -> list[str]:
    """The names of all files of a save, in the order of the manifest."""
    return [
        file_name(holds, slot=slot, shard=shard, num_shards=num_shards)
        for holds in HOLDS
        for shard in range(num_shards)
    ]
