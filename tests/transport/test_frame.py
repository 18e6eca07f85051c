"""Headers: what is believed, what is refused, and that nothing crashes in between."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_helpers import spec_of

from graphsplit.errors import FrameError, TransportError
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.dtypes import CODE_OF
from graphsplit.transport.frame import MESSAGE, FrameDecoder, FrameEncoder, header_bytes
from graphsplit.transport.layout import layout_of, pack, payload_view, unpack

SPEC = spec_of(torch.float32, (2, 3), max_bytes=256, edge=4, plan=9)
LIST_SPEC = spec_of(torch.int16, (None,), max_bytes=64)
# Where the fields lie in a header; see the docstring of frame.py.
MAGIC, FLAGS, DTYPE, GENERATION, PLAN, EDGE, BYTES, DIMS, OFFSET, SHAPE, STRIDES = (
    *(24, 28, 30, 32, 40, 48, 56, 64, 66, 72, 88),
)


def header_of(spec: ChannelSpec, value: torch.Tensor | None, generation: int = 1) -> bytes:
    frame = FrameEncoder(spec, generation=generation).frame_of(value)
    return MESSAGE.pack(0, 5, 2) + frame.raw


def patched(at: int, form: str, *numbers: int | bytes) -> bytes:
    header = bytearray(header_of(SPEC, torch.zeros(2, 3)))
    struct.pack_into(form, header, at, *numbers)
    return bytes(header)


def test_a_header_says_what_was_encoded() -> None:
    value = torch.zeros(3, 2).t()
    header = header_of(SPEC, value)
    decoder = FrameDecoder(SPEC, generation=1)
    frame = decoder.frame_of(header)
    assert len(header) == header_bytes(SPEC)
    assert frame.shape == (2, 3) and frame.strides == (1, 2) and frame.payload_bytes == 24
    decoder.frame_of_message(header, sequence=0, step=5, microbatch=2)
    assert decoder.frame_of(header) is frame


def test_layouts_that_take_turns_are_looked_at_once_and_few_are_kept() -> None:
    encoder, decoder = FrameEncoder(LIST_SPEC, generation=1), FrameDecoder(LIST_SPEC, generation=1)
    seen = []
    for size in (3, 5, 3, 0, 5):
        frame = encoder.frame_of(torch.zeros(size, dtype=torch.int16))
        assert frame.shape == (size,)
        taken = decoder.frame_of(MESSAGE.pack(0, 0, 0) + frame.raw)
        assert taken.shape == (size,)
        seen.append((frame, taken))
    for first, later in ((0, 2), (1, 4)):
        assert all(a is b for a, b in zip(seen[first], seen[later], strict=True))
    for size in range(30):
        frame = encoder.frame_of(torch.zeros(size, dtype=torch.int16))
        decoder.frame_of(MESSAGE.pack(0, 0, 0) + frame.raw)
    assert len(encoder._known) == len(decoder._known) == 8


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(3, dtype=torch.int16).to_sparse()])
def test_a_value_that_does_not_fit_is_refused_whatever_was_sent_before(wrong: torch.Tensor) -> None:
    encoder = FrameEncoder(LIST_SPEC, generation=1)
    for _ in range(2):
        encoder.frame_of(torch.zeros(3, dtype=torch.int16))
        with pytest.raises(TransportError, match="does not fit the channel"):
            encoder.frame_of(wrong)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "header bytes: expected 104, got 0"),
        (header_of(SPEC, None) + b"x", "header bytes: expected 104, got 105"),
        (header_of(SPEC, None, generation=2), "generation: expected 1, got 2"),
        (patched(MAGIC, "4s", b"XXXX"), "magic: expected b'GSF1', got b'XXXX'"),
        (patched(FLAGS, "<H", 2), "flags: expected 0 or 1, got 2"),
        (patched(FLAGS, "<H", 1), "fields of an absent value"),
        (patched(DTYPE, "<H", CODE_OF[torch.int8]), "expected torch.float32, got torch.int8"),
        (patched(DTYPE, "<H", 999), "got unknown dtype code 999"),
        (patched(PLAN, "<q", 8), r"\(plan, edge\): expected \(9, 4\), got \(8, 4\)"),
        (patched(EDGE, "<q", 5), r"\(plan, edge\): expected \(9, 4\), got \(9, 5\)"),
        (patched(BYTES, "<Q", 25), "payload bytes: expected 24, got 25"),
        (patched(BYTES, "<Q", 2**64 - 1), "payload bytes: expected 24"),
        (patched(DIMS, "<H", 3), "dimensions: expected 2, got 3"),
        (patched(OFFSET, "<H", 16), "offset: expected below 64 bytes, got 64 bytes"),
        (patched(SHAPE, "<q", 3), r"shape: expected \(2, 3\), got \(3, 3\)"),
        (patched(STRIDES, "<2q", -3, 1), "no negative number"),
        (patched(STRIDES, "<2q", 62, 1), r"at most 256, got 260 \(shape \(2, 3\), strides"),
        (patched(STRIDES, "<2q", 2**63 - 1, 2**63 - 1), "bytes with its strides: expected at most"),
    ],
)
def test_a_wrong_header_is_refused_with_expected_and_actual(header: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        FrameDecoder(SPEC, generation=1).frame_of(header)


@pytest.mark.parametrize(
    ("sequence", "step", "microbatch", "message"),
    [
        (1, 5, 2, "sequence number: expected 1, got 0"),
        (0, 6, 2, "expected step 6, microbatch 2, got step 5, microbatch 2"),
        (0, 5, 0, "expected step 5, microbatch 0, got step 5, microbatch 2"),
    ],
)
def test_the_wrong_message_is_refused(
    sequence: int, step: int, microbatch: int, message: str
) -> None:
    decoder = FrameDecoder(SPEC, generation=1)
    with pytest.raises(FrameError, match=message):
        decoder.frame_of_message(
            header_of(SPEC, None), sequence=sequence, step=step, microbatch=microbatch
        )


def test_the_length_of_a_one_dimensional_value_is_bounded() -> None:
    header = bytearray(header_of(LIST_SPEC, torch.zeros(4, dtype=torch.int16)))
    struct.pack_into("<2q", header, 72, 2**40, 0)
    with pytest.raises(FrameError, match="at most 64"):
        FrameDecoder(LIST_SPEC, generation=1).frame_of(bytes(header))


def decode_and_build(spec: ChannelSpec, header: bytes) -> None:
    """What a receiver does with a header: it may refuse; if not, memory stays within bounds."""
    try:
        frame = FrameDecoder(spec, generation=1).frame_of(header)
    except FrameError:
        return
    assert frame.payload_bytes <= spec.max_bytes
    if frame.layout is None:
        return
    value = frame.empty()
    assert value.untyped_storage().nbytes() <= spec.max_bytes + 64
    payload = torch.zeros(frame.payload_bytes, dtype=torch.uint8)
    frame.wire(value).copy_(payload_view(payload, frame.layout, frame.dtype))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([SPEC, LIST_SPEC]),
    st.lists(st.tuples(st.integers(0, 103), st.integers(0, 255)), max_size=12),
)
def test_mutated_headers_never_crash(spec: ChannelSpec, changes: list[tuple[int, int]]) -> None:
    shape = (2, 3) if spec is SPEC else (4,)
    header = bytearray(header_of(spec, torch.zeros(shape, dtype=spec.dtype)))
    for at, byte in changes:
        header[at % len(header)] = byte
    decode_and_build(spec, bytes(header))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([SPEC, LIST_SPEC]),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 70), min_size=4, max_size=4),
    st.integers(0, 2**64 - 1) | st.integers(0, 256),
    st.integers(0, 2**16 - 1) | st.integers(0, 16),
)
def test_hostile_numbers_never_crash(
    spec: ChannelSpec, numbers: list[int], payload_bytes: int, offset: int
) -> None:
    shape = (2, 3) if spec is SPEC else (4,)
    header = bytearray(header_of(spec, torch.zeros(shape, dtype=spec.dtype)))
    struct.pack_into("<Q", header, BYTES, payload_bytes)
    struct.pack_into("<H", header, OFFSET, offset)
    dims = 2 if spec is SPEC else 1
    struct.pack_into(f"<{dims}q", header, len(header) - 8 * dims, *numbers[:dims])
    if spec is LIST_SPEC:
        struct.pack_into("<q", header, SHAPE, numbers[2])
    decode_and_build(spec, bytes(header))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([SPEC, LIST_SPEC]), st.binary(max_size=120))
def test_random_bytes_never_crash(spec: ChannelSpec, noise: bytes) -> None:
    decode_and_build(spec, noise)
    decode_and_build(spec, noise[:24].ljust(24, b"\0") + header_of(spec, None)[24:])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=5), st.integers(0, 5))
def test_any_strides_are_rebuilt(dimensions: list[tuple[int, int]], offset: int) -> None:
    shape = [size for size, _ in dimensions]
    strides = [stride for _, stride in dimensions]
    value = torch.arange(400.0).as_strided(shape, strides, offset)
    layout = layout_of(shape, strides)
    payload, _ = pack(value)
    rebuilt = unpack(payload, layout, value.dtype, offset)
    assert rebuilt.stride() == value.stride() and torch.equal(rebuilt, value)
    assert layout.payload_elements <= layout.span
    assert rebuilt.untyped_storage().nbytes() == 4 * (layout.span + offset)
