"""The wheel and the sdist that users would get: whole, importable, typed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [p for p in (ROOT / "graphsplit").rglob("*") if p.suffix in (".py", ".pyi", ".typed")]
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_{kind}(sys.argv[1]))"
pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(600)]


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy: building leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("sdist")
    copied = folder / "copy"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            (copied / name).write_bytes((ROOT / name).read_bytes())
    name = run(sys.executable, "-c", BUILD.format(kind="sdist"), folder, folder=copied)
    return folder / name.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist gives."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    name = run(sys.executable, "-c", BUILD.format(kind="wheel"), folder, folder=unpacked)
    return folder / name.splitlines()[-1]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and finds what it depends on where the tests do."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def test_the_sdist_and_the_wheel_have_every_source(sdist: Path, wheel: Path) -> None:
    wanted = {p.relative_to(ROOT).as_posix() for p in SOURCES}

    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert wanted | {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_the_wheel_trains(python: Path, tmp_path: Path) -> None:
    script = """
import torch, graphsplit as gs
print(gs.__file__)
gs.init()
net = torch.nn.Linear(2, 1)
net.place("MS_WORKER", 0)
model = gs.Model(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
print(float(model.train_step(torch.ones(4, 2), torch.zeros(4, 1))) >= 0)
"""
    where, trained = run(python, "-c", script, folder=tmp_path).split()

    assert Path(where).is_relative_to(python.parents[1])
    assert trained == "True"


def test_examples_type_check_against_the_wheel(python: Path, tmp_path: Path) -> None:
    """``place`` on modules is known to ``operator`` alone: torch gives them any attribute."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\nstrict = True\nuntyped_calls_exclude = torch\n"
        "[mypy-train,linear]\ndisable_error_code = operator\n"
    )
    examples = ROOT / "examples" / "lenet_mnist"
    said = run(
        *(sys.executable, "-m", "mypy", "--config-file", settings, "--python-executable", python),
        *("--cache-dir", tmp_path / "cache", examples),
        folder=tmp_path,
    )

    assert said.startswith("Success")
