"""A training state in one process: what is saved, replaced, refused, and left alone."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_helpers import SmallDisk, alone, task_of
from simulated.compare import difference
from torch import nn

from graphsplit.checkpoint.disk import files
from graphsplit.checkpoint.disk import folder as folders
from graphsplit.encoding.values import to_text
from graphsplit.errors import CheckpointError, StateError
from graphsplit.torch_ext.attributes import buffers_of


class Tied(nn.Module):
    """A tied weight, running statistics, a buffer that is not persistent, extra state."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return self.head(self.norm(self.embed(x)))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def trained(steps: int = 2, *, seed: int = 0, make: Callable[[], nn.Module] = Tied) -> Any:
    torch.manual_seed(seed)
    network = make()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    for _ in range(steps):
        loss = network(torch.randint(0, 7, (5,))).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network, optimizer


def save(pair: Any, folder: Path, **extra: Any) -> None:
    alone(task_of(*pair)).save(folder, gather=False, extra=extra)


def load(pair: Any, folder: Path, **extra: Any) -> Any:
    return alone(task_of(*pair)).load(folder, extra=extra)


def state_of(pair: Any) -> Any:
    network, optimizer = pair
    return dict(network.state_dict()), network.seen, optimizer.state_dict()


def assert_same(one: Any, other: Any) -> None:
    assert difference(state_of(one), state_of(other)) is None


def test_everything_comes_back_with_every_bit(tmp_path: Path) -> None:
    pair, other = trained(), trained(0, seed=9)
    save(pair, tmp_path / "save")
    before = torch.get_rng_state()
    torch.rand(10)
    load(other, tmp_path / "save")
    assert_same(pair, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert other[0].head.weight is other[0].embed.weight


def test_plain_pytorch_reads_the_weights(tmp_path: Path) -> None:
    class Plain(Tied):
        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

    pair, other = trained(make=Plain), Plain()
    save(pair, tmp_path / "save")
    safetensors.torch.load_model(other, tmp_path / "save" / "weights.safetensors")
    assert difference(dict(pair[0].state_dict()), dict(other.state_dict())) is None


def test_no_file_of_a_save_is_a_pickle(tmp_path: Path) -> None:
    save(trained(), tmp_path / "save")
    assert sorted(os.listdir(tmp_path / "save")) == [
        "manifest.json",
        "training.safetensors",
        "weights.safetensors",
    ]
    json.loads((tmp_path / "save" / "manifest.json").read_text())


def test_a_second_save_replaces_the_first_and_a_third_the_second(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        pair, other = trained(steps), trained(0)
        save(pair, tmp_path / "save")
        assert len(os.listdir(tmp_path / "save")) == 3
        load(other, tmp_path / "save")
        assert_same(pair, other)


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "weights.txt").write_text("mine")
    save(trained(), tmp_path)
    save(trained(), tmp_path)
    folders.remove_save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "weights.txt"]


class Stop(BaseException):
    """The process is killed here."""


@pytest.mark.parametrize("moment", range(12))
def test_a_save_that_is_killed_anywhere_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    old, new, found = trained(1), trained(3), trained(0)
    save(old, tmp_path)
    left = moment
    originals = {name: getattr(os, name) for name in ("fsync", "replace", "unlink")}

    def dying(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Stop
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        monkeypatch.setattr(os, name, dying(name))
    try:
        save(new, tmp_path)
        is_finished = True
    except Stop:
        is_finished = False
    monkeypatch.undo()
    load(found, tmp_path)
    committed = json.loads((tmp_path / "manifest.json").read_text())["slot"] == 1
    assert_same(new if committed else old, found)
    assert committed or not is_finished
    save(new, tmp_path)  # what was left does not disturb the next one
    assert len(os.listdir(tmp_path)) == 3


def test_a_save_that_was_never_finished_is_no_save(tmp_path: Path) -> None:
    save(trained(), tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="it was not finished: its manifest is written last"):
        load(trained(0), tmp_path)


def test_a_file_in_the_place_of_the_folder_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"(?s)file is a file, and no folder.*Fix: give a save"
    ):
        save(trained(), tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"Not a directory"):
        save(trained(), tmp_path / "file" / "save")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("room", [0, 700, 1200, 3000, 8000, 9500])
def test_a_full_disk_is_reported_and_leaves_the_old_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    old, found = trained(1), trained(0)
    save(old, tmp_path)
    disk = SmallDisk(room)
    monkeypatch.setattr(files, "open_instead", disk.open)
    with pytest.raises(CheckpointError, match=r"(?s)nothing was saved .*No space left.*Fix: free"):
        save(trained(3), tmp_path)
    monkeypatch.undo()
    assert len(os.listdir(tmp_path)) == 3
    load(found, tmp_path)
    assert_same(old, found)


def test_a_folder_that_may_not_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot save to .*file/save: Not a directory"):
        save(trained(), tmp_path / "file" / "save")


def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra/rule is a builtins\.function"):
        save(trained(), tmp_path / "save", rule=lambda: None)
    assert not (tmp_path / "save").exists() or not os.listdir(tmp_path / "save")


