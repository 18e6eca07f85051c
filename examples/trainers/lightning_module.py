"""A small classifier under Lightning: `graphsplit run -n 2 lightning_module.py FOLDER [--resume]`.

Two lines are graphsplit's, beside imports: the placement, and the strategy. `FOLDER` gets logs and
checkpoints, from one of which `--resume` goes on, and what the run ends with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import graphsplit as gs
from graphsplit.integrations.lightning import GraphsplitStrategy


class Classifier(lightning.LightningModule):
    """Two parts; a metric of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss, logged."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Loss and accuracy, logged over the epoch."""
        x, y = batch
        scores = self.net(x)
        self.accuracy(scores, y)
        self.log("val_loss", nn.functional.cross_entropy(scores, y))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW, on a schedule by steps."""
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data() -> torch.utils.data.TensorDataset:
    """Points of four classes."""
    x = torch.randn(104, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())


def train(folder: Path, *, resume: bool = False) -> None:
    """Train with accumulation, clipping, checkpoints and early stopping."""
    lightning.seed_everything(3)
    module = Classifier()
    gs.apply_placement(module, {"net.{0..2}": 0, "net.{3..5}": 1})
    checkpoints = ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=20,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="logs", version=int(resume)),
        callbacks=[checkpoints, EarlyStopping("val_loss", 0.02, patience=1)],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=GraphsplitStrategy(),
    )
    loader = torch.utils.data.DataLoader(data(), 8, shuffle=True)
    held_out = torch.utils.data.DataLoader(data(), 16)
    start = folder / "checkpoints/epoch=3.ckpt" if resume else None
    trainer.fit(module, loader, held_out, ckpt_path=start)
    numbers = {name: value.item() for name, value in trainer.callback_metrics.items()}
    end = (module.losses, module.state_dict(), trainer.optimizers[0].state_dict(), numbers)
    if trainer.is_global_zero:
        print(numbers)
        torch.save(end, folder / ("resumed.pt" if resume else "end.pt"))


if __name__ == "__main__":
    train(Path(sys.argv[1]), resume="--resume" in sys.argv)
