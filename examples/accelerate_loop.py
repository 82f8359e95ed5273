"""Trains a model of transformers on packs by accelerate, in a loop that resumes.

    accelerate launch --num_processes 2 examples/accelerate_loop.py FOLDER STEPS

Model and optimizer are prepared, the loader is not: accelerate would shard again what is this rank's share already.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import tiny
import torch
from accelerate import Accelerator

import evenpack
from evenpack.adapters.first_step import require_whole_step
from evenpack.adapters.isolation import prove_isolation

MICRO_BATCHES = 2


def main(folder: Path, steps: int) -> None:
    accelerator = Accelerator(cpu=True)  # without it on GPUs
    accelerator.gradient_accumulation_steps = 1  # which `accelerate launch` may set, and `backward` divides by
    rank, ranks = accelerator.process_index, accelerator.num_processes
    loader = evenpack.Loader(
        tiny.documents(),
        pack_length=tiny.PACK_LENGTH,
        packs_per_step=tiny.PACKS_PER_STEP,
        rank=rank,
        ranks=ranks,
        micro_batches=MICRO_BATCHES,
        steps=steps,
    )
    model = tiny.build_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(loader)
    if checkpoint := tiny.newest(folder):
        accelerator.load_state(checkpoint)
    model_inputs = prove_isolation(model, loader)
    first = loader.step
    for step in loader.steps():
        inputs = [model_inputs(batch.to(accelerator.device)) for batch in step.micro_batches]
        if step.step == first:
            require_whole_step(loader, first, inputs, model_inputs)
        total = torch.zeros((), device=accelerator.device)
        for index, given in enumerate(inputs):
            with nullcontext() if index == MICRO_BATCHES - 1 else accelerator.no_sync(model):
                loss = model(**given, num_items_in_batch=step.counts.targets).loss  # a share of the step's mean
                accelerator.backward(loss * ranks)  # gradients are averaged over ranks; the share is to be added
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step.step + 1}: loss {accelerator.reduce(total):.7f}", flush=True)
        accelerator.save_state(folder / "unfinished")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (folder / "unfinished").rename(folder / f"step_{step.step + 1}")
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
