"""One safetensors file: written durably and whole or not at all, and read tensor by tensor."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from safetensors import SafetensorError, safe_open

from graphsplit.checkpoint.disk.layout import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    FileInfo,
    FileLayout,
    dtype_of_code,
    read_info,
)
from graphsplit.encoding.fields import integer
from graphsplit.errors import CheckpointError, InvariantError
from graphsplit.security.private_files import PART, open_instead, open_to_read, put_in_place
from graphsplit.tensor_meta import TensorMeta, contiguous_strides, octets_of

_PIECE_BYTES = 16 * 1024 * 1024


def no_tick() -> None:
    """Nobody wants to know how far it is."""


@dataclass(frozen=True)
class FileRecord:
    """The marks that tell whether a file is the one that was written.

    Attributes:
        name: Its name in the folder.
        size_bytes: Its size.
        header_sha256: SHA-256 of its header, which holds a checksum of every tensor.
    """

    name: str
    size_bytes: Annotated[int, integer(0, 1 << 62)]
    header_sha256: str


class TensorFileWriter:
    """Writes a file under a temporary name, in order, then gives it its own.

    Holds one piece of at most 16 MiB at a time; what is handed over is not copied.

    Args:
        path: The file.
        layout: What will be written.
        tick: Called after every piece, so that others see that this worker is alive.
    """

    def __init__(self, path: Path, layout: FileLayout, tick: Callable[[], None] = no_tick) -> None:
        self._path = path
        self._layout = layout
        self._tick = tick
        self._checksums: dict[str, int] = {}
        self._part = path.with_name(path.name + PART)
        self._file = open_instead(self._part)  # closed by finish or abandon
        try:
            self._file.write(layout.header({}))
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write the next tensor of the layout.

        Args:
            name: Its name.
            pieces: Its bytes, as one-dimensional ``uint8`` tensors.

        Raises:
            OSError: The write failed.
        """
        expected = list(self._layout.metas)[len(self._checksums)]
        if name != expected:
            raise InvariantError(f"{name} is written, but {expected} is next")
        checksum, size = 0, 0
        for piece in pieces:
            for start in range(0, piece.numel(), _PIECE_BYTES):
                data = _buffer(piece[start : start + _PIECE_BYTES])
                checksum = zlib.crc32(data, checksum)
                self._file.write(data)
                size += len(data)
                self._tick()
        if size != self._layout.metas[name].size_bytes:
            raise InvariantError(f"{name} has {size} bytes")
        self._checksums[name] = checksum

    def finish(self) -> FileRecord:
        """Write the checksums, bring all to the disk, and give the file its name.

        Raises:
            OSError: The write failed.
        """
        header = self._layout.header(self._checksums)
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        TensorFile(self._part).close()  # the library must be able to open it
        put_in_place(self._part, self._path)
        self._tick()
        size = len(header) + self._layout.data_bytes
        return FileRecord(self._path.name, size, _digest(header[PREFIX_BYTES:]))

    def abandon(self) -> None:
        """Leave nothing behind. Safe to call at any time."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink()


def write_file(
    path: Path,
    tensors: dict[str, torch.Tensor],
    layout: FileLayout,
    tick: Callable[[], None] = no_tick,
) -> FileRecord:
    """Write tensors that are all here.

    Raises:
        OSError: The write failed; nothing is left behind.
    """
    writer = TensorFileWriter(path, layout, tick)
    try:
        for name in layout.metas:
            writer.write(name, [octets_of(tensors[name])])
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


class TensorFile:
    """A safetensors file, open for reading. The library checks its header; values are read late.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is no whole safetensors file.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.record = _record_of(path)
        try:
            # Not by mmap: a file that shrinks while it is mapped ends the process.
            self._file = cast(Any, safe_open(path, framework="pt", backend="pread"))
            names = list(self._file.keys())
            slices = {name: self._file.get_slice(name) for name in names}
            metadata = dict(self._file.metadata() or {})
        except SafetensorError as error:
            fix = "it was cut off or changed after it was written; load another save."
            if zipfile.is_zipfile(path):
                fix = (
                    "it looks like one of torch.save: pass the state that PyTorch loads from it "
                    "with weights_only=True, on every worker."
                )
            raise CheckpointError(
                f"{path} is no whole safetensors file: {error}\n  Fix: {fix}"
            ) from None
        self.info: FileInfo = read_info(metadata, what=str(path))
        self.metas: dict[str, TensorMeta] = {
            name: self._meta(name, slices[name].get_dtype(), slices[name].get_shape())
            for name in names
        }

    def close(self) -> None:
        """Give the file back."""
        self._file.__exit__(None, None, None)

    def _meta(self, name: str, code: str, shape: list[int]) -> TensorMeta:
        what = f"{name!r} in {self._path}"
        stored = TensorMeta(dtype_of_code(code, what=what), tuple(shape), contiguous_strides(shape))
        true = self.info.stored_as_bytes.get(name)
        if true is None:
            return stored
        if stored.dtype != torch.uint8 or true.size_bytes != stored.size_bytes:
            raise CheckpointError(f"{what} is described as {true}, but stored as {stored}")
        return true

    def read(self, name: str) -> torch.Tensor:
        """A tensor, contiguous, in memory of its own; its checksum compared.

        Raises:
            CheckpointError: Its bytes are not those that were written.
        """
        meta = self.metas[name]
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name!r} in {self._path} cannot be read: {error}") from None
        expected = self.info.checksums.get(name)
        octets = octets_of(tensor)
        found = zlib.crc32(_buffer(octets))
        if expected is not None and found != expected:
            raise CheckpointError(
                f"{name!r} in {self._path} is damaged: its checksum is {found:08x}; expected "
                f"{expected:08x}\n  Fix: load another save."
            )
        if name in self.info.stored_as_bytes:
            return octets.view(meta.dtype).view(meta.shape)
        return tensor


def _record_of(path: Path) -> FileRecord:
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(PREFIX_BYTES), "little")
        header = file.read(min(length, size, MAX_HEADER_BYTES))
    return FileRecord(path.name, size, _digest(header))


def _digest(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()


def _buffer(octets: torch.Tensor) -> memoryview:
    array: Any = octets.numpy()
    return memoryview(array)
