"""``loss.backward()`` and ``torch.autograd.grad`` on values of the script's own loop."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from graphsplit.capture.reach.holders import Holder, unchanged
from graphsplit.distribute.calls import Call
from graphsplit.distribute.following.casts import casting_dtype
from graphsplit.distribute.following.forms import Following
from graphsplit.distribute.methods import need_whole_gradient
from graphsplit.distribute.parameters import InLoop, in_loop
from graphsplit.distribute.values import SPECIAL, LoopValue, as_value
from graphsplit.distribute.workers.asking import numbers_behind, tell
from graphsplit.distribute.workers.loop import Loop, shape_of
from graphsplit.errors import ConfigurationError, OwnershipError
from graphsplit.job.script import ModelCall
from graphsplit.optimizers.parameter_hooks import HookState, draws, hook_tables, line_of, state_of
from graphsplit.partition.checks.given_roots import unordered_parameters
from graphsplit.runtime.segments.autograd import accumulate_all, held_elsewhere
from graphsplit.torch_ext.attributes import (
    BACKWARD_HOOKS,
    GRADIENT_HOOKS,
    MODULES,
    sequence_number,
    steps_behind,
)
from graphsplit.torch_ext.private import run_backward


def _backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``Tensor.backward``, or ``torch.autograd.backward`` of several."""
    wanted = _Wanted.of(*args, **kwargs)
    wanted.run(wanted.add)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """``torch.autograd.grad``."""
    if is_grads_batched:
        raise ConfigurationError(
            "torch.autograd.grad(is_grads_batched=True) through a distributed network\n"
            "  Fix: call it for one gradient after the other."
        )
    wanted = _Wanted.of(outputs, grad_outputs, retain_graph, create_graph, inputs)
    found = wanted.run(wanted.found)
    if materialize_grads:
        found = [
            torch.zeros_like(asked) if gradient is None else gradient
            for asked, gradient in zip(wanted.inputs or (), found, strict=True)
        ]
    elif not allow_unused and any(gradient is None for gradient in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


@dataclass
class _Wanted:
    """One backward, as the script asks for it.

    Attributes:
        outputs: Where it begins.
        gradients: Their gradients; None for one.
        inputs: Where it ends; None for wherever it comes to.
        retain: Whether the script's own graph is kept.
    """

    outputs: list[LoopValue]
    gradients: list[Any]
    inputs: list[Any] | None
    retain: bool

    @staticmethod
    def of(
        outputs: Any,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
        *,
        grad_tensors: Any = None,
    ) -> _Wanted:
        """Check what the script has asked for."""
        if create_graph:
            raise ConfigurationError(
                "create_graph=True through a distributed network: gradients of gradients stop at "
                "the network's edge\n  Fix: compute what needs them (a penalty, derivatives) in "
                "the forward of a module that is kept whole, by gs.opaque(module), as "
                "docs/how-to/own-loop.md shows under 'A gradient penalty'."
            )
        several = [as_value(one) for one in _listed(outputs)]
        if not all(isinstance(one, LoopValue) for one in several):
            raise ConfigurationError(
                "backward of values that live on one worker and ordinary tensors together\n"
                "  Fix: call backward on their sum."
            )
        for one in () if inputs is None else map(as_value, _listed(inputs)):
            if isinstance(one, torch.Tensor) and not one.requires_grad:
                raise RuntimeError("One of the differentiated Tensors does not require grad")
            if isinstance(one, LoopValue):
                need_whole_gradient(one, "a gradient was asked for (inputs)")
        gradient = gradient if grad_tensors is None else grad_tensors
        given = [None] * len(several) if gradient is None else _listed(gradient)
        ends = None if inputs is None else _listed(inputs)
        return _Wanted(several, given, ends, bool(retain_graph))

    @property
    def loop(self) -> Loop:
        """The workers."""
        return self.outputs[0].loop

    def run(self, finish: Callable[[dict[int, torch.Tensor], Any], Any]) -> Any:
        """Run it, on all workers together."""
        return self.loop.job.script.collective(ModelCall("backward", self._run, (finish,)))

    def _run(self, finish: Callable[[dict[int, torch.Tensor], Any], Any]) -> Any:
        if casting_dtype() is not None:
            raise ConfigurationError(
                "backward under torch.autocast would cast some of its operations\n"
                "  Fix: call it after the block, which is for network and loss alone."
            )
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise ConfigurationError(_ANOMALY)
        loop, steps = self.loop, self._steps
        calls = [step.graphsplit_call for step in steps if hasattr(step, "graphsplit_call")]
        used = self._used(calls)
        _refuse_spent(calls, used)
        _refuse_split_sums(steps)
        _refuse_used_before(steps)
        reads = [step.graphsplit_read for step in steps if hasattr(step, "graphsplit_read")]
        totals: dict[int, torch.Tensor] = {}
        is_added_up = len(calls) > 1 or bool(reads) or self.inputs is not None
        if is_added_up:
            _refuse_unordered(calls, reads)
        for call in calls:
            call.state.totals = totals if is_added_up else None
            call.begin_backward(used[id(call)], retains=self.retain)
        given = [self._given(*pair) for pair in zip(self.outputs, self.gradients, strict=True)]
        loop.is_followed = any(output.home != loop.rank for output in self.outputs) and not all(
            map(_needs_no_following, steps)
        )
        with loop.job.reporting(), leaving_state(loop):
            loop.add_up(totals)
            try:
                tell(loop, numbers_behind(self.outputs))
                if len(calls) != 1:
                    loop.learn_told()  # first: workers that disagree would wait for each other
                found = self._found(given, steps)
                loop.learn_told()
                result = finish(totals, found)
            finally:
                loop.add_up(None)
        loop.num_changes += 1
        loop.taken.count += 1  # gradients are others from here on
        return result

    def _found(self, given: list[Any], steps: Sequence[Any]) -> list[Any]:
        """Run the script's own graph, and with it the backward of all calls, in one order.

        For GPUs autograd has threads of their own, which would come to calls in another order than
        workers that have shapes alone.
        """
        in_one_thread = torch.autograd.set_multithreading_enabled(False)
        with in_one_thread, Following() if self.loop.is_followed else nullcontext():
            held = [output.held for output in self.outputs]
            if self.inputs is not None:
                return self._to_inputs(held, given, steps)
            first = held[0] if len(held) == 1 and given == [None] else None
            # From one number: torch has nothing to check. Without memory it makes ones in Python.
            if first is not None and not first.dim() and first.is_floating_point():
                one = shape_of(first) if first.is_meta else torch.ones_like(first)
                run_backward((first,), (one,), self.retain, False, (), True, True)
            else:
                torch.autograd.backward(held, given, retain_graph=self.retain)
            return []

    @cached_property
    def _steps(self) -> list[Any]:
        steps = [step for output in self.outputs for step in steps_behind([output.held])]
        return list(dict.fromkeys(steps))

    def _used(self, calls: Sequence[Call]) -> dict[int, frozenset[int]]:
        """The outputs of each call that gradients come to, by the call's id."""
        found: dict[int, set[int]] = {id(call): set() for call in calls}
        edges: set[tuple[Any, int]] = {(o.held.grad_fn, o.held.output_nr) for o in self.outputs}
        edges.update(edge for step in self._steps for edge in step.next_functions)
        for step, index in edges:
            if hasattr(step, "graphsplit_call") and index < len(step.nodes):
                found[id(step.graphsplit_call)].add(step.nodes[index])
        return {key: frozenset(nodes) for key, nodes in found.items()}

    def _given(self, output: LoopValue, gradient: Any) -> Any:
        gradient = as_value(gradient)
        if isinstance(gradient, LoopValue):
            return gradient.at(output.home)
        if isinstance(gradient, torch.Tensor) and self.loop.rank != output.home:
            return gradient.to("meta")
        return gradient

    def _to_inputs(self, held: list[Any], given: list[Any], steps: Sequence[Any]) -> list[Any]:
        """Backward as far as the inputs; parameters are reached through the calls."""
        inner = [_inner(one) for one in self.inputs or ()]
        ends = [one for one in inner if one is not None]
        if len(ends) < len(inner):
            ends += [s.graphsplit_anchor for s in steps if hasattr(s, "graphsplit_anchor")]
        found = iter(
            torch.autograd.grad(held, ends, given, retain_graph=self.retain, allow_unused=True)
            if ends
            else ()
        )
        return [None if one is None else next(found) for one in inner]

    def add(self, totals: dict[int, torch.Tensor], found: Any) -> None:
        """Add once to ``.grad`` what was found."""
        if self.inputs is None:
            ends = [self._by_id()[key] for key in totals]
            gradients = list(totals.values())
        else:
            known = {id(one): one for one in self.inputs if id(one) in totals}
            pairs = [
                (_inner(one), gradient)
                for one, gradient in zip(self.inputs, found, strict=True)
                if gradient is not None
            ]
            ends = [*(one for one, _ in pairs), *known.values()]
            gradients = [*(gradient for _, gradient in pairs), *(totals[key] for key in known)]
            del pairs
        self.loop.twins.note_backward()
        with torch.no_grad():
            accumulate_all(ends, gradients, held_elsewhere(gradients))

    def _by_id(self) -> dict[int, torch.Tensor]:
        known: dict[int, torch.Tensor] = {}
        for step in self._steps:
            if hasattr(step, "graphsplit_call"):
                known |= {id(p): p for p in step.graphsplit_call.network.planner.parameters}
            elif hasattr(step, "graphsplit_read"):
                known[id(step.graphsplit_read)] = step.graphsplit_read
        return known

    def found(self, totals: dict[int, torch.Tensor], found: Any) -> list[Any]:
        """The gradients of the inputs, as values of the script."""
        parameters = [one for one in self.inputs or () if in_loop(one) is not None]
        mine = "".join("1" if id(p) in totals else "0" for p in parameters)
        told = self.loop.group.exchange(mine)
        positions = {id(p): index for index, p in enumerate(parameters)}
        results = []
        for one, gradient in zip(self.inputs or (), found, strict=True):
            known = in_loop(one)
            if known is not None:
                is_found = told[known.owner][positions[id(one)]] == "1"
                results.append(_total(one, known, totals) if is_found else None)
            elif isinstance(one, LoopValue) and gradient is not None:
                results.append(LoopValue.of(gradient, one.home, one.loop, one.loop.taken.next()))
            else:
                results.append(gradient)
        return results


def _total(parameter: torch.Tensor, known: InLoop, totals: dict[int, torch.Tensor]) -> LoopValue:
    held = totals.get(id(parameter), known.shape)
    return LoopValue.of(held, known.owner, known.loop, known.loop.taken.next())


def _inner(one: Any) -> Any:
    """A tensor of the script's autograd graph; None for a parameter, which calls are given."""
    if in_loop(one) is not None:
        return None
    return one.whole if isinstance(one, LoopValue) else one


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _refuse_spent(calls: Sequence[Call], used: Mapping[int, frozenset[int]]) -> None:
    if any(call.spent and not call.is_whole_behind(used[id(call)]) for call in calls):
        raise ConfigurationError(
            "backward through a call of a distributed network once more: what it kept was freed by "
            "the one before\n"
            "  Fix: pass retain_graph=True to the one before; or add the losses and call backward "
            "once, as in (first + second).backward()."
        )


def _refuse_used_before(steps: Sequence[Any]) -> None:
    """Refuse parameters that the script used before it was known where they live."""
    for step in steps:
        variable = getattr(step, "variable", None)
        if variable is not None and in_loop(variable) is not None:
            raise ConfigurationError(
                f"the script used a parameter of {tuple(variable.shape)} of a distributed network "
                f"before the network's first call, as in a penalty: every worker did so for "
                f"itself\n"
                f"  Fix: call the network first in the step, and use its parameters after that."
            )


def _refuse_split_sums(steps: Sequence[Any]) -> None:
    """Refuse a sum of gradients of a call's input that would begin outside the call."""
    uses = Counter(following for step in steps for following in step.next_functions)
    for step in steps:
        for index, _ in getattr(getattr(step, "graphsplit_call", None), "sums_of_inputs", ()):
            # Before the inputs that gradients flow into, there is the anchor.
            source = step.next_functions[1 + index]
            if uses[source] > 1 and _is_used_later(source, step, steps):
                raise ConfigurationError(_INPUT_USED_AGAIN)
    split = [step for step in steps if uses[step, 0] > 1 and _is_gathering(step)]
    if split:
        _refuse_later_uses(steps, split)


def _is_used_later(source: Any, step: Any, steps: Sequence[Any]) -> bool:
    """Whether a later use of an input, or another one of the same call, gives it a gradient."""
    users = [other for other in steps for one in other.next_functions if one == source]
    number = sequence_number(step)
    return users.count(step) > 1 or any(sequence_number(one) > number for one in users)


def _is_gathering(step: Any) -> bool:
    """Whether what an operation gives back for one operand comes together here, before the rest."""
    return hasattr(step, "graphsplit_way") or hasattr(step, "graphsplit_read")


def _needs_no_following(step: Any) -> bool:
    """Whether backward of a step runs no operation of the script."""
    return (
        hasattr(step, "graphsplit_one_step")
        or hasattr(step, "graphsplit_call")
        or hasattr(step, "variable")
        or _is_gathering(step)
    )


def _refuse_later_uses(steps: Sequence[Any], split: Sequence[Any]) -> None:
    """Refuse what an operation uses several times unless its sum begins with these uses."""
    consumers: dict[Any, list[Any]] = defaultdict(list)
    for step in steps:
        for following in step.next_functions:
            consumers[following].append(step)
        for tensor in _parameters_of(step):
            consumers[id(tensor)].append(step)
    for step in split:
        sources = [id(p) for p in _parameters_of(step)] or [step.next_functions[0]]
        others = {one for source in sources for one in consumers[source]} - {step}
        earliest = min(map(sequence_number, consumers[step, 0]))
        for other in others:
            uses = consumers[other, 0] if _is_gathering(other) else [other]
            if any(sequence_number(one) > earliest for one in uses):
                raise ConfigurationError(_USED_AGAIN)


def _parameters_of(step: Any) -> list[torch.Tensor]:
    """The parameters to which a step of the script's graph gives gradients."""
    if hasattr(step, "graphsplit_read"):
        return [step.graphsplit_read]
    call = getattr(step, "graphsplit_call", None)
    return [] if call is None else list({*call.network.planner_tensors().values()})


def _refuse_unordered(calls: Sequence[Call], reads: Sequence[torch.Tensor]) -> None:
    """Refuse sums over several uses whose order is unknown; alike on all workers."""
    uses: Counter[int] = Counter(id(parameter) for parameter in reads)
    if any(getattr(parameter, GRADIENT_HOOKS, None) for parameter in reads):
        raise ConfigurationError(_HOOKED.format("a parameter that the script uses by itself"))
    for call in calls:
        placed = call.plan.plan.placed
        unordered = unordered_parameters(call.plan.plan)
        names = call.network.planner_tensors()
        for position in placed.graph.state_names:
            tensor = names[placed.graph.nodes[position].target]
            uses[id(tensor)] += 1
            if uses[id(tensor)] < 2:
                continue
            if call.network.is_casting:
                raise ConfigurationError(
                    f"{placed.graph.nodes[position].target} is used by several calls under one "
                    f"backward(), with torch.autocast around them, which may cast it once for all\n"
                    f"  Fix: use torch.autocast inside forward, or call backward for each call."
                )
            if position in unordered:
                raise ConfigurationError(
                    f"{placed.graph.nodes[position].target} is used several times in one "
                    f"operation, on another worker, by several calls under one backward(): the "
                    f"order of its gradients is not known\n"
                    f"  Fix: place what uses it with it, or call backward for each call."
                )
            if getattr(tensor, GRADIENT_HOOKS, None):
                raise ConfigurationError(_HOOKED.format(placed.graph.nodes[position].target))


_INPUT_USED_AGAIN = (
    "a distributed network uses an input several times, and a later line uses it too: the "
    "gradients of such an input cannot be added up in eager's order\n"
    "  Fix: pass input.clone() to the network, there and in one process."
)
_USED_AGAIN = (
    "one operation of the script uses a parameter, or a value of another worker, several times (as "
    "functional.normalize does), and a later line uses it too: its gradients cannot be added up in "
    "eager's order\n"
    "  Fix: pass weight.clone() to that operation, there and in one process; or move it behind "
    "the later line."
)
_ANOMALY = (
    "backward under torch.autograd.detect_anomaly, which looks for NaN on every worker, also where "
    "values are not\n  Fix: torch.autograd.set_detect_anomaly(True, check_nan=False); and "
    "torch.isfinite(loss)."
)
_HOOKED = (
    "{} has a hook (register_hook), and is used several times under one backward(): the hook would "
    "see parts of its gradient\n"
    "  Fix: use register_post_accumulate_grad_hook, or call backward for each use."
)
SPECIAL.update(backward=_backward, grad=lambda func, args, kwargs: _grad(*args, **kwargs))


# Hooks on parameters, and on backward of modules: each runs on one worker, and must leave Python's
# state alone.
#
# In one process a counter that hooks keep counts all of them. Here each worker would count its own.
# Hooks may change gradients and step optimizers; what the script keeps of a gradient it takes from
# ``p.grad`` after backward, which is the same on every worker.

_known: dict[tuple[int, ...], tuple[list[object], tuple[HookState, ...]]] = {}
_MOST = 64


@contextmanager
def leaving_state(loop: Loop) -> Iterator[None]:
    """Run a backward, which may come to hooks of parameters, and of modules.

    Raises:
        OwnershipError: One that ran here has changed Python's state.
    """
    hooks = _hooks_of(loop)
    if not hooks:
        yield
        return
    with unchanged(_state_of(hooks), _error):
        yield


def _hooks_of(loop: Loop) -> list[object]:
    """The hooks that a backward may come to; asked at each step, so without names of modules."""
    parameters = chain.from_iterable(list(loop.here.values()))  # a network may go meanwhile
    found = [table for parameter in parameters for table in hook_tables(parameter)]
    waiting: list[Any] = [network for known in loop.networks if (network := known()) is not None]
    seen: set[int] = set()
    for module in waiting:  # grows meanwhile
        if id(module) not in seen:
            seen.add(id(module))
            found += [getattr(module, name) for name in BACKWARD_HOOKS]
            waiting += [one for one in getattr(module, MODULES).values() if one is not None]
    return [hook for table in filter(None, found) for hook in table.values()]


def _state_of(hooks: list[object]) -> tuple[HookState, ...]:
    key = tuple(map(id, hooks))
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        held = {
            holder.key: (holder, line_of(hook))
            for hook in hooks
            for holder in state_of(hook)
            if holder.decides and not holder.is_tensor
        }
        _known[key] = hooks, tuple(held.values())  # held, so that nothing else gets their numbers
    return _known[key][1]


def _error(holder: Holder, line: str) -> OwnershipError:
    if holder.is_generator:
        return draws(line)
    return OwnershipError(
        f"a hook on a parameter or module{line} changes {holder.name} on the worker where that is; "
        f"in one process all workers' lines would see it\n"
        f"  Fix: look at p.grad after backward(), which is the same on every worker. A hook may "
        f"change its gradient, step an optimizer, or write to tensors."
    )
