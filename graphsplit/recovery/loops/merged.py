"""The parts of an own loop's snapshot put together, for another number of workers.

Each part has what lived on one worker, and what all workers keep alike. Together they are the state
of one process: every worker puts all of it back, and its first calls decide what lives there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphsplit.encoding.packed import FlatTensors
from graphsplit.encoding.values import decode, encode
from graphsplit.errors import ConfigurationError
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.tensor_meta import has_same_bits

_OF_OPTIMIZERS = "optimizer"  # the names of their tensors begin with it
# Generators that the script does not seed differ between workers: those of the first go on. They
# stand by themselves, in the places of loaders, and in what a kept loader remembers.
_DRAWN = re.compile(r"generators|loader\d|keep\d+/remembered/\d+//(python|numpy)/")
_OWN = frozenset({"rank", "networks", "optimizers", "generators", "loaders"})


def merged(parts: Sequence[SnapshotShard], rank: int) -> SnapshotShard:
    """One part that has everything.

    Args:
        parts: Those of all workers that have written.
        rank: The worker that goes on with it.

    Raises:
        ConfigurationError: Something that is kept differs between workers; names it.
    """
    first, tensors = parts[0], _alike_tensors(parts)
    for part in parts[1:]:
        for key, value in first.values.items():
            if key not in _OWN and part.values.get(key) != value:
                raise _differs(key, len(parts))
    values = {
        **first.values,
        "rank": rank,
        "networks": [
            _network([part.values["networks"][at] for part in parts], tensors)
            for at in range(len(first.values["networks"]))
        ],
        "optimizers": [
            encode(_optimizer(parts, at), tensors, path=f"{_OF_OPTIMIZERS}{at}")
            for at in range(len(first.values["optimizers"]))
        ],
    }
    flat = FlatTensors()
    flat.copy(tensors)
    return SnapshotShard(values, flat.memory, flat.slots)


def _alike_tensors(parts: Sequence[SnapshotShard]) -> dict[str, torch.Tensor]:
    """All tensors but those of optimizers, by name; what several workers have is the same."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name in part.slots:
            if not name.startswith(_OF_OPTIMIZERS):
                tensor = part.tensor(name)
                known = found.setdefault(name, tensor)
                if not _DRAWN.match(name) and not has_same_bits(known, tensor):
                    raise _differs(name, len(parts))
    return found


def _network(nodes: Sequence[Any], tensors: dict[str, torch.Tensor]) -> list[Any]:
    """A network without owners: its placement decides them anew."""
    index, node, _ = nodes[0]
    if any(other[:2] != [index, node] for other in nodes):
        raise _differs(f"an attribute, or code that is kept whole, of network {index}", len(nodes))
    values = decode(node, tensors.__getitem__) | {"owners": {}}
    names = {name: has_gradient for _, _, told in nodes for name, has_gradient in told}
    return [index, encode(values, tensors, path=f"net{index}"), [list(p) for p in names.items()]]


def _optimizer(parts: Sequence[SnapshotShard], at: int) -> Mapping[str, Any]:
    """An optimizer with the entries of all workers, in the order in which they were made."""
    told = [decode(part.values["optimizers"][at], part.tensor) for part in parts]
    states = sorted((one for values in told for one in values.pop("state")), key=lambda s: s[1])
    if any(values != told[0] for values in told):
        raise _differs(f"settings of optimizer {at}", len(parts))
    return {**told[0], "is_settled": False, "state": states}


def _differs(what: str, num_workers: int) -> ConfigurationError:
    return ConfigurationError(
        f"a snapshot of a loop of the script's own was written by {num_workers} workers, on which "
        f"{what} was not the same: it belongs to each of them\n"
        f"  Fix: start the job with {num_workers} workers; or remove the folder, and begin anew."
    )