def test_extra_objects_and_values_come_back(tmp_path: Path) -> None:
    network, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    optimizer.step()
    scheduler.step()
    average = nn.Linear(2, 2)
    save((network, optimizer), tmp_path, scheduler=scheduler, average=average, note={"best": 0.5})
    other = trained(0)
    fresh = torch.optim.lr_scheduler.MultiStepLR(other[1], [1, 3])
    copy = nn.Linear(2, 2)
    loaded = load(other, tmp_path, scheduler=fresh, average=copy)
    assert fresh.state_dict() == scheduler.state_dict()
    assert torch.equal(copy.weight, average.weight)
    assert loaded.extra["note"] == {"best": 0.5}


def test_an_extra_object_that_was_not_saved_is_an_error(tmp_path: Path) -> None:
    save(trained(), tmp_path)
    with pytest.raises(StateError, match="missing: extra entry 'scheduler'"):
        load(trained(0), tmp_path, scheduler=nn.Linear(1, 1))


def test_all_that_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    save(trained(), tmp_path)

    class Other(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5)
            self.more = nn.Linear(2, 2).double()

    other = trained(0, seed=5, make=Other)
    before = {name: value.clone() for name, value in other[0].state_dict().items()
              if isinstance(value, torch.Tensor)}  # fmt: skip
    with pytest.raises(StateError, match="nothing was loaded") as caught:
        load(other, tmp_path)
    for text in (
        "missing: more.weight",
        "norm.weight is float32[4]; expected float32[5]",
        "norm.running_mean is float32[4]; expected float32[5]",
        "optimizer 0, AdamW: has groups of [5] parameters; [3] were saved. Fix: add the groups",
    ):
        assert text in str(caught.value)
    assert all(torch.equal(other[0].state_dict()[name], value) for name, value in before.items())


def test_another_dtype_is_another_network(tmp_path: Path) -> None:
    save(trained(), tmp_path)
    network = Tied().double()
    with pytest.raises(StateError, match=r"embed\.weight is float32\[7, 4\]; expected float64"):
        load((network, torch.optim.AdamW(network.parameters())), tmp_path)


def test_another_optimizer_and_an_unknown_key_are_named(tmp_path: Path) -> None:
    save(trained(), tmp_path)
    network = nn.Embedding(7, 4)
    with pytest.raises(StateError) as caught:
        load((network, torch.optim.SGD(network.parameters(), lr=0.1)), tmp_path)
    assert "unknown: norm.weight" in str(caught.value)
    assert "was saved from AdamW; it is SGD now" in str(caught.value)


def test_a_model_without_an_optimizer_loads_the_network_alone(tmp_path: Path) -> None:
    pair, network = trained(), Tied()
    save(pair, tmp_path)
    load((network, None), tmp_path)
    assert difference(dict(pair[0].state_dict()), dict(network.state_dict())) is None


def test_wider_optimizer_state_keeps_its_bits(tmp_path: Path) -> None:
    network = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for parameter in network.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
    save((network, optimizer), tmp_path)
    other = nn.Linear(3, 3).bfloat16()
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    load((other, fresh), tmp_path)
    assert difference(optimizer.state_dict(), fresh.state_dict()) is None


@pytest.mark.parametrize("name", ["weights.safetensors", "training.safetensors"])
def test_damage_is_noticed_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    save(trained(), tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 4
    (tmp_path / name).write_bytes(content)
    other, same = trained(0, seed=5), trained(0, seed=5)
    with pytest.raises(CheckpointError, match="is damaged: its checksum"):
        load(other, tmp_path)
    assert_same(other, same)


def test_a_bit_of_the_manifest_that_flips_is_noticed(tmp_path: Path) -> None:
    save(trained(), tmp_path)
    path, other = tmp_path / "manifest.json", trained(0, seed=5)
    written = path.read_bytes()
    for place in range(0, len(written), 7):
        damaged = written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :]
        if says_the_same(written, damaged):  # as a last digit of a number may
            continue
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load(other, tmp_path)
    assert_same(other, trained(0, seed=5))


def says_the_same(one: bytes, other: bytes) -> bool:
    try:
        same: bool = json.loads(one) == json.loads(other)
    except ValueError:
        return False
    return same


def test_a_file_of_another_save_is_noticed(tmp_path: Path) -> None:
    save(trained(1), tmp_path / "one")
    save(trained(2), tmp_path / "two")
    (tmp_path / "two" / "weights.safetensors").replace(tmp_path / "one" / "weights.safetensors")
    with pytest.raises(CheckpointError, match="is not the file that its manifest lists"):
        load(trained(0), tmp_path / "one")


def test_a_missing_file_and_a_truncated_one_are_named(tmp_path: Path) -> None:
    save(trained(), tmp_path)
    path = tmp_path / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"training\.safetensors is no whole safetensors"):
        load(trained(0), tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"training\.safetensors is seen by no worker"):
        load(trained(0), tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "training.safetensors"])
