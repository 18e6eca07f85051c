"""The instructions of a worker's program. Each reads back from the text it prints as.

============================  ==========================================================
``ZERO_GRADIENTS``            set the owned parameters' gradients to None
``FORWARD mb0 seg2``          run a segment
``BACKWARD mb0 seg2``         run a segment's backward: sum what came back, then autograd
``BACKWARD_INPUT mb0 seg2``   the part of it that others wait for
``BACKWARD_WEIGHT mb0 seg2``  the rest of it: gradients of large weights
``ACCUMULATE mb0 v7``         sum the gradients of a parameter that several segments use
``ADD_BLOCK mb1 v7``          add a block of parts that ends here to the sum of a gradient
``FOLD mb0 v9``               fold a microbatch into buffers: running statistics
``SEND mb0 edge3``            send the edge's value to its destination
``RECEIVE mb0 edge3``         wait for the edge's value from its source
``ADD_UP``                    add the sums of the batch's parts to the owned gradients
``REDUCE``                    unscale the owned gradients; note norms, and whether all are finite
``CLIP``                      clip the owned gradients by what all workers have noted
``OPTIMIZER``                 step the optimizer over the owned parameters
============================  ==========================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Opcode(Enum):
    """The kinds of instructions."""

    ZERO_GRADIENTS = "ZERO_GRADIENTS"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"
    BACKWARD_INPUT = "BACKWARD_INPUT"
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    ACCUMULATE = "ACCUMULATE"
    ADD_BLOCK = "ADD_BLOCK"
    FOLD = "FOLD"
    SEND = "SEND"
    RECEIVE = "RECEIVE"
    ADD_UP = "ADD_UP"
    REDUCE = "REDUCE"
    CLIP = "CLIP"
    OPTIMIZER = "OPTIMIZER"


BACKWARD = (Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
"""A backward is one of these, or the latter two."""
_OPERAND = {
    Opcode.FORWARD: "seg",
    Opcode.BACKWARD: "seg",
    Opcode.BACKWARD_INPUT: "seg",
    Opcode.BACKWARD_WEIGHT: "seg",
    Opcode.ACCUMULATE: "v",
    Opcode.ADD_BLOCK: "v",
    Opcode.FOLD: "v",
    Opcode.SEND: "edge",
    Opcode.RECEIVE: "edge",
}
_PATTERN = re.compile(r"(?P<opcode>[A-Z_]+)(?: mb(?P<microbatch>\d+) [a-z]+(?P<operand>\d+))?")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a worker's program.

    Attributes:
        opcode: What to do.
        operand: Segment, edge or value; -1 where there is none.
        microbatch: Which microbatch it belongs to.
    """

    opcode: Opcode
    operand: int = -1
    microbatch: int = 0

    def __str__(self) -> str:
        if self.opcode not in _OPERAND:
            return self.opcode.value
        return f"{self.opcode.value} mb{self.microbatch} {_OPERAND[self.opcode]}{self.operand}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Read an instruction back from its text.

        Raises:
            ValueError: The text is no instruction.
        """
        found = _PATTERN.fullmatch(text.strip())
        if found is None or found["opcode"] not in Opcode.__members__:
            raise ValueError(f"{text!r} is no instruction; expected for example 'SEND mb0 edge3'")
        opcode = Opcode[found["opcode"]]
        if opcode not in _OPERAND:
            instruction = cls(opcode)
        else:
            instruction = cls(opcode, int(found["operand"] or -1), int(found["microbatch"] or 0))
        if opcode in _OPERAND and found["operand"] is None:
            raise ValueError(f"{text!r} is no instruction; expected as in '{cls(opcode, 0)}'")
        if str(instruction) != text.strip():
            raise ValueError(f"{text!r} is no instruction; did you mean '{instruction}'?")
        return instruction
