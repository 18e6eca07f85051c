"""Values that the script asks for, and losses, which all workers are told without asking.

A worker that does not have a value tells the one that has it that it asks, and waits; that one
waits for all others. Every message says which value it is about, and a question also where the
script asks. So a question that only some workers ask, or in another order, moves nothing that
another one could be given for its own: who gets it names both lines, or the scheduler finds it by
the calls that all workers note.

A loss that backward begins at, and the single numbers that it was made of, are told to all
before it, as a step of a ``Model`` tells its loss: a script that prints one on one worker asks
nobody.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphsplit.cluster.wire.messages import ASKING
from graphsplit.distribute.workers.here import MOST_TOLD_BYTES, WITHOUT_PLACE, Here, TakenNumbers
from graphsplit.distribute.workers.loop import Loop
from graphsplit.errors import ConfigurationError, FrameError
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
_MOST_SHOWN = 110  # characters of a question, for the scheduler
_OF_BACKWARD, OF_GRADIENTS, _TOPIC = 1, 2, 16  # what messages are about; from the last on: values


def shown(number: Any) -> str:
    """A value's number, as people read it: parts of text and whole numbers."""
    if isinstance(number, tuple):
        return " ".join(map(str, number))
    return f"value {number}"


@dataclass(frozen=True)
class AskedValue:
    """A question for a value.

    Attributes:
        held: The value on its worker, its shape elsewhere.
        home: That worker.
        number: The value's own number, or numbers, as people read them.
        mark: What tells it from other values, the same on all workers.
        what: The function of the script that asks.
    """

    held: torch.Tensor
    home: int
    number: Any
    mark: int
    what: str

    def __str__(self) -> str:
        shape = tuple(self.held.shape)
        told = f"{self.what}() of {shown(self.number)} of {shape}, from worker {self.home}"
        return told[:_MOST_SHOWN]

    @property
    def topic(self) -> int:
        """A number for messages about this value, above those of all else."""
        return _TOPIC + zlib.crc32(f"{self.mark} {tuple(self.held.shape)}".encode())


def refuse_inside(loop: Loop, what: str) -> None:
    """Refuse what is asked or computed inside a call of a network: each worker does other things.

    Raises:
        ConfigurationError: A network runs forward.
    """
    if loop.is_calling:
        raise ConfigurationError(
            f"{what}() of a value that lives on one worker, inside a call of a network: an "
            f"attribute of the network, a hook or a closure holds the value\n"
            f"  Fix: hold it in a buffer (register_buffer) or a parameter, or make it before "
            f"gs.distribute."
        )


def ask(loop: Loop, question: AskedValue) -> torch.Tensor:
    """The value that one worker has, on all workers, each of which asks for it.

    Raises:
        CollectiveMismatchError: Another worker asks for another value, or nothing.
    """
    refuse_inside(loop, question.what)
    call = ModelCall(f"{ASKING}{question}", _ask, (loop, question))
    value: torch.Tensor = loop.job.script.collective(call)
    return value


def _ask(loop: Loop, question: AskedValue) -> torch.Tensor:
    loop.learn_told()  # it came before
    group, held, home = loop.job.asked, question.held, question.home
    with loop.job.reporting(), torch.no_grad(), DisableTorchFunctionSubclass():
        meta, others = TensorMeta.of(held), group.others(home)
        here = Here(loop.job, loop.taken, str(question))
        if loop.rank != home:
            with here.about(question.topic):
                group.send(here.told(), to=(home,))
            with here.about(WITHOUT_PLACE + question.topic):
                return group.receive_laid_out(meta, source=home)
        with here.about(question.topic):
            for peer in others:
                (asked,) = group.receive(MOST_TOLD_BYTES, source=peer, is_exact=False)
                here.read(asked, peer)
        with here.about(WITHOUT_PLACE + question.topic):
            group.send_laid_out(held.detach(), to=others)
        return held.detach().clone()


