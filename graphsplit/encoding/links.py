"""The links between the hosts of a job, as ``graphsplit doctor`` has measured them, in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from graphsplit.encoding import records
from graphsplit.encoding.fields import AtMost, MessageError, integer, number, string
from graphsplit.errors import ConfigurationError

_MOST_HOSTS = AtMost(1 << 12)
_MOST_LINKS = AtMost(1 << 20)
_MOST_BYTES = 256 << 20
_Rank = Annotated[int, integer(0, 1 << 20)]
_Name = Annotated[str, string(256)]


@dataclass(frozen=True)
class MeasuredHost:
    """A host.

    Attributes:
        name: As the user named it.
        workers: The ranks of the workers that it has.
        cores: How many cores they may use.
    """

    name: _Name
    workers: tuple[_Rank, ...]
    cores: Annotated[int, integer(1, 1 << 20)]


@dataclass(frozen=True)
class MeasuredLink:
    """The way from one host to another.

    Attributes:
        source: The name of the one.
        destination: That of the other.
        there_and_back_s: How long a byte takes there and back.
        bytes_per_s: How many bytes get there.
    """

    source: _Name
    destination: _Name
    there_and_back_s: Annotated[float, number(0, 1e6)]
    bytes_per_s: Annotated[float, number(1e-3, 1e15)]


@dataclass(frozen=True)
class MeasuredLinks:
    """All hosts of a job, and the links between them."""

    hosts: Annotated[tuple[MeasuredHost, ...], _MOST_HOSTS]
    links: Annotated[tuple[MeasuredLink, ...], _MOST_LINKS]

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            OSError: It cannot be written.
        """
        path.write_text(records.to_text(self) + "\n")


def read_links(path: Path) -> MeasuredLinks:
    """Read what ``save`` has written.

    Raises:
        ConfigurationError: There is no such file, or it holds something else.
    """
    try:
        with path.open("rb") as file:
            return records.from_text(MeasuredLinks, file.read(_MOST_BYTES), what=str(path))
    except (OSError, MessageError) as error:
        raise ConfigurationError(
            f"links={str(path)!r} cannot be used: {error}\n"
            f"  Fix: make the file by `graphsplit doctor -H a:2,b:3 --save-links {path.name}`"
        ) from None
