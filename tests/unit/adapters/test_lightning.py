"""PackDataModule in Lightning's Trainer, in one process: each global step trains on the loader's step."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from host_trainers import (
    PACK_LENGTH,
    PACKS_PER_STEP,
    VOCABULARY,
    alone,
    flat_gradients,
    own_documents,
    own_loader,
    relative_error,
)
from host_trainers import tiny_llama as build_model
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import RobertaConfig, RobertaForMaskedLM

import evenpack
from evenpack.adapters.huggingface import segment_starts
from evenpack.adapters.isolation import prove_isolation
from evenpack.adapters.lightning import PackDataModule
from evenpack.adapters.trainer import token_loss
from evenpack.studies.tiny_copies import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning")


class LanguageModel(pl.LightningModule):
    """Keeps the packs that it read and the gradients, by global step."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.model = build_model()
        self.learning_rate = learning_rate
        self.read: dict[int, list[tuple[int, ...]]] = {}
        self.gradients: dict[int, torch.Tensor] = {}

    def training_step(self, inputs: dict[str, Any], _index: int) -> torch.Tensor:
        packs = inputs["input_ids"].view(-1, PACK_LENGTH).tolist()
        self.read.setdefault(self.global_step, []).extend(map(tuple, packs))
        loss: torch.Tensor = self.model(**inputs).loss
        return loss * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, _optimizer: Any) -> None:
        self.gradients[self.global_step] = flat_gradients(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def trainer_of(folder: Path, *callbacks: Callback, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = ModelCheckpoint(
        folder, filename="{step}", auto_insert_metric_name=False, every_n_train_steps=1, save_top_k=-1
    )
    settings = {"max_steps": 4, "accelerator": "cpu", "devices": 1, **settings}
    return pl.Trainer(callbacks=[saves, *callbacks], **quiet, **settings)


def module_of(**settings: Any) -> PackDataModule:
    settings = {"pack_length": PACK_LENGTH, "packs_per_step": PACKS_PER_STEP, "seed": 3, **settings}
    return PackDataModule(own_documents(), **settings)


def packs_of(step: int) -> list[tuple[int, ...]]:
    (batch,) = own_loader().batches_of(step)
    return sorted(map(tuple, batch.tokens.view(-1, PACK_LENGTH).tolist()))


def require_read(model: LanguageModel, steps: range) -> None:
    assert {step: sorted(packs) for step, packs in model.read.items()} == {step: packs_of(step) for step in steps}


def test_it_resumes_with_other_micro_batches_where_lightning_would_cut_a_step(tmp_path: Path) -> None:
    """Three steps of two micro-batches end within the second group of four batches, which Lightning counts."""
    first = LanguageModel()
    trainer_of(tmp_path, max_steps=3, accumulate_grad_batches=2).fit(first, datamodule=module_of())
    require_read(first, range(3))
    resumed = LanguageModel()
    trainer = trainer_of(tmp_path, max_steps=5, accumulate_grad_batches=4)
    trainer.fit(resumed, datamodule=module_of(), ckpt_path=tmp_path / "3.ckpt")
    require_read(resumed, range(3, 5))
    whole = LanguageModel()
    trainer_of(tmp_path / "whole", max_steps=5).fit(whole, datamodule=module_of())
    for step, gradients in {**first.gradients, **resumed.gradients}.items():
        assert relative_error(gradients, whole.gradients[step]) < 1e-6
    _, expected = alone(build_model(), own_loader(), 0)
    assert relative_error(first.gradients[0], expected) < 1e-6


class OtherBorders(LanguageModel):
    """Changes what it was given, and leaves a part of it out."""

    def training_step(self, inputs: dict[str, Any], index: int) -> torch.Tensor:
        left = {name: value for name, value in inputs.items() if name != "position_ids"}
        return super().training_step({**left, "attention_mask": torch.ones_like(inputs["input_ids"])}, index)


def test_borders_that_a_training_step_loses_are_refused(tmp_path: Path) -> None:
    model = OtherBorders()
    with pytest.raises(evenpack.ConfigError, match=r"is called with other borders .*position_ids is left out"):
        trainer_of(tmp_path, accumulate_grad_batches=2).fit(model, datamodule=module_of())
    assert not model.gradients
    kept = LanguageModel()
    trainer_of(tmp_path, max_steps=2, accumulate_grad_batches=2).fit(kept, datamodule=module_of())
    assert not kept.model._forward_pre_hooks


def test_a_batch_that_was_read_ahead_is_not_lost(tmp_path: Path) -> None:
    """Lightning reads one batch ahead, and begins each epoch, here of two steps, by iterating anew."""
    model = LanguageModel()
    trainer = trainer_of(tmp_path, limit_train_batches=2)
    trainer.fit(model, datamodule=module_of())
    require_read(model, range(4))
    firsts = [next(iter(trainer.train_dataloader))["input_ids"] for _ in range(2)]
    assert sorted(map(tuple, firsts[0].view(-1, PACK_LENGTH).tolist())) == packs_of(4)
    assert torch.equal(*firsts)


def test_it_resumes_within_an_epoch_of_batches_and_within_a_step(tmp_path: Path) -> None:
    settings = {"limit_train_batches": 4, "accumulate_grad_batches": 2}
    trainer_of(tmp_path, max_steps=3, **settings).fit(LanguageModel(), datamodule=module_of())
    resumed = LanguageModel()
    trainer = trainer_of(tmp_path, max_steps=6, **settings)
    trainer.fit(resumed, datamodule=module_of(), ckpt_path=tmp_path / "3.ckpt")
    require_read(resumed, range(3, 6))
    assert trainer.current_epoch == 3
    saved = Saving(tmp_path / "within.ckpt")
    trainer_of(tmp_path, saved, max_steps=2, accumulate_grad_batches=2).fit(LanguageModel(), datamodule=module_of())
    again = LanguageModel()
    trainer = trainer_of(tmp_path, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(again, datamodule=module_of(), ckpt_path=saved.path)
    require_read(again, range(1, 3))


class Saving(Callback):
    """Saves a checkpoint after the first of two micro-batches of the second step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 3:
            trainer.save_checkpoint(self.path)


def test_a_second_fit_goes_on(tmp_path: Path) -> None:
    model, module = LanguageModel(), module_of()
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.fit(model, datamodule=module)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model, datamodule=module)
    require_read(model, range(4))


def test_validation_batches_of_ones_own_are_left_alone(tmp_path: Path) -> None:
    class Both(PackDataModule):
        def val_dataloader(self) -> Any:
            return DataLoader([1, 1])

    class Validated(LanguageModel):
        def validation_step(self, one: torch.Tensor, _index: int) -> None:
            self.validated = self.__dict__.get("validated", 0) + int(one)

    model = Validated()
    data = Both(own_documents(), pack_length=PACK_LENGTH, packs_per_step=PACKS_PER_STEP, seed=3)
    trainer_of(tmp_path, val_check_interval=2).fit(model, datamodule=data)
    require_read(model, range(4))
    assert model.validated == 2 + 2 * 2  # the check before the start, and after each two batches


class Doubling(Callback):
    """A host that changes what the model is given."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module._on_before_batch_transfer = lambda inputs, **_: {**inputs, "input_ids": inputs["input_ids"] + 1}


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (GradientAccumulationScheduler({0: 1}), None),
        (GradientAccumulationScheduler({0: 2}), "micro-batch 0 of step 1 arrived, and Lightning is at global step 0"),
        (Doubling(), "step 0 is not what evenpack's loader made: rank 0: micro-batch 0: input_ids has other values"),
    ],
)
def test_a_host_that_counts_otherwise_or_changes_batches_is_refused(
    callback: Callback, message: str | None, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, callback)
    if message is None:
        trainer.fit(LanguageModel(), datamodule=module_of())
        return
    with pytest.raises(evenpack.ConfigError, match=message):
        trainer.fit(LanguageModel(), datamodule=module_of())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": -1, "max_epochs": 1}, "set max_steps in Lightning's Trainer"),
        ({"accumulate_grad_batches": 3}, "16 packs a step and rank cannot be divided into 3 micro_batches"),
        ({"accumulate_grad_batches": 2, "limit_train_batches": 3}, r"limit_train_batches .*\(3\) cuts a step"),
        (
            {"accumulate_grad_batches": 2, "fast_dev_run": True},
            r"fast_dev_run \(1\) cuts a step",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused_before_the_first_step(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = LanguageModel()
    with pytest.raises(evenpack.ConfigError, match=message):
        trainer_of(tmp_path, **settings).fit(model, datamodule=module_of())
    assert not model.read


def test_what_the_trainer_knows_is_not_given() -> None:
    with pytest.raises(evenpack.ConfigError, match="leave out rank, ranks"):
        module_of(rank=0, ranks=2)


def test_a_checkpoint_of_other_data_or_without_a_state_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, max_steps=1).fit(LanguageModel(), datamodule=module_of())
    checkpoint = tmp_path / "1.ckpt"
    with pytest.raises(evenpack.CheckpointError, match="the state is of other data"):
        trainer_of(tmp_path).fit(LanguageModel(), datamodule=module_of(packs_per_step=8), ckpt_path=checkpoint)
    content = torch.load(checkpoint, weights_only=False)
    assert content.pop("PackDataModule")["step"] == 1
    torch.save(content, checkpoint)
    with pytest.raises(evenpack.CheckpointError, match="from a checkpoint without a state of PackDataModule"):
        trainer_of(tmp_path).fit(LanguageModel(), datamodule=module_of(), ckpt_path=checkpoint)


class Encoder(LanguageModel):
    """An encoder that counts positions from 2, with the loss of its logits, or its own."""

    def __init__(self, *, takes_own_loss: bool) -> None:
        super().__init__(learning_rate=0.0)
        config = RobertaConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        torch.manual_seed(0)
        self.model = tiny_model(RobertaForMaskedLM, config)
        self.takes_own_loss, self.losses = takes_own_loss, []

    def training_step(self, inputs: dict[str, Any], index: int) -> torch.Tensor:
        labels, count = inputs["labels"], inputs["num_items_in_batch"]
        self.losses.append(token_loss(self.model(**{**inputs, "labels": None}), labels, count, shifts=False))
        return super().training_step(inputs, index) if self.takes_own_loss else self.losses[-1]


def test_an_encoder_trains_as_sequences_alone_and_its_own_loss_is_refused(tmp_path: Path) -> None:
    masks = evenpack.RandomMasks(mask_token=3, special_tokens=[0, 1, 2], vocabulary_size=VOCABULARY)
    with pytest.raises(evenpack.ConfigError, match=r"RobertaForMaskedLM .*its own loss is .* own_loss=False"):
        trainer_of(tmp_path).fit(Encoder(takes_own_loss=True), datamodule=module_of(objective=masks))
    model, data = Encoder(takes_own_loss=False), module_of(objective=masks, own_loss=False)
    trainer_of(tmp_path, max_steps=1).fit(model, datamodule=data)
    (batch,) = own_loader(objective=masks).batches_of(0)
    form = data.form(batch)
    assert form["position_ids"].min() == 2
    total, labels = 0.0, form["labels"][0]
    for start, stop in pairwise(segment_starts(batch).tolist()):
        if (labels[start:stop] != -100).any():
            positions = torch.arange(2, 2 + stop - start)[None]  # given, as a document here may hold <pad>
            outputs = model.model(input_ids=batch.tokens[None, start:stop], position_ids=positions)
            total += token_loss(outputs, labels[None, start:stop], form["num_items_in_batch"], shifts=False).item()
    assert model.losses[0].item() == pytest.approx(total, rel=1e-6)
    kept = torch.load(tmp_path / "1.ckpt", weights_only=False)["PackDataModule"]["isolation"]
    assert (kept["isolated"], kept["mask"]) == (True, "block")


class TwoModels(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = build_model()


def test_a_module_of_two_models_needs_a_form(tmp_path: Path) -> None:
    with pytest.raises(evenpack.ConfigError, match=r"TwoModels has 2 models of transformers \(model, teacher\)"):
        trainer_of(tmp_path).fit(TwoModels(), datamodule=module_of())
    prepared = prove_isolation(build_model(), own_loader())

    def form(batch: evenpack.PackedBatch) -> dict[str, Any]:
        return {**prepared(batch), "num_items_in_batch": batch.step_counts.targets}

    model = TwoModels()
    trainer_of(tmp_path).fit(model, datamodule=module_of(form=form))
    require_read(model, range(4))
