"""A loop of accelerate's, over workers: `graphsplit run -n 2 accelerate_loop.py FOLDER [--resume]`.

Two lines are graphsplit's: the import of `Accelerator`, and the placement. `FOLDER` gets the state
after epoch 3, from which `--resume` goes on, and what the run ends with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import nn

import graphsplit as gs
from graphsplit.integrations.accelerate import Accelerator

EPOCHS, SAVED_AT = 8, 3


def network() -> nn.Module:
    """Three layers."""
    return nn.Sequential(
        *(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
    )


def data() -> torch.utils.data.TensorDataset:
    """Points of four classes."""
    x = torch.randn(104, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())


def train(folder: Path, *, resume: bool = False) -> None:
    """Accumulate over two batches, clip, step; evaluate after each epoch."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(3)
    loader = torch.utils.data.DataLoader(data(), 8, shuffle=True)
    held_out = torch.utils.data.DataLoader(data(), 16)
    net, criterion = network(), nn.CrossEntropyLoss()
    gs.apply_placement(net, {"{0..2}": 0, "{3..5}": 1})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    net, optimizer, schedule, loader, held_out = accelerator.prepare(
        net, optimizer, schedule, loader, held_out
    )
    if resume:
        accelerator.load_state(folder / "state")
    losses, norm = [], torch.zeros(())
    for epoch in range(SAVED_AT + 1 if resume else 0, EPOCHS):
        net.train()
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = criterion(net(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        net.eval()
        num_right = num_seen = 0
        for x, y in held_out:
            with torch.no_grad():
                guesses = net(x).argmax(-1)
            guesses, y = accelerator.gather_for_metrics((guesses, y))
            num_right, num_seen = num_right + int((guesses == y).sum()), num_seen + len(y)
        accelerator.print(f"epoch {epoch}: {num_right} of {num_seen} right, norm {norm.item():.3f}")
        if accelerator.is_main_process:
            with (folder / "right.txt").open("a") as file:
                file.write(f"{epoch} {num_right}\n")
        if epoch == SAVED_AT and not resume:
            accelerator.save_state(folder / "state")
    end = (losses, accelerator.get_state_dict(net), optimizer.state_dict(), torch.get_rng_state())
    accelerator.save(end, folder / ("resumed.pt" if resume else "end.pt"))


if __name__ == "__main__":
    train(Path(sys.argv[1]), resume="--resume" in sys.argv)
