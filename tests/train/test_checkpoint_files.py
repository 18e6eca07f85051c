"""Files that the safetensors library can read; whole or not at all; damage is noticed."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_helpers import SmallDisk
from simulated.compare import difference

from graphsplit.checkpoint.disk import files, folder
from graphsplit.checkpoint.disk.files import TensorFile, TensorFileWriter, write_file
from graphsplit.checkpoint.disk.layout import (
    INFO_KEY,
    FileInfo,
    FileLayout,
    meta_from_json,
)
from graphsplit.errors import CheckpointError
from graphsplit.security.private_files import replace_file
from graphsplit.tensor_meta import octets_of, plain_meta

COMMON = {
    "conv.weight": torch.randn(4, 3, 2, 2),
    "turned": torch.randn(5, 3).t(),
    "mask": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "half": torch.randn(3).bfloat16(),
    "eighth": torch.randn(3).to(torch.float8_e4m3fn),
    "phase": torch.randn(3, dtype=torch.complex64),
    'with "quotes", ünïcode': torch.ones(1, dtype=torch.int16),
}
RARE = {"wide": torch.randn(2, 3, dtype=torch.complex128), "conj": COMMON["phase"].conj()}


def write(path: Path, tensors: dict[str, torch.Tensor], **info: Any) -> files.FileRecord:
    layout = FileLayout.of({n: plain_meta(t) for n, t in tensors.items()}, FileInfo(**info))
    return write_file(path, tensors, layout)


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "w.safetensors", COMMON)
    found = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert difference(COMMON, {name: found[name] for name in COMMON}) is None


def test_a_file_gives_back_every_bit_of_every_dtype(tmp_path: Path) -> None:
    tensors = {**COMMON, **RARE}
    record = write(tmp_path / "w.safetensors", tensors)
    with closing(TensorFile(tmp_path / "w.safetensors")) as file:
        assert file.record == record
        assert file.metas == {n: plain_meta(t) for n, t in file_order(tensors)}
        assert difference(tensors, {name: file.read(name) for name in tensors}) is None


def file_order(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return sorted(tensors.items(), key=lambda item: item[0])


def test_a_file_of_the_library_is_read_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file({"a": torch.arange(3)}, path)
    with closing(TensorFile(path)) as file:
        assert torch.equal(file.read("a"), torch.arange(3))
        assert file.info == FileInfo()


def test_aliases_and_values_are_kept_in_the_header(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {"wte": torch.ones(2)}, aliases={"head": "wte"}, values={"lr": 0.1})
    with closing(TensorFile(path)) as file:
        assert file.info.aliases == {"head": "wte"}
        assert file.info.values == {"lr": 0.1}
    with safetensors.safe_open(path, "pt") as theirs:
        assert theirs.metadata()["head"] == "wte"  # as safetensors.torch.save_model notes it
        assert theirs.metadata()["format"] == "pt"


def test_the_widest_elements_come_first_so_that_all_are_aligned() -> None:
    metas = {n: plain_meta(t) for n, t in COMMON.items()}
    sizes = [meta.dtype.itemsize for meta in FileLayout.of(metas).metas.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(FileLayout.of(metas).header({})) % 8 == 0


def test_a_header_keeps_its_size_when_the_checksums_come() -> None:
    layout = FileLayout.of({"a": plain_meta(torch.ones(3))})
    assert len(layout.header({})) == len(layout.header({"a": 0xFFFFFFFF}))


def test_nothing_is_seen_before_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = {"a": torch.ones(4)}
    writer = TensorFileWriter(path, FileLayout.of({"a": plain_meta(tensors["a"])}))
    writer.write("a", [octets_of(tensors["a"])])
    assert not path.exists()
    writer.finish()
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_a_file_may_come_in_pieces_and_holds_no_whole_tensor(tmp_path: Path) -> None:
    value = torch.randn(1000)
    writer = TensorFileWriter(tmp_path / "w", FileLayout.of({"a": plain_meta(value)}))
    writer.write("a", octets_of(value).split(333))
    writer.finish()
    with closing(TensorFile(tmp_path / "w")) as file:
        assert torch.equal(file.read("a"), value)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {"a": torch.zeros(8)})
    before = path.read_bytes()
    monkeypatch.setattr(files, "open_instead", SmallDisk(1000).open)
    with pytest.raises(OSError, match="No space left"):
        write(path, {"a": torch.ones(1000)})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_a_text_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    replace_file(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(path, b"new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_one_flipped_bit_is_noticed_and_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {"a": torch.ones(4), "b": torch.ones(4)})
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with closing(TensorFile(path)) as file:
        assert torch.equal(file.read("a"), torch.ones(4))
        with pytest.raises(CheckpointError, match=r"'b' in .* is damaged: its checksum"):
            file.read("b")


@pytest.mark.parametrize("kept", [0, 3, 8, 40, -1, -100])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="no whole safetensors file"):
        TensorFile(path)


def header(described: Any) -> bytes:
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        (1 << 40).to_bytes(8, "little") + b"{}",
        header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header([]),
    ],
)
def test_sizes_in_a_header_are_not_trusted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        TensorFile(path)


@pytest.mark.parametrize(
    "info",
    [
        "no json",
        json.dumps({"version": 1}),
        json.dumps({"version": 1, "crc32": {"a": "xyz"}, "aliases": {}, "bytes": {}}),
        json.dumps({"version": 1, "crc32": {}, "aliases": {"b": 3}, "bytes": {}}),
        json.dumps({"version": 1, "crc32": {}, "aliases": {}, "bytes": {"a": ["os", [4]]}}),
        json.dumps({"version": 1, "crc32": {}, "aliases": {}, "bytes": {"a": ["int64", [9]]}}),
    ],
)
def test_metadata_of_another_form_is_refused(tmp_path: Path, info: str) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"a": torch.ones(4)}, path, {INFO_KEY: info})
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        TensorFile(path)


def test_another_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"a": torch.ones(4)}, path, {INFO_KEY: '{"version": 2}'})
    with pytest.raises(
        CheckpointError, match="written in format 2; this graphsplit reads format 1"
    ):
        TensorFile(path)


@pytest.mark.parametrize(
    "node",
    [None, [], ["float32"], ["float32", [-1]], ["float32", [1.5]], ["float32", [True]],
     ["float32", [1 << 50]], ["load", [1]], ["no_such", [1]], [3, [1]]],
)  # fmt: skip
def test_a_description_that_is_none_is_refused(node: Any) -> None:
    with pytest.raises(CheckpointError, match="expected"):
        meta_from_json(node, what="'a'")


def test_files_of_another_kind_are_told_with_the_way_to_load_them(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="pass the state that PyTorch loads from it"):
        TensorFile(tmp_path / "w.pt")
    write(tmp_path / "w.safetensors", COMMON)
    with pytest.raises(CheckpointError, match="it is no folder\n  Fix: a file of weights"):
        folder.read_manifest(tmp_path / "w.safetensors")
