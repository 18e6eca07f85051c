"""One worker's share of a Model: copied for a snapshot, and put back from one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphsplit.capture.reach.plain import PlainContents
from graphsplit.capture.state.kept_names import is_kept_name, kept_buffers, register_again
from graphsplit.capture.state.own_buffers import own_again, own_buffers
from graphsplit.checkpoint.contents import (
    GRADIENTS,
    OTHERS,
    CheckpointContents,
    NetworkState,
    Ownership,
    module_of_extra,
    optimizers_of,
    parameters_of,
)
from graphsplit.checkpoint.forms import forget_waiting_forms, kept_forms, put_forms
from graphsplit.checkpoint.restore import make_buffers_again
from graphsplit.checkpoint.states import States
from graphsplit.deferred.construction import is_deferred
from graphsplit.encoding.packed import FlatTensors
from graphsplit.encoding.values import Encoder, Fixed, decode
from graphsplit.errors import CheckpointError, ConfigurationError
from graphsplit.optimizers.optimizer import order_of
from graphsplit.optimizers.ownership import LEFT_OUT, Elsewhere, is_elsewhere
from graphsplit.planning.plain_attributes import put_own
from graphsplit.planning.task import (
    Task,
    materialize_all,
    named_state,
    stateful_modules,
)
from graphsplit.recovery.agreement import START
from graphsplit.recovery.snapshot.disk import contents_of
from graphsplit.recovery.snapshot.held import IN_MEMORY, HeldSource
from graphsplit.recovery.snapshot.left import LEFT, LeftInPython, sections_of
from graphsplit.recovery.snapshot.optimizers import (
    members_named,
    members_of,
    put_entries,
    put_settings,
    settings_of,
)
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.recovery.snapshot.tables import Given, are_same, tables_of
from graphsplit.torch_ext.attributes import is_waiting, num_changes, writes_of
from graphsplit.train.cluster_engine import ClusterEngine

Changed = Sequence[tuple[torch.Tensor, torch.Tensor]]  # tensors, with copies of their values
_count = itertools.count()


class _RestMine(Ownership):
    """Before there is a plan every worker has what nobody owns, and keeps a copy of its own."""

    def __init__(self, task: Task, owners: Mapping[str, int], rank: int) -> None:
        super().__init__(task, owners)
        self._rank = rank

    def saver(self, tensor: torch.Tensor) -> int:
        """This worker, if no other is known to own it."""
        return self._owners.get(id(tensor), self._rank)


class ModelSnapshot:
    """One worker's share of a Model.

    Args:
        index: Which Model of the script it is.
        task: What it trains.
        engine: Runs its steps.
        states: Knows how far it is.

    Attributes:
        was_regrouped: Whether owners were fixed anew since, among other workers.
        was_loaded: Whether a state was loaded: by the script, or from a snapshot on disk.
        start: The share as it was before the call in which owners were fixed; None before.
        can_begin_anew: Whether that is the whole network, as each worker has it before its first
            plan; not of a deferred one.
        began: When that was: Models are counted in the order in which they begin.
        given_at: The loss, the optimizer and the network's parts that it had at each snapshot, by
            number.
        given_before: Those that it had after the last call.
    """

    def __init__(self, index: int, task: Task, engine: ClusterEngine, states: States) -> None:
        self.index = index
        self.task = task
        self.engine = engine
        self.states = states
        self.was_loaded = self.was_regrouped = False
        self.start: SnapshotShard | None = None
        self.can_begin_anew = True
        self.began = 0
        self.given_at: dict[int, Given] = {}
        self.given_before = self.given()
        self._loss_fn, self._tables = task.loss_fn, self.given_before.tables
        self._optimizers = task.optimizers
        self._taken_away: list[torch.optim.Optimizer] = []
        self._names = {id(t): n for n, t in named_state(task.network, task.loss_fn).items()}
        self._is_checked = False
        self._encoder = Encoder()
        self.left = LeftInPython(task, engine.planner.python_values.losses)
        self._versions: tuple[int, ...] | None = None
        self._owned: list[torch.Tensor] = []
        self._num_left_out = Elsewhere.num_left_out
        self._num_known = 0, 0  # owners, and changes of a buffer's form
        self._known: tuple[NetworkState, Ownership] | None = None

    def check_once(self) -> None:
        """After the first step: let what cannot be kept be known now, not at a later snapshot.

        Raises:
            StateError: Something cannot be kept; names it.
        """
        if not self._is_checked and self.engine.progress.num_steps:
            self._is_checked = True
            self.collect({})

    @property
    def _rank(self) -> int:
        return self.engine.group().rank

    @property
    def is_settled(self) -> bool:
        """Whether owners are fixed."""
        return bool(self.engine.planner.owners)

    @property
    def matters(self) -> bool:
        """Whether a snapshot must hold it: a Model that was never used is as it was built."""
        return self.is_settled or self.was_loaded

    def tensors(self) -> Iterable[torch.Tensor]:
        """All parameters and buffers there are now."""
        return named_state(self.task.network, self.task.loss_fn).values()

    def given(self) -> Given:
        """The loss, the optimizer and the network's parts that it has now."""
        task, read = self.task, self.engine.planner.python_values.containers()
        own = self.states.python.own(with_tensors=not self.is_settled)
        return Given(task.loss_fn, task.optimizer, tables_of(task), own, read)

    def go_on_with(self, given: Given) -> None:
        """Let it have another loss, optimizer and network, as if the script had given them."""
        for tables in given.tables:
            tables.put()
        put_own(given.own)
        self.engine.planner.python_values.put(given.read)
        if not given.is_same(self.task):
            self.task.loss_fn, self.task.optimizer = given.loss_fn, given.optimizer
            self.engine.renew()

    def built(self) -> PlainContents:
        """The plain values that network and loss lead to: at first as the script has built them."""
        found = PlainContents((self.task.network, self.task.loss_fn))
        if not self.is_settled:
            self.left.look()
            self.engine.planner.python_values.built = found
        return found

    def check_given(self) -> None:
        """Note what the script has given since the last call.

        Raises:
            ConfigurationError: An optimizer that it had taken away: snapshots since then lack its
                state.
        """
        if self.left.has_run:
            self.left.look()
        now, before = self.task.optimizers, self._optimizers
        self._optimizers = now
        self._taken_away += [one for one in before if one not in now]
        back = [one for one in now if one in self._taken_away]
        if back:
            raise ConfigurationError(
                f"the script goes back to the {type(back[0]).__name__} that it had taken away; a "
                f"worker that comes back would not have its state\n"
                f"  Fix: make a new optimizer, and load_optimizer_state_dict; or start the job "
                f"with fail_fast."
            )

    def _follow(self) -> None:
        """Another loss or part, or a tensor that code keeps: what is known of tensors is old."""
        now, tables = (len(self.engine.planner.owners), num_changes()), tables_of(self.task)
        if now != self._num_known:
            self._num_known = now
            self._known, self._owned = None, []
        if self._loss_fn is not self.task.loss_fn or not are_same(self._tables, tables):
            task = self.task
            self._loss_fn, self._tables = task.loss_fn, tables
            self._names = {id(t): n for n, t in named_state(task.network, task.loss_fn).items()}
            self._known, self._owned = None, []

    def keep_start(self, *, must_be_whole: bool) -> None:
        """Before a call that may fix owners, and whose loader or callbacks may change something.

        Whoever is lost then, all of the start is here. Where a Model that began before has modules
        of it, that one has the start of these.

        Args:
            must_be_whole: Whether any worker may have to take any part of it.

        Raises:
            ConfigurationError: It must be whole, and the network is to be built on its owners
                alone; or an optimizer knows something of parameters that another Model has taken
                to other workers.
        """
        if self.is_settled or self.was_regrouped:
            return
        if must_be_whole and any(map(is_deferred, stateful_modules(self.task))):
            raise ConfigurationError(
                "a deferred network in a job with GS_RECOVERY=go_on, where each worker must be "
                "able to take any part of it\n  Fix: build it without deferring, or set "
                "GS_RECOVERY=wait_rejoin."
            )
        keys = [key for optimizer in self.task.optimizers for key in optimizer.state]
        with_state = [key for key in keys if isinstance(key, torch.Tensor)]
        if must_be_whole and any(map(is_elsewhere, with_state)):
            raise ConfigurationError(
                "an optimizer has a state of parameters that another Model has taken to other "
                "workers, in a job with GS_RECOVERY=go_on\n  Fix: load its state after the "
                "first step of its Model."
            )
        materialize_all(self.task)  # what a worker that is lost early has is nowhere else
        # Of the others each worker keeps its own part, as soon as there is one. All decide alike.
        taken, named = self.engine.planner.known_owners(), named_state(self.task.network, None)
        ids = {id(named[name]) for name in taken if name in named}
        is_whole = not any(id(one) in ids for one in with_state)
        self.engine.on_first_settled = None if is_whole else self._keep_start
        self.can_begin_anew = is_whole
        if is_whole:
            self._keep_start()

    def _keep_start(self) -> None:
        self.given_at[START] = self.given()
        self.began = next(_count)
        flat = FlatTensors()
        tensors: dict[str, torch.Tensor] = {}
        node = self.collect(tensors)
        flat.copy(tensors)
        self.start = SnapshotShard({"number": START, "models": [node]}, flat.memory, flat.slots)

    # Copying.

    def collect(
        self, tensors: dict[str, torch.Tensor], process: Fixed | None = None
    ) -> dict[str, Any]:
        """Everything, as it is now.

        Args:
            tensors: Tensors are added here, by name; they are not copied.
            process: What ``process_generators`` gave just now, if the caller knows.

        Returns:
            All values that are no tensors.

        Raises:
            StateError: Something cannot be kept; names it.
        """
        task, rank = self.task, self._rank
        left = self.left.kept((self.engine.planner,), rank)
        self._follow()
        if not self.is_settled:
            self.engine.settle_now()
        state, ownership = self._layout()
        contents = CheckpointContents(encoder=self._encoder)
        contents.add_network(state, ownership, rank)
        contents.add_others(state, ownership, rank)
        between = self.engine.progress.keeps_gradients
        contents.add_gradients(task, ownership, rank, between_updates=between)
        settings, members = [], []
        for name, optimizer in optimizers_of(task).items():
            contents.add_optimizer(name, optimizer, ownership, rank)
            settings.append([settings_of(optimizer), order_of(optimizer).num_steps])
            members.append([[self._names.get(id(p), "") for p in g] for g in members_of(optimizer)])
        contents.add_section("settings", settings)
        contents.add_section("members", members)
        contents.add_section("forms", kept_forms(task))
        contents.add_section("own", own_buffers(stateful_modules(task)))
        contents.add_section("python", self.states.python.saved(with_tensors=False))
        contents.add_section("attributes", self.engine.planner.python_values.kept())
        contents.add_section("kept", kept_buffers(task.network))
        contents.add_section(f"{LEFT}{rank}", left)
        contents.add_section("modules", dict(state.values))
        contents.add_section("engine", self.engine.counters())
        for section, value in self.states.sections(ownership, process).items():
            contents.add_section(section, value)
        prefix = f"m{self.index}"
        tensors.update({f"{prefix}/w/{name}": t for name, t in contents.weights.items()})
        tensors.update({f"{prefix}/t/{name}": t for name, t in contents.tensors.items()})
        return {
            "index": self.index,
            "aliases": contents.aliases,
            "sections": contents.sections,
            "loader_rank": self.engine.loader_rank,
        }

    def _layout(self) -> tuple[NetworkState, Ownership]:
        """The network's tensors and their owners: looked up once, as long as nothing else counts.

        Tensors keep their identity; what modules return from ``get_extra_state`` does not.
        """
        if self._known is not None:
            return self._known
        found = NetworkState.of(self.task), self._ownership()
        if self.is_settled and not found[0].values:
            self._known = found
        return found

    def _ownership(self) -> Ownership:
        if self.is_settled:
            return Ownership(self.task, self.engine.owners())
        return _RestMine(self.task, self.engine.owners(), self._rank)

    # Putting back.

    def put_back(self, part: SnapshotShard, *, inside: bool, is_shared: bool = False) -> None:
        """Everything, as it was.

        Args:
            part: What was copied.
            inside: Whether that was in the middle of ``train``, which then goes on from there.
            is_shared: Whether another Model may put back what this part lacks.
        """
        node = self.node_in(part)
        if node is None:
            raise CheckpointError(f"snapshot {part.number} does not hold Model {self.index}")
        contents = contents_of(part, node)
        forms = decode(contents.sections["forms"], contents.tensors.__getitem__)
        put_forms(self.task, forms, self.engine.owners(), self._rank)
        forget_waiting_forms(self.task)
        own_again(stateful_modules(self.task), contents.sections["own"])
        self._follow()
        register_again(self.task.network, contents.sections["kept"])
        with torch.no_grad():
            self._put_network(contents, is_shared=is_shared)
            self._put_gradients(contents)
        # Clones: the part's memory is used again, and a generator takes no view of a state.
        sections = {
            name: decode(value, lambda key: contents.tensors[key].clone())
            for name, value in contents.sections.items()
            if name not in ("optimizers", "network")
        }
        self._put_python(sections)
        self._put_optimizers(contents, sections["settings"], sections["members"])
        for key, value in sections["modules"].items():
            module_of_extra(self.task.network, key).set_extra_state(value)
        self.engine.set_counters(sections["engine"])
        self.states.go_back(sections, inside=inside)
        self.note_versions()

    def adopt(self, owners: Mapping[str, int]) -> None:
        """Take the owners that other workers have fixed, in a process that has no plan yet."""
        make_buffers_again(self.task, owners)
        self.engine.planner.adopt(owners)

    def let_go(self) -> None:
        """Other workers are there: forget owners, and have memory for everything."""
        self.engine.planner.let_go()
        self.was_regrouped = True
        for optimizer in self.task.optimizers:
            optimizer.state.clear()
            order_of(optimizer).made.clear()
        self._known, self._owned, self._versions = None, [], None

    def load(self, folder: Path, *, inside: bool) -> None:
        """As ``put_back``, from what all workers wrote to disk. Collective."""
        self._go_on_from(self.states.load_all(folder, extra={}), inside=inside)

    def load_parts(self, parts: Sequence[SnapshotShard], *, inside: bool) -> None:
        """As ``put_back``, from the parts of all workers, whoever took them. Collective."""
        source = HeldSource(self.engine.group(), parts, self.index)
        self._go_on_from(self.states.load_from(source, IN_MEMORY, extra={}), inside=inside)

    def _go_on_from(self, values: Mapping[str, Any], *, inside: bool) -> None:
        forget_waiting_forms(self.task)
        self.was_loaded = True
        self._put_python(values)
        self.engine.set_counters(values["engine"])
        self.states.end_run(values, inside=inside)
        self.note_versions()

    @property
    def can_start(self) -> bool:
        """Whether it is as it was built, or can be as it was before its first step."""
        return self.start is not None or not (self.is_settled or self.was_regrouped)

    def put_back_start(self) -> None:
        """As it was before the first step; nothing to do if no owner was fixed yet."""
        if self.start is not None:
            self.go_on_with(self.given_at[START])
            self.put_back(self.start, inside=False, is_shared=self.was_regrouped)

    def node_in(self, part: SnapshotShard) -> dict[str, Any] | None:
        """The part of this Model in a shard, if any."""
        nodes = part.values["models"]
        return next((node for node in nodes if node["index"] == self.index), None)

    def _put_network(self, contents: CheckpointContents, *, is_shared: bool) -> None:
        state, ownership = NetworkState.of(self.task), self._ownership()
        for key, tensor in state.tensors.items():
            value = contents.weights.get(key)
            if ownership.saver(tensor) == self._rank and not (value is None and is_shared):
                _copy(tensor, value, key)
        for name, tensor in state.others.items():
            value = contents.tensors.get(f"{OTHERS}{name}")
            is_later = value is None and (is_shared or is_kept_name(name))  # nothing stands for it
            if ownership.saver(tensor) == self._rank and not is_later:
                _copy(tensor, value, name)

    def _put_gradients(self, contents: CheckpointContents) -> None:
        ownership = self._ownership()
        for tensor in named_state(self.task.network, self.task.loss_fn).values():
            if ownership.saver(tensor) == self._rank and not is_elsewhere(tensor):
                kept = contents.tensors.get(f"{GRADIENTS}{ownership.name(tensor)}")
                tensor.grad = None if kept is None else kept.clone()

    def _put_python(self, sections: Mapping[str, Any]) -> None:
        """Plain attributes, the values that steps read, and what code kept whole can change."""
        self.states.python.put(sections["python"])
        self.engine.planner.python_values.put_back(sections["attributes"])
        self.left.put_back(sections_of(sections))

    def _put_optimizers(
        self, contents: CheckpointContents, settings: list[Any], members: list[list[list[str]]]
    ) -> None:
        saved = contents.sections.get("optimizers", {})
        named = named_state(self.task.network, self.task.loss_fn)
        for (name, optimizer), (groups, num_steps), names in zip(
            optimizers_of(self.task).items(), settings, members, strict=True
        ):
            put_settings(optimizer, groups, members_named(names, named, optimizer))
            parameters, made = parameters_of(optimizer), saved[name]["order"]
            entries = {
                index: decode(entry, lambda key: contents.tensors[key].clone())
                for index, entry in saved[name]["state"].items()
            }
            put_entries(
                optimizer,
                num_steps,
                ((parameters[int(i)], made[i], entry) for i, entry in entries.items()),
            )

    # What the script itself changes between calls.

    def note_versions(self) -> None:
        """Note that all is now as graphsplit left it."""
        self.given_before = self.given()
        self._follow()
        self._num_left_out = Elsewhere.num_left_out
        if not (self.is_settled or self.was_regrouped):
            return
        if not self._owned:
            named = named_state(self.task.network, self.task.loss_fn)
            tensors = {id(t): t for name, t in named.items() if not is_waiting(name)}
            self._owned = [t for t in tensors.values() if not is_elsewhere(t)]
        self._versions = tuple([writes_of(tensor) for tensor in self._owned])

    def changed_by_script(self) -> Changed:
        """Copies of the tensors that were written to, or made, since ``note_versions``."""
        if self._versions is None:
            return []
        found = [
            (tensor, tensor.detach().clone())
            for tensor, version in zip(self._owned, self._versions, strict=True)
            if writes_of(tensor) != version
        ]
        if not are_same(self._tables, tables_of(self.task)):
            named = named_state(self.task.network, self.task.loss_fn)
            new = {id(t): t for t in named.values() if id(t) not in self._names}
            found += [(t, t.detach().clone()) for t in new.values() if not is_elsewhere(t)]
        return found

    def left_out(self) -> list[torch.Tensor]:
        """Tensors that live elsewhere, written to by the script since ``note_versions``."""
        if Elsewhere.num_left_out == self._num_left_out:
            return []
        return [tensor for tensor in self.tensors() if hasattr(tensor, LEFT_OUT)]

    def change_again(self, changed: Changed) -> None:
        """Write again what the script has written; what was freed since lives elsewhere."""
        with torch.no_grad():
            for tensor, value in changed:
                if not is_elsewhere(tensor):
                    tensor.copy_(value)


def _copy(target: torch.Tensor, value: torch.Tensor | None, name: str) -> None:
    if value is None or value.shape != target.shape:
        raise CheckpointError(f"the snapshot does not hold {name} as this worker has it")
    target.copy_(value)
