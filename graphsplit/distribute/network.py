"""``gs.distribute``: a network that stays a network, run over all workers by each call."""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn.utils import stateless

from graphsplit.batches.signature import Arguments
from graphsplit.checkpoint.whole_values import PICKLED
from graphsplit.cluster.wire.messages import CALL_OF
from graphsplit.deferred.construction import is_deferred, materialize
from graphsplit.distribute import backward, methods  # noqa: F401  (operations on values)
from graphsplit.distribute.calls import NetworkCalls
from graphsplit.distribute.classes import made_by
from graphsplit.distribute.copies import as_copies, check_current, make_copies, others_of
from graphsplit.distribute.following.casts import casting_dtype, refuse_casts_beside_gpus
from graphsplit.distribute.following.operands import taken_apart
from graphsplit.distribute.given_buffers import take_over_given, watch_tables
from graphsplit.distribute.parameters import Gradients, mark_of
from graphsplit.distribute.states import check_alike, state_of
from graphsplit.distribute.steps import install
from graphsplit.distribute.values import LoopValue, as_value
from graphsplit.distribute.workers.here import is_dense
from graphsplit.distribute.workers.loop import Loop
from graphsplit.errors import ConfigurationError, OwnershipError, StoppedInOrder
from graphsplit.feeding.loader_checks import watch_loaders
from graphsplit.job import joined
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall
from graphsplit.optimizers.ownership import Residence, free, is_elsewhere
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.planning.planner import Planner
from graphsplit.planning.task import Task, named_state
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.tensor_meta import sample_of
from graphsplit.text import called, described
from graphsplit.torch_ext.attributes import STATE_VERSIONS
from graphsplit.torch_ext.private import (
    COMPILED_CALLS,
    DisableTorchFunctionSubclass,
    are_transforms_active,
)
from graphsplit.torch_ext.stand_ins import StandIn
from graphsplit.torch_ext.steering import owned_state
from graphsplit.train.arguments import problems_of_dynamic_dims
from graphsplit.witness.own_loops import watch_loop

Network = TypeVar("Network", bound=nn.Module)


@called("gs.distribute")
def distribute(
    net: Network,
    *,
    unplaced: UnplacedRule = "affinity",
    dynamic_dims: Mapping[int, int] | None = None,
) -> Network:
    """Let calls of a network run over all workers, under a training loop of the script's own.

    Every worker runs the loop as it is written for one process::

        net = gs.distribute(net)
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()

    A call runs whole, each part where it is placed. What it returns stays on the worker that made
    it; elsewhere a stand-in has its shape. Operations on it run where it is; ``.item()``, ``bool``,
    printing and NumPy ask, and every worker gets the answer. ``backward`` runs over the workers,
    and each optimizer steps on each worker what lives there.
    Under ``graphsplit run`` it calls ``gs.init()`` where the script has not.

    Args:
        net: The network, with its placement. It stays the same object, of a subclass of its class.
        unplaced: As for ``Model``.
        dynamic_dims: As for ``Model``.

    Returns:
        The network. In one process it is as it was.

    Raises:
        ConfigurationError: It is no module, or is distributed already; another launcher has
            started this as one of several processes and ``gs.init()`` was not called; or this job
            recovers, and has a ``Model`` besides.
    """
    _check(net)
    problems = problems_of_dynamic_dims(dynamic_dims)
    if unplaced not in ("affinity", "worker0"):
        problems.append(f"unplaced={unplaced!r}; expected 'affinity' or 'worker0'")
    if problems:
        raise ConfigurationError("distribute(...): " + "\n  ".join(problems))
    joined.init_late()
    job = joined.current()
    if job is None or job.num_workers == 1:
        if is_deferred(net):
            materialize(net)
        watch_loop(net)
        return net
    job.script.begin_own_loop()
    task = Task(net, None, None, unplaced, False, dynamic_dims=dict(dynamic_dims or {}))
    _give_class(net, Distributed(task, job))
    install(net, Loop.of(job))
    watch_loaders(_has_others)
    watch_tables()
    watch_loop(net)
    return net


def _has_others() -> bool:
    job = joined.current()
    return job is not None and job.num_workers > 1 and not job.is_closed


