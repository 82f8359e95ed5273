"""Trains transformers' GPT-2 on evenpack's batches in a plain PyTorch loop.

    python examples/training_loop.py [RUN.yaml [section.key=value ...]]

Without a run file it uses `demo`, a small GPT-2 on text that every Python installation has.
"""

import sys

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import evenpack

STEPS = 10

run = evenpack.open(*(sys.argv[1:] or ["demo"]))
run.prepare()
torch.manual_seed(run.config.run.seed)
sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": run.config.positions_needed}
end = dict.fromkeys(("bos_token_id", "eos_token_id"), run.prepared.end_of_text_id)
model = GPT2LMHeadModel(GPT2Config(vocab_size=run.prepared.vocabulary_size, **sizes, **end))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for step in run.steps(rank=0, ranks=1, stop_step=STEPS):
    loss = torch.zeros(())
    for batch in step.micro_batches:  # gradient accumulation
        segment = torch.bucketize(torch.arange(batch.slots), batch.cu_seqlens[1:], right=True)
        sees = (segment[:, None] == segment[None, :]).tril()  # of its own sequence, what came before
        inputs = {"input_ids": batch.tokens[None], "position_ids": batch.position_ids[None]}
        logits = model(**inputs, attention_mask=sees[None, None]).logits[0]
        targets = batch.targets["next_token"]
        losses = F.cross_entropy(logits, targets.labels, reduction="none") * targets.weights
        share = losses.sum() / batch.step_counts.targets  # of the mean over the whole step, whatever the ranks
        share.backward()
        loss += share.detach()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step.step + 1}: loss {loss:.4f} over {step.counts.targets:,} targets")
