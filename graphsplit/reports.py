"""A process's report of its end to whoever started it: one small file, named by the launcher.

``graphsplit run`` gives each process the name of a file of its own. A process that fails, or the
scheduler of a job that does, writes there what ended it, so that the launcher's last line can name
the root cause; reading it out of what the processes print would be guessing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from graphsplit.encoding import records
from graphsplit.root_cause import FailureCause

VARIABLE = "GS_REPORT_FILE"
_MAX_BYTES = 64 << 10
_MAX_CHARS = 2_000


@dataclass(frozen=True)
class EndReport:
    """The end of a process.

    Attributes:
        headline: What happened, to whom, in one line.
        where: The places that are known, in one line; empty if none is.
        rank: The worker that is to blame; -1 if none is.
    """

    headline: str
    where: str = ""
    rank: int = -1


def write_report(environ: Mapping[str, str], cause: FailureCause) -> None:
    """Leave a report where the launcher looks for it. The first one counts."""
    path = environ.get(VARIABLE, "").strip()
    if not path:
        return
    where = "; ".join(cause.where())
    report = EndReport(cause.headline[:_MAX_CHARS], where[:_MAX_CHARS], cause.rank)
    # The launcher may be gone, and its folder too: that must not hide the failure itself.
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "w") as file:
            file.write(records.to_text(report))


def who_failed_alike(environ: Mapping[str, str], text: str) -> str:
    """The process of this launcher that has ended with the same text before, as ``worker_0``.

    Empty if this one is the first, or cannot know. What is wrong with a script is wrong in each.
    """
    path = Path(environ.get(VARIABLE, "").strip())
    if not path.name:
        return ""
    mark = path.with_name(f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.error")
    own = path.with_suffix(".name")
    try:
        own.write_text(path.stem)
        os.link(own, mark)  # whole or not at all
    except FileExistsError:
        with contextlib.suppress(OSError):
            return mark.read_text()
    except OSError:  # the launcher may be gone, and its folder too
        pass
    return ""


def note_init(environ: Mapping[str, str]) -> None:
    """Tell the launcher that this process takes part in the job."""
    path = environ.get(VARIABLE, "").strip()
    if path:
        with contextlib.suppress(OSError):
            _init_mark(Path(path)).touch()


def has_begun(path: Path) -> bool:
    """Whether the process of this report has called ``gs.init()``."""
    return _init_mark(path).exists()


def forget(path: Path) -> None:
    """Another process will use this name."""
    path.unlink(missing_ok=True)
    _init_mark(path).unlink(missing_ok=True)


def _init_mark(path: Path) -> Path:
    return path.with_suffix(".begun")


def read_report(path: Path) -> EndReport | None:
    """The report of one process; None if it left none."""
    try:
        with path.open("rb") as file:
            found = records.from_text(EndReport, file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None
    return replace(found, headline=_one_line(found.headline), where=_one_line(found.where))


def _one_line(text: str) -> str:
    return " ".join(text.split())