def _check(net: Any) -> None:
    if not isinstance(net, nn.Module):
        raise ConfigurationError(
            f"distribute was given {described(net)}; expected a torch.nn.Module\n"
            f"  Fix: pass the network itself, not a gs.Model or what torch.compile made of it."
        )
    if behind(net) is not None:
        raise ConfigurationError(
            f"distribute was given a {type(net).__name__} that is distributed already\n"
            f"  Fix: call it once, and use what it returned."
        )


def behind(net: nn.Module) -> Distributed | None:
    """The machinery behind a network; None where it is not distributed."""
    found: Distributed | None = getattr(type(net), _BEHIND, None)
    return found


class Distributed:
    """The machinery behind a distributed network.

    Args:
        task: What a call runs.
        job: The job.

    Attributes:
        task: What a call runs.
        kept: The whole state, while ``state_dict`` answers on each worker by itself.
    """

    def __init__(self, task: Task, job: Job) -> None:
        self.task, self._job = task, job
        self.calls = NetworkCalls(task, job)
        self._casting: dict[torch.dtype | None, NetworkCalls] = {None: self.calls}
        self.kept: dict[str, Any] | None = None
        self._loop = Loop.of(job)
        self._settled: weakref.WeakSet[ProgramRunner] = weakref.WeakSet()
        self._gradients: Gradients | None = None
        self._ids: frozenset[int] = frozenset()  # of its parameters and buffers
        self._index = len(self._loop.networks)
        self._loop.networks.append(weakref.ref(task.network))
        forget = weakref.finalize(task.network, self._loop.forget, str(id(self)))
        forget.atexit = False

    @contextmanager
    def _as_itself(self) -> Iterator[None]:
        """Inside, the network is of its own class: it is captured, or its state is taken."""
        network: Any = self.task.network
        kind = type(network)
        is_cast = torch.is_autocast_enabled("cpu")
        casts = torch.autocast("cpu", enabled=False) if is_cast else nullcontext()
        object.__setattr__(network, "__class__", kind.__mro__[2])
        try:
            with self.calls.guard(), casts:
                yield
        finally:
            object.__setattr__(network, "__class__", kind)

    @property
    def is_part(self) -> bool:
        """Whether a call is one inside a call of a network around this one."""
        return self._loop.is_calling

    def call(self, arguments: Arguments) -> Any:
        """Run the network once.

        Raises:
            StoppedInOrder: The job was asked to end; all heard of it in an earlier call.
        """
        if self._job.is_stopping and not self._job.script.stops_own_loop:
            raise StoppedInOrder
        which = f"network {self._index + 1}, " if self._index else ""
        name = f"{CALL_OF}{which}{type(self.task.network).__name__}"
        if self._loop.is_in_backward:
            raise ConfigurationError(
                f"{name} was made by a backward, as torch.utils.checkpoint does\n"
                f"  Fix: use torch.utils.checkpoint inside the network's forward."
            )
        if self._loop.left.values:
            self._loop.left.take_out()
        return self._job.script.collective(ModelCall(name, self._call, (arguments,)))

    def _call(self, arguments: Arguments) -> Any:
        dtype = casting_dtype()
        if dtype is not None:
            refuse_casts_beside_gpus(self._tensors().values())
        originals, together, _ = taken_apart(*arguments)
        plain = [_plain(one) for one in originals]
        given = together(plain)
        take_over_given(self.task.network, self._loop)
        with self._as_itself():
            if dtype not in self._casting:
                task = dataclasses.replace(self.task, autocast=dtype)
                self._casting[dtype] = NetworkCalls(task, self._job)
            self.calls = self._casting[dtype]
            others = () if self._gradients is not None else self._begin()
            self._loop.is_calling = True
            try:
                call = self.calls.forward(given)
            finally:
                self._loop.is_calling = False
            self._settle(call.plan.runner)
            if others:
                tensors = self._tensors()
                make_copies(others, lambda name: mark_of(tensors[name], self._loop))
            if self.task.network.training:
                self._loop.calls.note(self._ids)
            inputs = [_original(*pair) for pair in zip(originals, plain, strict=True)]
            found = call.outputs(together(inputs), self._loop)
            if self._loop.left.values:
                self._loop.left.put_back(self.task.network, call.plan.plan.placed.graph)
            return found

    def _begin(self) -> list[tuple[torch.Tensor, str]]:
        """Before the first call: all workers have the same values; who else has their memory."""
        tensors = self._tensors()
        values = [one for one in tensors.values() if type(one) in (torch.Tensor, nn.Parameter)]
        sums = [zlib.crc32(sample_of(one)) for one in values if is_dense(one)]
        name = f"values of {type(self.task.network).__name__} before its first call"
        self._loop.taken.note(name, (), sums)
        return others_of(tensors)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every worker."""
        if self.kept is not None:
            return copy.copy(self.kept)
        found: dict[str, Any] = self._within("state_dict", self._gathered)
        tensors = self._tensors()
        as_copies(found, lambda name: mark_of(tensors.get(name), self._loop), tensors)
        return found

    def _gathered(self) -> dict[str, Any]:
        if self.owners():  # else each worker has all of it
            check_alike(self._loop, f"network {self._index}", type(self.task.network).__name__)
        return self.calls.state_dict()

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return named_state(self.task.network, None)

    def load_state_dict(self, state: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Load what this worker owns."""
        check_current(state)
        found = self._within("load_state_dict", self.calls.load_network, state, options)
        self._loop.loads.note(map(id, self._tensors().values()))
        return found

    def _within(self, name: str, run: Any, *args: Any) -> Any:
        def inside() -> Any:
            take_over_given(self.task.network, self._loop)
            with self._as_itself():
                return run(*args)

        return self._job.script.collective(ModelCall(name, inside))

    def _settle(self, runner: ProgramRunner) -> None:
        """A new plan has fixed where parameters live; some may be others than before."""
        if runner in self._settled:
            return
        self._settled.add(runner)
        self._take_note(self._tensors(), self.calls.planner.known_owners())

    def _take_note(self, tensors: Mapping[str, torch.Tensor], owners: Mapping[str, int]) -> None:
        job, network = self._job, self.task.network
        self._ids = frozenset(map(id, tensors.values()))
        residence = Residence(owned_state(tensors), owners, job.rank, job.num_workers)
        self._loop.settle(str(id(self)), residence)
        by_id = residence.owner_by_id()
        buffers = [buffer for buffer in network.buffers() if id(buffer) in by_id]
        self._gradients = Gradients(list(network.parameters()), buffers, by_id, self._loop)

    def owners(self) -> dict[str, int]:
        """The worker on which each parameter and buffer lives; empty before it is known."""
        return self._job.owners.known(self._tensors())

    def planners(self) -> list[Planner]:
        """Those of its calls: under autocast, and without."""
        return [calls.planner for calls in self._casting.values()]

    def python_values(self) -> list[list[Any]]:
        """Attributes that forward has changed, as ``put_python_values`` takes them."""
        with self._as_itself():
            kept = (planner.python_values.kept() for planner in self.planners())
            return [one for several in kept for one in several]

    def put_python_values(self, values: list[list[Any]]) -> None:
        """Let the network have these again."""
        with self._as_itself():
            self.calls.planner.python_values.put_back(values)

    def settle_as(self, owners: Mapping[str, int]) -> None:
        """Let each parameter and buffer live where it did in another process; free what others own.

        Args:
            owners: What ``owners`` gave there.
        """
        with self._as_itself(), DisableTorchFunctionSubclass():
            self.calls.planner.adopt(owners)
        self._take_note(self._tensors(), dict(owners))

    def copy(self, memo: dict[int, Any]) -> Any:
        """A copy of the network, each tensor of which lives where the one before it does."""
        network: Any = self.task.network
        take_over_given(network, self._loop)
        owners = self.calls.planner.known_owners()
        tensors = owned_state(self._tensors())
        with self._as_itself(), DisableTorchFunctionSubclass():
            for name, tensor in tensors.items() if owners else ():
                if id(tensor) not in memo:
                    memo[id(tensor)] = _copied(tensor, name, owners[name])
            made: Any = network.__new__(type(network))
            memo[id(network)] = made
            made.__dict__.update(copy.deepcopy(network.__dict__, memo))
        behind = Distributed(dataclasses.replace(self.task, network=made), self._job)
        _give_class(made, behind)
        if owners:
            copies = owned_state(named_state(made, None))
            self._job.owners.fix(copies, owners)
            behind._take_note(copies, owners)
        return made


