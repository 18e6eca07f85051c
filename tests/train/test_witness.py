"""What a Model notes for ``graphsplit check``."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.check.compare import compare
from graphsplit.check.record import UNTOUCHED, NoteKind, Notes, Operation, What, read_lines
from graphsplit.check.request import VARIABLE, NoteRequest, operations_file, write_request
from graphsplit.errors import EnoughSteps
from graphsplit.witness.values import Generators, digest_of, plain_value, tensor_value


def value_of(tensor: torch.Tensor) -> tuple[str, str]:
    found = tensor_value(NoteKind.PARAMETER, "p", tensor, whole=False)
    return found.form, found.digest


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("nan")]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.zeros(0),
        torch.tensor(3),
        torch.eye(3).to_sparse(),
        torch.ones(3, requires_grad=True),
    ],
    ids=str,
)
def test_every_kind_of_tensor_has_a_digest_of_its_own_bytes(tensor: torch.Tensor) -> None:
    assert value_of(tensor) == value_of(tensor.detach().clone())


def test_digests_tell_bits_apart_and_not_memory_layouts() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest_of(matrix.t()) == digest_of(matrix.t().contiguous())
    assert digest_of(torch.tensor([0.0])) != digest_of(torch.tensor([-0.0]))
    assert value_of(torch.zeros(4)) != value_of(torch.zeros(2, 2))
    assert value_of(torch.zeros(1)) != value_of(torch.zeros(1, dtype=torch.int32))
    lazy = torch.tensor([1 + 2j]).conj()
    assert digest_of(lazy) == digest_of(torch.tensor([1 - 2j]))


def test_plain_values_are_told_apart_by_type_and_bits() -> None:
    found = [
        plain_value(NoteKind.SETTING, "lr", v) for v in (1, 1.0, True, None, "1", (1,), object())
    ]
    assert len({(value.form, value.digest) for value in found}) == len(found)


def test_it_is_noted_whether_somebody_has_used_a_generator() -> None:
    generators = Generators()
    found = {value.name: value for value in generators.values()}
    assert found["random"].form == found["numpy"].form == UNTOUCHED
    assert found["torch"].digest == digest_of(torch.default_generator.get_state())
    random.random()
    np.random.rand()
    used = {value.name: value for value in generators.values()}
    assert all(value.form != UNTOUCHED for value in used.values())
    assert found["random"].digest != used["random"].digest


class Noted:
    """Trains a Model as the plain loop, and reads what it noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, request: NoteRequest) -> None:
        self.file = folder / "plain.jsonl"
        write_request(folder, request)
        monkeypatch.setenv(VARIABLE, str(self.file))

    def train(self, num_steps: int, *, weight: float = 0.0) -> tuple[Notes, ...]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
        with torch.no_grad():
            network[3].weight += weight
        optimizer = torch.optim.Adam(network.parameters())
        model = gs.Model(network, nn.CrossEntropyLoss(), optimizer, microbatches=2)
        inputs, target = torch.randn(8, 4), torch.randint(0, 2, (8,))
        model.predict(inputs)
        for _ in range(num_steps):
            model.train_step(inputs, target)
        return self.records()

    def records(self) -> tuple[Notes, ...]:
        return read_lines(Notes, self.file.read_text().splitlines(keepends=True))


def test_a_model_in_one_process_notes_everything_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict, start, first, second = Noted(tmp_path, monkeypatch, NoteRequest(5)).train(2)
    assert [r.what for r in (predict, start, first, second)] == [
        What.PREDICT, What.START, What.STEP, What.STEP,
    ]  # fmt: skip
    kinds = {value.kind for value in first.values}
    assert kinds == {
        NoteKind.LOSS, NoteKind.PARAMETER, NoteKind.GRADIENT, NoteKind.BUFFER,
        NoteKind.OPTIMIZER, NoteKind.SETTING, NoteKind.GENERATOR,
    }  # fmt: skip
    assert {v.name for v in first.values if v.kind is NoteKind.BUFFER} == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip
    assert compare([first], [[first]]).difference is None
    assert compare([first], [[second]]).difference is not None


def test_the_script_is_left_after_the_last_step_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(tmp_path, monkeypatch, NoteRequest(2))
    with pytest.raises(EnoughSteps) as left:
        noted.train(5)
    assert left.value.code == 0
    assert [r.number for r in noted.records() if r.what is What.STEP] == [1, 2]


def test_the_operations_of_one_step_are_noted_with_module_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(tmp_path, monkeypatch, NoteRequest(2, operations_of=("STEP", 2)))
    with pytest.raises(EnoughSteps):
        noted.train(3)
    lines = operations_file(noted.file).read_text().splitlines(keepends=True)
    operations = read_lines(Operation, lines)
    assert [op.module for op in operations if op.name == "aten.addmm.default"] == ["0", "3"] * 2
    assert not any("empty" in op.name for op in operations)
    assert any(op.module is None for op in operations)  # backward


def test_watching_operations_changes_no_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number, operations_of in enumerate((("", 0), ("STEP", 2))):
        folder = tmp_path / str(number)
        folder.mkdir()
        noted = Noted(folder, monkeypatch, NoteRequest(3, operations_of=operations_of))
        with pytest.raises(EnoughSteps):
            noted.train(3)
        found.append(noted.records())
    assert compare(found[0], [found[1]]).difference is None


def test_what_is_added_up_is_noted_apart_from_the_step_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = NoteRequest(2, operations_of=("BATCH", 2))
    noted = Noted(tmp_path, monkeypatch, request)
    network = nn.Linear(4, 2)
    model = gs.Model(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1))
    with pytest.raises(EnoughSteps):
        for _ in range(3):
            model.zero_grad()
            for _ in range(2):
                model.forward_backward(torch.ones(3, 4), torch.ones(3, 2))
            model.step()
    batch, step = What.BATCH, What.STEP
    expected = [What.START, batch, batch, step, batch, batch, step]
    assert [record.what for record in noted.records()] == expected
    lines = operations_file(noted.file).read_text().splitlines(keepends=True)
    names = [op.name for op in read_lines(Operation, lines)]
    assert names.count("aten.addmm.default") == 1


def test_nothing_is_noted_where_nobody_asks(tmp_path: Path) -> None:
    network = nn.Linear(4, 2)
    model = gs.Model(network, nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), lr=0.1))
    model.train_step(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    assert list(tmp_path.iterdir()) == []
