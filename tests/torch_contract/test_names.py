"""Each private name of torch is where graphsplit looks for it, and nobody else looks for one."""

import ast
import importlib
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import graphsplit
from graphsplit.torch_ext.contract import CONTRACT, PrivateName

LIBRARY = Path(graphsplit.__file__).parent
_parameter = torch.nn.Parameter(torch.zeros(1))
_scheduled = torch.optim.SGD([_parameter])
torch.optim.lr_scheduler.ConstantLR(_scheduled)
_scheduled.step()
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(torch.nn.ReLU())
_MADE: dict[str, Any] = {
    "torch.empty()": torch.empty(1),
    "torch.empty().untyped_storage()": torch.empty(1).untyped_storage(),
    "torch.nn.Module()": torch.nn.Module(),
    "torch.nn.Module().state_dict()": torch.nn.Module().state_dict(),
    "torch.nn.LSTM()": torch.nn.LSTM(1, 1),
    "torch.fx.GraphModule()": torch.fx.symbolic_trace(torch.nn.ReLU()),
    "torch.jit.script()": _scripted,
    "torch.jit.script()._c": _scripted._c,
    "torch.optim.SGD()": _scheduled,
    "torch.sparse()": torch.eye(1).to_sparse(),
    "torch.utils.data.DataLoader()": torch.utils.data.DataLoader([0]),
    "torch.amp.GradScaler()": torch.amp.GradScaler("cpu"),
}
with suppress(ImportError):
    _MADE["torchmetrics.SumMetric()"] = importlib.import_module("torchmetrics").SumMetric()


def look_up(path: str) -> Any:
    made = max((m for m in _MADE if path.startswith(f"{m}.")), key=len, default="")
    if made:
        value, names = _MADE[made], path[len(made) + 1 :].split(".")
    else:
        package, *names = path.split(".")
        value = importlib.import_module(package)
    at = made or package
    for name in names:
        if not hasattr(value, name):
            value = importlib.import_module(f"{at}.{name}")
        else:
            value = getattr(value, name)
        at = f"{at}.{name}"
    return value


@pytest.mark.parametrize("entry", CONTRACT, ids=lambda entry: entry.path)
def test_torch_has_it(entry: PrivateName) -> None:
    package = entry.path.partition(".")[0]
    version = pytest.importorskip(package).__version__
    try:
        look_up(entry.path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{package} {version} has moved {entry.path}: {error}\n{entry.why}")


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


# Private names of Python's own, and of NumPy's, that the library reads.
_OF_PYTHON = {
    *("_asdict", "_bit_generator", "_current_frames", "_exit", "_fields", "_getframe", "_inst"),
    *(
        "_lru_cache_wrapper",
        "_rand",
        "_reconstruct",
        "_run_exitfuncs",
        "_run_module_as_main",
        "_shutdown",
    ),
    "_value2member_map_",
}


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines: functions, classes, variables, attributes of ``self``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_reads(tree: ast.AST, names_of_torch: set[str]) -> set[tuple[str, str]]:
    """Private attributes of others that a file reads or names in quotes, with the line."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_own = owner in ("self", "cls") or owner.partition(".")[0] == "_aten"
            if node.attr.startswith("_") and not node.attr.startswith("__") and not is_own:
                found.add((node.attr, f"{node.lineno}: {ast.unparse(node)}"))
        elif isinstance(node, ast.Constant) and node.value in names_of_torch:
            found.add((node.value, f"{node.lineno}: {node.value!r}"))
    return {(name, line) for name, line in found if "torch.ops." not in line}


def test_no_other_package_reads_private_attributes() -> None:
    parts = {part for entry in CONTRACT for part in entry.path.split(".")}
    of_torch = {part for part in parts if part.startswith("_") and "(" not in part}
    trees = {
        file.relative_to(LIBRARY): ast.parse(file.read_text())
        for file in LIBRARY.rglob("*.py")
        if "torch_ext" not in file.parts and "_proto" not in file.parts
    }
    known = set().union(_OF_PYTHON, *map(own_names, trees.values())) - of_torch

    assert {
        f"{file}:{line}"
        for file, tree in trees.items()
        for name, line in private_reads(tree, of_torch)
        if name not in known
    } == set()


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
