"""Evaluation gives the mean over every held-out target, for any number of ranks and any layout."""

import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_files
import torch
import torch.nn.functional as F
from batches import build_batch
from run_files import run_values
from scored_tokens import next_token_logits
from sources import ListView
from torch import Tensor, nn

from evenpack.batch import PackedBatch
from evenpack.data.batches.objectives import rounded_size
from evenpack.data.order.plan import PackPlan
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.prepared import PreparedData
from evenpack.engine.activity import doing
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import SourceEvaluation, evaluate_model, evaluations_to_json, overall_accuracy
from evenpack.engine.resolving.resolve import resolve
from evenpack.engine.world.distributed import World
from evenpack.models.common.loss_sums import LossOutput, LossOutputs
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2

PACK_LENGTH = 32
VOCABULARY = 4096


class HeldOut(PreparedData):
    """Validation sequences in memory, by source."""

    def __init__(self, config: RunConfig, lengths: dict[str, list[int]]) -> None:
        self.config = config.data
        self.lengths = lengths

    @property
    def end_of_text_id(self) -> int:
        return 0

    @property
    def vocabulary_size(self) -> int:
        return VOCABULARY

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(self.lengths)

    def view(self, source: str, split: str) -> ListView:
        assert split == "validation"
        first_token = 1000 * self.source_names.index(source)
        sequences = [[length] for length in self.lengths[source]]
        return ListView(sequences=sequences, max_sequence_length=PACK_LENGTH, first_token=first_token)

    def plan(self, source: str, split: str, *, seed: int, batching: str) -> PackPlan:
        assert batching == "packs", "which validation is always of"
        lengths = self.view(source, split).lengths()
        packing = pack(LengthHistogram.from_lengths(lengths, longest=PACK_LENGTH), pack_length=PACK_LENGTH)
        return PackPlan(packing, np.argsort(lengths, kind="stable"), key=seed)


def run_config(**training: Any) -> RunConfig:
    data = {
        "sources": {name: {"kind": "builtin"} for name in ("wiki", "code")},
        "recipe": {"kind": "documents", "max_sequence_length": PACK_LENGTH},
        "pack_length": PACK_LENGTH,
    }
    step = {"packs_per_step": 4, "packs_per_micro_batch": 4, "steps": 1}
    values = run_values("gpt2", Path("nowhere"), data=data, training={**step, **training})
    return run_files.run_config(values)


LENGTHS = {
    "wiki": np.random.default_rng(1).integers(2, PACK_LENGTH + 1, 30).tolist(),
    "code": np.random.default_rng(2).integers(2, 12, 20).tolist(),
}
SOLO = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@dataclass
class Meeting:
    """Sums vectors over threads that act as ranks."""

    ranks: int
    vectors: dict[int, Tensor] = field(default_factory=dict)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=60)


@dataclass(frozen=True, kw_only=True)
class ThreadWorld(World):
    meeting: Meeting

    def all_sum(self, vector: Tensor) -> Tensor:
        assert vector.dtype == torch.float64
        self.meeting.vectors[self.rank] = vector
        self.meeting.barrier.wait()
        return torch.stack([self.meeting.vectors[rank] for rank in range(self.size)]).sum(0)


def evaluate_alone(model: nn.Module, **training: Any) -> dict[str, SourceEvaluation]:
    config = run_config(**training)
    return evaluate_model(model, resolve(config, HeldOut(config, LENGTHS)), SOLO)


def evaluate_on(ranks: int, model: nn.Module, config: RunConfig) -> list[dict[str, SourceEvaluation]]:
    """Returns the results of `ranks` ranks, which share one model whose mode none of them may change."""
    model.eval()
    meeting = Meeting(ranks)
    device = torch.device("cpu")

    def evaluate(rank: int) -> dict[str, SourceEvaluation]:
        world = ThreadWorld(rank=rank, size=ranks, local_rank=rank, device=device, meeting=meeting)
        return evaluate_model(model, resolve(config, HeldOut(config, LENGTHS)), world)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(evaluate, range(ranks)))


