"""A run that saves in the middle of its second epoch; and one that goes on from there.

``plain`` is the reference: a loop without graphsplit. All modes print the loss of every step and,
at the end, a digest of parameters, optimizer state and generator.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from nets import Fan
from same_bits import Counted

EPOCHS, STOP = 3, (2, 2)
PARTS = ("stem", "left", "middle", "right", "back", "head")


def digest(value: Any) -> str:
    """SHA-256 over all tensors and numbers of a nested value, in order."""
    seen = hashlib.sha256()
    for path, leaf in torch.utils._pytree.tree_flatten_with_path(value)[0]:
        content = leaf.detach().contiguous().view(-1) if isinstance(leaf, torch.Tensor) else None
        octets = repr(leaf).encode() if content is None else content.numpy().tobytes()
        seen.update(repr(path).encode() + octets)
    return seen.hexdigest()[:32]


def parts() -> tuple[Any, Any, DataLoader]:
    """Optimizer maker, scheduler maker, loader."""
    loader = DataLoader(Counted((12,), 20), batch_size=5, shuffle=True)
    return (
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.02),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95),
        loader,
    )


def say(*what: Any) -> None:
    print(*what, flush=True)


def place_parts(net: nn.Module, stride: int = 1) -> None:
    """Spread the parts of the network over all workers."""
    import graphsplit as gs

    for index, name in enumerate(PARTS):
        net.get_submodule(name).place("MS_WORKER", index * stride % gs.get_world_size())


def say_state(model: Any) -> None:
    """What a run has come to in the end: parameters, optimizer state and generator."""
    say("state", digest([model.state_dict(), model.optimizer_state_dict(), torch.get_rng_state()]))


def plain() -> None:
    """The reference: ordinary PyTorch."""
    torch.manual_seed(0)
    net = Fan()
    make_optimizer, make_scheduler, loader = parts()
    optimizer = make_optimizer(net)
    scheduler = make_scheduler(optimizer)
    for epoch in range(1, EPOCHS + 1):
        net.train()
        for step, (inputs, target) in enumerate(loader, start=1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), target)
            loss.backward()
            optimizer.step()
            scheduler.step()
            say(f"loss {epoch} {step} {digest(loss)}")
            if (epoch, step) == STOP:
                say("weights", digest(dict(sorted(net.state_dict().items()))))
    say("state", digest([dict(net.state_dict()), optimizer.state_dict(), torch.get_rng_state()]))


def split(arguments: argparse.Namespace) -> None:
    """The same through a Model, whole and resumed."""
    import graphsplit as gs

    class Watch(gs.callbacks.Callback):
        runs_last = True

        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            say(f"loss {context.epoch} {context.step} {digest(context.loss)}")
            if arguments.mode == "save" and (context.epoch, context.step) == STOP:
                save_everywhere(context.model, arguments.folder)

    gs.init()
    torch.manual_seed(arguments.seed)
    with gs.deferred_init():
        net = Fan()
    place_parts(net, arguments.stride)
    make_optimizer, make_scheduler, loader = parts()
    optimizer = make_optimizer(net)
    schedule = gs.callbacks.LearningRateScheduler(make_scheduler(optimizer), "step")
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
    if arguments.mode == "resume":
        model.load(arguments.folder.format(rank=gs.get_rank()))
    model.train(EPOCHS, loader, [Watch(), schedule])
    say_state(model)


def save_everywhere(model: Any, folder: str) -> None:
    """Shards on one disk; everything on worker 0's own disk; and where worker 1 cannot write."""
    import graphsplit as gs

    rank = gs.get_rank()
    model.save(Path(folder) / "shared")
    model.save(Path(folder) / f"disk{rank}" / "whole", gather=True)
    model.state_dict(to=Path(folder) / "weights.safetensors")
    before, here = Path.cwd(), Path(folder) / f"of{rank}"
    here.mkdir()
    if rank == 1:
        (here / "blocked").touch()
    os.chdir(here)
    try:
        model.save("blocked/save")
    except gs.errors.CheckpointError as error:
        say("refused", str(error).replace("\n", " "))
    finally:
        os.chdir(before)
    say("latest", gs.latest_checkpoint(Path(folder) / f"disk{rank}").name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("plain", "save", "resume"))
    parser.add_argument("--folder", default="")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args()
    plain() if found.mode == "plain" else split(found)
