"""A script of ``Seq2SeqTrainer``'s: in one process with ``plain``, or over the workers."""

import sys

import torch
import transformers
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

folder, how = sys.argv[1:]
if how == "plain":
    from transformers import Seq2SeqTrainer
else:
    from graphsplit.integrations.transformers import Seq2SeqTrainer


def trained() -> Seq2SeqTrainer:
    """A trainer that has trained; it saves, and says where it ends."""
    sizes = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    net = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    if how != "plain":
        import graphsplit as gs

        gs.apply_placement(net, {"encoder": 0, "decoder": 1})
        gs.distribute(net)  # as for dynamic_dims; it joins the job
    rows = [
        {"input_ids": torch.randint(16, (6,)), "labels": torch.randint(16, (4,))} for _ in range(8)
    ]
    arguments = Seq2SeqTrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = Seq2SeqTrainer(net, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    predictions = trainer.predict(rows[:4]).predictions
    logged = [entry.get("loss", entry.get("train_loss")) for entry in trainer.state.log_history]
    states = net.state_dict(), trainer.optimizer.state_dict()
    end = logged, trainer.evaluate()["eval_loss"], predictions, *states, torch.get_rng_state()
    trainer.save_model()
    if trainer.is_world_process_zero():
        torch.save(end, f"{folder}/end.pt")
    return trainer


if __name__ == "__main__":
    transformers.set_seed(0)
    trainer = trained()
    if how == "generating":
        trainer.args.predict_with_generate = True
        trainer.predict(trainer.train_dataset)
