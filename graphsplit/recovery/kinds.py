"""The kinds of calls: what is remembered of each, and how it is given again without running."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import Mode
from graphsplit.checkpoint.by_worker import states_of
from graphsplit.checkpoint.generators import is_same
from graphsplit.checkpoint.other_loaders import put_loader
from graphsplit.checkpoint.position import LoaderWatch, Position
from graphsplit.checkpoint.restore import told_keys
from graphsplit.checkpoint.states import Loaded, Stateful
from graphsplit.errors import ConfigurationError
from graphsplit.job.script import ModelCall
from graphsplit.planning.modes import ensure_training
from graphsplit.planning.python_values import can_be_written
from graphsplit.recovery.log import Entry
from graphsplit.recovery.results import pack, unpack
from graphsplit.recovery.snapshot.share import ModelSnapshot
from graphsplit.torch_ext.attributes import note_stepped
from graphsplit.torch_ext.private import pytree
from graphsplit.train.epochs import load_callbacks


class CallKind:
    """A call that returns plain values or tensors, and leaves nothing else behind."""

    def pack(self, call: ModelCall, result: Any) -> Any:
        """The result as JSON.

        Raises:
            StateError: It cannot be written.
        """
        return pack(result, what=f"{call.name}()")

    def unpack(self, call: ModelCall, share: ModelSnapshot | None, node: Any) -> Any:
        """The result again."""
        return unpack(node, what=f"{call.name}()")

    def after(self, call: ModelCall, share: ModelSnapshot | None, entry: Entry) -> Any:
        """The further effects of a call, beside what snapshots hold; None if there are none."""
        return None

    def give_again(self, call: ModelCall, share: ModelSnapshot | None, after: Any) -> None:
        """Leave it again."""


class _Train(CallKind):
    def after(self, call: ModelCall, share: ModelSnapshot | None, entry: Entry) -> Any:
        assert share is not None
        _, loader, callbacks, *_ = call.arguments
        values = {
            "callbacks": states_of(callbacks),
            "loader": LoaderWatch(loader).state(),
            "position": vars(share.states.position),
            "seed": share.engine.progress.seed,
        }
        return pack(values, what="callbacks and loader after train()")

    def give_again(self, call: ModelCall, share: ModelSnapshot | None, after: Any) -> None:
        assert share is not None
        _, loader, callbacks, *_ = call.arguments
        values = unpack(after, what="callbacks and loader after train()")
        load_callbacks(callbacks, values["callbacks"])
        put_loader(loader, values["loader"])
        position = Position.read(values["position"])
        progress = share.engine.progress
        progress.num_steps, progress.seed = position.num_steps, values["seed"]
        share.states.num_epochs = position.num_epochs
        share.states.resumption = None
        ensure_training(share.task.network)
        _mark_stepped(share)


class _ForwardBackward(CallKind):
    def give_again(self, call: ModelCall, share: ModelSnapshot | None, after: Any) -> None:
        assert share is not None
        ensure_training(share.task.network)
        share.engine.progress.begin()
        share.engine.progress.num_steps += 1


class _TrainStep(_ForwardBackward):
    def give_again(self, call: ModelCall, share: ModelSnapshot | None, after: Any) -> None:
        assert share is not None
        super().give_again(call, share, after)
        _mark_stepped(share)


class _Step(CallKind):
    def give_again(self, call: ModelCall, share: ModelSnapshot | None, after: Any) -> None:
        assert share is not None
        _mark_stepped(share)


def _mark_stepped(share: ModelSnapshot) -> None:
    """Schedulers warn if an optimizer has not stepped before them; it has, in another process."""
    for optimizer in share.task.optimizers:
        note_stepped(optimizer)


class _Eval(CallKind):
    def after(self, call: ModelCall, share: ModelSnapshot | None, entry: Entry) -> Any:
        state = LoaderWatch(call.arguments[0]).state()
        has_any = state is not None and not is_same(state, entry.loader)
        return pack(state, what="the loader after eval()") if has_any else None

    def give_again(self, call: ModelCall, share: ModelSnapshot | None, after: Any) -> None:
        assert share is not None
        share.task.network.eval()
        if after is not None:
            put_loader(call.arguments[0], unpack(after, what="the loader after eval()"))


class _Predict(CallKind):
    """Outputs have the network's own structure, which a capture tells again."""

    def pack(self, call: ModelCall, result: Any) -> Any:
        if can_be_written(pytree.tree_map_only(torch.Tensor, lambda tensor: None, result)):
            return pack({"plain": result}, what="predict()")
        return pack({"leaves": pytree.tree_leaves(result)}, what="predict()")

    def unpack(self, call: ModelCall, share: ModelSnapshot | None, node: Any) -> Any:
        assert share is not None
        found = unpack(node, what="predict()")
        if "plain" in found:
            return found["plain"]
        graph = share.engine.planner.graph_of(Mode.PREDICT, Signature.of(call.arguments))
        if graph.asks:
            raise ConfigurationError(
                "predict cannot give again what it returned: its structure depends on what "
                "forward asks tensors for\n"
                "  Fix: return tensors in plain tuples, lists and dictionaries."
            )
        return graph.output_spec.rebuild(found["leaves"])

    def give_again(self, call: ModelCall, share: ModelSnapshot | None, after: Any) -> None:
        assert share is not None
        share.task.network.eval()


