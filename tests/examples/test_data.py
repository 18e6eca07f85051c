from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

SOURCE = Path(__file__).parents[2] / "examples" / "lenet_mnist" / "data.py"


@pytest.fixture(scope="module")
def data() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("lenet_mnist_data", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def idx_images(num: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, num * 28 * 28, dtype=np.uint8)
    return struct.pack(">4I", 2051, num, 28, 28) + pixels.tobytes()


def idx_labels(num: int) -> bytes:
    return struct.pack(">2I", 2049, num) + bytes(i % 10 for i in range(num))


def write_mnist(
    folder: Path, *, num: int = 5, suffix: str = "", split_folders: bool = False
) -> None:
    for split, prefix in (("train", "train"), ("test", "t10k")):
        base = folder / split if split_folders else folder
        base.mkdir(parents=True, exist_ok=True)
        for kind, body in (("images-idx3", idx_images(num)), ("labels-idx1", idx_labels(num))):
            content = gzip.compress(body) if suffix else body
            (base / f"{prefix}-{kind}-ubyte{suffix}").write_bytes(content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("split_folders", [False, True])
def test_mnist_is_found_plain_or_gzip_in_either_layout(
    data: ModuleType, tmp_path: Path, suffix: str, split_folders: bool
) -> None:
    write_mnist(tmp_path, suffix=suffix, split_folders=split_folders)
    train, test = data.make_datasets(tmp_path)
    assert (len(train), len(test)) == (5, 5)
    images, labels = train.__getitems__([3, 1])
    assert images.shape == (2, 1, 32, 32) and images.dtype == torch.float32
    assert labels.tolist() == [3, 1] and labels.dtype == torch.int64


def test_pixels_are_scaled_resized_and_normalised(data: ModuleType, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    image, label = data.Mnist(tmp_path, "train")[2]
    raw = torch.frombuffer(bytearray(idx_images(5)[16:]), dtype=torch.uint8).reshape(5, 28, 28)
    expected = torch.nn.functional.interpolate(
        raw[2:3, None].float() / 255, size=(32, 32), mode="bilinear", align_corners=False
    )
    assert torch.equal(image, ((expected - 0.1307) / 0.3081)[0])
    assert label.item() == 2


def test_nothing_is_decoded_before_the_first_item(
    data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    decoded: list[Path] = []
    read_idx = data.read_idx
    monkeypatch.setattr(data, "read_idx", lambda path, m: decoded.append(path) or read_idx(path, m))
    dataset = data.Mnist(tmp_path, "train")
    loader = data.batches(dataset, batch_size=2, shuffle=True, drop_last=True)
    assert len(loader) == 2
    assert decoded == []
    images, labels = next(iter(loader))
    assert images.shape == (2, 1, 32, 32) and labels.shape == (2,)
    assert len(decoded) == 2


def test_a_missing_folder_says_how_to_get_the_files(data: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(data.MnistFileError) as error:
        data.make_datasets(tmp_path / "absent")
    for words in (str(tmp_path / "absent"), "t10k-labels-idx1-ubyte.gz", "--download"):
        assert words in str(error.value)


def test_a_missing_file_is_named(data: ModuleType, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(data.MnistFileError, match="t10k-labels-idx1-ubyte is missing"):
        data.make_datasets(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx_images(5)[:-1], "expected exactly 3920 bytes .* only 3919"),
        (idx_images(5) + b"x", "expected exactly 3920 bytes .* more"),
        (idx_labels(5) + b"x" * 16, "magic number 2051 .* found 2049"),
        (idx_images(5)[:7], "header of 16 bytes, .* after 7"),
        (struct.pack(">4I", 2051, 5, 8, 8) + b"x" * 320, "28x28, but found 8x8"),
        (idx_images(4), "expected 4 labels"),
        (b"", "after 0"),
    ],
)
def test_a_damaged_file_is_named_with_expected_and_actual(
    data: ModuleType, tmp_path: Path, content: bytes, words: str
) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(data.MnistFileError, match=f"(?s)train-.*{words}"):
        data.Mnist(tmp_path, "train")[0]


@pytest.mark.parametrize("keep", [5, -20])
def test_a_truncated_gzip_file_is_named(data: ModuleType, tmp_path: Path, keep: int) -> None:
    write_mnist(tmp_path, suffix=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(data.MnistFileError, match=r"train-images-idx3-ubyte\.gz"):
        data.Mnist(tmp_path, "train")[0]


def test_a_file_that_announces_too_much_is_refused(data: ModuleType, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    huge = struct.pack(">4I", 2051, 2**32 - 1, 28, 28)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(huge)
    with pytest.raises(data.MnistFileError, match="only 0"):
        data.Mnist(tmp_path, "train")[0]


def test_the_digits_are_split_the_same_way_every_time(data: ModuleType) -> None:
    state = torch.get_rng_state()
    train, test = data.make_datasets(None)
    assert (len(train), len(test)) == (1500, 297)
    images, labels = train.__getitems__([0, 1499])
    again, _ = data.make_datasets(None)[0].__getitems__([0, 1499])
    assert torch.equal(images, again)
    assert images.shape == (2, 1, 32, 32) and labels.dtype == torch.int64
    assert torch.equal(torch.get_rng_state(), state)


def fake_mirror(bodies: dict[str, bytes]) -> Any:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        name = url.rsplit("/", 1)[-1]
        if name not in bodies:
            raise OSError("no network")
        return io.BytesIO(bodies[name])

    return urlopen


def test_a_download_is_checked_and_only_then_named(
    data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {name: name.encode() for files in data.MNIST_FILES.values() for name in files}
    md5s = {name: hashlib.md5(body).hexdigest() for name, body in bodies.items()}
    served = {f"{name}.gz": gzip.compress(body) for name, body in bodies.items()}
    monkeypatch.setattr(data, "MD5_OF_UNCOMPRESSED", md5s)
    monkeypatch.setattr(data.urllib.request, "urlopen", fake_mirror(served))
    data.download_mnist(tmp_path)
    files = {path.name for path in tmp_path.glob("*ubyte*")}
    assert files == set(served)
    monkeypatch.setattr(data.urllib.request, "urlopen", fake_mirror({}))
    data.download_mnist(tmp_path)  # all there: nothing is fetched again


def test_a_download_that_fails_names_the_mirrors_and_leaves_no_file(
    data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"train-images-idx3-ubyte.gz": gzip.compress(b"something else")}
    for served, words in ((wrong, "expected MD5"), ({}, "no network")):
        monkeypatch.setattr(data.urllib.request, "urlopen", fake_mirror(served))
        with pytest.raises(data.MnistFileError, match=words):
            data.download_mnist(tmp_path)
        assert list(tmp_path.glob("*ubyte*")) == []


def test_the_real_mnist_is_read(data: ModuleType, mnist_path: Path) -> None:
    train, test = data.make_datasets(mnist_path)
    assert (len(train), len(test)) == (60000, 10000)
    images, labels = test.__getitems__([0, 9999])
    assert labels.tolist() == [7, 6]
    assert images.shape == (2, 1, 32, 32)
