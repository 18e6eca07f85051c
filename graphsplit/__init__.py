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
    from graphsplit.batches.microbatches import split_microbatches
    from graphsplit.capture.opaque.marks import opaque
    from graphsplit.checkpoint.disk.series import latest_checkpoint
    from graphsplit.collectives.calls import (
        all_gather,
        all_reduce,
        broadcast,
        broadcast_object,
        gather,
        recv,
        reduce,
        scatter,
        send,
    )
    from graphsplit.deferred.construction import deferred_init
    from graphsplit.distribute.network import distribute
    from graphsplit.job.joined import (
        barrier,
        finalize,
        get_rank,
        get_role,
        get_world_size,
        init,
        is_initialized,
    )
    from graphsplit.launching.launch import launch, launcher
    from graphsplit.marks.annotations import op, place
    from graphsplit.marks.ignored import ignore
    from graphsplit.marks.rules import apply_placement
    from graphsplit.marks.wire import wire
    from graphsplit.optimizers import clip
    from graphsplit.optimizers.per_parameter import per_parameter
    from graphsplit.recovery.loops.loop import loop
    from graphsplit.runtime.randomness import microbatch_rng_state
    from graphsplit.train import callbacks, metrics
    from graphsplit.train.model import Model

__all__ = [
    "Model",
    "__version__",
    "all_gather",
    "all_reduce",
    "apply_placement",
    "barrier",
    "broadcast",
    "broadcast_object",
    "callbacks",
    "clip",
    "deferred_init",
    "distribute",
    "errors",
    "finalize",
    "gather",
    "get_rank",
    "get_role",
    "get_world_size",
    "ignore",
    "init",
    "is_initialized",
    "latest_checkpoint",
    "launch",
    "launcher",
    "loop",
    "metrics",
    "microbatch_rng_state",
    "op",
    "opaque",
    "per_parameter",
    "place",
    "recv",
    "reduce",
    "scatter",
    "send",
    "split_microbatches",
    "wire",
]


# What other libraries call them.
_USUAL = {
    "Trainer": "Model",
    "DistributedDataParallel": "distribute",
    "init_process_group": "init",
    "destroy_process_group": "finalize",
    "rank": "get_rank",
    "size": "get_world_size",
    "world_size": "get_world_size",
    "allreduce": "all_reduce",
    "broadcast_object_list": "broadcast_object",
    "spawn": "launch",
    "device": "place",
}

# Where each name is: a script waits only for what it uses.
_HOMES = {
    "Model": "train.model",
    "all_gather": "collectives.calls",
    "all_reduce": "collectives.calls",
    "apply_placement": "marks.rules",
    "barrier": "job.joined",
    "broadcast": "collectives.calls",
    "broadcast_object": "collectives.calls",
    "callbacks": "train",
    "clip": "optimizers",
    "deferred_init": "deferred.construction",
    "distribute": "distribute.network",
    "finalize": "job.joined",
    "gather": "collectives.calls",
    "get_rank": "job.joined",
    "get_role": "job.joined",
    "get_world_size": "job.joined",
    "ignore": "marks.ignored",
    "init": "job.joined",
    "is_initialized": "job.joined",
    "latest_checkpoint": "checkpoint.disk.series",
    "launch": "launching.launch",
    "launcher": "launching.launch",
    "loop": "recovery.loops.loop",
    "metrics": "train",
    "microbatch_rng_state": "runtime.randomness",
    "op": "marks.annotations",
    "opaque": "capture.opaque.marks",
    "per_parameter": "optimizers.per_parameter",
    "place": "marks.annotations",
    "recv": "collectives.calls",
    "reduce": "collectives.calls",
    "scatter": "collectives.calls",
    "send": "collectives.calls",
    "split_microbatches": "batches.microbatches",
    "wire": "marks.wire",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        text = importlib.import_module("graphsplit.text")
        raise text.no_attribute("module 'graphsplit'", name, __all__, _USUAL)
    home = f"graphsplit.{_HOMES[name]}" if name in _HOMES else "graphsplit"
    module = importlib.import_module(home)
    if name not in vars(module):
        importlib.import_module(f"{home}.{name}")
    found = globals()[name] = vars(module)[name]
    return found


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
    importlib.import_module("graphsplit.api")
