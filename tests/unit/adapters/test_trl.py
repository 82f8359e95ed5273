"""PackSFTTrainer: what TRL prepares is trained on in packs, with the gradients of its examples alone."""

import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forked_ranks import RanksFailed, run_ranks
from host_trainers import (
    PACK_LENGTH,
    VOCABULARY,
    Read,
    flat_gradients,
    kept_gradients,
    planned_by_step,
    read_by_step,
    relative_error,
    tiny_llama,
    watched,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainingArguments

import evenpack
from evenpack.engine.world.distributed import World

if TYPE_CHECKING:  # a second, and each process of `scripts/pytest` collects this file
    from evenpack.adapters.trl import PackSFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL uses names that transformers will drop
EOS = 1
STEPS = 6


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": EOS, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def examples(count: int = 160) -> list[tuple[list[int], list[int]]]:
    """Returns the token ids of prompts and completions, some beyond a pack."""
    random = np.random.default_rng(2)
    sizes = random.integers(1, 18, size=(count, 2))
    return [tuple(random.integers(2, VOCABULARY, size).tolist() for size in pair) for pair in sizes]


def dataset(pairs: list[tuple[list[int], list[int]]]) -> datasets.Dataset:
    def text(ids: list[int]) -> str:
        return " ".join(f"w{index}" for index in ids)

    rows = [{"prompt": text(prompt), "completion": " " + text(completion)} for prompt, completion in pairs]
    return datasets.Dataset.from_list(rows)


def trainer_of(folder: Path, data: Any = None, **settings: Any) -> "PackSFTTrainer":
    from trl import SFTConfig

    from evenpack.adapters.trl import PackSFTTrainer

    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "save_strategy": "no"}
    plain = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    loader_settings = settings.pop("loader_settings", None)
    arguments = {"max_steps": 2, "max_length": PACK_LENGTH, "gradient_accumulation_steps": 2, **quiet, **plain}
    return PackSFTTrainer(
        model=tiny_llama(),
        args=SFTConfig(output_dir=str(folder), **arguments | settings),
        processing_class=tokenizer(),
        train_dataset=dataset(examples()) if data is None else data,
        packs_per_step=8,
        loader_settings=loader_settings,
    )


def alone(loader: evenpack.Loader, step: int) -> torch.Tensor:
    """Returns the gradients of a step from each of its examples by itself, of which the completion is learned."""
    of_tokens = {}
    for prompt, completion in examples():
        tokens = (*prompt, *completion, EOS)[:PACK_LENGTH]
        of_tokens[tokens] = len(prompt)
    model = tiny_llama()
    total = torch.zeros(())
    targets = 0
    for batch in loader.batches_of(step):
        bounds = batch.cu_seqlens.tolist()
        for start, stop in pairwise(bounds):
            tokens = tuple(batch.tokens[start:stop].tolist())
            if not any(tokens):
                continue
            given = torch.tensor([tokens])
            labels = given[0, 1:].clone()
            labels[: of_tokens[tokens] - 1] = -100
            targets += int((labels != -100).sum())
            logits = model(input_ids=given, use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, labels, reduction="sum")
    assert targets == loader.plan(step).counts.targets
    (total / targets).backward()
    return flat_gradients(model)


def test_completions_are_learned_as_from_examples_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, loader_settings={"seed": 5})
    gradients = kept_gradients(trainer)
    expected = alone(trainer.loader, 0)
    trainer.train()
    assert relative_error(gradients[0], expected) < 1e-6
    assert trainer.loader.step == 2
    assert "seed 5" in repr(trainer.loader)


