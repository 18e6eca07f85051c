"""The tables of the explanations name what the code has: no more, and nothing else."""

from __future__ import annotations

import re
from typing import get_args

from documents import ROOT, table

from graphsplit.cluster.scheduler.job.state import JobPhase
from graphsplit.cluster.wire.messages import SchedulerMessage, WorkerMessage
from graphsplit.program.instruction import Opcode

EXPLANATION = ROOT / "docs" / "explanation"


def named(page: str, comment: str) -> set[str]:
    """The first words of the first column; arguments in brackets are left out."""
    rows = table(EXPLANATION / page, f"table: {comment}")
    return {name for row in rows for name in re.findall(r"\w+", re.sub(r"\(.*?\)", "", row[0]))}


def test_every_instruction_stands_in_the_table() -> None:
    assert named("how-it-works.md", "instructions") == {opcode.value for opcode in Opcode}


def test_every_state_of_a_job_stands_in_the_table() -> None:
    assert named("membership.md", "states of the job") == {phase.value for phase in JobPhase}


def test_every_message_stands_in_a_table() -> None:
    for messages, who in ((WorkerMessage, "workers"), (SchedulerMessage, "the scheduler")):
        known = {kind.__name__ for kind in get_args(messages)}
        assert named("membership.md", f"messages of {who}") == known
