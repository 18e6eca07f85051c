"""Private attributes of torch's objects: the names of those that graphsplit reads or sets.

Other packages reach them by what stands here, so that a release which moves one is answered in one
place. :mod:`graphsplit.torch_ext.contract` says why each is needed, and a test looks each up. What
reads a name inside torch's own modules stands in :mod:`graphsplit.torch_ext.private`.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import graph_module
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

# Arguments of an operator that say whether it draws.
_PROBABILITIES, _SWITCHES = ("p", "dropout_p", "dropout"), ("train", "training", "is_training")

# A module: its tables, in which parameters, buffers and children are, and its hooks.
PARAMETERS, BUFFERS, MODULES = TABLES = ("_parameters", "_buffers", "_modules")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
ALL_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))
GLOBAL_BACKWARD_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    *GLOBAL_BACKWARD_HOOKS,
)
CALL = "_call_impl"  # what calling a module runs
CONVERT = "_apply"  # what converts a module, as its double() does
CALLS = (CALL, "_compiled_call_impl")
NOT_SAVED = "_non_persistent_buffers_set"  # the names of buffers that no state dictionary holds
_NOT_THE_USERS = ALL_HOOKS | {*TABLES, NOT_SAVED, "training", CALL}
MADE_BUFFERS = (
    "_graphsplit_made_buffers"  # names of buffers that are plain attributes in eager mode
)
CHECK_INPUT = "_check_input_dim"  # by which a norm refuses what has other dimensions
FLAT_WEIGHTS = "_flat_weight"  # how the attributes begin in which a recurrent layer keeps weights

# Saving and loading a module's state: methods that users override, and hooks.
SAVE, LOAD = "_save_to_state_dict", "_load_from_state_dict"
SAVING_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
LOADING_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
STATE_VERSIONS = "_metadata"  # of a state dictionary: versions of modules, for their own code
EXTRA_STATE = "_extra_state"  # the key under which what `get_extra_state` returns is kept

# A tensor: hooks that run with its gradient, and after it was added.
GRADIENT_HOOKS, ACCUMULATED_HOOKS = TENSOR_HOOKS = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
WRITES = "_version"  # how often a tensor's memory was written to


# An optimizer.
BEFORE_STEP, AFTER_STEP = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
BEFORE_STATE = "_optimizer_state_dict_pre_hooks"
OPTIMIZER_STATE_HOOKS = (
    BEFORE_STATE,
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
GLOBAL_STEP_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)
STEPPED = "_opt_called"  # where a learning rate scheduler notes that a step was taken
# torch.nn.utils.clip_grad: who asks, and by which name, for gradients put in groups.
NORM, GROUPING = "_get_total_norm", "_group_tensors_by_device_and_dtype"
GROWTH = "_growth_tracker"  # in a scaler's state: steps since its scale last changed


def is_module_call(frame: FrameType) -> bool:
    """Whether a frame is the call of a module: its ``self`` is the module."""
    return frame.f_code is nn.Module._call_impl.__code__


def module_now() -> nn.Module | None:
    """The innermost module whose call is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_module_call(frame):
            module: nn.Module = frame.f_locals["self"]
            return module
        frame = frame.f_back
    return None


def is_of_user(name: str) -> bool:
    """Whether an attribute of a module is the user's own, not PyTorch's."""
    return name not in _NOT_THE_USERS


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table itself."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The table itself."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table itself."""
    return module._modules


def refill(table: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Give a module's table these entries, in their order; the names of scripted ones are fixed."""
    if isinstance(table, dict):
        table.clear()
    for name, value in entries.items():
        table[name] = value


def writes_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to."""
    return tensor._version


def sequence_number(step: torch.autograd.graph.Node) -> int:
    """The place of an autograd step among those of its thread; backward takes later ones first."""
    number: int = step._sequence_nr()
    return number


def steps_behind(values: Iterable[Any], ends: Container[Any] = ()) -> Iterator[Any]:
    """The steps of autograd's graph behind the tensors among values, as far as some ends."""
    waiting, seen = [one.grad_fn for one in values if isinstance(one, torch.Tensor)], set()
    while waiting:
        step: Any = waiting.pop()
        if step is not None and step not in seen and step not in ends:
            seen.add(step)
            yield step
            waiting += [following for following, _ in step.next_functions]


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The base of a view; the tensor itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones under each name."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same number, of the memory itself."""
    return int(storage._cdata)


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Let each have the other's memory, in place."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def operator_schema(operator: Any) -> torch.FunctionSchema:
    """An operator's signature."""
    schema: torch.FunctionSchema = operator._schema
    return schema


def schema_of(function: Any) -> torch.FunctionSchema | None:
    """The same; None for a Python function."""
    schema = getattr(function, "_schema", None)
    return schema if isinstance(schema, torch.FunctionSchema) else None


