"""Notes what a Model computes, where ``graphsplit check`` asks for it; else nothing."""

from __future__ import annotations

from graphsplit.check.record import What
from graphsplit.witness.notes import Witness, witness_for

__all__ = ["What", "Witness", "witness_for"]
