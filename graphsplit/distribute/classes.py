"""Classes of distributed networks, which stand for those that the networks had before."""

from __future__ import annotations

from typing import Any


class AsBefore(type):
    """Of a class whose base behind the first one is the class before.

    It is equal to that one (``type(net) == nn.Linear``) and has the same objects. What is made by
    it is an object of that one, without machinery: ``type(net)(...)``, ``net[:2]`` of a Sequential.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the class before."""
        return cls.__mro__[2](*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        kind = other.__mro__[2] if isinstance(other, AsBefore) else other
        return kind is cls.__mro__[2]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[2])

    def __hash__(cls) -> int:
        return hash(cls.__mro__[2])


def made_by(kind: type[type]) -> type[type]:
    """The same for classes that are made by another class than ``type``.

    Args:
        kind: What makes the class before.
    """
    return AsBefore if kind is type else type(kind.__name__, (AsBefore, kind), {})