def _copied(tensor: torch.Tensor, name: str, owner: int) -> torch.Tensor:
    """A copy of a parameter or buffer; of one that lives elsewhere a stand-in."""
    value = torch.empty(tensor.shape, dtype=tensor.dtype) if is_elsewhere(tensor) else tensor
    made = value.detach().clone(memory_format=torch.preserve_format)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    if isinstance(tensor, StandIn):
        free(made, name=name, owner=owner, strides=tensor.true_strides())
    return made


def _plain(value: Any) -> Any:
    """An argument of a call, as all workers have it; it says whether gradients flow into it."""
    value = as_value(value)
    if not isinstance(value, torch.Tensor):
        return value
    asks = torch.is_grad_enabled() and value.requires_grad
    if isinstance(value, LoopValue):
        value = value.everywhere()
    return value.detach().requires_grad_() if asks else value


def _original(argument: Any, given: Any) -> Any:
    """The argument as the script gave it, where a gradient is to flow into it."""
    asks = isinstance(given, torch.Tensor) and given.requires_grad
    return as_value(argument) if asks else given


_BEHIND = "_graphsplit_behind"


def _give_class(network: Any, behind: Distributed) -> None:
    """Make a network one of a class of its own, which has the machinery: both live as long."""
    kind = type(network)
    space = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, _BEHIND: behind}
    made = made_by(type(kind))
    network.__class__ = made(kind.__name__, (_Calls, kind), {**space, "__doc__": kind.__doc__})


