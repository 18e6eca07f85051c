"""The page of wire formats names every file that makes bytes or reads them, and the bounds."""

from __future__ import annotations

import importlib
import re

from documents import ROOT, table

PAGE = ROOT / "docs" / "reference" / "wire-formats.md"
LIBRARY = ROOT / "graphsplit"
_MAKES_BYTES = re.compile(
    r"\b(struct\.(Struct|pack|unpack)|json\.(loads|dumps)|\w+_pb2\b|from_bytes)"
)
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "bytes": 1}


def named_files() -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text()))


def test_there_are_at_most_seven_formats() -> None:
    assert len(table(PAGE, "table: wire formats")) <= 7


def test_every_file_that_makes_or_reads_bytes_is_named() -> None:
    found = {
        str(file.relative_to(LIBRARY))
        for file in LIBRARY.rglob("*.py")
        if _MAKES_BYTES.search(file.read_text()) and file.parent.name != "_proto"
    }
    assert found - named_files() == set()


def test_every_file_that_is_named_is_there() -> None:
    assert [name for name in named_files() if not (LIBRARY / name).is_file()] == []
    assert {f"proto/graphsplit/{file.name}" for file in ROOT.glob("proto/graphsplit/*")} <= set(
        re.findall(r"`(proto/[\w/.]+)`", PAGE.read_text())
    )


def test_the_bounds_are_those_of_the_code() -> None:
    text = re.sub(r"\s+", " ", PAGE.read_text())
    found = re.findall(r"(\d+) (KiB|MiB|bytes)[^`|()]*\(`([\w.]+)\.([A-Z_]+)`\)", text)
    assert len(found) == len(re.findall(r"`[\w.]+\.[A-Z_]+`", text)) >= 8
    for number, unit, module, name in found:
        bound = getattr(importlib.import_module(f"graphsplit.{module}"), name)
        assert bound == int(number) * _UNITS[unit], f"{module}.{name}"


def test_nothing_in_the_library_reads_what_could_run_code() -> None:
    reads = {
        file.relative_to(LIBRARY).as_posix()
        for file in LIBRARY.rglob("*.py")
        if re.search(r"(pickle|marshal)\.load|torch\.load\(", file.read_text())
    }
    assert reads == {"launching/call.py"}  # what the caller has left in inherited memory
