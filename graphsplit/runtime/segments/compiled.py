"""Compile segments with ``torch.compile``.

Every segment is compiled by itself, when it first runs: once for each plan, that is for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit.torch_ext.private import mode_options

_INDUCTOR = "inductor"


@dataclass(frozen=True)
class Compiler:
    """How to compile.

    Attributes:
        arguments: What ``torch.compile`` is given.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, run: Callable[..., Any], *, dynamic: bool | None = None) -> Any:
        """Compile a function or a module.

        Random numbers are drawn from the default generator, as they are without a compiler.

        Args:
            run: What to compile.
            dynamic: Whether sizes may change from call to call; None: ``torch.compile`` finds out.
        """
        given = {"dynamic": dynamic, **self.arguments}
        if given.get("backend", _INDUCTOR) == _INDUCTOR:
            options = {"fallback_random": True}
            mode = given.pop("mode", None)
            if mode is not None:  # torch.compile takes a mode or options, and a mode is options
                options |= mode_options(mode)
            given["options"] = {**options, **(given.get("options") or {})}
        return torch.compile(run, **given)


def compiler_of(compile: bool | Mapping[str, Any]) -> Compiler | None:
    """The compiler that ``Model(compile=...)`` asks for."""
    if compile is False:
        return None
    return Compiler({} if compile is True else dict(compile))


def problems_of_compile(compile: Any) -> list[str]:
    """Problems of ``Model(compile=...)``, in words."""
    if isinstance(compile, bool):
        return []
    if not isinstance(compile, Mapping):
        return [
            f"compile={compile!r}; expected True, False, or a dictionary of arguments for "
            f"torch.compile, as in {{'mode': 'max-autotune'}}"
        ]
    known = {"backend", "mode", "options", "dynamic"}
    return [
        f"compile has {name!r}; expected some of {', '.join(sorted(known))}"
        for name in compile
        if name not in known
    ]
