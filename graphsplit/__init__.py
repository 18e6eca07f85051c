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

from graphsplit.version import __version__ as __version__

if TYPE_CHECKING:
    from graphsplit import errors as errors
    from graphsplit.batches.microbatches import split_microbatches as split_microbatches
    from graphsplit.capture.opaque.marks import opaque as opaque
    from graphsplit.checkpoint.disk.series import latest_checkpoint as latest_checkpoint
    from graphsplit.collectives.calls import all_gather as all_gather
    from graphsplit.collectives.calls import all_reduce as all_reduce
    from graphsplit.collectives.calls import broadcast as broadcast
    from graphsplit.collectives.calls import broadcast_object as broadcast_object
    from graphsplit.collectives.calls import gather as gather
    from graphsplit.collectives.calls import recv as recv
    from graphsplit.collectives.calls import reduce as reduce
    from graphsplit.collectives.calls import scatter as scatter
    from graphsplit.collectives.calls import send as send
    from graphsplit.deferred.construction import deferred_init as deferred_init
    from graphsplit.distribute.network import distribute as distribute
    from graphsplit.job.joined import barrier as barrier
    from graphsplit.job.joined import finalize as finalize
    from graphsplit.job.joined import get_rank as get_rank
    from graphsplit.job.joined import get_role as get_role
    from graphsplit.job.joined import get_world_size as get_world_size
    from graphsplit.job.joined import init as init
    from graphsplit.job.joined import is_initialized as is_initialized
    from graphsplit.launching.launch import launch as launch
    from graphsplit.launching.launch import launcher as launcher
    from graphsplit.marks.annotations import op as op
    from graphsplit.marks.annotations import place as place
    from graphsplit.marks.ignored import ignore as ignore
    from graphsplit.marks.rules import apply_placement as apply_placement
    from graphsplit.marks.wire import wire as wire
    from graphsplit.optimizers import clip as clip
    from graphsplit.optimizers.per_parameter import per_parameter as per_parameter
    from graphsplit.recovery.loops.loop import loop as loop
    from graphsplit.runtime.randomness import microbatch_rng_state as microbatch_rng_state
    from graphsplit.train import callbacks as callbacks
    from graphsplit.train import metrics as metrics
    from graphsplit.train.model import Model as Model


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
_PUBLIC = sorted((*_HOMES, "__version__", "errors"))
if not TYPE_CHECKING:  # whoever checks types reads the imports above
    __all__ = _PUBLIC


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        text = importlib.import_module("graphsplit.text")
        raise text.no_attribute("module 'graphsplit'", name, _PUBLIC, _USUAL)
    home = f"graphsplit.{_HOMES[name]}" if name in _HOMES else "graphsplit"
    module = importlib.import_module(home)
    if name not in vars(module):
        importlib.import_module(f"{home}.{name}")
    found = globals()[name] = vars(module)[name]
    return found


def __dir__() -> list[str]:
    return list(_PUBLIC)


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
