"""A series of saves: their names, which of them are kept, and which is the latest."""

from __future__ import annotations

import contextlib
import os
import re
import string
from pathlib import Path
from typing import Any

from graphsplit.checkpoint.disk import folder as folders
from graphsplit.checkpoint.disk.manifest import MANIFEST, is_file_of_a_save
from graphsplit.errors import CheckpointError, ConfigurationError
from graphsplit.job import joined
from graphsplit.job.group import WorkerGroup
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall
from graphsplit.text import called, described

FIELDS = ("epoch", "step", "num_steps")
_PLAIN_NAME = re.compile(r"[\w=+,@ -][\w.=+,@ -]*")


def check_path(what: str, path: Any) -> None:
    """Refuse what is no path.

    Raises:
        ConfigurationError: It is something else.
    """
    if not isinstance(path, (str, os.PathLike)):
        shown = repr(path) if isinstance(path, (int, float, type(None))) else described(path)
        none = "\n  Fix: gs.latest_checkpoint gives None where nothing is saved yet: look before."
        fix = none if path is None else ""
        raise ConfigurationError(f"{what} is {shown}; expected a path, as 'runs/first'{fix}")


class Series:
    """Saves whose names come from one template.

    Args:
        template: A path whose last part may contain ``{epoch}``, ``{step}`` and ``{num_steps}``,
            with a format such as ``{num_steps:06d}``.
        keep: How many complete saves to keep; None: all.

    Raises:
        ConfigurationError: The template, or the number, is not as above.
    """

    def __init__(self, template: str | os.PathLike[str], keep: int | None) -> None:
        check_path("path", template)
        path = Path(template)
        self._parent, self._name, self._keep = path.parent, path.name, keep
        problems = []
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            problems.append(f"keep={keep!r}; expected an int of 1 or more, or None")
        try:
            parts = list(string.Formatter().parse(self._name))
            self.path(**dict.fromkeys(FIELDS, 1))
            if "{" in str(path.parent):
                raise KeyError(str(path.parent))
        except (KeyError, IndexError, ValueError):
            parts = []
            problems.append(
                f"{os.fspath(template)!r} is no template of a path; expected fields {{epoch}}, "
                f"{{step}} and {{num_steps}} in its last part only"
            )
        if problems:
            raise ConfigurationError("\n  ".join(problems))
        self._pattern = re.compile(
            "".join(re.escape(text) + (r"\d+" if field else "") for text, field, *_ in parts)
        )

    def path(self, *, epoch: int, step: int, num_steps: int) -> Path:
        """The path of one save."""
        return self._parent / self._name.format(epoch=epoch, step=step, num_steps=num_steps)

    def prune(self) -> None:
        """Remove saves that are older than those to keep, and older unfinished ones.

        On the disk of this worker, from what is found there: no name comes from another worker.
        """
        if self._keep is None:
            return
        found = sorted(self._found())
        complete = [time for time, path in found if (path / MANIFEST).exists()]
        # A worker without a disk in common with worker 0 sees no manifest, only files.
        times = complete or [time for time, _ in found]
        for time, path in found:
            if len(times) >= self._keep and time < times[-self._keep]:
                folders.remove_save(path)

    def _found(self) -> list[tuple[int, Path]]:
        """Saves of this series on this disk, with the time of their last file."""
        found = []
        with contextlib.suppress(OSError):
            for path in self._parent.iterdir():
                if self._pattern.fullmatch(path.name) and path.is_dir():
                    times = [
                        (path / name).stat().st_mtime_ns
                        for name in os.listdir(path)
                        if name == MANIFEST or is_file_of_a_save(name)
                    ]
                    if times:
                        found.append((max(times), path))
        return found


@called("gs.latest_checkpoint")
def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The complete save in a folder that was saved last, on every worker; None if there is none.

    Collective. Workers that do not share a disk are told its name.
    """
    check_path("latest_checkpoint: folder", folder)
    job = joined.current()
    if job is None:
        return latest_of(Path(folder), WorkerGroup())
    call = ModelCall("latest_checkpoint", _latest_on_all, (Path(folder), job))
    found: Path | None = job.script.collective(call)
    return found


def _latest_on_all(folder: Path, job: Job) -> Path | None:
    with job.reporting():
        return latest_of(folder, job.control)


def latest_of(folder: Path, group: WorkerGroup) -> Path | None:
    """See ``latest_checkpoint``.

    Raises:
        CheckpointError: Another worker names a save as none is named.
    """
    mine = folders.newest(folder)
    names = [name for name in group.exchange(mine.name if mine is not None else "") if name]
    if not names:
        return None
    # A name, not a path: it cannot lead out of the folder that this worker's script gave.
    if not _PLAIN_NAME.fullmatch(names[0]):
        raise CheckpointError(
            f"the latest save in {folder} is named {names[0][:100]!r}; expected letters, digits "
            f"and -_.=+,@ in the names of saves"
        )
    return folder / names[0]
