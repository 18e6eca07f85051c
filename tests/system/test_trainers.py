"""Trainers that people have, two lines changed: the bits, the files and the lines of one process.

The plain script is the example without its two lines.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated.compare import difference

from system.helpers import JOBS, Finished, run_alone, run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(480)]
EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


def plain(
    example: str, folder: Path, *changes: tuple[str, str], arguments: tuple[str, ...] = ()
) -> list[str]:
    """Run an example without graphsplit's lines, in one process; what it prints."""
    text = (EXAMPLES / example).read_text()
    for old, new in (("import graphsplit as gs\n", ""), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    kept = [line for line in text.splitlines() if not line.startswith("    gs.")]
    assert len(kept) == len(text.splitlines()) - 1 and "import graphsplit" not in text
    folder.mkdir(exist_ok=True)
    script = folder / example
    script.write_text("\n".join(kept))
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    script.unlink()
    return done.stdout.splitlines()


CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    "accelerate_loop.py": (("from graphsplit.integrations.accelerate", "from accelerate"),),
    "run_clm.py": (("from graphsplit.integrations.transformers", "from transformers"),),
    "lightning_module.py": (
        ("from graphsplit.integrations.lightning import GraphsplitStrategy\n", ""),
        ("        strategy=GraphsplitStrategy(),\n", ""),
    ),
}


IMPORTS = {
    "accelerate_loop.py": ("accelerate.utils",),
    "run_clm.py": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "lightning_module.py": ("lightning", "torchmetrics"),
}


@functools.cache
def plain_once(example: str, folder: Path) -> list[str]:
    """What an example prints in one process; it is run once, in its own part of a folder."""
    return plain(example, folder / example, *CHANGES[example])


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples leave in one process: see ``plain_once``."""
    return tmp_path_factory.mktemp("plain")


def on_workers(example: str, folder: Path, *arguments: str) -> Finished:
    """Run an example on two workers."""
    script, imports = EXAMPLES / example, IMPORTS[example]
    job = run_job(script, str(folder), *arguments, workers=2, imports=imports)
    assert job.status == 0, job.output[-6000:]
    return job


THREE = {
    "accelerate_loop.py": [('"{3..5}": 1}', '"{3}": 2, "{4..5}": 1}')],
    "run_clm.py": [
        ('"transformer.h.{1..3}": 1}', '"transformer.h.1": 2, "transformer.h.{2..3}": 1}'),
        ("disable_tqdm=True", 'disable_tqdm=True, log_level="info"'),
    ],
    "lightning_module.py": [
        ('"net.{3..5}": 1}', '"net.3": 2, "net.{4..5}": 1}'),
        ("enable_progress_bar=False", "enable_progress_bar=True"),  # it looks at what is logged
    ],
}


# These, and the seed that Lightning sets, the libraries tell in every process.
WARNING = re.compile(r"/\S+\.py:\d+: |\[transformers\] `loss_type=None` was set|Seed set to")


def killed(example: str, folder: Path, rank: int, call: int) -> None:
    """Run an example on two workers, one of which dies; the job ends, and names it."""
    folder.mkdir()
    arguments = (str(EXAMPLES / example), str(folder), str(rank), str(call))
    job = run_job("killed_trainer.py", *arguments, workers=2, imports=IMPORTS[example])
    assert job.status != 0 and job.seconds < 60
    assert f"worker {rank} was killed by SIGKILL" in job.output.splitlines()[-1]


def on_three(example: str, folder: Path) -> Finished:
    """Run an example on three workers, one of which is between the other two, over gRPC."""
    text, script = (EXAMPLES / example).read_text(), folder.with_suffix(".py")
    for old, new in THREE[example]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    script.write_text(text)
    folder.mkdir()
    job = run_job(script, str(folder), workers=3, imports=IMPORTS[example], GS_TRANSPORT="grpc")
    assert job.status == 0, job.output[-6000:]
    return job


def end(folder: Path, name: str = "end.pt") -> Any:
    """What a run ends with."""
    return torch.load(folder / name, weights_only=False)


def files(folder: Path) -> list[str]:
    """All files."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_loop_of_accelerates_has_the_bits_and_the_files_of_one_process(
    tmp_path: Path, plain_folder: Path
) -> None:
    pytest.importorskip("accelerate", reason="needs graphsplit[accelerate]")
    example = "accelerate_loop.py"
    one, two = plain_folder / example, tmp_path / "workers"
    lines = plain_once(example, plain_folder)
    two.mkdir()
    job = on_workers(example, two)

    assert job.said_by("worker 0") == lines and len(lines) == 8
    assert job.said_by("worker 1") == []
    assert files(two) == files(one) and len(files(one)) == 6
    assert difference(end(one), end(two)) is None
    for name in ("state/model.safetensors", "right.txt"):  # the latter by the main process alone
        assert (one / name).read_bytes() == (two / name).read_bytes()

    lost = tmp_path / "lost"
    killed(example, lost, rank=1, call=90)  # in epoch 4, behind the checkpoint
    resumed = on_workers(example, lost, "--resume")
    assert resumed.said_by("worker 0") == lines[4:]
    losses, *states = end(lost, "resumed.pt")
    expected, *others = end(one)
    assert (losses, len(expected)) == (expected[52:], 104)
    assert difference(states, others) is None


def test_a_trigger_that_one_worker_sets_is_seen_by_all() -> None:
    pytest.importorskip("accelerate", reason="needs graphsplit[accelerate]")
    job = run_job("trigger.py", workers=2, imports=IMPORTS["accelerate_loop.py"])
    assert job.status == 0, job.output[-6000:]
    for rank in range(2):
        assert job.said_by(f"worker {rank}") == ["False", "True", "False"]


