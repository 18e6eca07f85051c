"""Lets the tests of this folder import its helpers."""

import sys
from pathlib import Path

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).parent))
# Imported on first use: of two threads, the second one could find the package of that name.
assert callable(gs.distribute)
