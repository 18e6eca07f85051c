"""The public names. Importing this gives every ``torch.nn.Module`` the method ``place``."""

from graphsplit import errors as errors
from graphsplit.placement import annotations as _annotations
from graphsplit.placement.annotations import op, place
from graphsplit.runtime.deferred_init import deferred_init
from graphsplit.runtime.job import (
    barrier,
    finalize,
    get_rank,
    get_role,
    get_world_size,
    init,
    is_initialized,
)
from graphsplit.train import callbacks, metrics
from graphsplit.train.model import Model

_annotations.install()

__all__ = [
    "Model",
    "barrier",
    "callbacks",
    "deferred_init",
    "errors",
    "finalize",
    "get_rank",
    "get_role",
    "get_world_size",
    "init",
    "is_initialized",
    "metrics",
    "op",
    "place",
]
