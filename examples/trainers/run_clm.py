"""A small GPT-2 under Trainer, like run_clm: `graphsplit run -n 2 run_clm.py FOLDER [--resume]`.

Two lines are graphsplit's: the import of `Trainer`, and the placement. `FOLDER` gets checkpoints,
from one of which `--resume` goes on, and what the run ends with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import graphsplit as gs
from graphsplit.integrations.transformers import Trainer

STEPS = 50


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of a language that is easily learned; the first words are not to be predicted."""

    def __init__(self, seed: int, size: int) -> None:
        drawn = torch.randint(32, (size, 2), generator=torch.Generator().manual_seed(seed))
        self.tokens = (drawn[:, :1] + torch.arange(12) * (1 + drawn[:, 1:] % 3)) % 32

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        labels = tokens.clone()
        labels[: 1 + index % 4] = -100
        return {"input_ids": tokens, "labels": labels}


def accuracy(found: Any) -> dict[str, float]:
    """How many next words are right."""
    guesses = found.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((guesses == found.label_ids[:, 1:]).mean())}


def train(folder: Path, *, resume: bool = False) -> None:
    """Train, evaluate and save as scripts do."""
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=5,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=25,
        save_steps=10,
        save_total_limit=4,
        report_to=[],
        seed=5,
        use_cpu=True,
        disable_tqdm=True,
    )
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=32,
        n_layer=4,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    gs.apply_placement(model, {"transformer.h.0": 0, "transformer.h.{1..3}": 1})
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Text(1, 160),
        eval_dataset=Text(2, 24),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=str(folder / "run/checkpoint-20") if resume else None)
    trainer.save_model(str(folder / "model"))
    model.save_pretrained(folder / "pretrained")
    optimizer: Any = trainer.optimizer
    state, parameters = optimizer.state_dict(), model.state_dict()
    history = [
        {name: value for name, value in line.items() if not name.endswith(("runtime", "second"))}
        for line in trainer.state.log_history
    ]
    if trainer.is_world_process_zero():
        end = history, parameters, state, torch.get_rng_state()
        torch.save(end, folder / ("resumed.pt" if resume else "end.pt"))


if __name__ == "__main__":
    train(Path(sys.argv[1]), resume="--resume" in sys.argv)