@pytest.fixture(scope="module")
def gpt2() -> Gpt2:
    """Returns a model with weights so large that predictions differ much between tokens."""
    config = Gpt2Config(kind="gpt2", preset="tiny", layers=1, hidden_size=16, heads=2, dropout=0.5)
    model = Gpt2(config, vocabulary_size=VOCABULARY, max_positions=PACK_LENGTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


class PerfectModel(nn.Module):
    """Predicts every target, and has no other outputs."""

    def __init__(self, look: Callable[[PackedBatch], None] = lambda batch: None) -> None:
        super().__init__()
        self.look = look

    def forward(self, batch: PackedBatch) -> LossOutputs:
        self.look(batch)
        return {"next_token": LossOutput(torch.zeros(()), (batch.targets["next_token"].weights > 0).sum())}


def test_loss_and_counts_are_those_of_every_sequence_alone(gpt2: Gpt2):
    config = run_config()
    evaluations = evaluate_on(1, gpt2, config)[0]
    for name, lengths in LENGTHS.items():
        view = HeldOut(config, LENGTHS).view(name, "validation")
        loss_sum, correct = 0.0, 0
        for sequence in range(view.count):
            tokens = torch.from_numpy(view.tokens(sequence))
            logits = logits_of_one(gpt2, tokens)
            loss_sum += F.cross_entropy(logits[:-1].double(), tokens[1:], reduction="sum").item()
            correct += int((logits[:-1].argmax(-1) == tokens[1:]).sum())
        targets = sum(length - 1 for length in lengths)
        assert evaluations[name].targets == targets
        assert evaluations[name].sequences == len(lengths)
        assert evaluations[name].loss == pytest.approx(loss_sum / targets, rel=1e-6)
        assert evaluations[name].accuracy == pytest.approx(correct / targets)


@torch.no_grad()
def logits_of_one(model: Gpt2, tokens: Tensor) -> Tensor:
    batch, _ = build_batch([[tokens.tolist()]], "packed", max_sequence_length=len(tokens))
    return next_token_logits(model, batch)


@pytest.mark.parametrize("layout", ["packed", "unpadded", "padded"])
def test_it_is_the_same_at_any_number_of_ranks_in_any_layout(gpt2: Gpt2, layout: str):
    alone = evaluate_on(1, gpt2, run_config())[0]
    for ranks in (2, 4):
        for evaluations in evaluate_on(ranks, gpt2, run_config(layout=layout)):
            for name, expected in alone.items():
                assert evaluations[name].loss == pytest.approx(expected.loss, rel=1e-6)
                assert replace(evaluations[name], loss=expected.loss) == expected


def test_each_sequence_is_evaluated_once_over_the_ranks_and_without_padding():
    """This would show any cost of an evaluation beyond its forward passes, such as padding or repeated sequences."""
    batches: list[PackedBatch] = []
    evaluate_on(4, PerfectModel(batches.append), run_config(layout="padded"))
    assert sum(batch.local_counts.tokens for batch in batches) == sum(map(sum, LENGTHS.values()))
    assert sum(int((batch.sequence_ids >= 0).sum()) for batch in batches) == sum(map(len, LENGTHS.values()))
    for batch in batches:
        assert batch.slots == rounded_size(batch.local_counts.tokens)


def test_ranks_without_a_pack_do_not_disturb_the_others():
    config = run_config(evaluation_packs=2, packs_per_micro_batch=1)
    everyone = evaluate_on(4, PerfectModel(), config)
    assert everyone == [everyone[0]] * 4
    assert everyone[0]["wiki"].packs == 2


def test_every_target_is_counted_once_and_only_targets_are():
    evaluations = evaluate_on(2, PerfectModel(), run_config())[0]
    for name, lengths in LENGTHS.items():
        assert evaluations[name].targets == sum(lengths) - len(lengths)
        assert evaluations[name].accuracy == 1.0


def test_at_most_the_given_number_of_packs_is_read():
    seen: list[int] = []
    moves = doing.moves
    model = PerfectModel(lambda batch: seen.append(batch.local_counts.packs))
    evaluations = evaluate_alone(model, evaluation_packs=3, packs_per_micro_batch=2)
    assert {name: evaluation.packs for name, evaluation in evaluations.items()} == {"wiki": 3, "code": 3}
    assert seen == [2, 1, 2, 1]
    assert doing.moves - moves == 4, "each batch is progress"


@pytest.mark.parametrize("nothing", [[], [1, 1]])
def test_a_source_with_nothing_held_out_is_absent_by_name(caplog: pytest.LogCaptureFixture, nothing: list[int]):
    prepared = HeldOut(run_config(), {"wiki": [5], "code": nothing})
    evaluations = evaluate_model(PerfectModel(), resolve(run_config(), prepared), SOLO)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "code" in record.getMessage()
    assert "wiki" not in record.getMessage()
    as_json = evaluations_to_json(prepared, evaluations)
    assert as_json["code"] is None
    assert as_json["wiki"] == evaluations["wiki"].to_json()
    assert evaluations["wiki"].targets == 4


@pytest.mark.parametrize("was_training", [True, False])
def test_dropout_and_gradients_are_off_and_the_mode_comes_back(gpt2: Gpt2, was_training: bool):
    seen: list[tuple[bool, bool]] = []
    handle = gpt2.register_forward_pre_hook(lambda *_: seen.append((gpt2.training, torch.is_grad_enabled())))
    gpt2.train(was_training)
    first, second = (evaluate_alone(gpt2) for _ in range(2))
    handle.remove()
    assert first == second
    assert set(seen) == {(False, False)}
    assert gpt2.training is was_training


def test_the_mode_comes_back_after_an_error():
    def fail(_: PackedBatch) -> None:
        raise RuntimeError("device lost")

    model = PerfectModel(fail).train()
    with pytest.raises(RuntimeError, match="device lost"):
        evaluate_alone(model)
    assert model.training


@pytest.mark.parametrize(("precision", "expected"), [("fp32", torch.float32), ("bf16_autocast", torch.bfloat16)])
def test_matrix_products_have_the_precision_of_training(precision: str, expected: torch.dtype):
    seen: set[torch.dtype] = set()
    matrix = torch.ones(2, 2)
    evaluate_alone(PerfectModel(lambda batch: seen.add((matrix @ matrix).dtype)), precision=precision)
    assert seen == {expected}


def source_evaluation(loss: float, accuracy: float, targets: int) -> SourceEvaluation:
    return SourceEvaluation(loss=loss, accuracy=accuracy, others={}, targets=targets, sequences=2, packs=1)


def test_overall_accuracy_weighs_each_source_by_its_targets():
    of_source = {"wiki": source_evaluation(2.0, 0.5, 100), "code": source_evaluation(4.0, 0.9, 300)}
    assert overall_accuracy(of_source) == pytest.approx((0.5 * 100 + 0.9 * 300) / 400)
    assert overall_accuracy({}) is None


def test_perplexity_is_the_exponential_of_the_loss_and_never_overflows():
    assert source_evaluation(2.0, 0.5, 10).to_json()["perplexity"] == math.exp(2.0)
    assert source_evaluation(1e4, 0.0, 1).perplexity == math.inf
