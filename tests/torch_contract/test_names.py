"""Each private name of torch is where graphsplit looks for it, and nobody else looks for one."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from graphsplit.torch_ext.contract import CONTRACT, PrivateName

LIBRARY = Path(__file__).parents[2] / "graphsplit"
_parameter = torch.nn.Parameter(torch.zeros(1))
_MADE: dict[str, Any] = {
    "torch.empty()": torch.empty(1),
    "torch.empty().untyped_storage()": torch.empty(1).untyped_storage(),
    "torch.nn.Module()": torch.nn.Module(),
    "torch.nn.Module().state_dict()": torch.nn.Module().state_dict(),
    "torch.optim.SGD()": torch.optim.SGD([_parameter]),
    "torch.amp.GradScaler()": torch.amp.GradScaler("cpu"),
}


def look_up(path: str) -> Any:
    made = max((m for m in _MADE if path.startswith(f"{m}.")), key=len, default="")
    if made:
        value, names = _MADE[made], path[len(made) + 1 :].split(".")
    else:
        value, names = torch, path.split(".")[1:]
    at = made or "torch"
    for name in names:
        if not hasattr(value, name):
            value = importlib.import_module(f"{at}.{name}")
        else:
            value = getattr(value, name)
        at = f"{at}.{name}"
    return value


@pytest.mark.parametrize("entry", CONTRACT, ids=lambda entry: entry.path)
def test_torch_has_it(entry: PrivateName) -> None:
    try:
        look_up(entry.path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"torch {torch.__version__} has moved {entry.path}: {error}\n{entry.why}")


def test_each_name_is_listed_once() -> None:
    paths = [entry.path for entry in CONTRACT]

    assert len(paths) == len(set(paths))


def private_paths(file: Path) -> set[str]:
    """Private names of torch that a file imports or reads by their whole path."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            paths = [ast.unparse(node)]
        else:
            continue
        found |= {p for p in paths if p.startswith("torch.") and "._" in p and ".__" not in p}
    return {p for p in found if not p.startswith("torch.ops.")}


def test_no_other_package_names_them() -> None:
    outside = {
        f"{file.relative_to(LIBRARY)}: {path}"
        for file in LIBRARY.rglob("*.py")
        if "torch_ext" not in file.parts and "_proto" not in file.parts
        for path in private_paths(file)
    }

    # Documented, in spite of its name.
    assert {path for path in outside if not path.endswith("torch._check")} == set()


def test_what_this_package_names_is_in_the_contract() -> None:
    listed = {entry.path for entry in CONTRACT}
    named = {
        path
        for file in (LIBRARY / "torch_ext").glob("*.py")
        for path in private_paths(file)
        # A module or class that an entry is in, or an attribute of what an entry names.
        if not any(e.startswith(path) or path.startswith(f"{e}.") for e in listed)
    }

    assert {path for path in named if path != "torch._check"} == set()
