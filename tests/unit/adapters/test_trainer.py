"""PackTrainer in one process: what it refuses before the first step, and encoders on it."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_trainers import (
    VOCABULARY,
    flat_gradients,
    kept_gradients,
    own_documents,
    own_loader,
    plain_inputs,
    relative_error,
    tiny_llama,
)
from repository import ROOT
from slow_cases import slow_but
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    TrainerCallback,
    TrainingArguments,
)

import evenpack
from evenpack.adapters.huggingface import IGNORED, segment_starts
from evenpack.adapters.trainer import PackTrainer, token_loss
from evenpack.losses import MASKED_TOKEN


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    settings = {"max_steps": 2, "save_strategy": "no", "report_to": "none", **settings}
    return TrainingArguments(output_dir=str(folder), disable_tqdm=True, use_cpu=True, **settings)


def trainer_of(folder: Path, loader: evenpack.Loader, model: Any = None, **settings: Any) -> PackTrainer:
    return PackTrainer(model=model or tiny_llama(), args=arguments(folder, **settings), loader=loader)


def test_the_lines_of_the_readme_train(tmp_path: Path) -> None:
    (_, lines) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    names = {"evenpack": evenpack, "documents": own_documents(), "model": tiny_llama(), "resume": None}
    exec(lines, names | {"args": arguments(tmp_path, max_steps=1)}, names)
    assert names["trainer"].state.global_step == 1


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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gradient_accumulation_steps", 2, "gradient_accumulation_steps is 2"),
        ("label_smoothing_factor", 0.1, "label_smoothing_factor is not computed on packs"),
    ],
)
def test_arguments_that_change_after_the_trainer_was_made_are_refused(
    name: str, value: float, message: str, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, own_loader())
    setattr(trainer.args, name, value)
    with pytest.raises(evenpack.ConfigError, match=message):
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


class OtherBorders(PackTrainer):
    """Gives the model other borders in its first step than the adapter made."""

    given: Any = None

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        inputs.update({name: None for name in self.given if name in inputs})
        inputs.update({name: torch.ones_like(inputs["input_ids"]) for name in self.given if name not in inputs})
        return super().compute_loss(model, inputs, *arguments, **keywords)


class OtherTokens(OtherBorders):
    """Changes some tokens, embeds them itself, and then leaves out what it is told to."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        ids = inputs["input_ids"]
        changed = torch.where(torch.arange(ids.shape[1]) % 7 == 0, (ids + 1) % 50, ids)
        inputs["inputs_embeds"] = model.get_input_embeddings()(changed)
        del inputs["input_ids"]
        inputs.update(dict.fromkeys(self.given))
        return PackTrainer.compute_loss(self, model, inputs, *arguments, **keywords)


class OwnHead(OtherBorders):
    """Calls the model without its head, as those do who take a loss of their own."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
        model.eval()
        labels = inputs.pop("labels")
        del inputs["shift_labels"]
        inputs.update(dict.fromkeys(self.given))
        logits = model.lm_head(model.model(**inputs).last_hidden_state)
        return token_loss({"logits": logits}, labels, num_items_in_batch, shifts=True)


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        (OtherBorders, "position_ids"),
        (OtherTokens, "position_ids"),
        (OwnHead, "position_ids"),
        (OwnHead, "use_cache"),
    ],
)
def test_borders_that_are_lost_between_the_adapter_and_the_model_are_refused(
    kind: type[OtherBorders], lost: str, tmp_path: Path
) -> None:
    model = tiny_llama()
    before = model.lm_head.weight.clone()
    for given in ([lost], []):
        trainer = kind(model=model, args=arguments(tmp_path), loader=own_loader())
        trainer.given = given
        if given:
            with pytest.raises(evenpack.ConfigError, match=f"is called with other borders .*{lost} is left out"):
                trainer.train()
            assert torch.equal(model.lm_head.weight, before)
        else:
            trainer.train()
            assert not model._forward_pre_hooks
            assert not model.model._forward_pre_hooks


def test_borders_may_be_others_where_leaks_are_allowed(tmp_path: Path) -> None:
    trainer = OtherBorders(model=tiny_llama(), args=arguments(tmp_path), loader=own_loader(), allow_leaks=True)
    trainer.given = ["attention_mask"]
    trainer.train()


class MeanLoss(torch.nn.Module):
    """A model whose loss is a mean, and that takes no count of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()

    def forward(
        self,
        input_ids: Any,
        position_ids: Any = None,
        labels: Any = None,
        shift_labels: Any = None,
        use_cache: bool = False,
    ) -> Any:
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


