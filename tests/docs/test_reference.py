"""The reference pages say what the code says."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from documents import ROOT, Block, blocks, table

import graphsplit
from graphsplit import errors
from graphsplit.cli.commands import main
from graphsplit.settings import ClusterSettings
from graphsplit.train import callbacks, metrics

REFERENCE = ROOT / "docs" / "reference"
ENVIRONMENT = {row[0]: row[1] for row in table(REFERENCE / "environment.md", "table: environment")}
WORKER = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "5", "MS_SCHED_PORT": "8118"}
ROLES = {"MS_SCHED", "MS_WORKER"}


class Recorded(dict[str, str]):
    """An environment that remembers which variables were asked for."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.asked: set[str] = set()

    def get(self, key: str, default: str | None = None) -> str | None:  # type: ignore[override]
        self.asked.add(key)
        return super().get(key, default)


@pytest.mark.real_processes
def test_the_api_pages_are_built(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs" / "build_api.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "train_step" in (tmp_path / "graphsplit.html").read_text()


def test_the_table_lists_the_variables_that_are_read() -> None:
    environ = Recorded(WORKER)
    ClusterSettings.from_environ(environ)
    of_launchers = {"GS_LAUNCHER", "GS_RENDEZVOUS_DIR", "GS_LAUNCHER_LINE"}
    of_files = {"GS_REPORT_FILE", "GS_CHECK_FILE"}
    assert environ.asked | of_launchers | of_files == set(ENVIRONMENT)


def test_no_other_variable_is_named_anywhere_in_the_code() -> None:
    named: set[str] = set()
    for path in (ROOT / "graphsplit").rglob("*.py"):
        named.update(re.findall(r"[\"'\[ (](?:environ\[)?\"?((?:MS|GS)_[A-Z_]+)", path.read_text()))
    assert named - ROLES <= set(ENVIRONMENT)


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
def test_the_default_is_the_one_of_the_table(name: str) -> None:
    default = ENVIRONMENT[name]
    if default == "required":
        with pytest.raises(errors.ConfigurationError, match=name):
            ClusterSettings.from_environ({k: v for k, v in WORKER.items() if k != name})
    elif name != "MS_ROLE":
        given = {**WORKER, name: "" if default == "none" else default}
        assert ClusterSettings.from_environ(given) == ClusterSettings.from_environ(WORKER)


@pytest.mark.parametrize("block", blocks("help"), ids=str)
def test_the_help_of_a_command_is_the_one_that_is_printed(block: Block) -> None:
    arguments = [*block.name.split("/"), "--help"]
    result = CliRunner().invoke(main, arguments, prog_name="graphsplit", terminal_width=78)
    assert result.output.strip() == block.text.strip()


def test_the_api_page_names_every_public_name() -> None:
    rows = table(REFERENCE / "api.md", "names: graphsplit")
    assert {_bare(row[0]) for row in rows} == set(graphsplit.__all__)


def test_every_page_names_what_there_is() -> None:
    """What stands as ``gs.name`` in a how-to is public."""
    pages = [path.read_text() for path in (ROOT / "docs" / "how-to").glob("*.md")]
    named = {name for text in pages for name in re.findall(r"\bgs\.([A-Za-z_]\w*)", text)}
    assert named - set(graphsplit.__all__) == set()


def test_the_api_page_names_every_method_of_a_model() -> None:
    rows = table(REFERENCE / "api.md", "names: graphsplit.Model")
    methods = {name for name, _ in _methods(graphsplit.Model)}
    assert {_bare(row[0]) for row in rows} == methods


def test_every_public_name_has_a_docstring() -> None:
    lacking = [name for name, value in _public() if not (inspect.getdoc(value) or "").strip()]
    assert lacking == []


def test_every_public_class_and_function_says_more_than_its_base_does() -> None:
    lacking = [
        name for name, value in _public() if not isinstance(value, property) and not value.__doc__
    ]
    assert lacking == []


def _bare(call: str) -> str:
    """``train`` out of ``train(epochs, loader)``, and ``init`` out of ``gs.init()``."""
    return call.removeprefix("gs.").partition("(")[0]


def _public() -> Iterator[tuple[str, object]]:
    for name in graphsplit.__all__:
        value = getattr(graphsplit, name)
        if name != "__version__":
            yield name, value
    yield from _classes("Model", {"Model": graphsplit.Model})
    for module in (callbacks, metrics, errors):
        yield from _classes(module.__name__, _own(module))


def _own(module: ModuleType) -> dict[str, type]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
    }


def _classes(where: str, found: Mapping[str, type]) -> Iterator[tuple[str, object]]:
    for name, value in found.items():
        yield f"{where}.{name}", value
        yield from ((f"{where}.{name}.{method}", f) for method, f in _methods(value))


def _methods(value: type) -> Iterator[tuple[str, object]]:
    own = [one for one in value.__mro__ if one is value or one.__module__.startswith("graphsplit.")]
    for name, attribute in itertools.chain(*(vars(one).items() for one in own)):
        if name[0] != "_" and (inspect.isfunction(attribute) or isinstance(attribute, property)):
            yield name, attribute
