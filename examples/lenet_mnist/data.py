"""The example's data: MNIST from IDX files, or scikit-learn's digits when no path is given.

Nothing is read or decoded before the first item is asked for, so a worker that consumes no
input pays nothing for its loader; ``len()`` needs only the first bytes of a file. Both data
sets give images ``[1, 32, 32]`` (float32, normalised) and labels (int64), and transform a
whole batch at once in ``__getitems__``.

    python data.py --download PATH      fetch the four MNIST files into PATH
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import math
import struct
import urllib.request
import zlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

IMAGE_SIZE = 32
MEAN, STD = 0.1307, 0.3081
NUM_DIGITS, NUM_TRAIN_DIGITS = 1797, 1500
READ_BYTES = 1 << 20

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
MNIST_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
MD5_OF_UNCOMPRESSED = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)

Batch = tuple[torch.Tensor, torch.Tensor]
Bytes = npt.NDArray[np.uint8]


class MnistFileError(ValueError):
    """An MNIST file is missing, truncated or not what its name says."""


class ImageDataset(Dataset[Batch]):
    """Grey images with labels, loaded on first use and transformed a batch at a time."""

    def __init__(self, max_value: float) -> None:
        """Pixels are stored as ``0..max_value``."""
        self._max_value = max_value
        self._loaded: tuple[torch.Tensor, torch.Tensor] | None = None

    def _load(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return raw images ``[num, rows, columns]`` and labels ``[num]`` (int64)."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of images, without decoding any."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Batch:
        """Return one image ``[1, 32, 32]`` and its label."""
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return the images ``[batch, 1, 32, 32]`` and labels ``[batch]`` at ``indices``."""
        if self._loaded is None:
            self._loaded = self._load()
        images, labels = self._loaded
        chosen = torch.tensor(indices)
        pixels = images[chosen].unsqueeze(1).to(torch.float32).div_(self._max_value)
        size = (IMAGE_SIZE, IMAGE_SIZE)
        resized = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        return resized.sub_(MEAN).div_(STD), labels[chosen]


class Mnist(ImageDataset):
    """One half of MNIST, ``"train"`` or ``"test"``, from IDX files in ``folder``."""

    def __init__(self, folder: Path, split: str) -> None:
        super().__init__(max_value=255.0)
        images_name, labels_name = MNIST_FILES[split]
        self._images_path = _find_file(folder, split, images_name)
        self._labels_path = _find_file(folder, split, labels_name)

    def __len__(self) -> int:
        """Return the number of images that the file's header announces."""
        with _open(self._images_path) as file:
            return _read_shape(file, self._images_path, IMAGES_MAGIC)[0]

    def _load(self) -> tuple[torch.Tensor, torch.Tensor]:
        images = read_idx(self._images_path, IMAGES_MAGIC)
        labels = read_idx(self._labels_path, LABELS_MAGIC)
        if len(images) != len(labels):
            raise MnistFileError(
                f"{self._labels_path}: expected {len(images)} labels, as many as the images in "
                f"{self._images_path.name}, but it has {len(labels)}. {_how_to_get()}"
            )
        return torch.from_numpy(images), torch.from_numpy(labels).to(torch.int64)


class Digits(ImageDataset):
    """1,797 handwritten digits of 8x8 that scikit-learn carries: 1,500 to train, 297 to test."""

    def __init__(self, split: str) -> None:
        super().__init__(max_value=16.0)
        # The files are ordered by writer: a fixed shuffle gives both halves all hands.
        order = np.random.default_rng(0).permutation(NUM_DIGITS)
        self._rows = order[:NUM_TRAIN_DIGITS] if split == "train" else order[NUM_TRAIN_DIGITS:]

    def __len__(self) -> int:
        """Return the number of images in this half."""
        return len(self._rows)

    def _load(self) -> tuple[torch.Tensor, torch.Tensor]:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        digits = load_digits()
        images = torch.from_numpy(digits.images[self._rows])
        return images, torch.from_numpy(digits.target[self._rows]).to(torch.int64)


def make_datasets(
    folder: Path | None, *, download: bool = False
) -> tuple[ImageDataset, ImageDataset]:
    """Return the training and the test set: MNIST from ``folder``, or the digits if it is None."""
    if folder is None:
        return Digits("train"), Digits("test")
    if download:
        download_mnist(folder)
    return Mnist(folder, "train"), Mnist(folder, "test")


def batches(
    dataset: Dataset[Batch], *, batch_size: int, shuffle: bool = False, drop_last: bool = False
) -> DataLoader[Batch]:
    """Return a loader of whole batches; collating would only take them apart and stack them."""
    return DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, collate_fn=_keep)


def _keep(batch: Any) -> Any:
    return batch


