"""Made-up records of two workers and a plain loop."""

from __future__ import annotations

from graphsplit.check.record import UNTOUCHED, Kind, Operation, Record, Value, What


def value(kind: Kind, name: str = "", digest: str = "same", *, form: str = "float32[2]") -> Value:
    return Value(kind, name, form, digest)


def generator(name: str, digest: str) -> Value:
    return Value(Kind.GENERATOR, name, "state", digest)


def step(number: int, *values: Value, model: int = 1, torch: str = "g") -> Record:
    loss = () if any(v.kind is Kind.LOSS for v in values) else (value(Kind.LOSS),)
    return Record(What.STEP, model, number, (*loss, *values, generator("torch", torch)))


def start(*values: Value, random: str = UNTOUCHED) -> Record:
    return Record(What.START, 1, 0, (*values, generator("torch", "g"), generator("random", random)))


WEIGHT_A = value(Kind.PARAMETER, "a.weight")
WEIGHT_B = value(Kind.PARAMETER, "b.weight")
GRADIENT_A = value(Kind.GRADIENT, "a.weight")
GRADIENT_B = value(Kind.GRADIENT, "b.weight")


def operation(
    name: str, *digests: str, order: tuple[int, ...] = (), target: str = "", source: str = ""
) -> Operation:
    return Operation(name, digests, order, target, "block.1", source)
