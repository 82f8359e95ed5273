"""Trains a model of transformers on packs by FSDP2 (`fully_shard`), in a plain loop that resumes.

torchrun --nproc-per-node 2 examples/fsdp2_loop.py FOLDER STEPS
"""

import sys
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
        balances_each_micro_batch=True,  # ranks gather parameters in each
        steps=steps,
    )
    model = tiny.build_model()
    mesh = init_device_mesh("cpu", (ranks,))  # cuda
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if checkpoint := tiny.newest(folder):
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        state = {**parts, "loader": loader.state_dict()}
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loader.load_state_dict(state["loader"])
    model_inputs = prove_isolation(model, loader)
    first = loader.step
    for step in loader.steps():
        inputs = [model_inputs(batch) for batch in step.micro_batches]
        if step.step == first:
            require_whole_step(loader, first, inputs, model_inputs)
        total = torch.zeros(())
        for index, given in enumerate(inputs):
            model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
            loss = model(**given, num_items_in_batch=step.counts.targets).loss  # a share of the step's mean
            (loss * ranks).backward()  # FSDP averages gradients over ranks; the share is to be added
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step.step + 1}: loss {total:.7f}", flush=True)
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save({**parts, "loader": loader.state_dict()}, checkpoint_id=folder / "unfinished")
        if rank == 0:
            (folder / "unfinished").rename(folder / f"step_{step.step + 1}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
