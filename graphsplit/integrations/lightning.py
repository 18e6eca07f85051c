"""Lightning's ``Trainer``, over the workers of a job: a strategy.

Two lines of a script change::

    gs.apply_placement(module, {"net.encoder": 0, "net.decoder": 1})
    trainer = Trainer(strategy=GraphsplitStrategy(), ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torchmetrics import Metric

from graphsplit.collectives.calls import broadcast_object
from graphsplit.feeding.loader_checks import refuse_shares
from graphsplit.integrations.workers import distributed, told, workers
from graphsplit.job import joined
from graphsplit.torch_ext.private import change_shown


class GraphsplitStrategy(SingleDeviceStrategy):
    """Runs a ``LightningModule``'s networks over the workers of a job.

    The networks are the module's children that have parameters, each with the placement that it
    has. Every worker runs the trainer whole, on all batches; worker 0 logs and writes files.
    Without ``graphsplit run`` it is Lightning's strategy for one device.

    Raises:
        ConfigurationError: ``MS_ROLE`` is set, and the job cannot be joined.
    """

    strategy_name = "graphsplit"

    def __init__(self) -> None:
        self._job = workers()
        super().__init__("cpu")
        if self._job is not None:
            self.global_rank = self.local_rank = self._job.rank
            rank_zero_only.rank = self._job.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process logs and writes files."""
        return self._job is None or self._job.rank == 0

    def model_to_device(self) -> None:
        """Distribute the networks; the value of each log is asked for by all workers."""
        module: Any = self.lightning_module
        if self._job is None:
            super().model_to_device()
            return
        for _, network in self._networks():
            distributed(network, self._job)
        if "log" not in vars(module):
            log = module.log
            module.log = lambda name, value, *args, **kwargs: log(
                name, _told(value), *args, **kwargs
            )

    def process_dataloader(self, dataloader: object) -> object:
        """As in Lightning; refuse a loader that gives shares, which its own teardown would hide.

        Raises:
            ConfigurationError: It gives each process a share of the data.
        """
        if self._job is not None:
            refuse_shares(dataloader, "Lightning's Trainer")
        return super().process_dataloader(dataloader)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """As in Lightning, but the closure runs before the step and not inside it."""
        if self._job is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with _closure_first(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in Lightning, without gradients; values of inference mode have no versions."""
        with torch.inference_mode(False), torch.no_grad():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As ``validation_step``."""
        with torch.inference_mode(False), torch.no_grad():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As ``validation_step``; every worker has the predictions."""
        with torch.inference_mode(False), torch.no_grad():
            return told(super().predict_step(*args, **kwargs))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As in Lightning: each worker takes what it owns."""
        module: Any = self.lightning_module
        if self._job is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        rest = dict(checkpoint["state_dict"])
        for name, network in self._networks():
            own = [key for key in rest if key.startswith(f"{name}.")]
            part = {key.removeprefix(f"{name}."): rest.pop(key) for key in own}
            network.load_state_dict(part, strict=strict)
        names = tuple(f"{name}." for name, _ in self._networks())
        found = module.load_state_dict(rest, strict=False)
        missing = [key for key in found.missing_keys if not key.startswith(names)]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(f"missing keys: {missing}; unexpected: {found.unexpected_keys}")

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The value, on every worker."""
        return told(tensor)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers."""
        if self._job is not None:
            joined.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value of one worker, on all."""
        return obj if self._job is None else broadcast_object(obj, src)

    def teardown(self) -> None:
        """As in Lightning; nothing is on another device."""
        if self._job is None:
            super().teardown()
            return
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _networks(self) -> list[tuple[str, nn.Module]]:
        module: Any = self.lightning_module
        return [
            (name, child)
            for name, child in module.named_children()
            if next(child.parameters(), None) is not None
        ]


def _told(value: Any) -> Any:
    """Let all workers know a value that is logged: the progress bar of worker 0 looks at it."""
    if isinstance(value, Metric):
        change_shown(value, told)
        compute: Any = value.compute
        if not isinstance(compute, partial):
            metric: Any = value
            metric.compute = partial(_computed, compute)
        return value
    return told(value)


def _computed(compute: Callable[[], Any]) -> Any:
    return told(compute())


@contextmanager
def _closure_first(optimizer: Any) -> Iterator[None]:
    """Inside, ``step(closure)`` runs the closure, and then steps without one."""
    before = vars(optimizer).get("step")

    def put_back() -> None:
        if before is None:
            vars(optimizer).pop("step", None)
        else:
            optimizer.step = before

    def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        put_back()
        optimizer.step(**kwargs)
        return found

    optimizer.step = step
    try:
        yield
    finally:
        put_back()
