"""The documents of the repository, and what is written in them.

A comment on the line before a fenced block, or before a table, says what the block is::

    <!-- snippet: train.py -->            a program that a reader saves under this name and runs
    <!-- quoted: tests/golden/x.txt -->   a piece of this file
    <!-- help: run -->                    what `graphsplit run --help` prints
    <!-- help: manifest/k8s -->           what `graphsplit manifest k8s --help` prints
    <!-- table: environment -->           the first column lists what the code has
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(
    r"^<!-- (?P<kind>\w+): (?P<name>\S+) -->\n```\w*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_ANY_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block with a comment before it.

    Attributes:
        document: Where it stands.
        kind: What the comment says it is.
        name: What the comment names.
        text: Its content.
    """

    document: Path
    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.name}"


def documents() -> list[Path]:
    """Every document of the repository."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(kind: str) -> list[Block]:
    """All blocks of one kind, document by document."""
    return [
        Block(document, found["kind"], found["name"], found["text"])
        for document in documents()
        for found in _FENCED.finditer(document.read_text())
        if found["kind"] == kind
    ]


def table(document: Path, comment: str) -> list[list[str]]:
    """The rows of the table that follows a comment; backquotes and the header are left out."""
    text = document.read_text()
    lines = text[text.index(f"<!-- {comment} -->") :].splitlines()[1:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        # A pipe inside a cell is written as \|.
        rows.append([cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows[2:]


def links(document: Path) -> list[str]:
    """Targets of the links of a document, those in fenced blocks left out."""
    return _LINK.findall(_ANY_FENCE.sub("", document.read_text()))


def anchors(document: Path) -> set[str]:
    """What a link may name after `#`: the headings, as they are turned into anchors."""
    headings = _HEADING.findall(_ANY_FENCE.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}
