"""Trains a model of transformers on packs by its Trainer, which resumes by itself.

torchrun --nproc-per-node 2 examples/trainer.py FOLDER STEPS
"""

import gc
import sys
from contextlib import suppress
from pathlib import Path

import tiny
from accelerate import PartialState
from transformers import TrainingArguments

import evenpack
from evenpack.adapters.trainer import PackTrainer

with suppress(ImportError):
    import deepspeed  # noqa: F401  # accelerate does once ranks have a group, and defaults of functions would keep that

MICRO_BATCHES = 2


def main(folder: Path, steps: int) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        gradient_accumulation_steps=MICRO_BATCHES,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_steps=1,
        logging_steps=1,
        report_to="none",
        use_cpu=True,  # without it on GPUs
    )
    loader = evenpack.Loader(
        tiny.documents(),
        pack_length=tiny.PACK_LENGTH,
        packs_per_step=tiny.PACKS_PER_STEP,
        rank=arguments.process_index,
        ranks=arguments.world_size,
        micro_batches=MICRO_BATCHES,
    )
    trainer = PackTrainer(model=tiny.build_model(), args=arguments, loader=loader)
    trainer.train(resume_from_checkpoint=tiny.newest(folder, "checkpoint-*") is not None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    # A thread of gloo that frees what it has gathered while Python ends aborts the process: the group ends before, with
    # all that holds it.
    gc.collect()
    PartialState().destroy_process_group()
