"""State dictionaries of own loops: copies that say so where it could be seen.

In one process ``state_dict()`` holds the tensors themselves: a later step shows in it, and a write
into it is one into the parameter. Over workers it holds copies, which do neither. So each is an
ordinary tensor until that could be seen: a write into it, and a look at one that is out of date,
are errors.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphsplit.distribute.forms import written
from graphsplit.errors import OwnershipError
from graphsplit.torch_ext.attributes import base_of, storage_of
from graphsplit.torch_ext.private import (
    DisableTorchFunctionSubclass,
    pytree,
    storage_use_count,
)
from graphsplit.torch_ext.stand_ins import StandIn

_CPU = torch.device("cpu")
Mark = Callable[[], Any]


class StateCopy(torch.Tensor):
    """A copy of a value, in a state dictionary.

    Attributes:
        key: That in the dictionary.
        mark: Gives what changes whenever the value is written to.
        taken_at: The mark when the copy was made.
    """

    key: str
    mark: Mark
    taken_at: Any

    @staticmethod
    def of(tensor: torch.Tensor, key: str, mark: Mark, taken_at: Any) -> StateCopy:
        """The copy, in the same memory."""
        with DisableTorchFunctionSubclass():
            made = tensor.detach().as_subclass(StateCopy)
        made.key, made.mark, made.taken_at = key, mark, taken_at
        return made

    def plain(self) -> torch.Tensor:
        """The copy as an ordinary tensor.

        Raises:
            OwnershipError: The value was written to since.
        """
        if self.mark() != self.taken_at:
            raise OwnershipError(
                f"a copy of {self.key!r} (of a state dictionary, or taken by detach() or .data "
                f"before the first call of the network) was looked at after a step or another "
                f"write: in one process it would have changed with it\n"
                f"  Fix: take it again for the new value; to keep the old one, take clone() of it, "
                f"or copy.deepcopy(net.state_dict()), there and in one process."
            )
        with DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    as_loop_value = plain  # where it meets values of the loop

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in StandIn.harmless:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for target in _targets(getattr(func, "__name__", ""), args, kwargs):
            if isinstance(target, StateCopy):
                raise OwnershipError(
                    f"a copy of {target.key!r} (of a state dictionary, or taken by detach() or "
                    f".data before the first call of the network) was written to: in one process "
                    f"this would write into the network or the optimizer\n"
                    f"  Fix: write into the parameter under torch.no_grad(); or change "
                    f"copy.deepcopy(net.state_dict()), and load it with load_state_dict."
                )
        copies = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, StateCopy)]
        args, kwargs = pytree.tree_map_only(StateCopy, StateCopy.plain, (args, kwargs))
        result = func(*args, **kwargs)
        if type(result) is not torch.Tensor or not copies:
            return result
        memory = storage_of(result)
        with DisableTorchFunctionSubclass():
            source = next((one for one in copies if storage_of(one) == memory), None)
        if source is None:
            return result
        return StateCopy.of(result, source.key, source.mark, source.taken_at)  # a view of it

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.plain().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


def others_of(tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, str]]:
    """Tensors of the script in the memory of a network's: ``detach()`` and ``.data`` gave them.

    Args:
        tensors: Parameters and buffers by name, as in one process: they have their memory.

    Returns:
        Each with the name of the one whose memory it is in.
    """
    with DisableTorchFunctionSubclass():
        own = {id(tensor): tensor for tensor in tensors.values()}
        memories = {storage_of(tensor): name for name, tensor in tensors.items()}
        held = Counter(map(storage_of, own.values()))
        # One more use is that of the object through which the number is asked for.
        shared = {memory for memory in memories if storage_use_count(memory) > held[memory] + 1}
        if not shared:
            return []
        known = own.keys() | _bases_alone(own.values())
        return [
            (one, memories[storage_of(one)])
            for one in gc.get_objects()
            if type(one) is torch.Tensor
            and id(one) not in known
            and (one.layout, one.device) == (torch.strided, _CPU)
            and storage_of(one) in shared
        ]


def _bases_alone(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the tensors that these are views of, and that nobody else holds."""
    least = min(_uses([torch.zeros(1)[:]]).values())
    return {key for key, uses in _uses(tensors).items() if uses <= least}


def _uses(views: Iterable[torch.Tensor]) -> dict[int, int]:
    """How often the base of each view is held, by its id."""
    found = {id(base): base for view in views if (base := base_of(view)) is not view}
    return {key: sys.getrefcount(base) for key, base in found.items()}


def make_copies(others: Iterable[tuple[torch.Tensor, str]], mark_of: Callable[[Any], Mark]) -> None:
    """Let tensors that shared a network's memory until now be copies, as the same objects."""
    for tensor, name in others:
        tensor.__class__ = StateCopy
        made: Any = tensor
        made.key, made.mark = name, mark_of(name)
        made.taken_at = made.mark()


def check_current(state: Mapping[str, Any]) -> None:
    """Refuse a state that has become out of date, before torch takes it for one that does not fit.

    Raises:
        OwnershipError: As ``StateCopy.plain``.
    """
    for value in state.values():
        if isinstance(value, StateCopy):
            value.plain()


def as_copies(state: Any, mark_of: Callable[[Any], Mark]) -> None:
    """Put copies in the place of the tensors of a dictionary, and of dictionaries in it.

    Args:
        state: The dictionary.
        mark_of: The mark of each value, by its key.
    """
    for key, value in list(state.items()):
        if isinstance(value, torch.Tensor):
            mark = mark_of(key)
            state[key] = StateCopy.of(value, str(key), mark, mark())
        elif isinstance(value, Mapping):
            as_copies(value, mark_of)


def _targets(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [args[0]] if name == "__set__" else written(name, args, kwargs)