class _LoadNetwork(CallKind):
    """Torch's own ``load_state_dict`` returns a named tuple, one of the user's anything."""

    def pack(self, call: ModelCall, result: Any) -> Any:
        is_torchs = isinstance(result, type(told_keys([], [])))
        return pack({"keys" if is_torchs else "plain": result}, what="load_state_dict()")

    def unpack(self, call: ModelCall, share: ModelSnapshot | None, node: Any) -> Any:
        found = unpack(node, what="load_state_dict()")
        return told_keys(*found["keys"]) if "keys" in found else found["plain"]


class _Load(CallKind):
    def pack(self, call: ModelCall, result: Any) -> Any:
        values = {"position": vars(result.position), "extra": dict(result.extra)}
        return pack(values, what="load()")

    def unpack(self, call: ModelCall, share: ModelSnapshot | None, node: Any) -> Any:
        found = unpack(node, what="load()")
        return Loaded(Position.read(found["position"]), found["extra"])

    def after(self, call: ModelCall, share: ModelSnapshot | None, entry: Entry) -> Any:
        states = {n: v.state_dict() for n, v in _stateful(call).items()}
        return pack(states, what="extra after load()") if states else None

    def give_again(self, call: ModelCall, share: ModelSnapshot | None, after: Any) -> None:
        if after is not None:
            states = unpack(after, what="extra after load()")
            for name, value in _stateful(call).items():
                value.load_state_dict(copy.deepcopy(states[name]))


def _stateful(call: ModelCall) -> Mapping[str, Stateful]:
    return {n: v for n, v in call.arguments[1].items() if isinstance(v, Stateful)}


class _Path(CallKind):
    def pack(self, call: ModelCall, result: Any) -> Any:
        return pack(None if result is None else str(result), what=f"{call.name}()")

    def unpack(self, call: ModelCall, share: ModelSnapshot | None, node: Any) -> Any:
        found = unpack(node, what=f"{call.name}()")
        return None if found is None else Path(found)


_KINDS: dict[str, CallKind] = {
    "train": _Train(),
    "train_step": _TrainStep(),
    "forward_backward": _ForwardBackward(),
    "step": _Step(),
    "eval": _Eval(),
    "predict": _Predict(),
    "load": _Load(),
    "load_state_dict": _LoadNetwork(),
    "latest_checkpoint": _Path(),
}
_PLAIN = CallKind()
_LOADS = frozenset({"load", "load_state_dict", "load_optimizer_state_dict"})


def kind_of(name: str) -> CallKind:
    """The kind of a call, by its name."""
    return _KINDS.get(name, _PLAIN)


def loads_state(name: str) -> bool:
    """Whether a call of this name brings a state from outside."""
    return name in _LOADS
