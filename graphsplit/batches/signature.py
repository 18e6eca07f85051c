"""A batch's arguments and their signature, and whether two batches are alike."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphsplit.batches import records
from graphsplit.capture.numbers.known_values import is_all_ones
from graphsplit.errors import ConfigurationError
from graphsplit.tensor_meta import CPU, DTYPES, SPARSE_FIX, TensorMeta
from graphsplit.torch_ext.private import pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_SAMPLED = 64
TARGETS = ("target", "targets", "label", "labels")
"""How the target of a batch that is a mapping may be named."""
_SEQUENCES: dict[type[Any], str] = {list: "l", tuple: "u"}
_MAPPINGS: dict[type[Any], str] = {dict: "d", OrderedDict: "o"}


@dataclass(frozen=True)
class Signature:
    """Structure, dtypes, shapes, strides and devices of a step's arguments; plain values whole.

    Masks of nothing but ones are told apart from others: networks leave them out.

    Attributes:
        text: Canonical JSON. Equal texts, equal signatures.
        digest: First 16 hexadecimal digits of the SHA-256 of ``text``.
    """

    text: str
    digest: str

    @classmethod
    def of(cls, arguments: Arguments) -> Signature:
        """The signature of some arguments.

        Raises:
            ConfigurationError: Something in them is neither tensor, number, string, bool, None,
                nor a list, tuple, dictionary, named tuple or dataclass of such.
        """
        known = _signatures.get(key := _quick_key(arguments))
        if known is None:
            known = cls.read(json.dumps(_encode(arguments)))
            if len(_signatures) >= _MAX_SIGNATURES:
                _signatures.clear()
            _signatures[key] = known
        return known

    @classmethod
    def read(cls, text: str) -> Signature:
        """The signature with a given text."""
        return cls(text, hashlib.sha256(text.encode()).hexdigest()[:16])

    def example(self, device: str | None = None) -> Arguments:
        """Arguments with this signature, tensors filled with zeros; with ones, masks of ones.

        Args:
            device: Where to make all of them; None: each where it is.
        """
        args, kwargs = _decode(json.loads(self.text), device)
        return args, kwargs

    def structure(self) -> str:
        """The part that is equal for signatures that differ in the sizes of tensors alone."""
        return _SIZES.sub(_without_sizes, self.text)

    def difference(self, other: Signature) -> str:
        """The first way in which this batch is another one than that, in words for users."""
        for told, kept in _ASPECTS:
            if _SIZES.sub(kept, self.text) != _SIZES.sub(kept, other.text):
                return told
        return "the batch has other strides"


# One encoded tensor: {"t": ["float32", [4, 8], [8, 1]]}; a mask of nothing but ones: {"ones": ...};
# one that a gradient is wanted of: {"grad": ...}.
# On another device than a CPU, that comes last: {"t": ["float32", [4, 8], [8, 1], "cuda:0"]}.
_SIZES = re.compile(
    r'\{"(t|ones|grad)": \["(\w+)", \[([\d, ]*)\], \[[\d, ]*\]((?:, "[\w:]+")?)\]\}'
)


_ASPECTS: tuple[tuple[str, Any], ...] = (
    ("the batch has other parts, or other values that are no tensors", ""),
    ("the batch has other shapes or dtypes", r"\2 \3\4"),
    ("a gradient is asked for of other inputs", lambda found: str(found[1] == "grad")),
    ("a mask has nothing but ones now, or no longer", r"\1"),
)


def _without_sizes(found: re.Match[str]) -> str:
    return f'{{"{found[1]}": ["{found[2]}", {len(found[3].split())}{found[4]}]}}'


_MAX_SIGNATURES = 256
_signatures: dict[tuple[Any, ...], Signature] = {}


def _quick_key(arguments: Arguments) -> tuple[Any, ...]:
    """Something cheap that is equal for equal signatures alone."""
    plain = _plain_tensors(arguments)
    if plain is not None:
        return tuple(
            [
                (t.dtype, t.shape, t.stride(), t.requires_grad, _is_ones(t), t.is_cpu or t.device)
                for t in plain
            ]
        )
    found, spec = pytree.tree_flatten(arguments)
    return (
        spec,
        *(
            (leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad, _is_ones(leaf), leaf.device)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf), repr(*_encode(leaf).values()))
            for leaf in found
        ),
    )


def _is_ones(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a mask of nothing but ones; most are no masks at all."""
    return not tensor.is_floating_point() and tensor.dim() > 1 and is_all_ones(tensor)


