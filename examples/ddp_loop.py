"""Trains a model of transformers on packs by DistributedDataParallel, in a plain loop that resumes.

    torchrun --nproc-per-node 2 examples/ddp_loop.py FOLDER STEPS

Start it again with more steps, and with any number of processes that divides 16: it goes on in the same order.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evenpack
from evenpack.adapters.first_step import require_whole_step
from evenpack.adapters.isolation import prove_isolation

MICRO_BATCHES = 2


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")  # nccl on GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loader = evenpack.Loader(
        tiny.documents(),
        pack_length=tiny.PACK_LENGTH,
        packs_per_step=tiny.PACKS_PER_STEP,
        rank=rank,
        ranks=ranks,
        micro_batches=MICRO_BATCHES,
        steps=steps,
    )
    model = DistributedDataParallel(tiny.build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if checkpoint := tiny.newest(folder):
        state = torch.load(checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    folder.mkdir(parents=True, exist_ok=True)
    model_inputs = prove_isolation(model, loader)
    first = loader.step
    for step in loader.steps():
        inputs = [model_inputs(batch) for batch in step.micro_batches]
        if step.step == first:
            require_whole_step(loader, first, inputs, model_inputs)
        total = torch.zeros(())
        for index, given in enumerate(inputs):
            with nullcontext() if index == MICRO_BATCHES - 1 else model.no_sync():
                loss = model(**given, num_items_in_batch=step.counts.targets).loss  # a share of the step's mean
                (loss * ranks).backward()  # DDP averages gradients over ranks; the share is to be added
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step.step + 1}: loss {total:.7f}", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "loader": loader.state_dict()}, folder / "unfinished")
            (folder / "unfinished").rename(folder / f"step_{step.step + 1}")
    del model  # else it ends the group, and waits for gloo's thread while that thread waits for Python's lock
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