def read_idx(path: Path, magic: int) -> Bytes:
    """Read an IDX file of bytes, plain or gzip, and check its magic number, shape and length."""
    with _open(path) as file:
        shape = _read_shape(file, path, magic)
        expected = math.prod(shape)
        try:
            body = _read_at_most(file, expected + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise MnistFileError(
                f"{path}: expected {expected} bytes of data after the header, but the gzip "
                f"stream is damaged or cut off ({error}). {_how_to_get()}"
            ) from error
    if len(body) != expected:
        found = f"only {len(body)}" if len(body) < expected else "more"
        raise MnistFileError(
            f"{path}: expected exactly {expected} bytes of data for the shape {shape} in its "
            f"header, but it has {found}. {_how_to_get()}"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read_at_most(file: IO[bytes], num_bytes: int) -> bytearray:
    """Read piece by piece: a damaged header must not decide how much memory is taken."""
    body = bytearray()  # torch wants memory that it may write to
    while len(body) < num_bytes and (piece := file.read(min(READ_BYTES, num_bytes - len(body)))):
        body += piece
    return body


def _read_shape(file: IO[bytes], path: Path, magic: int) -> tuple[int, ...]:
    num_dims = magic & 0xFF
    size = 4 + 4 * num_dims
    try:
        header = file.read(size)
    except (EOFError, OSError, zlib.error) as error:
        raise MnistFileError(f"{path}: the gzip stream is damaged ({error})") from error
    if len(header) != size:
        raise MnistFileError(
            f"{path}: expected a header of {size} bytes, but the file ends after {len(header)}. "
            f"{_how_to_get()}"
        )
    found, *shape = struct.unpack(f">{1 + num_dims}I", header)
    if found != magic:
        raise MnistFileError(
            f"{path}: expected the magic number {magic} of an IDX file with {num_dims} "
            f"dimension(s) of bytes, but found {found}. {_how_to_get()}"
        )
    if num_dims == 3 and tuple(shape[1:]) != (28, 28):
        raise MnistFileError(f"{path}: expected images of 28x28, but found {shape[1]}x{shape[2]}")
    return tuple(shape)


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _find_file(folder: Path, split: str, name: str) -> Path:
    for candidate in _candidates(folder, split, name):
        if candidate.is_file():
            return candidate
    if not folder.is_dir():
        raise MnistFileError(
            f"{folder}: expected a folder with MNIST, but there is none. {_how_to_get()}"
        )
    looked = ", ".join(str(path) for path in _candidates(folder, split, name))
    raise MnistFileError(f"{folder}: {name} is missing; looked for {looked}. {_how_to_get()}")


def _candidates(folder: Path, split: str, name: str) -> list[Path]:
    return [base / (name + suffix) for base in (folder, folder / split) for suffix in ("", ".gz")]


def _how_to_get() -> str:
    names = "\n".join(f"    {name}.gz" for files in MNIST_FILES.values() for name in files)
    return (
        "\n  Fix: put the four files there, plain or gzip,\n"
        f"{names}\n"
        f"  from {MIRRORS[0]} or {MIRRORS[1]} ,\n"
        "  or add --download to have them fetched; or leave the path out (and DATA_PATH unset)\n"
        "  to train on the small digits set that needs no download."
    )


def download_mnist(folder: Path) -> None:
    """Fetch the files that are missing in ``folder``, check them, and name them at the end.

    Several processes may call this at once: one fetches, the others wait and find the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for split, names in MNIST_FILES.items():
            for name in names:
                if not any(path.is_file() for path in _candidates(folder, split, name)):
                    _download_file(folder / f"{name}.gz", MD5_OF_UNCOMPRESSED[name])


def _download_file(target: Path, md5: str) -> None:
    problems = []
    for mirror in MIRRORS:
        url = mirror + target.name
        print(f"fetching {url}", flush=True)
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                compressed = response.read()
            found = hashlib.md5(gzip.decompress(compressed), usedforsecurity=False).hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            problems.append(f"{url}: {error}")
            continue
        if found != md5:
            problems.append(f"{url}: expected MD5 {md5} of the uncompressed file, found {found}")
            continue
        partial = target.with_suffix(".partial")
        partial.write_bytes(compressed)
        # Renamed last, so that an interrupted download is never taken for the file.
        partial.replace(target)
        return
    lines = "\n".join(f"    {problem}" for problem in problems)
    raise MnistFileError(f"{target}: the download failed:\n{lines}{_how_to_get()}")


def main() -> None:
    """Fetch MNIST into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--download", metavar="PATH", type=Path, required=True)
    folder = parser.parse_args().download
    try:
        download_mnist(folder)
    except MnistFileError as error:
        raise SystemExit(str(error)) from None
    print(f"MNIST is in {folder}")


if __name__ == "__main__":
    main()