def _plain_tensors(arguments: Arguments) -> tuple[torch.Tensor, ...] | None:
    """The leaves, where all arguments are tensors: the usual case, for which no tree is made."""
    args, kwargs = arguments
    return args if not kwargs and all([isinstance(arg, torch.Tensor) for arg in args]) else None


def _encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        meta = TensorMeta.of(value)
        kind = "ones" if _is_ones(value) else "grad" if value.requires_grad else "t"
        where = () if meta.device == CPU else (meta.device,)
        return {kind: [str(meta.dtype).removeprefix("torch."), meta.shape, meta.strides, *where]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"v": value}
    if type(value) in _SEQUENCES:
        return {_SEQUENCES[type(value)]: [_encode(item) for item in value]}
    if type(value) in _MAPPINGS:  # in their order, which is that of the graph's inputs
        pairs = [[_encode_key(key), _encode(item)] for key, item in value.items()]
        return {_MAPPINGS[type(value)]: pairs}
    fields = records.fields_of(value)
    if fields is not None:
        pairs = [[name, _encode(item)] for name, item in fields]
        return {"r": [*records.name_of(type(value)), pairs]}
    fix = "convert it in the data set or in collate_fn."
    if hasattr(value, "get_seq_length"):  # a cache of transformers
        fix = (
            "pass all tokens to each call, with use_cache=False; dynamic_dims={1: largest} of "
            "gs.Model or gs.distribute makes one plan for all lengths. To call generate(), load "
            "the saved weights in one process."
        )
    raise ConfigurationError(
        f"a batch holds a {type(value).__name__}; expected tensors, numbers, strings, None, and "
        f"lists, tuples, dictionaries, named tuples or dataclasses of them\n"
        f"  Fix: {fix}"
    )


def _encode_key(key: Any) -> Any:
    if isinstance(key, (str, int)):
        return key
    raise ConfigurationError(
        f"a dictionary in a batch has a key of type {type(key).__name__}; expected str or int\n"
        f"  Fix: convert it in the data set or in collate_fn."
    )


def _decode(node: dict[str, Any], device: str | None) -> Any:
    ((kind, content),) = node.items()
    if kind in ("t", "ones", "grad"):
        dtype, shape, strides, *where = content
        where = device or (where[0] if where else CPU)
        made = torch.empty_strided(shape, strides, dtype=DTYPES[dtype], device=where)
        return made.fill_(kind == "ones").requires_grad_(kind == "grad")
    if kind == "v":
        return content
    if kind == "r":
        module, name, pairs = content
        return records.make(module, name, {key: _decode(item, device) for key, item in pairs})
    for container, tag in _MAPPINGS.items():
        if kind == tag:
            return container((key, _decode(item, device)) for key, item in content)
    items = [_decode(item, device) for item in content]
    return items if kind == "l" else tuple(items)


def leaves(arguments: Arguments) -> list[Any]:
    """All values in the order of the captured graph's inputs."""
    plain = _plain_tensors(arguments)
    if plain is not None:
        return list(plain)
    found, _ = pytree.tree_flatten(arguments)
    return found


def fingerprint(arguments: Arguments) -> int:
    """A cheap checksum of a batch's values, to notice loaders that disagree.

    Sums every tensor as integers, and takes 64 evenly spaced elements as they are, so that the
    same samples in another order differ too. A guard against mistakes, not against malice.
    """
    checksum = 0
    for leaf in leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            words = _as_words(leaf)
            step = max(1, words.size // _SAMPLED)
            checksum = zlib.crc32(words[::step].tobytes(), checksum)
            total = int(np.add.reduce(words, dtype=np.uint64))
            checksum ^= (total ^ total >> 32) & 0xFFFFFFFF
        else:
            checksum = zlib.crc32(repr(leaf).encode(), checksum)
    return checksum


_OF_NUMPY = frozenset((torch.float32, torch.int64, torch.float64, torch.int32, torch.uint8))


def _check_dense(tensor: torch.Tensor) -> None:
    """Refuse a tensor of a batch that is not dense.

    Raises:
        ConfigurationError: It is sparse.
    """
    if tensor.layout is not torch.strided:
        raise ConfigurationError(
            f"a batch holds a tensor of layout {tensor.layout}, which cannot be sent\n"
            f"  Fix: {SPARSE_FIX}"
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_neg())
    )