def train_on(world: World, folder: str) -> torch.Tensor:
    """Returns the gradients of the first step on one of several ranks."""
    trainer = trainer_of(Path(folder), max_steps=1, gradient_accumulation_steps=4 // world.size)
    gradients = kept_gradients(trainer)
    trainer.train()
    return gradients[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_learn_the_same(ranks: int, tmp_path: Path) -> None:
    expected = alone(trainer_of(tmp_path).loader, 0)
    for gradients in run_ranks(train_on, ranks, str(tmp_path)):
        assert relative_error(gradients, expected) < 1e-6


def train_on_and_die(
    world: World, folder: str, micro_batches: int, dies_at: int | None, resume: str | None
) -> tuple[Read, list[float]]:
    """Returns what this rank read of six steps, with a checkpoint after each two of them, and all losses so far."""
    saves = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "max_steps": STEPS}
    trainer = trainer_of(Path(folder), gradient_accumulation_steps=micro_batches, **saves)
    kept_gradients(trainer, dies_at=dies_at)
    read = watched(trainer.model, lambda: trainer.state.global_step)
    trainer.train(resume_from_checkpoint=resume)
    return read, [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.slow
def test_a_killed_run_goes_on_at_other_numbers_of_processes_in_one_order(tmp_path: Path) -> None:
    """Two processes are killed in step 3, one goes on from step 2 and is killed in step 5, four go on from step 4."""
    ((straight, losses),) = run_ranks(train_on_and_die, 1, str(tmp_path / "whole"), 1, None, None)
    planned = planned_by_step(trainer_of(tmp_path).loader, range(STEPS))
    assert read_by_step([straight]) == planned
    assert len({pack for packs in planned.values() for pack in packs}) == STEPS * 8

    folder = tmp_path / "killed"
    with pytest.raises(RanksFailed):
        run_ranks(train_on_and_die, 2, str(folder), 2, 3, None)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2"]
    with pytest.raises(RanksFailed):
        run_ranks(train_on_and_die, 1, str(folder), 4, 5, str(folder / "checkpoint-2"))
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    last = run_ranks(train_on_and_die, 4, str(folder), 1, None, str(folder / "checkpoint-4"))
    assert read_by_step(read for read, _ in last) == {step: planned[step] for step in (4, 5)}
    assert last[0][1] == pytest.approx(losses, rel=1e-5)


def test_each_example_is_in_a_pack_once(tmp_path: Path) -> None:
    loader = trainer_of(tmp_path).loader
    (kept,) = loader.accounting.values()
    cut = [[*prompt, *completion, EOS][:PACK_LENGTH] for prompt, completion in examples()]
    learned = [one for one, (prompt, _) in zip(cut, examples(), strict=True) if len(prompt) < PACK_LENGTH]
    assert kept.documents_kept == len(learned)
    assert kept.tokens_kept == sum(map(len, learned))


DECISIONS = {
    "loss_type": "computed: nll and dft",
    "completion_only_loss": "in the labels that TRL makes",
    "assistant_only_loss": "in the labels that TRL makes",
    "router_aux_loss_coef": "added by TRL, of whole micro-batches; refused beside label smoothing",
    "eos_token": "in the tokens that TRL makes",
    "pad_token": "of evaluation",
}
"""What becomes of each argument that SFTConfig adds to a Trainer's, and whose name speaks of losses or tokens."""


def test_each_option_of_the_loss_has_its_decision() -> None:
    from trl import SFTConfig

    names = {one.name for one in fields(SFTConfig)} - {one.name for one in fields(TrainingArguments)}
    assert {name for name in names if re.search("loss|smooth|label|token|coef", name)} == set(DECISIONS)


def test_another_loss_is_that_of_examples_alone_and_tokens_those_of_the_plan(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, loss_type="dft", learning_rate=0.0, logging_steps=1, max_steps=1)
    loader, model = trainer.loader, tiny_llama()
    total = 0.0
    for batch in loader.batches_of(0):
        targets = batch.targets["next_token"]
        for start, stop in pairwise(batch.cu_seqlens.tolist()):
            used = targets.weights[start:stop] > 0
            if not used.any():
                continue
            with torch.no_grad():
                logits = model(input_ids=batch.tokens[None, start:stop], use_cache=False).logits[0]
            every = logits.log_softmax(-1)[used]
            chosen = every.gather(1, targets.labels[start:stop][used, None])
            total -= float((chosen * chosen.exp()).sum())
    trainer.train()
    (line, *_) = trainer.state.log_history
    counts = loader.plan(0).counts
    assert line["loss"] == pytest.approx(total / counts.targets, rel=1e-6)
    assert trainer._total_train_tokens == counts.tokens  # what TRL says beside evaluations
    assert line["num_tokens"] == counts.tokens < PACK_LENGTH * counts.packs


@pytest.mark.parametrize(
    "settings", [{"packing": True}, {"padding_free": True, "max_length": None}, {"eval_packing": True}]
)
def test_packing_by_trl_beside_the_loader_is_refused(
    settings: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with pytest.raises(evenpack.ConfigError, match=r"without packing and padding_free|leave eval_packing out"):
        trainer_of(tmp_path, **settings)


def test_a_dataset_that_is_streamed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(evenpack.DataError, match="packs need all lengths"):
        trainer_of(tmp_path, dataset(examples()).to_iterable_dataset())
