"""Two towers and a contrastive loss, as in CLIP: `graphsplit run -n 3 clip_towers.py`.

Both towers compute at the same time, each on its worker; the loss, which needs all pairs of the
batch, is on a third. Copies of the model would each see their own part of the batch only.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import graphsplit as gs


class Clip(nn.Module):
    """Returns the loss of a batch of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GELU(), nn.Flatten())
        self.image_head = nn.Linear(8 * 16, 32)
        self.words = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.text = nn.TransformerEncoder(layer, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Images [n, 3, 16, 16] and their texts [n, 8]."""
        image = F.normalize(self.image_head(self.image(images)), dim=-1)
        text = F.normalize(self.text(self.words(texts)).mean(dim=1), dim=-1)
        with gs.place("MS_WORKER", 2):
            logits = self.scale.exp() * image @ text.t()
            pairs = torch.arange(len(images))
            return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2


def train(steps: int = 5) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and parameters."""
    torch.manual_seed(0)
    net = Clip()
    for part in (net.image, net.image_head):
        part.place("MS_WORKER", 0)
    for other in (net.words, net.text):
        other.place("MS_WORKER", 1)
    model = gs.Model(net, optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3))
    losses = []
    for _ in range(steps):
        losses.append(model.train_step(torch.randn(8, 3, 16, 16), torch.randint(50, (8, 8))))
    return losses, model.state_dict()


if __name__ == "__main__":
    gs.init()
    print("losses:", [f"{loss:.4f}" for loss in train()[0]])
