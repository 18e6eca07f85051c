"""Values that the script asks for, and losses, which all workers are told without asking.

A worker that does not have a value tells the one that has it that it asks, and waits; that one
waits for all others. So a question that only some workers ask moves nothing that another one could
be given for its own, and the scheduler finds it by the calls that all workers note.

A loss that backward begins at, and the single numbers that it was made of, are told to all
before it, as a step of a ``Model`` tells its loss: a script that prints one on one worker asks
nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphsplit.cluster.wire.messages import ASKING
from graphsplit.distribute.workers.loop import Loop, laid_out
from graphsplit.distribute.workers.taken import CHECKSUM_BYTES
from graphsplit.errors import ConfigurationError
from graphsplit.job.script import ModelCall
from graphsplit.tensor_meta import TensorMeta
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

# Operations on single numbers whose result every worker may find by itself: IEEE 754 fixes it.
_EXACT = frozenset(
    (
        *("add", "sub", "__rsub__", "mul", "div", "true_divide", "neg"),
        *("add_", "sub_", "mul_", "div_", "detach", "clone", "sum", "mean"),
    )
)

_MOST_TOLD = 16  # of one backward


def ask(loop: Loop, held: torch.Tensor, home: int, what: str) -> torch.Tensor:
    """The value that one worker has, on all workers, each of which asks for it.

    Args:
        loop: The workers.
        held: The value on its worker, its shape elsewhere.
        home: That worker.
        what: The function of the script that asks.
    """
    if loop.is_calling:
        raise ConfigurationError(
            f"{what}() of a value that lives on one worker, inside a call of a network: an "
            f"attribute of the network, a hook or a closure holds the value\n"
            f"  Fix: hold it in a buffer (register_buffer) or a parameter, or make it before "
            f"gs.distribute."
        )
    call = ModelCall(ASKING + what, _ask, (loop, held, home))
    value: torch.Tensor = loop.job.script.collective(call)
    return value


def _ask(loop: Loop, held: torch.Tensor, home: int) -> torch.Tensor:
    group = loop.job.asked
    with loop.job.reporting(), torch.no_grad(), DisableTorchFunctionSubclass():
        meta, others = TensorMeta.of(held), group.others(home)
        if loop.rank != home:
            group.send(loop.taken.told(), to=(home,))
            return laid_out(group.receive_tensor(meta, source=home), meta)
        for peer in others:
            (told,) = group.receive(CHECKSUM_BYTES, source=peer)
            loop.taken.compare(told, home, peer)
        group.send(held.detach(), to=others)
        return held.detach().clone()


def numbers_behind(outputs: Sequence[Any]) -> list[Any]:
    """Single numbers among values, and those that they were made of: what not all know yet."""
    waiting, found = list(outputs), dict[int, Any]()
    while waiting and len(found) < _MOST_TOLD:
        value = waiting.pop(0)
        if id(value) not in found and value.is_untold_number:
            found[id(value)] = value
            waiting += value.parts
        value.parts = ()
    return list(found.values())


def tell(loop: Loop, values: Sequence[Any]) -> None:
    """Let all workers know these single numbers; a home sends its own as one message."""
    group = loop.job.asked
    with DisableTorchFunctionSubclass(), torch.no_grad():
        for home in sorted({value.home for value in values}):
            of_home = [value for value in values if value.home == home]
            if home == loop.rank:
                told = [(loop.is_own_memory(v.held), v.held.clone()) for v in of_home]
                pieces = [piece for own, number in told for piece in (torch.tensor([own]), number)]
                group.send(loop.taken.told(), *pieces, to=group.others(home))
            else:
                told = _told(loop, of_home, home)
            for value, (is_fixed, number) in zip(of_home, told, strict=True):
                value.learn(number, is_fixed=is_fixed)


def _told(loop: Loop, values: Sequence[Any], home: int) -> list[tuple[bool, torch.Tensor]]:
    sizes = [CHECKSUM_BYTES, *(s for value in values for s in (1, value.held.nbytes))]
    message = torch.cat(list(loop.job.asked.receive(sum(sizes), source=home)))
    checksum, *rest = message.split(sizes)
    loop.taken.compare(checksum, loop.rank, home)
    pieces = iter(rest)
    dtypes = [value.held.dtype for value in values]
    return [(bool(next(pieces)), next(pieces).clone().view(dtype).view(())) for dtype in dtypes]


def follow(
    func: Callable[..., Any], name: str, operands: Sequence[Any]
) -> Callable[[], Any] | None:
    """A function that finds a result of numbers that all workers know; None: not all do.

    Args:
        func: The operation.
        name: Its name.
        operands: Its arguments, all given by position.
    """
    if name not in _EXACT:
        return None
    numbers = []
    for operand in operands:
        known = operand if type(operand) in (int, float) else getattr(operand, "known_number", None)
        if known is None:
            return None
        numbers.append(known.clone() if isinstance(known, torch.Tensor) else known)

    def find() -> Any:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return func(*numbers)

    return find