def exchange(loop: Loop, question: str, text: str) -> list[str]:
    """Every worker's text, on all.

    Args:
        loop: The workers.
        question: What it answers; all ask for the same at once.
        text: In ASCII, of 1 MB at most.

    Raises:
        CollectiveMismatchError: Another worker asks for something else.
    """
    loop.learn_told()  # it came before
    group, here = loop.job.asked, Here(loop.job, loop.taken, question)
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    found = []
    with here.about(_TOPIC + zlib.crc32(question.encode())):
        for source in loop.job.ranks:
            if source == loop.rank:
                group.send(here.told(), mine, to=group.others(source))
                found.append(text)
            else:
                message = torch.cat(list(group.receive(1 << 20, source=source, is_exact=False)))
                found.append(here.read(message, source).numpy().tobytes().decode("ascii").strip())
    return found


def device_of(value: Any) -> torch.device:
    """Where a value is, on the worker that has it.

    Raises:
        CollectiveMismatchError: Another worker asks for something else.
    """
    return torch.device(exchange(value.loop, "device", str(value.held.device))[value.home])


def told_place(value: Any) -> torch.device:
    """Where a value is, as the script is told.

    Raises:
        ConfigurationError: It is a parameter's gradient on a GPU: PyTorch's clipping asks so, to
            choose kernels for all gradients at once, which do not add up as those for one do.
    """
    found = device_of(value)
    if found.type != "cpu" and value.is_gradient:
        raise ConfigurationError(
            f"a gradient on {found}, of a network that gs.distribute has cut, was asked where it "
            f"is, as clip_grad_norm_ does\n  Fix: gs.Model(..., clip=gs.clip.GlobalNorm(max_norm)) "
            f"clips; p.device of the parameter says where it is."
        )
    return found


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
    """Let all workers know these single numbers; a home sends its own as one message.

    It does so before its part of backward first waits for a value. Others learn them when they look
    at one, or when their part is done: nobody who has something else to do waits for them.
    """
    group, here = loop.job.asked, Here(loop.job, loop.taken, "backward()")
    own = [value for value in values if value.home == loop.rank]
    homes = sorted({value.home for value in values} - {loop.rank})
    others = group.others(loop.rank)
    if own:
        group.ends(others)
    for home in homes:
        group.expect(home)  # before this worker sends: who sends waits for room
    with DisableTorchFunctionSubclass(), torch.no_grad():
        if own:
            told = [(loop.is_own_memory(v.held), v.held.clone()) for v in own]
            pieces = [piece for one, number in told for piece in (torch.tensor([one]), number)]
            loop.unsent = partial(_send, here, [here.told(), *pieces])
            for value, (is_fixed, number) in zip(own, told, strict=True):
                value.learn(number, is_fixed=is_fixed, version=value.version())
    taken = loop.taken.now()
    of_others = {
        home: [(value, value.version()) for value in values if value.home == home] for home in homes
    }

    def learn() -> None:
        with DisableTorchFunctionSubclass(), torch.no_grad(), here.about(_OF_BACKWARD):
            for home, pairs in of_others.items():
                told = _told(here, [value for value, _ in pairs], home, taken)
                for (value, version), (is_fixed, number) in zip(pairs, told, strict=True):
                    value.learn(number, is_fixed=is_fixed, version=version)

    loop.untold = learn


def _send(here: Here, pieces: Sequence[torch.Tensor]) -> None:
    group, rank = here.job.asked, here.job.rank
    with torch.no_grad(), here.about(_OF_BACKWARD):
        group.send(*pieces, to=group.others(rank))


def _told(
    here: Here, values: Sequence[Any], home: int, mine: TakenNumbers
) -> list[tuple[bool, torch.Tensor]]:
    sizes = [s for value in values for s in (1, value.held.nbytes)]
    most = MOST_TOLD_BYTES + sum(sizes)
    message = torch.cat(list(here.job.asked.receive(most, source=home, is_exact=False)))
    told = here.read(message, home, mine=mine)
    if len(told) != sum(sizes):
        raise FrameError(f"worker {home} told {len(told)} bytes of {len(values)} numbers")
    pieces = iter(told.split(sizes))
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
