"""Transformers loads a tuned model with the same outputs and losses, sequence by sequence."""

import io
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetuning_tasks import finetune_config, write_encoder, write_pairs, write_questions, write_scores, write_sentences
from rich.console import Console
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer

from evenpack.config import with_values
from evenpack.errors import BackendError, ConfigError, RunError
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.data import read_task
from evenpack.finetuning.model import FinetunedModel, Pretrained, read_pretrained
from evenpack.finetuning.run import finetune, new_finetuned, save_model
from evenpack.finetuning.train import Finetuning
from evenpack.models import huggingface
from evenpack.progress import Progress

WRITERS = {
    "sst2": lambda folder: write_sentences(folder, training=9, evaluation=4),
    "rte": lambda folder: write_pairs(folder, rows=9),
    "stsb": lambda folder: write_scores(folder, rows=9),
    "squad": lambda folder: write_questions(folder, questions=4),
}


def changed(model: FinetunedModel) -> FinetunedModel:
    """Changes every weight, as training would."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize(
    ("task", "kind"),
    [*product(WRITERS, ("bert", "modernbert")), ("rte", "bert without a pooler")],
)
def test_transformers_loads_it_with_equal_outputs_and_losses(task: str, kind: str, tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder", kind)
    config = finetune_config(task, WRITERS[task](tmp_path / "task"), encoder, tmp_path / "out")
    config = with_values(config, {"run": {"save_models": True}}, origin="test")
    pretrained = read_pretrained(config)
    model = changed(new_finetuned(config, pretrained, 0))
    save_model(config, pretrained.tokenizer, model, 0)
    auto: Any = AutoModelForQuestionAnswering if task == "squad" else AutoModelForSequenceClassification
    theirs, report = auto.from_pretrained(tmp_path / "out" / "seed_0", output_loading_info=True)
    assert {key: list(value) for key, value in report.items() if value} == {}
    for outputs, loss, sequence in computed_sequences(config, pretrained, model):
        if kind == "modernbert":
            del sequence["token_type_ids"]
        found = theirs.eval()(**{name: torch.from_numpy(np.array(values))[None] for name, values in sequence.items()})
        expected = torch.stack((found.start_logits, found.end_logits), dim=-1) if task == "squad" else found.logits
        torch.testing.assert_close(outputs, expected.squeeze(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loss, found.loss, rtol=1e-5, atol=1e-5)


def computed_sequences(
    config: FinetuneConfig, pretrained: Pretrained, model: FinetunedModel
) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """Returns outputs and loss of each packed training sequence, and what transformers takes in its place."""
    data = read_task(config.data, pretrained.tokenizer)
    finetuning = Finetuning(config=config, data=data, tokenizer=pretrained.tokenizer, device=torch.device("cpu"))
    planner = finetuning.planner(0)
    plan = planner.plan(0)
    batch = finetuning.collator(planner).collate(plan.packs, plan.counts)
    with torch.no_grad():
        outputs = model.outputs(batch)
        parts, losses = model.head.by_sequence(outputs, batch), model.head.sequence_losses(outputs, batch)
    found = []
    for sequence_id, part, loss in zip(plan.packs.sequence_ids.tolist(), parts, losses, strict=False):
        tokens, label = data.training.read(np.array([sequence_id])).tokens, data.training.labels[sequence_id]
        types = (np.arange(len(tokens)) >= data.training.first_lengths[sequence_id]).astype(np.int64)
        named = {"labels": label} if label.ndim == 0 else {"start_positions": label[0], "end_positions": label[1]}
        found.append((part, loss, {"input_ids": tokens, "token_type_ids": types} | named))
    assert len(found) == len(parts) > 3
    return found


def test_the_folder_has_the_tokenizer_and_the_tasks_labels(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "bert")
    config = finetune_config("rte", write_pairs(tmp_path / "task", rows=9), encoder, tmp_path / "out")
    config = with_values(config, {"run": {"save_models": True}}, origin="test")
    pretrained = read_pretrained(config)
    save_model(config, pretrained.tokenizer, new_finetuned(config, pretrained, 0), 0)
    values = json.loads((tmp_path / "out" / "seed_0" / "config.json").read_text())
    assert values["architectures"] == ["BertForSequenceClassification"]
    assert values["id2label"] == {"0": "entailment", "1": "not_entailment"}
    assert values["problem_type"] == "single_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "seed_0")
    sequences = read_task(config.data, pretrained.tokenizer).training
    first, second = (tmp_path / "task" / "train.tsv").read_text().splitlines()[1].split("\t")[1:3]
    encoded = tokenizer(first, second)
    length = int(sequences.lengths()[0])
    assert encoded["input_ids"] == sequences.token_file.read(0, length).tolist()
    assert encoded["token_type_ids"] == [int(index >= sequences.first_lengths[0]) for index in range(length)]


def saving_config(tmp_path: Path) -> FinetuneConfig:
    task = write_sentences(tmp_path / "task", training=9, evaluation=4)
    config = finetune_config("sst2", task, write_encoder(tmp_path / "bert"), tmp_path / "out")
    return with_values(config, {"run": {"save_models": True, "seeds": (0, 1)}}, origin="test")


def test_each_seed_has_its_model_and_is_trained_again_without_it(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    config = saving_config(tmp_path)
    without = with_values(config, {"run": {"save_models": False}}, origin="test")
    trained: list[list[str]] = []
    for asked in (without, config, config):
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("seed_*")}
        with Progress(Console(file=io.StringIO())) as progress:
            finetune(asked, progress, hold=lambda _: nullcontext())
        after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("seed_*")}
        trained.append(sorted(path.name for path in after if before.get(path) != after[path]))
    results, folders = ["seed_0.json", "seed_1.json"], ["seed_0", "seed_1"]
    assert trained == [results, sorted([*results, *folders]), []]


def test_a_family_without_such_a_model_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saving_config(tmp_path)
    bare = huggingface.mapping_of(read_pretrained(config).section)
    monkeypatch.setattr(huggingface, "mapping_of", lambda config: type(bare)(**vars(bare) | {"task_models": {}}))
    with (
        pytest.raises(ConfigError, match="no model of family 'bert' with a head of kind 'sequence'"),
        Progress(Console(file=io.StringIO())) as progress,
    ):
        finetune(config, progress, hold=lambda _: pytest.fail("the folder would be made"))


def test_a_disk_that_fills_is_named(
    tmp_path: Path, files_of_at_most: Callable[[int], AbstractContextManager[None]]
) -> None:
    config = saving_config(tmp_path)
    pretrained = read_pretrained(config)
    model = new_finetuned(config, pretrained, 0)
    with files_of_at_most(20_000), pytest.raises(RunError, match=rf"^{tmp_path}/out/seed_1 cannot be written: .*large"):
        save_model(config, pretrained.tokenizer, model, 1)
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(("backend", "reason"), [("flash", "CUDA device"), ("flex", "no dropout")])
def test_a_backend_that_cannot_serve_is_refused_before_anything_is_written(
    backend: str, reason: str, tmp_path: Path
) -> None:
    encoder = write_encoder(tmp_path / "encoder", "modernbert")
    config = finetune_config("sst2", WRITERS["sst2"](tmp_path / "task"), encoder, tmp_path / "out", dropout=0.1)
    config = with_values(config, {"attention": {"backend": backend}}, origin="test")
    with pytest.raises(BackendError, match=reason), Progress(Console(file=io.StringIO())) as progress:
        finetune(config, progress, hold=lambda _: pytest.fail("the folder would be made"))
    assert not (tmp_path / "out").exists()
