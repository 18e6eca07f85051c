"""Frames that nobody should send, by the million, against the decoder and a receiving channel.

    python tests/fuzz/frame_fuzzer.py --frames 10000000 --seed 1

Most frames are valid ones, changed in one of the ways that ``CHANGES`` lists; the rest is noise.
Each one is either refused by ``FrameError``, or fits what ``check_accepted`` says, which is written
against the documented format and shares no code with the decoder. One in eight goes to a receiver
in pieces, which must never hold more than its channel allows. Memory has to stay flat.
"""

from __future__ import annotations

import argparse
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from google.protobuf.message import DecodeError

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import FrameError
from graphsplit.failure import AbortSignal
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.frame import MESSAGE, Frame, FrameDecoder, FrameEncoder
from graphsplit.transport.grpc.chunk import ChunkPart, read_chunk
from graphsplit.transport.grpc.inbound import GrpcReceiver
from graphsplit.transport.session import AbortWatch
from graphsplit.transport.wait import WaitPolicy

GENERATION = 3
MESSAGE_BYTES, FIXED_BYTES = 24, 48
INTERESTING = (
    *(0, 1, 2, 3, 7, 8, 63, 64, 255, 4096, 4097, 65535, 65536),
    *(1 << 31, (1 << 31) - 1, 1 << 32, 1 << 47, 1 << 62, (1 << 63) - 1, (1 << 64) - 1),
)
SPECS = (
    ChannelSpec(0, 0, 0, 1, torch.float32, (4,), 16, 2),
    ChannelSpec(0, 1, 0, 1, torch.float32, (3, 2), 64, 1),
    ChannelSpec(0, 2, 0, 1, torch.float64, (None, 8), 4096, 2),
    ChannelSpec(0, 3, 0, 1, torch.int64, (), 8, 2),
    ChannelSpec(1, 0, 0, 1, torch.bfloat16, (2, None, 3, None), 2048, 4),
    ChannelSpec(1, 1, 0, 1, torch.bool, (None,), 512, 2),
    ChannelSpec(-1, 6, 0, 1, torch.uint8, (None,), 65536, 2),
    ChannelSpec(2, 9, 0, 1, torch.complex64, (1, 2, 3, 4, 5), 4096, 2),
)
CODES = {
    torch.bool: 1,
    torch.uint8: 2,
    torch.int64: 6,
    torch.bfloat16: 8,
    torch.float32: 9,
    torch.float64: 10,
    torch.complex64: 12,
}


@dataclass
class Tally:
    """What became of the frames."""

    frames: int = 0
    accepted: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


class Corpus:
    """Valid headers of one channel."""

    def __init__(self, spec: ChannelSpec, rng: random.Random) -> None:
        self.spec = spec
        self.encoder = FrameEncoder(spec, generation=GENERATION)
        self.headers = [MESSAGE.pack(0, 0, 0) + self.encoder.frame_of(None).raw]
        for _ in range(16):
            value = self._value(rng)
            if value is not None:
                self.headers.append(MESSAGE.pack(0, 0, 0) + self.encoder.frame_of(value).raw)

    def _value(self, rng: random.Random) -> torch.Tensor | None:
        """A value of any size and layout that the channel takes."""
        shape = [n if n is not None else rng.choice((0, 1, 2, 5)) for n in self.spec.shape]
        layout = rng.randrange(3)
        value = torch.empty(shape, dtype=self.spec.dtype)
        if layout == 1 and len(shape) > 1:
            order = list(range(len(shape)))
            rng.shuffle(order)
            inverse = [order.index(i) for i in range(len(shape))]
            value = torch.empty([shape[i] for i in order], dtype=self.spec.dtype).permute(inverse)
        elif layout == 2:
            value = torch.empty([1] * len(shape), dtype=self.spec.dtype).expand(shape)
        return value


def flip_bits(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)


