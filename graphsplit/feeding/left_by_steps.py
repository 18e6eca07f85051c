"""Traces of a step on one worker, which all get as one process would have them.

* Python values that calls kept whole leave. A counter in a loss that asks for values, the best loss
  so far, a list of losses: the script finds them after the step, and so does code of another mode.
  Tensors, too, which the script reads; one with a history says where it is.
  Where generators stand that they draw from: the script may draw from them, too.
* Inputs that forward or the loss writes to. In one process there is one batch, and what was written
  stays in it: for the metrics, for the next epoch over the same tensors, for the script.
* Gradients of inputs that ask for one (``x.requires_grad_()``): for ``x.grad``, and for what the
  script has made ``x`` of.
* Buffers to which an operation gives another size. A quantisation-aware layer starts with one
  scale, and has one for each channel after its first run; a graph that another worker records later
  is to show the same sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphsplit.capture.graph import Node, NodeKind
from graphsplit.capture.reach.holders import Holder
from graphsplit.checkpoint.generators import is_same, put_generator, state_of_generator
from graphsplit.errors import ConfigurationError
from graphsplit.feeding.left_kinds import Known, is_unknown
from graphsplit.feeding.left_values import (
    SAME,
    Before,
    has_unknown,
    learned,
    learned_key,
    told,
    told_keys,
)
from graphsplit.guards.values import MISSING, Frozen, freeze, reference_of, same
from graphsplit.job.control import ControlChannels
from graphsplit.job.group import WorkerGroup
from graphsplit.optimizers.ownership import is_elsewhere, resize
from graphsplit.partition.checks.one_state import opaque_calls
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.tensor_meta import plain_meta, share_elements
from graphsplit.torch_ext.attributes import MODULES, storage_of, writes_of


def note_left(planned: ReadyPlan, rank: int) -> dict[str, Any]:
    """The values that the calls of one worker may change, as they are before a step."""
    holders = planned.left_by_calls.get(rank, {})
    known = Known(holders)
    return {name: _noted(one, known) for name, one in holders.items()}


def _noted(holder: Holder, known: Known) -> Any:
    if holder.tensor is not None:
        return holder.held()  # how often it was written to
    if holder.generator is not None:
        return state_of_generator(holder.generator)
    entries = holder.entries()
    plain = {
        k: v for k, v in entries.items() if type(v) is torch.Tensor and id(v) not in known.apart
    }
    held = freeze(entries, apart=known.apart)
    made = _made(held, known)
    writes = {key: writes_of(value) for key, value in plain.items()}
    return held, writes, made, _is_copied(holder)


def _made(held: Frozen, known: Known) -> dict[Any, Any]:
    """The contents of entries with objects that code has made: no holder knows these."""
    of_entries = zip(held.keys, held.items, strict=True)
    return {key: freeze(told(reference_of(e), known)) for key, e in of_entries if known.is_made(e)}


def share_left(group: WorkerGroup, planned: ReadyPlan, before: Mapping[str, Any]) -> None:
    """Give all workers what calls have changed. All call it, after the step.

    Args:
        group: All workers.
        planned: What has run.
        before: What ``note_left`` gave on this worker.

    Raises:
        ConfigurationError: What has changed is not there on this worker.
    """
    what = "what code kept whole has left in Python"
    for rank, holders in sorted(planned.left_by_calls.items()):
        news, known = None, Known(holders, group.name(rank), group.name(group.rank))
        if rank == group.rank:
            noted = {name: was for name, was in before.items() if _has_entries(holders[name])}
            copied = {name for name, (*_, is_copied) in noted.items() if is_copied}
            then = Before({name: was[0] for name, was in noted.items()}, copied, known)
            contents = then.news()  # first, as it is taken: what is new is numbered
            found = {
                name: list(_news(holders[name], was, known, then)) for name, was in before.items()
            }
            news = contents, {name: changed for name, changed in found.items() if changed}
        contents, changed = group.share_value(news, source=rank, what=what)
        if rank != group.rank and (contents or changed):
            own = {name: one for name, one in holders.items() if _has_entries(one)}
            held = {n: freeze(one.entries(), apart=known.apart) for n, one in own.items()}
            then = Before(held, {name for name, one in own.items() if _is_copied(one)}, known)
            then.fill(contents)
            for name, entries in changed.items():
                _take(known.holder(name), entries, known, then, known.where(name))


def _has_entries(holder: Holder) -> bool:
    return not (holder.is_tensor or holder.is_generator)


def _is_copied(holder: Holder) -> bool:
    """Whether it gives a copy of what it is: of a list, a set, an array."""
    return not isinstance(holder.held(), (dict, tuple))


def _news(holder: Holder, was: Any, known: Known, before: Before) -> Iterator[list[Any]]:
    """Entries that are new, and keys of those gone.

    Each entry with its key, whether it was written to, whether it is the object of before, and
    whether it comes behind others that it came before.
    """
    if holder.is_generator:
        state = state_of_generator(holder.generator)
        if not is_same(was, state):
            yield ["", state]
        return
    if holder.tensor is not None:
        sent = told(holder.tensor.detach(), known) if holder.held() != was else SAME
        if sent is not SAME and not is_unknown(sent):
            yield ["", sent, True, False, False]
        return
    held, writes, made, is_copied = was
    old, now = dict(zip(held.keys, held.items, strict=True)), holder.entries()
    moved = _moved([key for key in old if key in now], [key for key in now if key in old])
    for (key, value), name in zip(now.items(), told_keys(now, [*old], known), strict=True):
        if key not in old:
            is_new = True
        elif is_copied:
            is_new = before.has_changed(old[key], value)
        else:
            is_new = not before.is_as_before(old[key], value)
        if not is_new and key in made:
            is_new = not same(made[key], told(value, known))
        if is_new or (key in writes and writes[key] != writes_of(value)):
            sent = told(value, known, before, what=repr(key))
            if key == MODULES and has_unknown(sent):  # workers compare what modules they have
                continue
            is_filled = key in old and reference_of(old[key]) is value
            is_written = not (is_new or is_unknown(sent))
            yield [name, sent, is_written, is_filled, key in moved]
        elif key in moved:
            yield [name, SAME, False, True, True]
    gone = [key for key in old if key not in now]
    yield from ([name] for name in told_keys(gone, [*old], known))


def _moved(old: Sequence[Any], now: Sequence[Any]) -> frozenset[Any]:
    """The keys from the first one on that has another place in the order."""
    pairs = enumerate(zip(old, now, strict=True))
    return frozenset(now[next((at for at, pair in pairs if _are_other(*pair)), len(now)) :])


def _are_other(one: Any, other: Any) -> bool:
    """Whether two keys are not one to a dictionary, which knows tensors by what they are."""
    is_tensors = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
    return one is not other and (is_tensors or one != other)


def _take(
    holder: Holder, news: Sequence[Sequence[Any]], known: Known, before: Before, where: str
) -> None:
    if holder.is_generator:
        put_generator(holder.generator, news[0][1])
        return
    entries = {"": holder.tensor} if holder.tensor is not None else holder.entries()
    old = [*entries]
    for name, *value in news:
        key = learned_key(name, known, old, where)
        if value:
            there = entries.get(key, MISSING)
            new = learned(value[0], there, where, known, before, is_filled=value[2])
            if value[1] and type(there) is torch.Tensor:  # it was written to
                with torch.no_grad():
                    there.copy_(new)
            elif new is not MISSING and holder.tensor is None:
                if value[3]:
                    entries.pop(key, None)
                entries[key] = new
        else:
            entries.pop(key, None)
    if holder.tensor is None:
        holder.hold_entries(entries)


def share_written(
    control: ControlChannels, planned: ReadyPlan, inputs: Sequence[Any], holders: Collection[int]
) -> None:
    """Give what was written to all workers that hold the batch. All of these call it.

    Args:
        control: The channels of the job.
        planned: What has run.
        inputs: This worker's flattened inputs of one microbatch.
        holders: The workers that hold the batch.

    Raises:
        ConfigurationError: Another input shares its memory, and may have been read elsewhere.
    """
    for index, ranks in planned.written_inputs:
        tensor, source = inputs[index], ranks[0]
        _refuse_aliases(tensor, (one for at, one in enumerate(inputs) if at != index))
        waiting = sorted(set(holders).difference(ranks))
        if control.rank == source:
            control.send(tensor, to=waiting)
        elif control.rank in waiting:
            with torch.no_grad():
                tensor.copy_(control.receive_tensor(plain_meta(tensor), source=source))


def _refuse_aliases(written: torch.Tensor, others: Iterable[Any]) -> None:
    for other in others:
        is_plain = isinstance(other, torch.Tensor) and other.layout is torch.strided
        is_one = is_plain and storage_of(other) == storage_of(written)
        if is_one and share_elements(written, other):
            raise ConfigurationError(
                "forward or the loss writes to an input that shares memory with another one; where "
                "that is read, on another worker, it has not changed\n"
                "  Fix: give one of them a memory of its own, as in y.clone()."
            )


def share_gradients_of_inputs(
    control: ControlChannels,
    planned: ReadyPlan,
    gradients: Mapping[tuple[int, int], torch.Tensor | None],
    inputs: Iterator[Sequence[Any]],
) -> None:
    """Go on with backward where the script has made a batch. All workers hold it, and call this.

    Args:
        control: The channels of the job.
        planned: What has run.
        gradients: Those that were added up here, by node and microbatch.
        inputs: The flattened inputs of each microbatch, as the script has given them.
    """
    what = "the gradient of an input"
    for microbatch, given in zip(range(planned.part.num_microbatches), inputs, strict=False):
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for node, place, source in planned.asking_inputs:
            if planned.plan.is_in(microbatch, node):
                own = gradients.get((node, microbatch))
                told = None if own is None else list(own.stride())
                strides = control.share_value(told, source=source, what=what)
                if strides is not None:
                    meta = replace(plain_meta(given[place]), strides=tuple(strides))
                    found.append((given[place], control.broadcast(own, meta, source=source)))
        if found:
            torch.autograd.backward([one for one, _ in found], [made for _, made in found])


_RESIZING = "fused_moving_avg_obs"


def share_sizes(
    control: ControlChannels, plan: PartitionPlan, tensors: Mapping[str, torch.Tensor]
) -> bool:
    """Take the sizes of buffers from their owners. All workers call it, after a plan's first run.

    Args:
        control: The channels of the job.
        plan: What has run.
        tensors: Parameters and buffers by name.

    Returns:
        Whether one has another size than in the plan; the same on all workers.
    """
    has_changed = False
    for node, owner in _resizable(plan):
        tensor = tensors.get(node.target)
        if tensor is None:  # a buffer that has another form by now
            continue
        mine, what = list(tensor.shape), f"the size of {node.target}"
        shape = control.share_value(mine, source=owner, what=what)
        if shape != list(tensor.shape) and is_elsewhere(tensor):
            resize(tensor, shape)
        has_changed |= node.meta is not None and shape != list(node.meta.shape)
    return has_changed


def _resizable(plan: PartitionPlan) -> Iterator[tuple[Node, int]]:
    """Buffers that an operation may resize, each with its owner."""
    graph, workers = plan.placed.graph, plan.placed.workers
    whole = {position for position, call in opaque_calls(plan) if call.traits.written}
    found: dict[str, tuple[Node, int]] = {}
    for position, node in enumerate(graph.nodes):
        if position in whole or _RESIZING in node.target:
            for read in node.reads:
                if graph.nodes[read].kind is NodeKind.BUFFER:
                    found[graph.nodes[read].target] = graph.nodes[read], workers[read]
    yield from found.values()
