"""PackTrainer in one process: what it refuses before the first step, and encoders on it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from host_trainers import (
    PACK_LENGTH,
    VOCABULARY,
    flat_gradients,
    kept_gradients,
    own_documents,
    own_loader,
    relative_error,
    tiny_llama,
)
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    TrainingArguments,
)

import evenpack
from evenpack.adapters.huggingface import IGNORED, model_inputs, segment_starts
from evenpack.adapters.trainer import PackTrainer
from evenpack.data.batches.objectives import DynamicMasks
from evenpack.data.recipes import DocumentsRecipe, MaskingConfig
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, Loss


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    settings = {"max_steps": 2, "save_strategy": "no", "report_to": "none", **settings}
    return TrainingArguments(output_dir=str(folder), disable_tqdm=True, use_cpu=True, **settings)


def trainer_of(folder: Path, loader: evenpack.Loader, model: Any = None, **settings: Any) -> PackTrainer:
    return PackTrainer(model=model or tiny_llama(), args=arguments(folder, **settings), loader=loader)


@pytest.mark.parametrize(
    ("loader", "settings", "message"),
    [
        ({}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2.* 1 micro_batches"),
        ({"ranks": 2, "rank": 1}, {}, "process 0 of 1, and the loader was made for rank 1 of 2"),
        ({}, {"max_steps": -1}, "set max_steps: .* an epoch of its data has 12 steps"),
    ],
)
def test_numbers_that_disagree_are_refused_before_the_first_step(
    loader: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(evenpack.ConfigError, match=message):
        trainer_of(tmp_path, own_loader(**loader), **settings)


def test_numbers_that_change_after_the_trainer_was_made_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, own_loader())
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(evenpack.ConfigError, match="gradient_accumulation_steps is 2"):
        trainer.train()


def test_a_dataset_beside_the_loader_or_a_loader_under_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(evenpack.ConfigError, match="not both"):
        PackTrainer(model=tiny_llama(), args=arguments(tmp_path), loader=own_loader(), train_dataset=[{"labels": 1}])
    loader = own_loader()
    next(iter(loader))
    with pytest.raises(evenpack.ConfigError, match="the loader is at step 1"):
        trainer_of(tmp_path, loader)


def test_a_loader_that_ends_before_the_trainer_is_an_error(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, own_loader(steps=1))
    with pytest.raises(evenpack.RunError, match=r"ended at step 1, before max_steps \(2\)"):
        trainer.train()


class MeanLoss(torch.nn.Module):
    """A model whose loss is a mean, and that takes no count of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()

    def forward(self, input_ids: Any, position_ids: Any, labels: Any, shift_labels: Any, use_cache: bool) -> Any:
        return self.model(input_ids=input_ids, position_ids=position_ids, labels=labels, use_cache=use_cache)


def test_a_model_that_takes_no_count_of_targets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(evenpack.ConfigError, match="MeanLoss takes no number of targets"):
        trainer_of(tmp_path, own_loader(), MeanLoss()).train()


class OneLabelLess(PackTrainer):
    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        return super()._get_num_items_in_batch(batch_samples, device) - 1


def test_another_count_of_targets_is_refused(tmp_path: Path) -> None:
    loader = own_loader()
    trainer = OneLabelLess(model=tiny_llama(), args=arguments(tmp_path), loader=loader)
    targets = loader.plan(0).counts.targets
    with pytest.raises(evenpack.ConfigError, match=f"counts {targets - 1} targets in a step that has {targets}"):
        trainer.train()


def test_training_again_begins_at_the_first_step(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, own_loader())
    trainer.train()
    assert trainer.loader.step == 2
    trainer.train()
    assert trainer.loader.step == 2


def test_a_checkpoint_of_other_data_or_of_another_trainer_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, own_loader(), save_strategy="steps", save_steps=1).train()
    checkpoint = tmp_path / "checkpoint-1"
    others = own_loader(packs_per_step=8)
    with pytest.raises(evenpack.CheckpointError, match="the state is of other data"):
        trainer_of(tmp_path, others).train(resume_from_checkpoint=str(checkpoint))
    state = checkpoint / "trainer_state.json"
    state.write_text(state.read_text().replace('"evenpack.Loader"', '"somebody"'))
    with pytest.raises(evenpack.CheckpointError, match="not made by PackTrainer"):
        trainer_of(tmp_path, own_loader()).train(resume_from_checkpoint=str(checkpoint))