class Changes(TrainerCallback):
    """Does something when the first step has ended."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.change()


@pytest.mark.parametrize(
    ("micro_batches", "name", "value", "message"),
    [
        (1, "gradient_accumulation_steps", 4, "step 1 took 4 micro-batches, and the loader makes 1 a step: a callback"),
        (2, "gradient_accumulation_steps", 1, "step 1 took 1 micro-batches, and the loader makes 2 a step: a callback"),
        (1, "step", 3, "the loader is at step 3: it was moved"),
    ],
)
def test_a_callback_that_changes_the_micro_batches_of_a_step_or_moves_the_loader_is_refused(
    tmp_path: Path, micro_batches: int, name: str, value: int, message: str
) -> None:
    loader = own_loader(micro_batches=micro_batches)
    trainer = trainer_of(tmp_path, loader, gradient_accumulation_steps=micro_batches, max_steps=4)
    trainer.add_callback(Changes(lambda: setattr(loader if name == "step" else trainer.args, name, value)))
    with pytest.raises(evenpack.ConfigError, match=message):
        trainer.train()


def test_a_finished_training_that_resumes_trains_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    trainer_of(tmp_path, own_loader(micro_batches=2), **settings).train()
    for most in (2, 1):  # Trainer itself would train one step more
        again = trainer_of(tmp_path, own_loader(micro_batches=2), **settings, max_steps=most)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert (again.state.global_step, again.loader.step) == (2, 2)
        assert f"the checkpoint is of step 2, and max_steps is {most}: nothing is trained" in caplog.text
        saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
        assert all(torch.equal(saved[name], value) for name, value in again.model.state_dict().items())
        assert not (tmp_path / "checkpoint-3").exists()


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


MASKS = evenpack.RandomMasks(mask_token=0, special_tokens=[0], vocabulary_size=VOCABULARY)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
ENCODERS = {
    "bert": lambda: BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **NO_DROPOUT, **SIZES)),
    "modernbert": lambda: ModernBertForMaskedLM(
        ModernBertConfig(vocab_size=VOCABULARY, local_attention=8, global_attn_every_n_layers=2, **SPECIAL, **SIZES)
    ),
}


@pytest.mark.parametrize("attention", slow_but(["sdpa"], ["sdpa", "eager"]))
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_learns_from_packs_what_it_learns_from_sequences_alone(
    name: str, attention: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = ENCODERS[name]()
    model.config._attn_implementation = attention
    loader = own_loader(objective=MASKS, micro_batches=2)
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
        inputs = plain_inputs(causal=False)(batch)
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
    loader = own_loader(objective=MASKS)
    by_sequences = replace(loader._settings.objective, masked_token=replace(MASKED_TOKEN, divided_by="sequences"))
    loader._settings = replace(loader._settings, objective=by_sequences)
    with pytest.raises(evenpack.ConfigError, match="divided_by='targets'"):
        plain_inputs(causal=False)(loader[0])


DECISIONS = {
    "label_smoothing_factor": "refused",
    "average_tokens_across_devices": "needed where there are several processes",
    "use_liger_kernel": "proved with the model: its loss must be the sum over the targets of the step",
    "liger_kernel_config": "as use_liger_kernel",
    "neftune_noise_alpha": "refused",
    "include_num_input_tokens_seen": "as the plan has them",
    "prediction_loss_only": "of evaluation",
    "label_names": "of evaluation",
    "hub_token": "no loss",
    "logging_nan_inf_filter": "of the log alone",
}
"""What becomes of each argument of a Trainer whose name speaks of losses, labels, noise or tokens."""


def test_each_option_of_the_loss_has_its_decision() -> None:
    names = {one.name for one in fields(TrainingArguments)}
    assert {name for name in names if re.search("loss|smooth|label|neftune|liger|token|nan", name)} == set(DECISIONS)


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    return token_loss(outputs, labels, num_items_in_batch, shifts=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is for rows of one document"),
        ({"eval_strategy": "epoch", "eval_dataset": []}, "eval_strategy='epoch' would be the end alone.* 12 of them"),
        ({"save_strategy": "epoch", "logging_strategy": "epoch"}, "save_strategy, logging_strategy='epoch' would"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is not computed on packs"),
    ],
)
def test_options_that_would_not_be_what_they_say_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {key: settings.pop(key) for key in ("eval_dataset",) if key in settings}
    with pytest.raises(evenpack.ConfigError, match=message):
        PackTrainer(model=tiny_llama(), args=arguments(tmp_path, **settings), loader=own_loader(), **given)


def test_a_routers_auxiliary_loss_that_each_micro_batch_would_add_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.output_router_logits = True
    trainer_of(tmp_path, own_loader(), model)
    with pytest.raises(evenpack.ConfigError, match=r"output_router_logits=True .* would add it 2 times: set it to Fa"):
        trainer_of(tmp_path, own_loader(micro_batches=2), model, gradient_accumulation_steps=2)


def test_a_loss_of_ones_own_is_left_alone(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, own_loader(), learning_rate=0.0, logging_steps=1)
    own = PackTrainer(
        model=tiny_llama(),
        args=arguments(tmp_path, learning_rate=0.0, logging_steps=1),
        loader=own_loader(),
        compute_loss_func=own_loss,
    )
    losses = []
    for trainer in (plain, own):
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_tokens_seen_are_those_of_the_plan_and_no_rate_counts_batches_that_are_not(tmp_path: Path) -> None:
    loader = own_loader(micro_batches=2)
    settings = {"include_num_input_tokens_seen": "non_padding", "logging_steps": 1, "gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, loader, **settings)
    result = trainer.train()
    seen = [line["num_input_tokens_seen"] for line in trainer.state.log_history][:2]
    first, second = (loader.plan(step).counts.tokens for step in range(2))
    assert seen == [first, first + second]
    assert first + second == trainer.state.num_input_tokens_seen
    assert "train_samples_per_second" not in {*result.metrics, *trainer.state.log_history[-1]}
    assert result.metrics["train_steps_per_second"] > 0
