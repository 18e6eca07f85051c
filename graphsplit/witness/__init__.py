"""Notes what a Model computes, where ``graphsplit check`` asks for it; else nothing."""

from __future__ import annotations

from graphsplit.witness.notes import Witness, witness_for

__all__ = ["Witness", "witness_for"]
