"""What was trained over workers is read without graphsplit: by plain PyTorch, by transformers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recovery_features.parts import adam, batches, plain_net
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import graphsplit as gs

assert threads_as_workers
pytestmark = [pytest.mark.usefixtures("threads_as_workers"), pytest.mark.timeout(200)]
SAVE = "runs/step-000014"
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))


def plain_state() -> dict[str, torch.Tensor]:
    """After two steps of the loop that does not know graphsplit."""
    net = plain_net(place=False)
    optimizer = adam(net)
    for inputs, target in list(batches())[:2]:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), target).backward()
        optimizer.step()
    return net.state_dict()


def trained(gather: bool) -> None:
    net = plain_net(place=True)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    model.train(1, list(batches())[:2])
    model.save(SAVE, gather=gather)


@pytest.mark.parametrize(("num_workers", "gather"), [(1, False), (3, True), (3, False)])
def test_plain_pytorch_loads_a_save_as_the_page_shows(
    num_workers: int, gather: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from documents import ROOT, blocks

    monkeypatch.chdir(tmp_path)
    if num_workers == 1:
        trained(gather)
    else:
        ThreadCluster(lambda _: trained(gather), num_workers).run()
    (block,) = (b for b in blocks("piece") if b.name == "plain_load")
    assert block.document == ROOT / "docs/how-to/save-and-load.md"
    Path("plain_load.py").write_text(block.text)
    found = runpy.run_path("plain_load.py", {"net": plain_net(place=False)})
    assert difference(plain_state(), found["net"].state_dict()) is None


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


def tokens() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6) % 16


def pretrained(folder: Path) -> Any:
    net: Any = tiny_gpt2()
    net.transformer.h[1].place("MS_WORKER", 1)
    net.lm_head.place("MS_WORKER", 2)  # its weight is tied to that of the embedding
    model = gs.Model(net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2))
    for _ in range(2):
        model.train_step(input_ids=tokens(), labels=tokens())
    state = model.state_dict()
    if gs.get_rank() == 0:
        net.save_pretrained(folder, state_dict=state)


def test_transformers_loads_what_save_pretrained_wrote(tmp_path: Path):
    net: Any = tiny_gpt2()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        net(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    ThreadCluster(lambda _: pretrained(tmp_path), 3).run()
    found: Any = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert difference(net.state_dict(), found.state_dict()) is None
    assert found.lm_head.weight is found.transformer.wte.weight
