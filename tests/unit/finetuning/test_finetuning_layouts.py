"""Packed, un-padded and padded fine-tuning have the same loss and gradients."""

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from finetuning_tasks import finetune_config, write_encoder, write_pairs, write_questions, write_scores, write_sentences
from slow_cases import slow_but
from torch import Tensor

from evenpack.config import with_values
from evenpack.data.order.selection import PackSelection
from evenpack.data.order.step_shape import Layout
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.data import read_task
from evenpack.finetuning.model import FinetunedModel, read_pretrained
from evenpack.finetuning.run import new_finetuned
from evenpack.finetuning.train import Finetuning, Trainer
from evenpack.losses import StepCounts

WRITERS = MappingProxyType(
    {"sst2": write_sentences, "rte": write_pairs, "stsb": write_scores, "squad": write_questions}
)
LAYOUTS = ("packed", "unpadded", "padded")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("tasks")
    return {
        "sst2": write_sentences(place / "sst2", training=40, evaluation=10),
        "rte": write_pairs(place / "rte", rows=30),
        "stsb": write_scores(place / "stsb", rows=30),
        "squad": write_questions(place / "squad", questions=12),
    }


def opened(config: FinetuneConfig) -> tuple[Finetuning, FinetunedModel]:
    pretrained = read_pretrained(config)
    data = read_task(config.data, pretrained.tokenizer)
    finetuning = Finetuning(config=config, data=data, tokenizer=pretrained.tokenizer, device=torch.device("cpu"))
    return finetuning, new_finetuned(config, pretrained, seed=0)


def one_step(config: FinetuneConfig) -> tuple[float, dict[str, Tensor], PackSelection]:
    """Returns the loss, the gradients and the sequences of the second step."""
    finetuning, model = opened(config)
    planner = finetuning.planner(seed=4)
    plan = planner.plan(1)
    trainer = Trainer(model, config.training, steps=10)
    loss, _ = trainer.accumulate(finetuning.collator(planner), plan)
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return loss, gradients, plan.packs


@pytest.mark.parametrize(
    ("task", "kind"), [*slow_but(["squad", "stsb"], ((task, "bert") for task in WRITERS)), ("squad", "modernbert")]
)
def test_all_layouts_give_the_same_loss_and_gradients(
    task: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    encoder = write_encoder(tmp_path / "encoder", kind)
    config = finetune_config(task, folders[task], encoder, tmp_path, layout="padded", sequences_per_step=9)
    loss, gradients, packs = one_step(config)
    assert gradients["encoder.token_embedding.weight"].abs().max() > 1e-5
    assert any(name.startswith("head.classifier") for name in gradients)
    for layout in ("packed", "unpadded"):
        for packs_per_micro_batch in (None, 2):
            changes = {"layout": layout, "packs_per_micro_batch": packs_per_micro_batch}
            other = one_step(with_values(config, {"training": changes}, origin="test"))
            assert sorted(other[2].sequence_ids) == sorted(packs.sequence_ids)
            assert other[0] == pytest.approx(loss, rel=1e-5)
            assert other[1].keys() == gradients.keys()
            scale = max(float(one.abs().max()) for one in gradients.values())
            for name, gradient in gradients.items():
                torch.testing.assert_close(other[1][name], gradient, rtol=1e-5, atol=1e-5 * scale)
    if task != "squad":
        assert len(
            one_step(with_values(config, {"training": {"layout": "packed"}}, origin="test"))[2].offsets
        ) - 1 < len(packs.sequence_ids)


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_zero(
    encoder: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"warmup_fraction": 0.4, "learning_rate": 1e-3, "gradient_clipping": None, "weight_decay": 0.0}
    config = finetune_config("sst2", folders["sst2"], encoder, tmp_path, sequences_per_step=9, **settings)
    finetuning, model = opened(config)
    trainer = Trainer(model, config.training, steps=10)
    planner = finetuning.planner(seed=1)
    biases, changes = model.head.classifier.bias, []
    for _ in range(10):
        before = biases.detach().clone()
        trainer.step(finetuning.collator(planner), planner.plan(0))
        changes.append(float((biases.detach() - before).abs().max()))
    assert changes[0] == pytest.approx(1e-3 / 4, rel=1e-2), "the first step of AdamW is as long as its rate"
    assert changes[9] < 1e-8, "the last update has a rate of 0"
    assert max(changes[3:6]) > 2 * changes[0]


def test_a_model_without_a_pooler_gets_a_new_one_that_depends_on_the_seed_alone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path / "bert", "bert without a pooler")
    config = finetune_config("sst2", folders["sst2"], folder, tmp_path / "out")
    pretrained = read_pretrained(config)
    first, again, other = (new_finetuned(config, pretrained, seed).head.pooler.weight for seed in (1, 1, 2))
    assert float(first.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_hold_what_the_plan_of_their_step_counts(
    layout: Layout, encoder: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = finetune_config(
        "rte", folders["rte"], encoder, tmp_path, layout=layout, sequences_per_step=9, packs_per_micro_batch=2
    )
    finetuning, _ = opened(config)
    planner = finetuning.planner(seed=0)
    plan = planner.plan(0)
    collator = finetuning.collator(planner)
    batches = [collator.collate(plan.micro_batch(0, index), plan.counts) for index in range(plan.micro_batches)]
    assert len(batches) > 1
    held = StepCounts(packs=0, sequences=0, tokens=0, targets=0)
    for batch in batches:
        held += batch.local_counts
        assert batch.step_counts == plan.counts
        weights = batch.targets["sequence_class"].weights
        assert weights.sum() == batch.local_counts.sequences
        rows = {"packed": batch.local_counts.packs, "padded": batch.local_counts.sequences}
        if layout in rows:
            assert batch.slots == rows[layout] * 48, "no row is padding alone"
    assert held == plan.counts
