"""Trains a model of transformers on packs by Lightning's Trainer, which resumes by itself.

torchrun --nproc-per-node 2 examples/lightning_loop.py FOLDER STEPS
"""

import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from evenpack.adapters.lightning import PackDataModule

MICRO_BATCHES = 2


class LanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.build_model()
        self.total = torch.zeros(())

    def training_step(self, inputs: dict[str, Any], _index: int) -> torch.Tensor:
        share = self.model(**inputs).loss  # a share of the step's mean
        self.total += share.detach()
        # Lightning averages gradients over ranks and micro-batches; the share is to be added.
        return share * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, _optimizer: Any) -> None:
        loss = self.trainer.strategy.reduce(self.total, reduce_op="sum")
        self.print(f"step {self.global_step + 1}: loss {loss:.7f}", flush=True)
        self.total = torch.zeros(())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder: Path, steps: int) -> None:
    data = PackDataModule(tiny.documents(), pack_length=tiny.PACK_LENGTH, packs_per_step=tiny.PACKS_PER_STEP)
    saves = ModelCheckpoint(
        folder, filename="step_{step}", auto_insert_metric_name=False, every_n_train_steps=1, save_top_k=-1
    )
    trainer = Trainer(
        max_steps=steps,
        accumulate_grad_batches=MICRO_BATCHES,
        accelerator="cpu",  # "gpu" on GPUs
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(LanguageModel(), datamodule=data, ckpt_path=tiny.newest(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
