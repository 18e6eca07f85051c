"""The programs that the documents show run as they stand, in one process and for one epoch."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, Block, blocks
from torch import nn

import graphsplit as gs
from graphsplit.job import joined

TUTORIAL = ROOT / "docs" / "tutorial.md"
ALONE = [block for block in blocks("snippet") if block.document != TUTORIAL]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A fresh process, as far as graphsplit sees, in an empty folder."""
    for name in ("MS_ROLE", "DATA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(joined, "_one_process", False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    generator = torch.get_rng_state()
    yield
    torch.set_rng_state(generator)
    sys.modules.pop("network", None)  # the tutorial's module


def save(block: Block) -> None:
    Path(block.name).write_text(_shortened(block.text))


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(name, run_name="__main__")


@pytest.mark.parametrize("block", ALONE, ids=str)
def test_a_program_runs_as_it_stands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    save(block)
    run(block.name, monkeypatch)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pairs.py", {"gradient_order": "pairs"}),
        (
            "rounded_pairs.py",
            {"gradient_order": "pairs", "gradient_dtype": torch.bfloat16},
        ),
        ("by_microbatch.py", {"accumulate_by": "microbatch", "accumulate": 3}),
    ],
)
def test_a_loop_without_graphsplit_has_the_bits_of_a_model(name: str, options: Any) -> None:
    (block,) = (block for block in ALONE if block.name == name)
    save(block)
    assert "graphsplit" not in block.text
    plain = runpy.run_path(block.name)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, microbatches=plain["M"], **options)
    model.train(1, plain["loader"])
    for one, other in zip(net.parameters(), plain["net"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_two_casts_have_the_bits_of_a_wired_value(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {block.name: block for block in ALONE}
    assert "graphsplit" not in programs["rounded.py"].text
    for name in ("rounded.py", "wired.py"):
        save(programs[name])
    plain, wired = map(runpy.run_path, ("rounded.py", "wired.py"))
    for one, other in zip(plain["net"].parameters(), wired["net"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_checkpoint_that_was_saved_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in ALONE if block.name == "save_and_load.py")
    save(block)
    run(block.name, monkeypatch)
    run(block.name, monkeypatch, "--resume")


def test_the_readme_shows_how_to_print_the_accuracy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = (block for block in ALONE if block.document == ROOT / "README.md")
    save(block)
    run(block.name, monkeypatch)
    assert "Accuracy is: {'Accuracy': 0." in capsys.readouterr().out


def test_the_tutorials_loop_and_its_model_end_in_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tutorial = {block.name: block for block in blocks("snippet") if block.document == TUTORIAL}
    for block in tutorial.values():
        save(block)
    states = []
    for name in ("plain.py", "train.py"):
        run(name, monkeypatch)
        states += re.findall(r"^state: (\w+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(states) == 2
    assert len(set(states)) == 1


def test_the_tutorial_shows_what_explain_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tutorial = {block.name: block for block in blocks("snippet") if block.document == TUTORIAL}
    Path("try").mkdir()
    monkeypatch.chdir("try")
    monkeypatch.syspath_prepend(Path.cwd())
    save(tutorial["network.py"])
    save(tutorial["look.py"])
    run("look.py", monkeypatch)
    found = re.search(r"^Operations.*?\n\n", capsys.readouterr().out, re.DOTALL | re.MULTILINE)
    assert found is not None
    assert found[0].strip() in TUTORIAL.read_text(), f"docs/tutorial.md should show:\n{found[0]}"


def _shortened(text: str) -> str:
    """One epoch, and not the 1,797 digits but a few: what runs is the same."""
    text = re.sub(r"^EPOCHS = \d+$", "EPOCHS = 1", text, flags=re.MULTILINE)
    text = text.replace("model.train(5, loader", "model.train(1, loader")
    return text.replace("load_digits()", "load_digits(n_class=3)")
