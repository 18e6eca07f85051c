"""LeNet-5 for images of 1x32x32, written for one device; nothing in it knows about workers."""

from __future__ import annotations

import torch
from torch import nn


class LeNet5(nn.Module):
    """Two convolutions and three linear layers; ``[batch, 1, 32, 32] -> [batch, 10]`` logits.

    Parameters start from a normal distribution of standard deviation 0.02, cut off at two of them,
    as weights do in MindSpore's example, whose convolutions have no biases.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one logit per class for every image."""
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        logits: torch.Tensor = self.fc3(x)
        return logits
