"""Where each tensor lies in a safetensors file, known before its first byte is written.

A file is ``length of the header (8 bytes, little-endian) | header (JSON) | bytes of the tensors``.
The library writes a file from tensors that are all in memory. Here only dtypes and shapes are
known at first, and the bytes come one tensor at a time, perhaps from other workers. So the header
is made here; every file is opened with the library before it counts.

What the format has no word for stands in the header's metadata, under ``"graphsplit"``, as JSON:

    crc32     of every tensor's bytes. Zero until all are written, of a fixed width, so that the
              header keeps its length.
    aliases   other names of a tensor. The format refuses tensors that share memory; each is
              stored once, under its first name.
    bytes     dtype and shape of a tensor whose dtype the format does not know; stored as bytes.
    values    whatever else belongs to the file, as ``values.encode`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit.encoding.values import from_text, meta_from_json, meta_to_json, to_text
from graphsplit.errors import CheckpointError, StateError
from graphsplit.tensor_meta import TensorMeta

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 100_000_000  # the library reads no longer ones
INFO_KEY = "graphsplit"
PREFIX_BYTES = 8

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16",
    "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64",
    "I64": "int64", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _NAMES.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class FileInfo:
    """The notes of a file beside its tensors.

    Attributes:
        aliases: For a name that shares its tensor with another: the name it is stored under.
        values: Encoded values that belong to the file.
        checksums: CRC-32 of each tensor's bytes.
        stored_as_bytes: True dtype and shape of tensors that are stored as bytes.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Any = None
    checksums: Mapping[str, int] = field(default_factory=dict)
    stored_as_bytes: Mapping[str, TensorMeta] = field(default_factory=dict)


@dataclass(frozen=True)
class FileLayout:
    """The order of a file's tensors, and its header.

    Attributes:
        metas: dtype and shape of every tensor, in the order in which they lie in the file: those
            with the widest elements first, so that each is aligned.
        info: What else the file says.
    """

    metas: Mapping[str, TensorMeta]
    info: FileInfo

    @classmethod
    def of(cls, metas: Mapping[str, TensorMeta], info: FileInfo | None = None) -> FileLayout:
        """The layout for tensors in any order.

        Raises:
            StateError: The header would be longer than the format allows.
        """
        order = sorted(metas, key=lambda name: (-metas[name].dtype.itemsize, name))
        layout = cls({name: metas[name] for name in order}, info or FileInfo())
        size = len(layout.header({}))
        if size > MAX_HEADER_BYTES:
            raise StateError(
                f"the header of {len(metas)} tensors takes {size} bytes; the safetensors format "
                f"allows {MAX_HEADER_BYTES}"
            )
        return layout

    @property
    def data_bytes(self) -> int:
        """Size of all tensors."""
        return sum(meta.size_bytes for meta in self.metas.values())

    def header(self, checksums: Mapping[str, int]) -> bytes:
        """Length and header, of the same size whatever the checksums are."""
        described: dict[str, Any] = {"__metadata__": self._metadata(checksums)}
        offset = 0
        for name, meta in self.metas.items():
            end = offset + meta.size_bytes
            code = _CODES.get(meta.dtype)
            described[name] = {
                "dtype": code or "U8",
                "shape": list(meta.shape) if code else [meta.size_bytes],
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % PREFIX_BYTES)
        return len(text).to_bytes(PREFIX_BYTES, "little") + text

    def _metadata(self, checksums: Mapping[str, int]) -> dict[str, str]:
        aliases = dict(self.info.aliases)
        info: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "crc32": {name: f"{checksums.get(name, 0):08x}" for name in self.metas},
            "aliases": aliases,
            "bytes": {
                name: meta_to_json(meta)
                for name, meta in self.metas.items()
                if meta.dtype not in _CODES
            },
            "values": self.info.values,
        }
        # "format", and the way in which aliases are noted, are the library's own habits.
        return {**aliases, "format": "pt", INFO_KEY: to_text(info)}


def read_info(metadata: Mapping[str, str], *, what: str) -> FileInfo:
    """The notes of a file beside its tensors; nearly none if it was written by others.

    Raises:
        CheckpointError: It was written by graphsplit in another format, or changed since.
    """
    if INFO_KEY not in metadata:
        return FileInfo()
    found = from_text(metadata[INFO_KEY], what=f"the metadata of {what}")
    check_version(found.get("version"), what=what)
    match found:
        case {"crc32": dict(checksums), "aliases": dict(aliases), "bytes": dict(stored)}:
            try:
                crc32 = {name: int(text, 16) for name, text in checksums.items()}
            except (TypeError, ValueError):
                raise CheckpointError(f"the checksums in {what} are no numbers") from None
            if all(isinstance(name, str) for name in aliases.values()):
                metas = {n: meta_from_json(m, what=f"{n!r} in {what}") for n, m in stored.items()}
                return FileInfo(aliases, found.get("values"), crc32, metas)
    raise CheckpointError(f"the metadata of {what} lacks an entry that graphsplit writes")


def check_version(version: Any, *, what: str) -> None:
    """Refuse what another format wrote.

    Raises:
        CheckpointError: The version is not the one that is read here.
    """
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{what} is written in format {version!r}; this graphsplit reads format "
            f"{FORMAT_VERSION}\n  Fix: load it with the graphsplit that wrote it."
        )


def dtype_of_code(code: str, *, what: str) -> torch.dtype:
    """The dtype that a file's header names.

    Raises:
        CheckpointError: Nobody here knows it.
    """
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise CheckpointError(f"{what} has dtype {code}, which this torch does not have")
    return dtype
