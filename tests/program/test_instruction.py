"""Instructions read back from the text they print as."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphsplit.program.instruction import Instruction, Opcode

NUMBERS = st.integers(0, 10_000)
BARE = (Opcode.ZERO_GRADIENTS, Opcode.ADD_UP, Opcode.REDUCE, Opcode.CLIP, Opcode.OPTIMIZER)
INSTRUCTIONS = st.one_of(
    st.sampled_from(BARE).map(Instruction),
    st.builds(Instruction, st.sampled_from([o for o in Opcode if o not in BARE]), NUMBERS, NUMBERS),
)


@given(INSTRUCTIONS)
def test_every_instruction_reads_back_from_its_text(instruction: Instruction) -> None:
    assert Instruction.parse(str(instruction)) == instruction


def test_the_text_names_microbatch_and_operand() -> None:
    assert str(Instruction(Opcode.SEND, 3, 1)) == "SEND mb1 edge3"
    assert str(Instruction(Opcode.FORWARD, 2)) == "FORWARD mb0 seg2"
    assert str(Instruction(Opcode.ACCUMULATE, 7)) == "ACCUMULATE mb0 v7"
    assert str(Instruction(Opcode.OPTIMIZER)) == "OPTIMIZER"


@pytest.mark.parametrize(
    "text",
    [
        *("", "SEND", "SEND edge3", "SEND mb0 seg3", "SEND mb0 edge03", "SEND mb0 edge-1"),
        *("send mb0 edge3", "FLY mb0 edge3", "OPTIMIZER mb0 seg1", "SEND mb0 edge3 now"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no instruction"):
        Instruction.parse(text)


def test_an_opcode_without_its_operand_is_told_how_to_be_written() -> None:
    with pytest.raises(ValueError, match="expected as in 'FORWARD mb0 seg0'"):
        Instruction.parse("FORWARD")