def _as_words(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's memory as 64-bit numbers, or as bytes where it is no multiple of them."""
    if tensor.numel() == 0:
        return np.zeros(0, dtype=np.uint64)
    if tensor.dtype in _OF_NUMPY and _is_plain(tensor):  # a tenth of the calls, at every step
        octets = tensor.numpy().reshape(-1).view(np.uint8)
        return octets.view(np.uint64) if octets.size % 8 == 0 else octets
    _check_dense(tensor)
    plain = tensor.detach().cpu().contiguous()
    octets = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()  # as ``octets_of``
    return octets.view(np.uint64) if octets.size % 8 == 0 else octets


_NO_TARGET = (
    "\n  Fix: pass what loss_fn compares with as well, or drop loss_fn where the network returns "
    "the loss."
)


def split_batch(batch: Any, *, has_loss_fn: bool) -> Arguments:
    """A loader's batch as the arguments of one step.

    A mapping becomes keyword arguments of the network. With a loss function a batch is
    ``(inputs, target)`` or ``(input, ..., target)``, or a mapping with an entry that is named as
    targets are; without one, all are the network's. A dataclass counts as a tuple of its fields,
    as a named tuple does.

    Raises:
        ConfigurationError: The batch does not fit.
    """
    if isinstance(batch, Mapping):
        if not has_loss_fn:
            return (), dict(batch)
        name = _target_among(batch)
        return (batch[name],), {key: value for key, value in batch.items() if key != name}
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = tuple(getattr(batch, field.name) for field in dataclasses.fields(batch))
    if not isinstance(batch, (list, tuple)) or (has_loss_fn and len(batch) < 2):
        raise ConfigurationError(
            f"a batch is a {type(batch).__name__}"
            f"{f' of {len(batch)}' if isinstance(batch, Sequence) else ''}; expected "
            f"(inputs, target), a tuple of inputs and a target, or a mapping"
            + (_NO_TARGET if has_loss_fn else "")
        )
    if not has_loss_fn:
        return tuple(batch), {}
    *inputs, target = batch
    if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)):
        inputs = list(inputs[0])
    return (*inputs, target), {}


def inputs_of(batch: Any, *, has_loss_fn: bool) -> Arguments:
    """A loader's batch as what the network alone is given: without its target, if it has one."""
    is_input = isinstance(batch, (list, tuple)) and len(batch) == 1
    if is_input or isinstance(batch, torch.Tensor):  # there is no target to leave out
        return split_batch(batch, has_loss_fn=False)
    args, kwargs = split_batch(batch, has_loss_fn=has_loss_fn)
    return (args[:-1] if has_loss_fn else args), kwargs


def _target_among(batch: Mapping[Any, Any]) -> str:
    """The entry of a mapping that the loss function is given beside the network's outputs."""
    found = [name for name in TARGETS if name in batch]
    if len(found) == 1:
        return found[0]
    entries = f"{', '.join(found)}, all of them targets" if found else ", ".join(map(str, batch))
    raise ConfigurationError(
        f"a batch is a mapping with {entries or 'nothing in it'}; the Model has a loss_fn, which "
        f"is given the entry that is named {' or '.join(TARGETS)}\n"
        f"  Fix: name one entry so in collate_fn, or let the network return the loss and drop "
        f"loss_fn."
    )


def targets_of(arguments: Arguments, *, has_loss_fn: bool) -> tuple[Any, ...]:
    """The target among a step's arguments, if there is one."""
    args, kwargs = arguments
    return args[-1:] if has_loss_fn else tuple(kwargs[n] for n in TARGETS if n in kwargs)[:1]


def num_samples(arguments: Arguments) -> int:
    """Size of the first dimension of the first tensor that has one; else 1."""
    for leaf in leaves(arguments):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return 1
