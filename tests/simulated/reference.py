"""The plain eager loop that everything is compared with.

It uses nothing of graphsplit, but for the two functions that say what a microbatch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphsplit.batches.microbatches import split_microbatches
from graphsplit.runtime.randomness import (
    all_generators,
    microbatch_rng_state,
    process_generators,
    set_all_generators,
    set_process_generators,
)


@dataclass(frozen=True)
class Extras:
    """The options of a loop besides backward and step.

    Attributes:
        clip: ``clip(parameters)``: clips their gradients; what it returns is kept.
        make_scaler: Makes a ``GradScaler``.
        autocast: The dtype of a ``torch.autocast`` block around network and loss.
        set_to_none: Passed to ``zero_grad``.
        on_gradients: ``on_gradients(network)``: called between backward and clipping.
        accumulate: How many batches make one step.
        in_pairs: Whether gradients of microbatches are added in pairs.
        by_microbatch: Whether each microbatch is added over the batches of a step first.
        gradient_dtype: To what gradients of microbatches, and sums of two, are rounded.
    """

    clip: Callable[[list[torch.Tensor]], Any] | None = None
    make_scaler: Callable[[], torch.amp.GradScaler] | None = None
    autocast: torch.dtype | None = None
    set_to_none: bool = True
    on_gradients: Callable[[nn.Module], None] | None = None
    accumulate: int = 1
    in_pairs: bool = False
    by_microbatch: bool = False
    gradient_dtype: torch.dtype | None = None


class EagerLoop:
    """A network trained by the loop that anybody would write.

    The generator that it draws from is its own; the default one is left as it was found.

    Args:
        make: Makes network, loss function (or None), optimizer, or several that are stepped one
            after the other, and scheduler (or None).
        microbatches: Over how many microbatches of each batch gradients accumulate.
        split: Another way to split a batch than along dimension 0.
        loss_weight: What the loss of a microbatch counts, where not its number of rows.
        extras: What else it does.
    """

    def __init__(
        self,
        make: Callable[[], tuple[nn.Module, Any, Any, Any]],
        *,
        microbatches: int = 1,
        split: Callable[[Any, int], Sequence[Any]] | None = None,
        loss_weight: Callable[..., Any] | None = None,
        extras: Extras | None = None,
    ) -> None:
        self.num_microbatches, self.split, self.loss_weight = microbatches, split, loss_weight
        self.seed: int | None = None
        self.num_steps = self.num_batches = 0
        self.generator = torch.default_generator.get_state()
        self.process = process_generators()
        with self.own_generator():
            self.network, self.loss_fn, optimizer, self.scheduler = make()
        one = isinstance(optimizer, torch.optim.Optimizer)
        self.optimizers = [optimizer] if one else list(optimizer)
        self.extras = extras or Extras()
        self.scaler = self.extras.make_scaler() if self.extras.make_scaler else None
        self.gradient_norm: torch.Tensor | None = None
        self.parts: dict[torch.Tensor, dict[int, Any]] = {}

    def train_step(self, batch: Any) -> torch.Tensor:
        """One step of training; returns the loss."""
        with self.own_generator():
            if not self.network.training:
                self.network.train()
            if self.num_batches % self.extras.accumulate == 0:
                for optimizer in self.optimizers:
                    optimizer.zero_grad(set_to_none=self.extras.set_to_none)
            if self.num_microbatches == 1:
                with self._casting():
                    loss = self._loss(self._forward(batch), batch)
                self._scaled(loss).backward()
            else:
                loss = self._accumulate(batch)
            self.num_batches += 1
            if self.num_batches % self.extras.accumulate == 0:
                self._update()
            if self.scheduler is not None:
                self.scheduler.step()
            return loss.detach()

    def _update(self) -> None:
        extras, scaler = self.extras, self.scaler
        if scaler is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        if extras.on_gradients is not None:
            extras.on_gradients(self.network)
        if extras.clip is not None:
            self.gradient_norm = extras.clip(list(self.network.parameters()))
        for optimizer in self.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        loss = loss if self.extras.accumulate == 1 else loss / self.extras.accumulate
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _casting(self) -> AbstractContextManager[Any]:
        dtype = self.extras.autocast
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def _accumulate(self, batch: Any) -> torch.Tensor:
        """The loops that docs/how-to/microbatches.md prints."""
        if self.seed is None:
            self.seed = torch.initial_seed()
        before, losses = torch.default_generator.get_state(), []
        extras = self.extras
        trained = self._trained() if extras.in_pairs or extras.by_microbatch else []
        earlier = [p.grad for p in trained]
        if self.num_batches % extras.accumulate == 0 or not extras.by_microbatch:
            self.parts = {}
        for m, (microbatch, weight) in enumerate(self._microbatches(batch)):
            torch.default_generator.set_state(microbatch_rng_state(self.seed, self.num_steps, m))
            with self._casting():
                loss = self._loss(self._forward(microbatch), microbatch)
            for p in trained:
                p.grad = None
            self._scaled(loss * weight).backward()
            for p in trained:
                own = self.parts.setdefault(p, {})
                own[m] = _added(own.get(m), p.grad)
            losses.append(loss.detach() * weight)
        ends = (self.num_batches + 1) % extras.accumulate == 0 or not extras.by_microbatch
        for p, gradient in zip(trained, earlier, strict=True):
            p.grad = _added(gradient, self._sum(self.parts[p])) if ends else gradient
        torch.default_generator.set_state(before)
        self.num_steps += 1
        total = sum(losses)
        assert isinstance(total, torch.Tensor)
        return total

    def _sum(self, parts: dict[int, Any]) -> Any:
        sums: list[Any] = []
        for m in range(max(parts) + 1):
            if self.extras.in_pairs:
                _add_pairs(sums, parts.get(m), m, self.extras.gradient_dtype)
            else:
                sums = [_added(sums[0], parts.get(m)) if sums else parts.get(m)]
        while len(sums) > 1:
            sums[-2:] = [_added(sums[-2], sums[-1])]
        return sums[0]

    def _trained(self) -> list[torch.Tensor]:
        of_loss = self.loss_fn.parameters() if isinstance(self.loss_fn, nn.Module) else ()
        return list(dict.fromkeys((*self.network.parameters(), *of_loss)))

    def _microbatches(self, batch: Any) -> list[tuple[Any, float]]:
        if self.split is None:
            pairs = split_microbatches(batch, self.num_microbatches)
            if self.loss_weight is None:
                return pairs
            pieces = [piece for piece, _ in pairs]
        else:
            pieces = list(self.split(batch, self.num_microbatches))
        counts = [self._count(piece) for piece in pieces]
        return [(p, count / sum(counts)) for p, count in zip(pieces, counts, strict=True)]

    def _count(self, microbatch: Any) -> Any:
        if self.loss_weight is None:
            first = next(iter(microbatch.values() if isinstance(microbatch, dict) else microbatch))
            return len(first)
        if isinstance(microbatch, Mapping):
            return self.loss_weight(**microbatch)
        return self.loss_weight(*microbatch)

    def evaluate(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Loss and outputs in eval mode."""
        with self._evaluating():
            outputs = self._forward(batch)
            return self._loss(outputs, batch), outputs

    def predict(self, batch: Any) -> Any:
        """Outputs in eval mode."""
        with self._evaluating():
            return self._forward(batch)

    def _forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.network(**batch)
        return self.network(*(batch if self.loss_fn is None else batch[:-1]))

    def _loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        if self.loss_fn is not None:
            loss = self.loss_fn(outputs, batch[-1])
        elif isinstance(outputs, torch.Tensor):
            loss = outputs
        else:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
        assert isinstance(loss, torch.Tensor)
        return loss

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.network.modules()]
        self.network.eval()
        try:
            with self.own_generator(), torch.no_grad(), self._casting():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    @contextmanager
    def own_generator(self) -> Iterator[None]:
        """Let the loop's generators be those of the process."""
        before = all_generators()
        torch.default_generator.set_state(self.generator)
        set_process_generators(self.process)
        try:
            yield
        finally:
            self.generator, self.process = torch.default_generator.get_state(), process_generators()
            set_all_generators(before)


def _add_pairs(blocks: list[Any], part: Any, number: int, dtype: torch.dtype | None) -> None:
    part = _rounded(part, dtype)
    while number % 2:
        part = _rounded(_added(blocks.pop(), part), dtype)
        number //= 2
    blocks.append(part)


def _rounded(part: Any, dtype: torch.dtype | None) -> Any:
    return part if part is None or dtype is None else part.to(dtype).to(part.dtype)


def _added(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other