def test_the_trainer_of_transformers_has_the_bits_and_the_files_of_one_process(
    tmp_path: Path, plain_folder: Path
) -> None:
    pytest.importorskip("accelerate", reason="needs graphsplit[transformers]")
    example = "run_clm.py"
    one, two = plain_folder / example, tmp_path / "workers"
    lines = plain_once(example, plain_folder)
    two.mkdir()
    job = on_workers(example, two)

    assert [numbers(line) for line in printed(job, 0)] == [numbers(line) for line in lines]
    assert (len(lines), printed(job, 1)) == (8, [])
    assert files(two) == files(one) and len(files(one)) == 40
    assert difference(end(one), end(two)) is None
    weights = ("model/model.safetensors", "pretrained/model.safetensors")
    for name in (*weights, "model/config.json", "run/checkpoint-30/scheduler.pt"):
        assert (one / name).read_bytes() == (two / name).read_bytes()

    lost = tmp_path / "lost"
    killed(example, lost, rank=0, call=48)  # the one that writes all files
    on_workers(example, lost, "--resume")
    (*logged, whole), *states = end(lost, "resumed.pt")
    (*expected, other), *others = end(one)
    assert logged == expected and {**whole, "train_loss": 0} == {**other, "train_loss": 0}
    assert difference(states, others) is None


def test_a_module_of_lightnings_has_the_bits_and_the_files_of_one_process(
    tmp_path: Path, plain_folder: Path
) -> None:
    pytest.importorskip("lightning", reason="needs graphsplit[lightning]")
    example = "lightning_module.py"
    one, two = tmp_path / "plain", tmp_path / "workers"
    lines = plain_once(example, plain_folder)
    shutil.copytree(plain_folder / example, one)  # it goes on there
    two.mkdir()
    job = on_workers(example, two)

    assert [line for line in job.said_by("worker 0") if line.startswith("{")] == lines[-1:]
    assert not [line for line in job.said_by("worker 1") if line.startswith("{")]
    assert files(two) == files(one) and len(files(one)) == 10
    logged = "logs/version_0/metrics.csv"
    assert (one / logged).read_bytes() == (two / logged).read_bytes()
    assert difference(end(one), end(two)) is None and len(end(one)[0]) == 104

    # It draws anew, in one process too.
    plain(example, one, *CHANGES[example], arguments=("--resume",))
    lost = tmp_path / "lost"
    killed(example, lost, rank=1, call=90)
    on_workers(example, lost, "--resume")
    assert difference(end(one, "resumed.pt"), end(lost, "resumed.pt")) is None
    assert len(end(one, "resumed.pt")[0]) == 52


@pytest.mark.parametrize("example", CHANGES)
def test_a_trainer_has_the_bits_and_the_files_of_one_process_on_three_workers(
    example: str, tmp_path: Path, plain_folder: Path
) -> None:
    """By gRPC; on two workers by shared memory. One worker alone logs, warnings left out."""
    library = {"a": "accelerate", "r": "transformers", "l": "lightning"}[example[0]]
    pytest.importorskip(library, reason=f"needs graphsplit[{library}]")
    plain_once(example, plain_folder)
    job = on_three(example, tmp_path / "workers")

    assert files(tmp_path / "workers") == files(plain_folder / example)
    assert difference(end(plain_folder / example), end(tmp_path / "workers")) is None
    once = {"a": "epoch 7: ", "r": "[transformers] ***** Running training *****", "l": "GPU avail"}
    logged = [line for rank in range(3) for line in job.said_by(f"worker {rank}")]
    assert len([line for line in logged if line.startswith(once[example[0]])]) == 1
    for rank in (1, 2):
        said = job.said_by(f"worker {rank}")
        assert [line for line in said if not WARNING.match(line)] == []


def test_the_seq2seq_trainer_has_the_bits_of_one_process_and_refuses_to_generate(
    tmp_path: Path,
) -> None:
    pytest.importorskip("accelerate", reason="needs graphsplit[transformers]")
    script, (one, two) = "sequence_to_sequence.py", (tmp_path / "plain", tmp_path / "workers")
    run_alone(script, str(one), "plain")
    job = run_job(script, str(two), "generating", workers=2, imports=IMPORTS["run_clm.py"])

    assert "ConfigurationError: generate() was called on a network that is" in job.output
    assert job.status != 0
    assert difference(end(one), end(two)) is None
    assert files(two) == files(one)


def test_an_own_loop_that_generates_ends_at_the_scripts_line() -> None:
    pytest.importorskip("accelerate", reason="needs graphsplit[transformers]")
    job = run_job("generating.py", workers=2, imports=IMPORTS["run_clm.py"])

    text = (JOBS / "generating.py").read_text().splitlines()
    (line,) = [number for number, code in enumerate(text, 1) if code.endswith("# with a cache")]
    assert job.status != 0 and "use_cache=False" in job.output
    assert f"jobs/generating.py:{line}; " in job.output.splitlines()[-1]
    assert [line for line in job.said_by("worker 0") if line.startswith("loss 1.9")]


def printed(job: Finished, rank: int) -> list[str]:
    """What a worker logs; its warnings go to another stream."""
    return [line for line in job.said_by(f"worker {rank}") if line.startswith("{")]


def numbers(line: str) -> dict[str, str]:
    """What a line of the log says, but for times."""
    found: dict[str, str] = ast.literal_eval(line)
    return {k: v for k, v in found.items() if not k.endswith(("runtime", "second"))}
