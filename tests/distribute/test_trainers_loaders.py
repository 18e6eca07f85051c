"""Trainers read a loader where an own loop reads it: one that gives shares is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import Trainer, TrainingArguments

import graphsplit as gs
from graphsplit.distribute import network
from graphsplit.errors import ConfigurationError, GraphsplitError
from graphsplit.feeding.loader_checks import watch_loaders
from graphsplit.frames import script_frame
from graphsplit.integrations import lightning as lightning_strategy
from graphsplit.integrations.lightning import GraphsplitStrategy
from graphsplit.integrations.workers import refuse_other_generators
from graphsplit.job import joined

assert threads_as_workers
DATA = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)


class Net(nn.Module):
    """Answers as networks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner(x), y)}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(*batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def of_accelerate(loader: Any, folder: Path) -> None:
    net, read = Accelerator(cpu=True).prepare(Net(), loader)
    for x, y in read:
        net(x, y)["loss"].backward()


def of_transformers(loader: Any, folder: Path) -> None:
    class WithLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

    args = TrainingArguments(
        output_dir=str(folder), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    WithLoader(Net(), args, train_dataset=DATA).train()


class WithWorkers(GraphsplitStrategy):
    """Finds its workers when the networks are where they should be."""

    def process_dataloader(self, dataloader: object) -> object:
        self._job = joined.current()
        return super().process_dataloader(dataloader)


def of_lightning(loader: Any, folder: Path) -> None:
    lightning.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=folder,
        strategy=WithWorkers(),
    ).fit(Module(), loader)  # fmt: skip


@pytest.mark.parametrize("train", [of_accelerate, of_transformers, of_lightning])
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_refuses_a_loader_that_gives_shares(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_loaders(network._has_others)
    job = SimpleNamespace(num_workers=2, is_closed=False)
    monkeypatch.setattr(joined, "current", lambda: job)
    monkeypatch.setattr(lightning_strategy, "workers", lambda: None)
    with pytest.raises(ConfigurationError, match="DistributedSampler of num_replicas=2") as caught:
        train(DataLoader(DATA, 3, sampler=DistributedSampler(DATA, 2, 0)), tmp_path)
    assert "Fix: pass the whole data on every worker" in str(caught.value)


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_worker_that_is_elsewhere_is_not_taken_for_other_random_numbers(
    is_elsewhere: bool,
) -> None:
    def script(rank: int) -> None:
        job = joined.current()
        assert job is not None
        loss = gs.distribute(nn.Linear(4, 2))(torch.ones(3, 4)).sum()
        if is_elsewhere and rank:
            loss.item()
        torch.manual_seed(rank)
        refuse_other_generators(job)

    told = r"evaluate\(\) or predict at .*test_trainers_loaders.py:\d+, in script"
    with pytest.raises(GraphsplitError, match=told if is_elsewhere else "random generators differ"):
        ThreadCluster(script, 2, is_recoverable=False).run()


def test_lines_of_a_script_are_not_those_of_its_trainer(tmp_path: Path) -> None:
    file = tmp_path / "site-packages" / "transformers" / "trainer.py"
    file.parent.mkdir(parents=True)
    file.write_text("def evaluate(ask):\n    return ask()\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    frame = names["evaluate"](lambda: script_frame(sys._getframe(1)))
    assert frame is sys._getframe()