def masks(loss: Loss = MASKED_TOKEN) -> DynamicMasks:
    special = np.zeros(VOCABULARY, dtype=bool)
    special[0] = True
    vocabulary = MaskingVocabulary(mask_id=0, special=special, continues=np.zeros(VOCABULARY, dtype=bool))
    return DynamicMasks(
        masked_token=loss,
        next_sentence=NEXT_SENTENCE,
        recipe=DocumentsRecipe(kind="documents", max_sequence_length=PACK_LENGTH, long_documents="split"),
        masking=MaskingConfig(),
        vocabulary=vocabulary,
        seed=1,
    )


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
ENCODERS = {
    "bert": lambda: BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **NO_DROPOUT, **SIZES)),
    "modernbert": lambda: ModernBertForMaskedLM(
        ModernBertConfig(vocab_size=VOCABULARY, local_attention=8, global_attn_every_n_layers=2, **SPECIAL, **SIZES)
    ),
}


def test_random_masks_are_those_of_training_and_count_the_targets_of_a_step() -> None:
    given = evenpack.RandomMasks(mask_token=0, special_tokens=[0], vocabulary_size=VOCABULARY)
    loader, expected = own_loader(objective=given), own_loader(objective=masks())
    loader._settings = replace(loader._settings, objective=replace(loader._settings.objective, seed=1))
    (batch,), (other,) = loader.batches_of(2), expected.batches_of(2)
    assert torch.equal(batch.tokens, other.tokens)
    (plain,) = own_loader().batches_of(2)
    targets = batch.targets["masked_token"]
    used = targets.weights > 0
    assert int(used.sum()) == loader.plan(2).counts.targets > 16
    assert torch.equal(plain.tokens[targets.positions[used]], targets.labels[used])
    changed = (plain.tokens != batch.tokens).nonzero().flatten()
    assert set(changed.tolist()) < set(targets.positions[used].tolist())
    assert (batch.tokens[changed] == 0).float().mean() > 0.7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"special_tokens": [61]}, r"ids below vocabulary_size \(61\), and leave others to draw, found 61"),
        ({"special_tokens": range(61)}, "leave others to draw"),
        ({"share": 2.0}, "arguments of evenpack.RandomMasks"),
    ],
)
def test_random_masks_that_cannot_be_drawn_are_named(settings: dict[str, Any], message: str) -> None:
    settings = {"mask_token": 0, "special_tokens": [1], "vocabulary_size": VOCABULARY, **settings}
    with pytest.raises(evenpack.ConfigError, match=message):
        own_loader(objective=evenpack.RandomMasks(**settings))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_learns_from_packs_what_it_learns_from_sequences_alone(
    name: str, attention: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = ENCODERS[name]()
    model.config._attn_implementation = attention
    loader = own_loader(objective=masks(), micro_batches=2)
    expected = model_gradients_alone(model, loader)
    trainer = trainer_of(tmp_path, loader, model, gradient_accumulation_steps=2, max_grad_norm=0.0)
    gradients = kept_gradients(trainer)
    trainer.train()
    assert relative_error(gradients[0], expected) < 1e-6


def model_gradients_alone(model: Any, loader: evenpack.Loader) -> torch.Tensor:
    """Returns the gradients of step 0 from each of its segments by itself; those without targets add nothing."""
    model.zero_grad()
    segments = 0
    for batch in loader.batches_of(0):
        inputs = model_inputs(batch)
        starts = segment_starts(batch).tolist()
        for start, stop in pairwise(starts):
            labels = inputs["labels"][:, start:stop]
            if (labels != IGNORED).any():
                logits = model(input_ids=inputs["input_ids"][:, start:stop]).logits[0]
                total = F.cross_entropy(logits, labels[0], reduction="sum", ignore_index=IGNORED)
                (total / batch.step_counts.targets).backward()
                segments += 1
    assert segments == loader.plan(0).counts.sequences
    assert segments > len(own_documents()) / 20
    gradients = flat_gradients(model)
    model.zero_grad()
    return gradients


def test_masked_tokens_that_do_not_weigh_the_same_are_refused() -> None:
    loader = own_loader(objective=masks(replace(MASKED_TOKEN, divided_by="sequences")))
    with pytest.raises(evenpack.ConfigError, match="divided_by='targets'"):
        model_inputs(loader[0])


def test_a_loader_that_reads_ahead_gives_the_trainer_the_same_steps(tmp_path: Path) -> None:
    found = []
    for workers in (0, 1):
        trainer = trainer_of(tmp_path, own_loader(workers=workers, micro_batches=2), gradient_accumulation_steps=2)
        gradients = kept_gradients(trainer)
        trainer.train()
        found.append(gradients)
    assert len(found[0]) == 2
    assert all(torch.equal(here, ahead) for here, ahead in zip(*found, strict=True))
