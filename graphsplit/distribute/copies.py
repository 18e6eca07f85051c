"""State dictionaries of own loops: copies that say so where it could be seen.

In one process ``state_dict()`` holds the tensors themselves: a later step shows in it, and a write
into it is one into the parameter. Over workers it holds copies, which do neither. So each is an
ordinary tensor until that could be seen: a write into it, and a look at one that is out of date,
are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphsplit.distribute.values import written
from graphsplit.errors import OwnershipError
from graphsplit.torch_ext.attributes import storage_of
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, pytree
from graphsplit.torch_ext.stand_ins import StandIn

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
                f"{self.key!r} of a state dictionary was looked at after a step or another "
                f"write: in one process it would have changed with it, here it is a copy\n"
                f"  Fix: call state_dict() again for the new value; to keep the old one, take "
                f"copy.deepcopy(net.state_dict()), there and in one process."
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
                    f"{target.key!r} of a state dictionary was written to, which is a copy: in "
                    f"one process this would write into the network or the optimizer\n"
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