def draws_by_default(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws from the default generator.

    On which device it runs decides which operator attention is: that it may draw says too little.
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    schema = operator_schema(operator)
    given = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    given |= by_name(schema, args, kwargs)  # torch leaves out what is as the default is
    if given.get("generator") is not None or any(given.get(n) == 0 for n in _PROBABILITIES):
        return False
    return all(given.get(name) is not False for name in _SWITCHES)


def by_name(
    schema: torch.FunctionSchema, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by the names that a signature gives them."""
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def overload_name(operator: Any) -> str:
    """Which of its packet's overloads an operator is."""
    return str(operator._overloadname)


def code_of_scripted(module: Any) -> str:
    """The source of all methods of a scripted module."""
    return "".join(module._get_method(method).code for method in module._method_names())


def in_cplusplus(module: torch.jit.ScriptModule) -> Any:
    """The C++ object behind a scripted module."""
    return module._c


def lines_of(module: torch.fx.GraphModule) -> dict[int, int | None]:
    """For each line of a module's code, from that of ``forward``, the index of its node."""
    return getattr(module, "_lineno_map", None) or {}


def forget_source(filename: str) -> None:
    """Drop the source of generated code from torch's cache; where there is none, none is kept."""
    loader = getattr(graph_module, "_loader", None)
    getattr(loader, "eval_cache", {}).pop(filename, None)


def scaler_findings(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """A scaler's findings in gradients since its last update, by the optimizer's identity."""
    findings: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return findings


def note_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let a learning rate scheduler believe that there was a step."""
    setattr(optimizer, STEPPED, True)


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor as they are, which need not be coalesced."""
    return tensor._indices(), tensor._values()


# Buffers that get another form: a table that grows, a cache that is made at its first use. What a
# step puts in a buffer's place has a tensor of its own for each form. The one that counts is in its
# place; the others wait beside it, under names that no module gives:
#
#     mask                                    the table of 8 tokens
#     other form of mask [16, 16] …           that of 16, until it is put in the place

_FORM = "other form of "
_FIRST = "_graphsplit_first_forms"  # among a module's attributes: its buffers as they were first
_OWN = "_graphsplit_form"  # of a tensor that is written to at a step's end: where it waits


class _Changes:
    """How often any buffer has got another form: who keeps lists of tensors looks here."""

    count = 0


@dataclass(frozen=True)
class BufferForm:
    """The present of a place for a buffer.

    Attributes:
        tensor: The tensor; None: the buffer is None; ``MISSING``: there is no such buffer.
        is_saved: Whether it belongs to the state dictionary.
    """

    tensor: Any
    is_saved: bool

    def __str__(self) -> str:
        form = getattr(self.tensor, _OWN, "") or shown_form(self.tensor)
        return form if self.is_saved else f"{form}, not persistent"

    __repr__ = __str__


def num_changes() -> int:
    """How often buffers got another form so far, in this process."""
    return _Changes.count


def shown_form(value: Any) -> str:
    """The form of what is in a buffer's place, for people and for names."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {list(value.shape)} {list(value.stride())} {value.device}"


def name_of_form(name: str, tensor: torch.Tensor) -> str:
    """Where a form of a buffer waits."""
    return f"{_FORM}{name} {shown_form(tensor)}".replace(".", "·")


def is_waiting(name: str) -> bool:
    """Whether this is the name, qualified or not, of a form that waits."""
    return name.rpartition(".")[2].startswith(_FORM)


def buffer_of_form(name: str) -> str:
    """The qualified name of the buffer for which a form waits; other names as they are."""
    path, dot, own = name.rpartition(".")
    if not own.startswith(_FORM):
        return name
    return f"{path}{dot}{own.removeprefix(_FORM).partition(' torch·')[0]}"


def form_in(attributes: Mapping[str, Any], name: str, missing: Any) -> BufferForm:
    """The present form of a buffer, in a module with these attributes."""
    return BufferForm(attributes[BUFFERS].get(name, missing), name not in attributes[NOT_SAVED])


def add_form(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Let a tensor wait for being put in a buffer's place."""
    setattr(tensor, _OWN, name_of_form(name, tensor))
    _wait(vars(module), tensor)


def is_own(tensor: Any) -> bool:
    """Whether a tensor is one that only the module's place holds: it was made for a form."""
    return hasattr(tensor, _OWN)


def put_form(attributes: dict[str, Any], name: str, form: BufferForm, missing: Any) -> None:
    """Put a form in a buffer's place; the one that is there waits.

    A tensor that the user's code may hold does not wait: it stays as it is, as in eager mode.
    """
    buffers, not_saved = attributes[BUFFERS], attributes[NOT_SAVED]
    firsts = attributes.setdefault(_FIRST, {})
    firsts.setdefault(name, form_in(attributes, name, missing))
    now = buffers.get(name)
    if form.tensor is missing:
        buffers.pop(name, None)
    else:
        buffers[name] = form.tensor
    (not_saved.discard if form.is_saved or form.tensor is missing else not_saved.add)(name)
    if is_own(form.tensor):
        waiting = getattr(form.tensor, _OWN)
        buffers.pop(waiting, None)
        not_saved.discard(waiting)
    if is_own(now) and now is not form.tensor:
        _wait(attributes, now)
    _sort(buffers)
    _Changes.count += 1


def forget_waiting(module: nn.Module) -> None:
    """Forget the forms that wait: another worker that is new has none."""
    for name in list(filter(is_waiting, vars(module)[BUFFERS])):
        del vars(module)[BUFFERS][name]
        vars(module)[NOT_SAVED].discard(name)
        _Changes.count += 1


def first_forms(module: nn.Module) -> dict[str, BufferForm]:
    """The buffers that have got another form, each as it was first."""
    found: dict[str, BufferForm] = vars(module).get(_FIRST, {})
    return found


def _wait(attributes: dict[str, Any], tensor: torch.Tensor) -> None:
    waiting = getattr(tensor, _OWN)
    attributes[BUFFERS][waiting] = tensor
    attributes[NOT_SAVED].add(waiting)
    _sort(attributes[BUFFERS])


def _sort(buffers: dict[str, Any]) -> None:
    """Let forms that wait come last, in an order that does not depend on when they came."""
    for name in sorted(filter(is_waiting, buffers)):
        buffers[name] = buffers.pop(name)


class OwnHooks:
    """The hooks that graphsplit itself registers at each step, among all that torch numbers.

    Attributes:
        count: How many there were.
    """

    count: ClassVar[int] = 0


def num_hooks() -> int:
    """How many hooks other code has registered so far, on anything."""
    own = OwnHooks.count  # first: what another thread registers meanwhile must not make it smaller
    return RemovableHandle.next_id - own
