"""A small GPT with accumulation and resume: `graphsplit run -n 2 gpt_like.py [--resume]`.

The gradients of four batches are added before each step, and clipped together. With `--resume` it
goes on from what the last run has saved, with the bits of a run that was never interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import graphsplit as gs

WORDS, LENGTH, WIDTH, ACCUMULATE = 40, 12, 32, 4


class Gpt(nn.Module):
    """Embeddings, blocks, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each next token."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and what follows each."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (4, LENGTH + 1), generator=generator).cumsum(1) % WORDS
    return tokens[:, :-1], tokens[:, 1:]


def train(
    folder: Path, *, steps: int = 3, resume: bool = False
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and parameters; saves at the end."""
    torch.manual_seed(0)
    net = Gpt()
    for part in (net.words, net.places, *net.blocks[:2]):
        part.place("MS_WORKER", 0)
    for other in (*net.blocks[2:], net.norm, net.head):
        other.place("MS_WORKER", 1)
    model = gs.Model(
        net,
        loss_of,
        torch.optim.AdamW(net.parameters(), lr=1e-3),
        clip=gs.clip.GlobalNorm(1.0),
    )
    done = 0
    if resume:
        done = model.load(folder).extra["done"]
    losses = []
    for step in range(done, done + steps):
        model.zero_grad()
        for part in range(ACCUMULATE):
            tokens, following = batch(step * ACCUMULATE + part)
            losses.append(model.forward_backward(tokens, following, scale=1 / ACCUMULATE))
        model.step()
    model.save(folder, extra={"done": done + steps})
    return losses, model.state_dict()


if __name__ == "__main__":
    gs.init()
    losses, _ = train(Path("gpt_like_saved"), resume="--resume" in sys.argv)
    print("losses:", [f"{loss:.4f}" for loss in losses])
