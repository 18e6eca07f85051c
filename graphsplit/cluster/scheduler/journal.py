"""The scheduler's journal: what it must know to go on, safe against crashes and bad disks.

A file of records, written at its end and forced to disk; each holds the whole state of the job, so
the last one counts::

    header    8 bytes   b"GSJRNL" and the version of the format, 16 bits
    record    12 bytes  length of the payload, checksum of this length, checksum of the payload
              payload   JSON

    payload checksum = crc32(payload, checksum of the record before)      chains them
    length checksum  = crc32(length,  checksum of the record before)

[Note: torn or corrupted] A crash while a record is written leaves a part of it at the very end:
too few bytes, or bytes that were never written and read as zeros. That record was not relied on by
anybody, so it is dropped, with a word in the log. Everything else that does not fit was written
once and changed later; then nothing in the file can be believed, and it is refused. The length has
a checksum of its own so that a damaged length in the middle is not taken for a torn end.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphsplit.cluster.scheduler.job.image import JobImage, from_json, to_json
from graphsplit.cluster.scheduler.job.rules import JobRules
from graphsplit.encoding.fields import MessageError
from graphsplit.errors import JournalError
from graphsplit.security.private_files import replace_file

HEADER = b"GSJRNL" + struct.pack("<H", 1)
_RECORD = struct.Struct("<III")
_MAX_RECORD_BYTES = 64 << 20
_COMPACT_BYTES = 8 << 20
_FIX = (
    "  Fix: if the job is to go on, put back an intact copy of the file; if not, remove it, and "
    "the next scheduler forms a new job"
)


@dataclass(frozen=True)
class JournalContents:
    """The contents of a journal.

    Attributes:
        payload: The last record; None if there is none.
        end: Where the last whole record ends.
        checksum: Of the last whole record, to chain the next one to.
        torn_bytes: How many bytes of a record that was never finished follow.
    """

    payload: bytes | None
    end: int
    checksum: int
    torn_bytes: int


def parse(data: bytes) -> JournalContents:
    """Check all of a journal's bytes. Pure.

    Raises:
        JournalError: They were changed after they were written; says where.
    """
    if len(data) < len(HEADER) and HEADER.startswith(data):
        return JournalContents(None, 0, 0, len(data))
    if not data.startswith(HEADER):
        raise JournalError("it does not begin as a journal of this version of graphsplit")
    payload, at, checksum = None, len(HEADER), 0
    while at < len(data):
        rest = data[at:]
        if len(rest) < _RECORD.size or not any(rest):
            return JournalContents(payload, at, checksum, len(rest))
        length, length_checksum, payload_checksum = _RECORD.unpack_from(rest)
        if zlib.crc32(rest[:4], checksum) != length_checksum or length > _MAX_RECORD_BYTES:
            raise JournalError(f"the record at byte {at} has a damaged length")
        found = rest[_RECORD.size : _RECORD.size + length]
        if len(found) < length:
            return JournalContents(payload, at, checksum, len(rest))
        if zlib.crc32(found, checksum) != payload_checksum:
            is_last = at + _RECORD.size + length >= len(data)
            if is_last and not found[-1:].strip(b"\0"):
                return JournalContents(payload, at, checksum, len(rest))
            raise JournalError(f"the record at byte {at} has a damaged payload")
        payload, checksum = found, payload_checksum
        at += _RECORD.size + length
    return JournalContents(payload, at, checksum, 0)


def record_of(payload: bytes, checksum: int) -> bytes:
    """The bytes of a record that follows the one with this checksum."""
    length = struct.pack("<I", len(payload))
    return (
        _RECORD.pack(len(payload), zlib.crc32(length, checksum), zlib.crc32(payload, checksum))
        + payload
    )


class Journal:
    """One journal file, readable and writable by this user only.

    ``write`` returns when the record is on disk. The file is replaced by one with only the last
    record now and then, so it does not grow.

    Args:
        path: The file; its folder is made if there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checksum = 0
        self._end = 0

    def read(self, rules: JobRules, log: Callable[[str], None]) -> JobImage | None:
        """The job that was written down; None if there is none, or if it has ended.

        Raises:
            JournalError: The file cannot be read, is damaged, or is of a job of another shape.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None
        try:
            contents = parse(data)
            image = None if contents.payload is None else _image(contents.payload)
        except JournalError as error:
            raise self._error(f"is damaged, and nothing in it is believed: {error}") from None
        if contents.torn_bytes:
            log(
                f"the journal {self._path} ends in a record that was never finished "
                f"({contents.torn_bytes} bytes): it is dropped"
            )
        self._checksum, self._end = contents.checksum, contents.end
        if image is None or image.phase == "ended":
            return None
        self._check_shape(image, rules)
        return image

    def write(self, image: JobImage) -> None:
        """Put a record at the end, and wait until it is on disk.

        Raises:
            JournalError: It cannot be written.
        """
        payload = json.dumps(to_json(image), separators=(",", ":")).encode()
        try:
            if self._end < len(HEADER) or self._end > _COMPACT_BYTES:
                self._replace(payload)
            else:
                self._append(payload)
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from None

    def _append(self, payload: bytes) -> None:
        record = record_of(payload, self._checksum)
        with self._path.open("r+b") as file:
            file.seek(self._end)
            file.truncate()  # a torn end must not stand in the middle
            file.write(record)
            file.flush()
            os.fsync(file.fileno())
        self._note(payload, self._end + len(record))

    def _replace(self, payload: bytes) -> None:
        """Write a new file beside the old one, and put it in its place in one go."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = HEADER + record_of(payload, 0)
        replace_file(self._path, content)
        self._checksum = 0
        self._note(payload, len(content))

    def _note(self, payload: bytes, end: int) -> None:
        self._checksum, self._end = zlib.crc32(payload, self._checksum), end

    def _check_shape(self, image: JobImage, rules: JobRules) -> None:
        for name, written, now in (
            ("MS_WORKER_NUM", image.num_workers, rules.num_workers),
            ("GS_RECOVERY", image.recovery, rules.recovery),
        ):
            if written != now:
                raise self._error(
                    f"is of a job that has not ended, with {name}={written}; this scheduler was "
                    f"started with {now}"
                )

    def _error(self, what: str) -> JournalError:
        return JournalError(f"the journal {self._path} (MS_RECOVERY_PATH) {what}\n{_FIX}")


def _image(payload: bytes) -> JobImage:
    try:
        found = json.loads(payload)
        if not isinstance(found, dict):
            raise MessageError("it is not an object")
        return from_json(found)
    except ValueError as error:
        raise JournalError(f"the last record: {error}") from None
