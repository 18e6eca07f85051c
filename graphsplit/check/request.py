"""The request of ``graphsplit check`` to a process, and where that leaves its notes. Files.

All processes of one pass share a folder::

    request.json      what is asked
    worker_0.jsonl    what a process notes, one record per line; plain.jsonl is the plain loop's
    plain.refusals    what a job would refuse, in a pass that looks for that
    worker_0.ops      the operations of one step, in a pass that looks for where a difference begins
    generator         the generator state that worker 0 left gs.init() with
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphsplit.encoding import records
from graphsplit.errors import ConfigurationError
from graphsplit.security.private_files import replace_file

VARIABLE = "GS_CHECK_FILE"
PLAIN = "plain"
_REQUEST, _GENERATOR = "request.json", "generator"
_REFUSALS = ".refusals"


@dataclass(frozen=True)
class NoteRequest:
    """The values that a process is asked to note.

    Attributes:
        num_steps: After how many training steps it leaves the script.
        operations_of: The training step whose operations are noted as well, as a kind of note and
            its number from 1; 0: of none.
        whole: Kind and name of a value whose elements are all noted; empty for none.
        survey_for: For how many workers all is to be found that a job would refuse; 0: for none.
    """

    num_steps: int
    operations_of: tuple[str, int] = ("", 0)
    whole: tuple[str, str] = ("", "")
    survey_for: int = 0


def records_file(folder: Path, process: str) -> Path:
    """Where a process notes what it computes; ``process`` as in ``"worker 0"``."""
    return folder / f"{process.replace(' ', '_')}.jsonl"


def operations_file(records: Path) -> Path:
    """Where a process notes the operations of one step, given where it notes the rest."""
    return records.with_suffix(".ops")


def write_request(folder: Path, request: NoteRequest) -> None:
    """Ask the processes that will be given files in this folder."""
    (folder / _REQUEST).write_text(records.to_text(request))


def requested_file(environ: Mapping[str, str]) -> Path | None:
    """Where this process is to note what it computes; None where nobody asks."""
    path = environ.get(VARIABLE, "").strip()
    return Path(path) if path else None


def read_request(file: Path) -> NoteRequest:
    """The request to the process that was given a file.

    Raises:
        ConfigurationError: There is no request beside the file.
    """
    try:
        return records.from_text(NoteRequest, (file.parent / _REQUEST).read_text())
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{VARIABLE}={file} is set, but there is no request of graphsplit check beside that "
            f"file\n  Fix: unset {VARIABLE}; graphsplit check sets it for the processes that it "
            f"starts."
        ) from None


def write_refusal(records: Path, text: str) -> None:
    """Note what a job would refuse, given where the process notes the rest."""
    with records.with_suffix(_REFUSALS).open("a") as file:
        file.write(f"{json.dumps(text)}\n")


def read_refusals(records: Path) -> tuple[str, ...]:
    """The refusals of a job, each once, in the order in which they were found."""
    try:
        lines = records.with_suffix(_REFUSALS).read_text().splitlines()
    except FileNotFoundError:
        return ()
    return tuple(dict.fromkeys(str(json.loads(line)) for line in lines))


def leave_generator(file: Path, state: bytes) -> None:
    """Worker 0 has left ``gs.init()``: the plain loop is to begin from the same state."""
    with contextlib.suppress(FileNotFoundError):
        replace_file(file.parent / _GENERATOR, state)


def left_generator(file: Path) -> bytes | None:
    """The state that worker 0 left ``gs.init()`` with; None if it never came there."""
    try:
        return (file.parent / _GENERATOR).read_bytes()
    except FileNotFoundError:
        return None
