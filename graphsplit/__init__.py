"""graphsplit: say where each piece of a PyTorch model lives, and run the same script everywhere.

    import torch, graphsplit as gs

    gs.init()                                # joins the cluster of MS_*; alone without MS_ROLE
    net = LeNet()
    net.conv1.place("MS_WORKER", 3)
    net.fc1.place("MS_WORKER", 0)
    model = gs.Model(net, loss_fn=torch.nn.CrossEntropyLoss(),
                     optimizer=torch.optim.SGD(net.parameters(), lr=0.01))
    model.train(10, loader)

The whole computation is captured as one graph, cut into one program per worker, and trained as if
it had all run in one process: bit for bit.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphsplit.version import __version__

if TYPE_CHECKING:
    from graphsplit import errors
    from graphsplit.api import (
        Model,
        apply_placement,
        barrier,
        callbacks,
        clip,
        deferred_init,
        finalize,
        get_rank,
        get_role,
        get_world_size,
        ignore,
        init,
        is_initialized,
        latest_checkpoint,
        metrics,
        microbatch_rng_state,
        op,
        opaque,
        per_parameter,
        place,
        split_microbatches,
    )

__all__ = [
    "Model",
    "__version__",
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


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("graphsplit.api"), name)
    raise AttributeError(f"module 'graphsplit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)


def _is_command_line() -> bool:
    """Whether this process is the ``graphsplit`` command, which does without torch's seconds."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    if name != "-m":
        return name in ("graphsplit", "graphsplit.exe")
    # Python has yet to find the module: only its own arguments say which one it looks for.
    options = [one for one in sys.orig_argv[1:] if one.startswith("-m")]
    first = options[0] if options else ""
    module = first[2:] or "".join(sys.orig_argv[sys.orig_argv.index(first) + 1 :][:1])
    without = ("graphsplit", "graphsplit.cluster.scheduler")
    return module in without or module.startswith("graphsplit.cli")


if not _is_command_line():
    importlib.import_module("graphsplit.api")  # also gives every nn.Module its method `place`
