"""``Model(recompute=...)``: what users say, as paths of modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphsplit.marks.pattern import PatternError, read_pattern


def recomputed_paths(net: nn.Module, recompute: Any) -> bool | tuple[str, ...]:
    """The paths of the modules that are asked for; True for the whole network."""
    if isinstance(recompute, bool):
        return recompute
    found: dict[str, None] = {}
    for wanted in recompute:
        found.update(dict.fromkeys(_paths(net, wanted)))
    return True if "" in found else tuple(found)


def problems_of_recompute(net: Any, recompute: Any, compile: Any) -> list[str]:
    """Problems of ``Model(recompute=...)``, in words."""
    if recompute is False or not isinstance(net, nn.Module):
        return []
    problems = []
    if compile is not False:
        problems.append(
            "recompute is given, and compile: the compiler decides by itself what to keep; leave "
            "one of them out"
        )
    if isinstance(recompute, bool):
        return problems
    if not isinstance(recompute, (list, tuple)):
        return [
            *problems,
            f"recompute={recompute!r}; expected True, False, or a list of modules or patterns of "
            f"their names, as in ['layers.*']",
        ]
    return problems + [problem for wanted in recompute for problem in _problems(net, wanted)]


def _problems(net: nn.Module, wanted: Any) -> list[str]:
    if isinstance(wanted, nn.Module):
        if not _paths(net, wanted):
            return [f"recompute has a {type(wanted).__name__} that is not in net"]
        return []
    if not isinstance(wanted, str):
        return [f"recompute has {wanted!r}; expected modules, or patterns of their names"]
    try:
        pattern = read_pattern(wanted)
    except PatternError as error:
        return [f"recompute has {wanted!r}: {error}"]
    if not pattern.select(net):
        return [f"recompute has {wanted!r}: {pattern.miss(net)}"]
    return []


def _paths(net: nn.Module, wanted: Any) -> list[str]:
    """The paths of a module, or of those that a pattern matches."""
    if isinstance(wanted, str):
        return list(read_pattern(wanted).select(net))
    named = net.named_modules(remove_duplicate=False)
    return [path for path, module in named if module is wanted]
