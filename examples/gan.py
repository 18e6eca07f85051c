"""A GAN, each network on its worker: `graphsplit run -n 2 gan.py`.

Two losses over shared modules are two Models; each steps what its optimizer has.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as score

import graphsplit as gs


class Judge(nn.Module):
    """The loss of the discriminator."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """What is real is to get ones, what is made zeros."""
        made = self.generator(noise).detach()
        right = self.discriminator(real)
        wrong = self.discriminator(made)
        return score(right, torch.ones_like(right)) + score(wrong, torch.zeros_like(wrong))


class Deceive(nn.Module):
    """The loss of the generator."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """What is made is to get ones."""
        found = self.discriminator(self.generator(noise))
        return score(found, torch.ones_like(found))


def networks() -> tuple[nn.Sequential, nn.Sequential]:
    """Generator and discriminator."""
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3),
                                  nn.Linear(32, 1))  # fmt: skip
    return generator, discriminator


def train(steps: int = 5) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and parameters."""
    torch.manual_seed(0)
    generator, discriminator = networks()
    generator.place("MS_WORKER", 0)
    discriminator.place("MS_WORKER", 1)
    judging = gs.Model(
        Judge(generator, discriminator),
        optimizer=torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    )
    deceiving = gs.Model(
        Deceive(generator, discriminator),
        optimizer=torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
    )
    losses = []
    for _ in range(steps):
        real, noise = torch.randn(16, 2) + 3, torch.randn(16, 8)
        losses.append(judging.train_step(real, noise))
        losses.append(deceiving.train_step(noise))
    return losses, deceiving.state_dict()


if __name__ == "__main__":
    gs.init()
    print("losses:", [f"{loss:.4f}" for loss in train()[0]])