def test_a_pipe_that_somebody_planted_is_not_waited_for(tmp_path: Path, name: str) -> None:
    save(trained(), tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: it is no regular file"):
        load(trained(0), tmp_path)


def edit(path: Path, **changes: Any) -> None:
    """Another manifest, with the checksum that belongs to it."""
    manifest = {**json.loads(path.read_text()), **changes}
    node = {k: v for k, v in manifest.items() if k not in ("format", "version", "checksum")}
    manifest["checksum"] = zlib.crc32(to_text(node).encode())
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 7}, "written in format 7; this graphsplit reads format 1"),
        ({"format": "theirs"}, "no manifest of a graphsplit training state"),
        ({"files": []}, "lists files that no save has"),
        ({"files": [{"name": "../../etc/passwd", "size_bytes": 1, "header_sha256": ""}]}, "lists"),
        ({"slot": 3}, "slot is 3, not 0 to 1"),
        ({"num_shards": 10**9}, "num_shards is 1000000000, not 1 to 100000"),
        ({"colour": 1}, "colour is not expected"),
        ({"files": 3}, "files is 3, no list"),
        ({"training": {"network": {}, "optimizers": {}, "position": {"step": -1}}}, "missing: the"),
    ],
)
def test_a_manifest_of_another_form_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save(trained(), tmp_path)
    edit(tmp_path / "manifest.json", **changes)
    with pytest.raises((CheckpointError, StateError), match=message):
        load(trained(0), tmp_path)


def test_a_folder_of_saves_is_told_from_a_save(tmp_path: Path) -> None:
    save(trained(), tmp_path / "step-10")
    with pytest.raises(CheckpointError, match=r"it holds saves, the newest is .*step-10"):
        load(trained(0), tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        load(trained(0), tmp_path / "elsewhere")


def test_one_file_of_weights_is_written_and_loaded(tmp_path: Path) -> None:
    pair, other = trained(), Tied()
    states = alone(task_of(*pair))
    states.save_weights(tmp_path / "w.safetensors")
    alone(task_of(other)).load_weights(tmp_path / "w.safetensors")
    assert difference(dict(pair[0].state_dict()), dict(other.state_dict())) is None
    assert other.calls == pair[0].calls


def test_the_optimizers_go_into_one_file(tmp_path: Path) -> None:
    pair, other = trained(), trained(0)
    alone(task_of(*pair)).save_optimizers(tmp_path / "o.safetensors")
    alone(task_of(*other)).load_optimizers(tmp_path / "o.safetensors")
    assert difference(pair[1].state_dict(), other[1].state_dict()) is None


def test_weights_that_the_library_saved_are_loaded(tmp_path: Path) -> None:
    pair, other = trained(make=lambda: nn.Embedding(7, 4)), nn.Embedding(7, 4)
    safetensors.torch.save_model(pair[0], str(tmp_path / "w.safetensors"))
    alone(task_of(other)).load_weights(tmp_path / "w.safetensors")
    assert torch.equal(pair[0].weight, other.weight)


def test_a_weight_that_is_tied_here_and_stored_once_under_its_other_name_is_found(
    tmp_path: Path,
) -> None:
    network = Tied()
    state = {k: v for k, v in network.state_dict().items() if k != "embed.weight"}
    calls = state.pop("_extra_state")
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    other = Tied()
    with pytest.raises(StateError, match=r"loaded\n  missing: _extra_state$"):
        alone(task_of(other)).load_weights(tmp_path / "w.safetensors")
    assert calls == {"calls": 0}


def test_a_hook_that_makes_entries_is_named_or_heard(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    network.register_state_dict_post_hook(
        lambda module, state, prefix, local: state.update(double=module.weight * 2)
    )
    with pytest.raises(CheckpointError, match="holds double, which are neither parameters"):
        alone(task_of(network)).save(tmp_path / "folder", gather=False, extra={})
    alone(task_of(network)).save_weights(tmp_path / "w")
    found = safetensors.torch.load_file(tmp_path / "w")
    assert torch.equal(found["double"], network.weight * 2) and len(found) == 3


class Remembering(nn.Module):
    """A module with a tensor that is no state until capture makes it a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.hidden = torch.zeros(3)


@pytest.mark.parametrize("place", ["network", "loss"])
def test_a_tensor_attribute_that_was_a_buffer_is_loaded(tmp_path: Path, place: str) -> None:
    def task(hidden: torch.Tensor, *, captured: bool) -> Any:
        network, loss = nn.Sequential(Remembering()), Remembering()
        holder = network[0] if place == "network" else loss
        if captured:
            del holder.hidden
            holder.register_buffer("hidden", hidden, persistent=False)
        optimizer = torch.optim.SGD([*network.parameters(), *loss.parameters()], lr=0.1)
        return task_of(network, optimizer, loss), holder

    values = torch.tensor([1.0, 2.0, 3.0])
    alone(task(values, captured=True)[0]).save(tmp_path, gather=False, extra={})
    fresh, holder = task(values, captured=False)
    alone(fresh).load(tmp_path, extra={})
    assert torch.equal(holder.hidden, values) and "hidden" in buffers_of(holder)
