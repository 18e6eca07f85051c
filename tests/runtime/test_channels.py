"""What is known of a program's sends before it runs."""

from __future__ import annotations

import pytest

from graphsplit.program.instruction import Instruction
from graphsplit.runtime.channels import before_waiting_work


@pytest.mark.parametrize(
    ("program", "positions"),
    [
        (["BACKWARD mb0 seg0", "SEND mb0 edge0", "OPTIMIZER"], [2]),
        (["SEND mb0 edge0", "BACKWARD_WEIGHT mb0 seg0", "OPTIMIZER"], [1]),
        (["SEND mb0 edge0", "SEND mb0 edge1", "FORWARD mb1 seg0"], []),
        (["BACKWARD mb0 seg0", "OPTIMIZER"], []),
    ],
)
def test_others_go_first_after_a_send_where_the_next_instruction_can_wait(
    program: list[str], positions: list[int]
) -> None:
    instructions = [Instruction.parse(line) for line in program]
    assert list(before_waiting_work(instructions)) == positions
