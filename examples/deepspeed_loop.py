"""Trains a model of transformers on packs by DeepSpeed's own `initialize`, in a loop that resumes.

deepspeed --num_gpus 2 examples/deepspeed_loop.py FOLDER STEPS
"""

import sys
from pathlib import Path

import deepspeed
import tiny
import torch
import torch.distributed as dist

import evenpack
from evenpack.adapters.first_step import require_whole_step
from evenpack.adapters.isolation import prove_isolation

MICRO_BATCHES = 2


def main(folder: Path, steps: int) -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for the CPU it would be compiled now, for minutes
    deepspeed.init_distributed(dist_backend="gloo")  # nccl on GPUs
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
    model = tiny.build_model()
    settings = {
        "train_batch_size": tiny.PACKS_PER_STEP,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,  # 1.0 if it is not written
        "zero_optimization": {"stage": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if checkpoint := tiny.newest(folder):
        _, kept = engine.load_checkpoint(str(folder), tag=checkpoint.name)
        loader.load_state_dict(kept["loader"])
    model_inputs = prove_isolation(engine, loader)
    first = loader.step
    for step in loader.steps():
        inputs = [model_inputs(batch.to(engine.device)) for batch in step.micro_batches]
        if step.step == first:
            accumulation = engine.gradient_accumulation_steps()
            require_whole_step(loader, first, inputs, model_inputs, accumulation=accumulation)
        total = torch.zeros((), device=engine.device)
        for given in inputs:
            loss = engine(**given, num_items_in_batch=step.counts.targets).loss  # a share of the step's mean
            engine.backward(loss * ranks * MICRO_BATCHES)  # DeepSpeed averages over both; the shares are to be added
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step.step + 1}: loss {total:.7f}", flush=True)
        engine.save_checkpoint(str(folder), tag=f"step_{step.step + 1}", client_state={"loader": loader.state_dict()})
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, steps = (word for word in sys.argv[1:] if not word.startswith("--local_rank"))  # which `deepspeed` inserts
    main(Path(folder), int(steps))
