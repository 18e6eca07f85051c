"""The public names. Importing this gives every ``torch.nn.Module`` the method ``place``."""

from graphsplit import errors as errors
from graphsplit.capture.opaque_marks import opaque
from graphsplit.guards.ignored import ignore
from graphsplit.placement import annotations as _annotations
from graphsplit.placement.annotations import op, place
from graphsplit.placement.rules import apply_placement
from graphsplit.runtime import clip
from graphsplit.runtime import joined as _joined
from graphsplit.runtime.deferred_init import deferred_init
from graphsplit.runtime.joined import (
    barrier,
    finalize,
    get_rank,
    get_role,
    get_world_size,
    init,
    is_initialized,
)
from graphsplit.runtime.per_parameter import per_parameter
from graphsplit.runtime.randomness import microbatch_rng_state
from graphsplit.train import callbacks, metrics
from graphsplit.train.checkpoint.series import latest_checkpoint
from graphsplit.train.microbatches import split_microbatches
from graphsplit.train.model import Model
from graphsplit.train.recovery.install import install as _install_recovery

_annotations.install()
_joined.on_joined.append(_install_recovery)

__all__ = [
    "Model",
    "apply_placement",
    "barrier",
    "callbacks",
    "clip",
    "deferred_init",
    "errors",
    "finalize",
    "get_rank",
    "get_role",
    "get_world_size",
    "ignore",
    "init",
    "is_initialized",
    "latest_checkpoint",
    "metrics",
    "microbatch_rng_state",
    "op",
    "opaque",
    "per_parameter",
    "place",
    "split_microbatches",
]
