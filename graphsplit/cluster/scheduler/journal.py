"""The scheduler's journal: what it must know to go on, safe against crashes and bad disks.

A file with the whole state of the job, which is replaced in one go whenever that changes::

    header      8 bytes    b"GSJRNL" and the version of the format, 16 bits
    checksum    32 bytes   SHA-256 of the payload
    payload                JSON

A write that was cut off leaves the state before. Whatever does not fit was changed after it was
written: then nothing in the file can be believed, and it is refused.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.rules import JobRules
from graphsplit.encoding.fields import MessageError
from graphsplit.errors import JournalError
from graphsplit.security.private_files import open_to_read, replace_file

HEADER = b"GSJRNL" + struct.pack("<H", 2)
_PAYLOAD_AT = len(HEADER) + hashlib.sha256().digest_size
_FIX = (
    "  Fix: if the job is to go on, put back an intact copy of the file; if not, remove it, and "
    "the next scheduler forms a new job"
)
_FIX_OF_WRITING = "  Fix: make room there, or set MS_RECOVERY_PATH to a folder that can be written."


def content_of(payload: bytes) -> bytes:
    """The bytes of a journal."""
    return HEADER + hashlib.sha256(payload).digest() + payload


def parse(content: bytes) -> JobImage:
    """The job in a journal's bytes. Pure.

    Raises:
        JournalError: They were changed after they were written, or are of another version.
    """
    if not content.startswith(HEADER):
        raise JournalError("it does not begin as a journal of this version of graphsplit")
    payload = content[_PAYLOAD_AT:]
    if content != content_of(payload):
        raise JournalError("its checksum differs")
    try:
        return JobImage.read(payload)
    except MessageError as error:
        raise JournalError(str(error)) from None


def _begins_anew(image: JobImage, rules: JobRules) -> bool:
    """Whether a job whose processes were all lost is started again, with another number of them."""
    is_restarted = rules.restarts and image.recovery == rules.recovery
    return is_restarted and image.num_workers != rules.num_workers


class Journal:
    """One journal file, readable and writable by this user only.

    Args:
        path: The file; its folder is made if there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, rules: JobRules) -> JobImage | None:
        """The job that was written down; None if there is none, it has ended, or it begins anew.

        Raises:
            JournalError: The file cannot be read, is damaged, or is of a job of another shape.
        """
        try:
            with open_to_read(self._path) as file:
                image = parse(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None
        except JournalError as error:
            raise self._error(f"is damaged, and nothing in it is believed: {error}") from None
        if image.phase == "ended" or _begins_anew(image, rules):
            return None
        self._check_shape(image, rules)
        return image

    def write(self, image: JobImage) -> None:
        """Put another state in the place of the last one, and wait until it is on disk.

        Raises:
            JournalError: It cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, content_of(image.to_text().encode()))
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}", _FIX_OF_WRITING) from None

    def _check_shape(self, image: JobImage, rules: JobRules) -> None:
        for name, written, now in (
            ("MS_WORKER_NUM", image.num_workers, rules.num_workers),
            ("GS_RECOVERY", image.recovery, rules.recovery),
        ):
            if written != now:
                raise self._error(
                    f"is of a job that has not ended, with {name}={written}; this scheduler was "
                    f"started with {now}",
                    f"  Fix: start it with {name}={written}; or, if that job is over, remove the "
                    f"file, and the next scheduler forms a new job",
                )

    def _error(self, what: str, fix: str = _FIX) -> JournalError:
        return JournalError(f"the journal {self._path} (MS_RECOVERY_PATH) {what}\n{fix}")
