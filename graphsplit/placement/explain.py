"""Explain a plan to a person: every operation with its worker, the reason, and what crosses."""

from __future__ import annotations

from graphsplit.partition.plan import PartitionPlan


def explain_plan(plan: PartitionPlan) -> str:
    return "TODO"
