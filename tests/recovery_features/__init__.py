"""Scripts that use what training offers, one thing or a few at a time.

Each takes whether to place the network, builds everything anew, and returns what is to be compared
with the plain loop.
"""

from recovery_features import (
    calls,
    changed_parts,
    computing,
    feeding,
    left_in_python,
    networks,
    optimizers,
    replicated,
)
from recovery_features.parts import FEATURES

__all__ = [
    "FEATURES",
    "calls",
    "changed_parts",
    "computing",
    "feeding",
    "left_in_python",
    "networks",
    "optimizers",
    "replicated",
]
