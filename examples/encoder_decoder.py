"""Encoder and decoder on two workers: `graphsplit run -n 2 encoder_decoder.py`.

Each layer of the decoder uses what the encoder has made: its value crosses the cut once, however
many layers want it.
"""

from __future__ import annotations

import torch
from torch import nn

import graphsplit as gs

WORDS, LENGTH = 30, 7


class Translate(nn.Module):
    """Returns logits for each next word."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, 16)
        self.target = nn.Embedding(WORDS, 16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2
        )
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Source and target sentences, as numbers of words."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        memory = self.encoder(self.source(source))
        found: torch.Tensor = self.head(self.decoder(self.target(target), memory, tgt_mask=mask))
        return found


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over all words."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def sentences() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A source, the beginning of each target, and what comes next in it."""
    source = torch.randint(WORDS, (8, LENGTH))
    target = source.flip(1)
    return source, target[:, :-1], target[:, 1:]


def train(steps: int = 5) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and parameters."""
    torch.manual_seed(0)
    net = Translate()
    for part in (net.source, net.encoder):
        part.place("MS_WORKER", 0)
    for other in (net.target, net.decoder, net.head):
        other.place("MS_WORKER", 1)
    model = gs.Model(net, loss_of, torch.optim.Adam(net.parameters(), lr=1e-3))
    losses = []
    for _ in range(steps):
        source, target, following = sentences()
        losses.append(model.train_step((source, target), following))
    return losses, model.state_dict()


if __name__ == "__main__":
    gs.init()
    print("losses:", [f"{loss:.4f}" for loss in train()[0]])
