"""Batches for the models of the zoo, the same in every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY = 64
SAMPLES, LENGTH = 2, 10

Batch = dict[str, Any]
Make = Callable[[torch.Generator], Batch]


def batches_by(make: Make, num: int = 3) -> list[Batch]:
    """Some batches, each from the same generator."""
    generator = torch.Generator().manual_seed(7)
    return [make(generator) for _ in range(num)]


def tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random tokens; the smallest numbers are kept for padding and the like."""
    return torch.randint(4, VOCABULARY, shape or (SAMPLES, LENGTH), generator=generator)


def padding_mask() -> torch.Tensor:
    """The last sample is shorter."""
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    mask[-1, -3:] = 0
    return mask


def next_token(generator: torch.Generator) -> Batch:
    """Decoders: every token foretells the next one."""
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def next_token_padded(generator: torch.Generator) -> Batch:
    """Decoders, with samples of different length."""
    mask = padding_mask()
    ids = tokens(generator)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def next_token_all_ones(generator: torch.Generator) -> Batch:
    """Decoders, with a mask that masks nothing."""
    return {**next_token(generator), "attention_mask": torch.ones(SAMPLES, LENGTH).long()}


def masked_tokens(generator: torch.Generator) -> Batch:
    """Encoders: some tokens are to be restored."""
    ids = tokens(generator)
    hidden = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.4
    hidden[:, 0] = True
    return {
        "input_ids": ids.masked_fill(hidden, 3),
        "attention_mask": padding_mask(),
        "labels": ids.masked_fill(~hidden, -100),
    }


def masked_tokens_of_one_length(generator: torch.Generator) -> Batch:
    """Encoders, with a mask that masks nothing."""
    return {**masked_tokens(generator), "attention_mask": torch.ones(SAMPLES, LENGTH).long()}


def classified_tokens(generator: torch.Generator) -> Batch:
    """Encoders: a class for the whole text."""
    return {
        "input_ids": tokens(generator),
        "attention_mask": padding_mask(),
        "labels": torch.randint(0, 3, (SAMPLES,), generator=generator),
    }


def translated(generator: torch.Generator) -> Batch:
    """Encoder and decoder: one text becomes another."""
    return {
        "input_ids": tokens(generator),
        "attention_mask": padding_mask(),
        "labels": tokens(generator, SAMPLES, 6),
    }


def classified_images(size: int) -> Make:
    """Square images with a class each."""

    def make(generator: torch.Generator) -> Batch:
        return {
            "pixel_values": torch.randn(SAMPLES, 3, size, size, generator=generator),
            "labels": torch.randint(0, 3, (SAMPLES,), generator=generator),
        }

    return make


def segmented_images(generator: torch.Generator) -> Batch:
    """Square images with a class for every pixel."""
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 3, (SAMPLES, 32, 32), generator=generator),
    }


def images_and_texts(generator: torch.Generator) -> Batch:
    """Two towers; a plain value among the tensors."""
    return {
        "input_ids": tokens(generator),
        "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator),
        "attention_mask": padding_mask(),
        "return_loss": True,
    }


def images_and_texts_unmasked(generator: torch.Generator) -> Batch:
    """Two towers, texts of one length."""
    batch = images_and_texts(generator)
    del batch["attention_mask"]
    return batch


def time_series(generator: torch.Generator) -> Batch:
    """What was measured, and what was measured next."""
    return {
        "past_values": torch.randn(SAMPLES, 16, 3, generator=generator),
        "future_values": torch.randn(SAMPLES, 4, 3, generator=generator),
    }


def spectrograms(generator: torch.Generator) -> Batch:
    """Speech as Mel spectrograms, to be written down."""
    return {
        "input_features": torch.randn(SAMPLES, 8, 20, generator=generator),
        "labels": tokens(generator, SAMPLES, 6),
    }


def classified_waves(generator: torch.Generator) -> Batch:
    """Speech as sound, with a class."""
    return {
        "input_values": torch.randn(SAMPLES, 400, generator=generator),
        "labels": torch.randint(0, 3, (SAMPLES,), generator=generator),
    }


def waves(generator: torch.Generator) -> Batch:
    """Speech as sound, to be written down."""
    return {
        "input_values": torch.randn(SAMPLES, 400, generator=generator),
        "labels": torch.randint(1, 20, (SAMPLES, 4), generator=generator),
    }
