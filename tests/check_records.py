"""Made-up records of two workers and a plain loop."""

from __future__ import annotations

from graphsplit.check.record import UNTOUCHED, NotedValue, NoteKind, Notes, Operation, What


def value(
    kind: NoteKind, name: str = "", digest: str = "same", *, form: str = "float32[2]"
) -> NotedValue:
    return NotedValue(kind, name, form, digest)


def generator(name: str, digest: str) -> NotedValue:
    return NotedValue(NoteKind.GENERATOR, name, "state", digest)


def step(number: int, *values: NotedValue, model: int = 1, torch: str = "g") -> Notes:
    loss = () if any(v.kind is NoteKind.LOSS for v in values) else (value(NoteKind.LOSS),)
    return Notes(What.STEP, model, number, (*loss, *values, generator("torch", torch)))


def start(*values: NotedValue, random: str = "r", is_used: bool = False) -> Notes:
    form = "state" if is_used else UNTOUCHED
    found = NotedValue(NoteKind.GENERATOR, "random", form, random)
    return Notes(What.START, 1, 0, (*values, generator("torch", "g"), found))


WEIGHT_A = value(NoteKind.PARAMETER, "a.weight")
WEIGHT_B = value(NoteKind.PARAMETER, "b.weight")
GRADIENT_A = value(NoteKind.GRADIENT, "a.weight")
GRADIENT_B = value(NoteKind.GRADIENT, "b.weight")


def operation(
    name: str, *digests: str, order: tuple[int, ...] = (), target: str = "", source: str = ""
) -> Operation:
    return Operation(name, digests, order, target, "block.1", source)