class _Calls(nn.Module):
    """Methods of a distributed network that differ from those before."""

    _graphsplit_behind: ClassVar[Distributed]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._graphsplit_behind.is_part:
            return super().__call__(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise ConfigurationError(_COMPILED)
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(COMPILED_CALLS):  # what cannot be compiled is run as it is
            raise ConfigurationError(_COMPILED)
        is_functional = caller == stateless.__file__
        if is_functional or are_transforms_active():
            raise ConfigurationError(_TRANSFORMED)
        return self._graphsplit_behind.call((args, kwargs))

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        if keep_vars:  # these are the parameters, of which each worker has its own
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=True)
        found = self._graphsplit_behind.state_dict()
        if destination is None and not prefix:
            return found
        return _under(prefix, found, {} if destination is None else destination)

    def load_state_dict(
        self, state_dict: Any, strict: bool | None = None, assign: bool = False
    ) -> Any:
        if not isinstance(state_dict, Mapping):
            return super().load_state_dict(state_dict)  # PyTorch's own error
        options = {} if strict is None else {"strict": strict}
        options |= {"assign": True} if assign else {}
        return self._graphsplit_behind.load_state_dict(state_dict, options)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigurationError(_COMPILED)

    def __copy__(self) -> Any:
        with self._graphsplit_behind._as_itself():
            return copy.copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._graphsplit_behind.copy(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OwnershipError(PICKLED)


def _under(prefix: str, state: Mapping[str, Any], destination: Any) -> Any:
    """A state as a part of that of the module around it."""
    destination.update({prefix + name: value for name, value in state.items()})
    versions, parts = (getattr(one, STATE_VERSIONS, None) for one in (destination, state))
    if versions is not None and parts is not None:
        path = prefix.removesuffix(".")
        versions.update({f"{path}.{name}".rstrip("."): at for name, at in parts.items()})
    return destination


_TRANSFORMED = (
    "torch.func (functional_call, grad, vmap) around a call of a distributed network: each worker "
    "has other parameters\n"
    "  Fix: use torch.autograd.grad for gradients, change parameters under torch.no_grad(), "
    "or use torch.func inside the network's forward."
)
_COMPILED = (
    "torch.compile around a distributed network would compile on each worker another part\n"
    "  Fix: leave torch.compile out, or use gs.Model(..., compile=True)."
)


# States of networks and optimizers, gathered once: then one worker may ask for them by itself.


@contextmanager
def gathered(
    networks: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[None]:
    """Collective at its beginning: gather what ``state_dict()`` of all these gives.

    Inside, ``state_dict()`` answers on each worker by itself, with all that all workers have. So
    the code of a library that saves may run on one of them.

    Args:
        networks: Networks; those that are not distributed are left alone.
        optimizers: Their optimizers.
    """
    with ExitStack() as stack:
        for network in networks:
            distributed = behind(network)
            if distributed is not None:
                stack.enter_context(_keeping(distributed, distributed.state_dict()))
        for optimizer in optimizers:
            state = state_of(optimizer)
            if state is not None:
                stack.enter_context(_keeping(state, state.gather(optimizer)))
        yield


@contextmanager
def _keeping(holder: Any, whole: Any) -> Iterator[None]:
    holder.kept = whole
    try:
        yield
    finally:
        holder.kept = None
