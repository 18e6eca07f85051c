"""The house stays one to find your way in: sizes of folders, of files and of functions."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import graphsplit

ROOT = Path(graphsplit.__file__).parent
GENERATED = ROOT / "_proto"
FILES = sorted(path for path in ROOT.rglob("*.py") if GENERATED not in path.parents)
LINES = {path: len(path.read_text().splitlines()) for path in FILES}


def test_no_folder_has_more_than_fifteen_files_side_by_side() -> None:
    found = Counter(path.parent.relative_to(ROOT) for path in FILES)
    assert not {str(folder): number for folder, number in found.items() if number > 15}


def test_no_room_is_larger_than_18_percent() -> None:
    found: Counter[str] = Counter()
    for path, lines in LINES.items():
        found[path.relative_to(ROOT).parts[0]] += lines
    assert not {room: n for room, n in found.items() if n > 0.18 * sum(LINES.values())}


def test_no_file_is_longer_than_500_lines_and_no_function_than_60() -> None:
    assert not {str(path): lines for path, lines in LINES.items() if lines > 500}
    functions = {
        f"{path.relative_to(ROOT)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    assert not {name: lines for name, lines in functions.items() if lines > 60}


def test_every_package_says_what_it_is_for() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert not [path for path in packages if not ast.get_docstring(ast.parse(path.read_text()))]


def test_no_two_classes_that_others_use_have_one_name() -> None:
    found = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, number in found.items() if number > 1]


def test_no_docstring_begins_with_a_question() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    assert not [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "").startswith("What ")
    ]
