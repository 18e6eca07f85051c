"""The public names. Importing this gives every ``torch.nn.Module`` the method ``place``."""

from graphsplit import errors as errors
from graphsplit.batches.microbatches import split_microbatches
from graphsplit.capture.opaque.marks import opaque
from graphsplit.checkpoint.disk.series import latest_checkpoint
from graphsplit.deferred.construction import deferred_init
from graphsplit.job import joined as _joined
from graphsplit.job.joined import (
    barrier,
    finalize,
    get_rank,
    get_role,
    get_world_size,
    init,
    is_initialized,
)
from graphsplit.marks import annotations as _annotations
from graphsplit.marks.annotations import op, place
from graphsplit.marks.ignored import ignore
from graphsplit.marks.rules import apply_placement
from graphsplit.optimizers import clip
from graphsplit.optimizers.per_parameter import per_parameter
from graphsplit.recovery.install import install as _install_recovery
from graphsplit.runtime.random.randomness import microbatch_rng_state
from graphsplit.train import callbacks, metrics
from graphsplit.train.model import Model

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