def lie(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    """A field of eight bytes, mostly a size or a stride, becomes an interesting number."""
    offset = rng.randrange(0, len(header) - 7, 4)
    struct.pack_into("<Q", header, offset, rng.choice(INTERESTING))


def lie_about_sizes(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    """Payload, shape and strides at once, so that some of them agree."""
    start = MESSAGE_BYTES + FIXED_BYTES
    for offset in range(start, len(header) - 7, 8):
        if rng.random() < 0.5:
            struct.pack_into("<q", header, offset, rng.choice((0, 1, 2, 3, 64, 1 << 40, -1)))
    if rng.random() < 0.7:
        struct.pack_into("<Q", header, MESSAGE_BYTES + 32, rng.choice(INTERESTING))


def cut_or_extend(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    if rng.random() < 0.5:
        del header[rng.randrange(len(header)) :]
    else:
        header += rng.randbytes(rng.choice((1, 8, 16, 100)))


def noise(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    header[:] = rng.randbytes(len(header))


def of_another_channel(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    header[:] = rng.choice(rng.choice(corpora).headers)


def of_another_generation(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    struct.pack_into("<q", header, MESSAGE_BYTES + 8, rng.choice((0, 1, 2, 4, -1, 1 << 62)))


def replay(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    struct.pack_into("<Q", header, 0, rng.choice(INTERESTING))


def nothing(header: bytearray, rng: random.Random, corpora: Sequence[Corpus]) -> None:
    """A frame as it should be: the decoder must not be right by refusing everything."""


CHANGES: tuple[Callable[[bytearray, random.Random, Sequence[Corpus]], None], ...] = (
    *(flip_bits, flip_bits, lie, lie, lie_about_sizes, lie_about_sizes, cut_or_extend, noise),
    *(of_another_channel, of_another_generation, replay, nothing),
)


def check_accepted(header: bytes, spec: ChannelSpec) -> None:
    """What every accepted header must be, by the format's description alone."""
    dims = len(spec.shape)
    assert len(header) == MESSAGE_BYTES + FIXED_BYTES + 16 * dims
    magic, flags, code, generation, plan, edge, payload, count, offset = struct.unpack_from(
        "<4sHHqqqQHH", header, MESSAGE_BYTES
    )
    assert (magic, generation, plan, edge) == (b"GSF1", GENERATION, spec.plan, spec.edge)
    assert code == CODES[spec.dtype] and count == dims and flags in (0, 1)
    numbers = struct.unpack_from(f"<{2 * dims}q", header, MESSAGE_BYTES + FIXED_BYTES)
    shape, strides = numbers[:dims], numbers[dims:]
    if flags == 1:
        assert payload == 0 and offset == 0 and not any(numbers)
        return
    assert all(n >= 0 for n in numbers)
    assert all(want in (None, got) for want, got in zip(spec.shape, shape, strict=True))
    elements = span = 1
    for size, stride in zip(shape, strides, strict=True):
        elements *= size
        span += (size - 1) * stride
    span = span if elements else 0
    itemsize = spec.dtype.itemsize
    assert span * itemsize <= spec.max_bytes and payload <= span * itemsize
    assert None not in spec.shape or elements * itemsize <= spec.max_bytes
    assert offset * itemsize < 64


class Target:
    """The decoders and a receiver of every channel."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.corpora = [Corpus(spec, self.rng) for spec in SPECS]
        self.decoders = [FrameDecoder(spec, generation=GENERATION) for spec in SPECS]
        self.watch = AbortWatch(WaitPolicy(AbortSignal()))
        self.tally = Tally()

    def frame(self) -> tuple[int, bytes, str]:
        """A channel, and a header for it."""
        rng = self.rng
        number = rng.randrange(len(SPECS))
        header = bytearray(rng.choice(self.corpora[number].headers))
        change = rng.choice(CHANGES)
        change(header, rng, self.corpora)
        return number, bytes(header), change.__name__

    def decode_one(self) -> None:
        """One frame for a decoder."""
        number, header, kind = self.frame()
        decoder, tally = self.decoders[number], self.tally
        tally.frames += 1
        try:
            frame = decoder.frame_of_message(header, sequence=0, step=0, microbatch=0)
        except FrameError:
            tally.refused += 1
            assert kind != "nothing", f"a valid header was refused: {header.hex()}"
            return
        check_accepted(header, SPECS[number])
        if tally.accepted % 256 == 0 and frame.layout is not None:
            assert tuple(frame.empty().shape) == frame.layout.shape
        tally.accepted += 1
        tally.kinds[kind] += 1

    def receive_some(self) -> None:
        """A few frames, in pieces, for a receiver, until it refuses one."""
        rng, tally = self.rng, self.tally
        number = rng.randrange(len(SPECS))
        spec = SPECS[number]
        receiver = GrpcReceiver(spec, cast(Any, _Nobody()), self.watch, GENERATION)
        for sequence in range(spec.depth + 2):
            tally.frames += 1
            header = bytearray(rng.choice(self.corpora[number].headers))
            struct.pack_into("<Q", header, 0, sequence)
            size = struct.unpack_from("<Q", header, MESSAGE_BYTES + 32)[0]
            if rng.random() < 0.3:
                rng.choice(CHANGES)(header, rng, self.corpora)
            if rng.random() < 0.2:
                size = rng.choice((0, 1, size + 1, 2 * size, 1 << 16))
            try:
                half = size // 2
                receiver.put(ChunkPart(header=bytes(header), data=bytes(half), size=half))
                receiver.put(ChunkPart(data=bytes(size - half), size=size - half))
            except FrameError:
                tally.refused += 1
                break
            tally.accepted += 1
            # A header that was cut to nothing only goes on with the message before it.
            held = receiver._arrived.qsize() + (receiver._arriving is not None)
            assert held <= spec.depth, "more messages than the channel's depth were taken"
        receiver.close()

    def parse_one(self) -> None:
        """One message of a stream, as bytes, for the parser that stands in for protobuf."""
        rng, tally = self.rng, self.tally
        tally.frames += 1
        number, header, _ = self.frame()
        spec = SPECS[number]
        chunk = pb.Chunk(plan=spec.plan, edge=spec.edge, header=header, payload=rng.randbytes(9))
        data = bytearray(chunk.SerializeToString())
        for _ in range(rng.choice((0, 1, 2, 4))):
            data[rng.randrange(len(data))] = rng.choice((0, 8, 0x1A, 0x22, 0x7F, 0x80, 0xFF))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            piece = read_chunk(bytes(data))
        except FrameError:
            tally.refused += 1
            return
        tally.accepted += 1
        assert 0 <= piece.start <= piece.start + piece.size <= len(data)
        parts = [piece.header, piece.proof, *piece.credits]
        assert sum(map(len, parts)) + piece.size <= len(data)
        try:
            theirs = pb.Chunk.FromString(bytes(data))
        except DecodeError:
            return
        payload = bytes(data[piece.start : piece.start + piece.size])
        assert (theirs.header, theirs.payload) == (piece.header, payload)

    def run(self, frames: int, *, report: Callable[[str], None]) -> None:
        """Decode this many frames."""
        started, rss = time.monotonic(), 0
        next_report = max(1, frames // 20)
        while self.tally.frames < frames:
            for _ in range(24):
                self.decode_one()
            for _ in range(4):
                self.parse_one()
            self.receive_some()
            if self.tally.frames >= next_report:
                next_report += max(1, frames // 20)
                now = resident_bytes()
                rss = rss or now
                tally, took_s = self.tally, time.monotonic() - started
                report(
                    f"{tally.frames} frames in {took_s:.0f} s: {tally.accepted} accepted, "
                    f"{tally.refused} refused; resident memory {now - rss:+d} bytes"
                )
                assert now - rss < 16 << 20, "memory grows"


class _Nobody:
    """Where a receiver's news go."""

    def notify(self) -> None: ...

    def grant(self, spec: ChannelSpec, messages: int) -> None: ...

    def memory_for(self, receiver: GrpcReceiver, frame: Frame) -> torch.Tensor | None:
        return frame.empty_payload(None)


def resident_bytes() -> int:
    """How much memory this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--frames", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {arguments.seed}", flush=True)
    target = Target(arguments.seed)
    target.run(arguments.frames, report=lambda line: print(line, flush=True))
    print(f"accepted by what was done to them: {dict(target.tally.kinds)}")


if __name__ == "__main__":
    main()
