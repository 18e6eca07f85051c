"""A distributed network of transformers that is asked to generate, in a loop of its script."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import graphsplit as gs

gs.init()
torch.manual_seed(0)
SIZES = {"vocab_size": 8, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 1}
net = GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0))
gs.apply_placement(net, {"transformer.h.0": 0, "transformer.h.1": 1})
net = gs.distribute(net)
words = torch.zeros(1, 4, dtype=torch.long)
print(f"loss {net(input_ids=words, labels=words).loss.item():.3f}")
net.eval()
with torch.no_grad():
    net.generate(words, max_new_tokens=3, do_sample=False)  # with a cache
