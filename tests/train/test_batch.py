"""Batches: how they are taken apart, described and compared."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from graphsplit.batches.signature import Signature, fingerprint, num_samples, split_batch
from graphsplit.batches.step_functions import loss_of
from graphsplit.errors import ConfigurationError

X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [((X, Y), 2), ((X, X, Y), 3), (((X, X), Y), 3), ([X, Y], 2), (([X], Y), 2)],
)
def test_with_a_loss_a_batch_is_inputs_and_a_target(batch, expected):
    args, kwargs = split_batch(batch, has_loss_fn=True)
    assert len(args) == expected
    assert args[-1] is Y
    assert kwargs == {}


@dataclasses.dataclass
class Pair:
    inputs: torch.Tensor
    target: torch.Tensor


@pytest.mark.parametrize("has_loss_fn", [True, False])
def test_a_dataclass_counts_as_a_tuple_of_its_fields(has_loss_fn):
    args, kwargs = split_batch(Pair(X, Y), has_loss_fn=has_loss_fn)
    assert args[0] is X and args[1] is Y and len(args) == 2 and kwargs == {}


class Cache:
    def get_seq_length(self):
        return 3


def test_a_cache_of_transformers_is_refused_with_the_way_out():
    with pytest.raises(ConfigurationError, match=r"holds a Cache; .*\n.*use_cache=False.*dynamic_"):
        Signature.of(((X, Cache()), {}))


def test_a_mapping_becomes_keyword_arguments():
    assert split_batch({"x": X, "labels": Y}, has_loss_fn=False) == ((), {"x": X, "labels": Y})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X}, "a mapping with x; the Model"),
        (X, r"tuple of 1"),
        ((X,), "tuple of 1"),
        (3, "int"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, message):
    with pytest.raises(ConfigurationError, match=message):
        split_batch(batch, has_loss_fn=True)


def test_a_signature_survives_its_text_and_gives_an_example_of_the_same_signature():
    arguments = ((X.t(), {"mask": Y > 1, "scale": 2.0}, [None, "mean"]), {"labels": Y})
    signature = Signature.of(arguments)
    args, kwargs = signature.example()
    assert Signature.read(signature.text) == signature
    assert Signature.of((args, kwargs)) == signature
    assert args[0].stride() == X.t().stride()
    assert args[1]["scale"] == 2.0
    assert args[2] == [None, "mean"]


@pytest.mark.parametrize("other", [X.double(), X[:3], X.t().contiguous().t(), X.view(2, 6)])
def test_another_dtype_shape_or_stride_is_another_signature(other):
    assert Signature.of(((X,), {})) != Signature.of(((other,), {}))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ((X[:1],), "other shapes or dtypes"),
        ((X.double(),), "other shapes or dtypes"),
        ((X, 1), "other parts"),
        ((X.clone().requires_grad_(),), "a gradient is asked for of other inputs"),
        ((torch.ones_like(X, dtype=torch.bool),), "other shapes or dtypes"),
        ((X.clone().as_strided(X.shape, X.stride()[::-1]),), "other strides"),
    ],
)
def test_what_is_other_in_a_batch_is_told(other, told):
    assert told in Signature.of((other, {})).difference(Signature.of(((X,), {})))


def test_one_and_true_and_one_point_zero_are_three_signatures():
    assert len({Signature.of(((value,), {})) for value in (1, True, 1.0)}) == 3


def test_zero_and_minus_zero_are_two_signatures():
    assert Signature.of(((0.0,), {})) != Signature.of(((-0.0,), {}))


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    scale: float = 1.0


class Named(NamedTuple):
    x: torch.Tensor
    more: object


def test_a_signature_keeps_the_order_of_keys_and_the_classes_of_records():
    batch = ((Record(X), Named(Y, {2: X, 1: None})), {"z": X, "a": OrderedDict(y=Y, b=1)})
    (record, named), keywords = Signature.read(Signature.of(batch).text).example()
    assert type(record) is Record
    assert (type(named), list(named.more)) == (Named, [2, 1])
    assert (list(keywords), list(keywords["a"])) == (["z", "a"], ["y", "b"])
    assert type(keywords["a"]) is OrderedDict


def test_a_record_whose_class_is_not_known_is_refused():
    text = Signature.of(((Record(X),), {})).text.replace('"Record"', '"Unknown"')
    with pytest.raises(ConfigurationError, match=r"Unknown with the fields x, scale"):
        Signature.read(text).example()


def test_a_signature_names_no_class_but_that_of_a_record():
    text = Signature.of(((Record(X),), {})).text
    text = text.replace(f'"{Record.__module__}", "Record"', '"subprocess", "Popen"')
    with pytest.raises(ConfigurationError, match="knows no such dataclass or named tuple"):
        Signature.read(text).example()


def test_a_mask_of_ones_has_a_signature_of_its_own():
    ones = torch.ones(2, 3, dtype=torch.int64)
    padded = ones.clone()
    padded[1, 2] = 0
    assert Signature.of(((ones,), {})) != Signature.of(((padded,), {}))
    assert torch.equal(Signature.of(((ones,), {})).example()[0][0], ones)
    labels = torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    assert Signature.of(((labels[0],), {})) == Signature.of(((labels[1],), {}))


def test_what_cannot_be_described_is_refused():
    with pytest.raises(ConfigurationError, match="a batch holds a set"):
        Signature.of((({1, 2},), {}))


@pytest.mark.parametrize(
    "other",
    [X + 0, X.flip(0), X.clone().index_put_((torch.tensor(1),), torch.tensor(9.0))],
    ids=["equal", "other order", "one value"],
)
def test_a_fingerprint_tells_values_and_their_order_apart(other):
    is_equal = torch.equal(X, other)
    assert (fingerprint(((X,), {})) == fingerprint(((other,), {}))) == is_equal


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0), torch.tensor(True), torch.ones(3, dtype=torch.bfloat16), X.t(),
     torch.ones(5, dtype=torch.complex64), torch.arange(9.0)[::9], torch.ones(1).expand(1)],
)  # fmt: skip
def test_every_tensor_has_a_fingerprint(tensor):
    assert fingerprint(((tensor,), {})) == fingerprint(((tensor.clone(),), {}))


def test_samples_are_counted_by_the_first_tensor_with_a_dimension():
    assert num_samples(((torch.tensor(1.0), X), {})) == 4
    assert num_samples(((3,), {})) == 1


def test_a_network_must_return_a_loss_where_there_is_no_loss_fn():
    assert loss_of({"loss": X.sum()}) == X.sum()
    with pytest.raises(ConfigurationError, match=r"a tensor of shape \[4, 3\]"):
        loss_of(X)
