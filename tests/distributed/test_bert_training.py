"""BERT from prepared pairs to updates (invariants 3, 6 and 7), and the metrics of its two losses."""

import logging
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from masked_batches import MaskedPair, build_masked_batch, roughen
from pair_sources import pair_run
from slow_cases import slow_but
from step_shapes import step_shape
from tiny_training import changed, logged, records, train_all

from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.data.sequences.masking import mask_sequences, masked_count, masking_keys
from evenpack.engine.build import CHECKPOINTS, build_at, build_model, find_start
from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.weights import load_model_weights
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import evaluate_model, evaluations_to_json
from evenpack.engine.resolving.resolve import open_run, resolve
from evenpack.engine.world.distributed import World

STEP = 2
"""The step that is looked at; others before it are only planned."""
LAYOUTS = ("packed", "unpadded", "padded")
REDUCTIONS = ("token", "sequence")
BALANCINGS = ("exact", "expected")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares a run of two sources."""
    config = pair_run(tmp_path_factory.mktemp("pairs"))
    prepare(config.data, config.prepared_dir)
    return config


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of one step over all ranks."""

    loss_sums: list[float]
    correct: list[int]
    gradient: torch.Tensor
    """Of all parameters, one behind another."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The division, layout and denominators of a step."""

    accumulation: int
    layout: str = "packed"
    reduction: str = "token"
    balancing: str = "exact"


def settings() -> list[Setting]:
    """Returns splits and layouts, and for one of them the reductions and balancings."""
    splits = [Setting(accumulation=accumulation, layout=layout) for accumulation, layout in product((1, 2), LAYOUTS)]
    return splits + [
        Setting(accumulation=2, reduction=reduction, balancing=balancing)
        for reduction, balancing in product(REDUCTIONS, BALANCINGS)
        if (reduction, balancing) != ("token", "exact")
    ]


def measure(world: World, config: RunConfig) -> dict[Setting, Measured]:
    return {setting: measure_one(world, config, setting) for setting in settings()}


def measure_one(world: World, config: RunConfig, setting: Setting) -> Measured:
    packs = config.training.packs_per_step // (world.size * setting.accumulation)
    config = changed(
        config,
        training={"packs_per_micro_batch": packs, "layout": setting.layout, "gradient_clipping": None},
        model={"mlm_reduction": setting.reduction, "loss_balancing": setting.balancing},
    )
    run = build_at(find_start(open_run(config), world))
    roughen(run.engine.model)
    batches = list(run.start.batches(stop_step=STEP + 1))[STEP]
    assert len(batches.micro_batches) == setting.accumulation
    loss_sums, correct, _ = run.engine.compute_gradients(STEP, batches.micro_batches)
    run.engine.reduction.finish()
    gradients = [parameter.grad for parameter in run.engine.model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    sums = world.all_sum(torch.stack([*map(torch.Tensor.sum, loss_sums.values()), *correct.values()]).double()).tolist()
    measured = Measured(
        loss_sums=sums[:2],
        correct=[round(number) for number in sums[2:]],
        gradient=torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]),
    )
    run.engine.deepspeed.destroy()
    return measured


def sequences_of_step(config: RunConfig) -> list[MaskedPair]:
    """Returns the pairs of the step with their masks, each made separately."""
    prepared = PreparedData.open(config.prepared_dir, config.data)
    sources = packed_sources(prepared, "train", seed=config.run.seed)
    objective = resolve(config, prepared).objective
    shape = step_shape(items_per_step=config.training.packs_per_step)
    packs = StepPlanner(sources, prepared.weights, shape=shape, ranks=1, objective=objective).plan(STEP).packs
    pairs, vocabulary = [], prepared.tokenizer.masking_vocabulary()
    for index in range(packs.packs):
        source = sources[packs.sources[index]]
        epoch = packs.stream_positions[index : index + 1] // source.plan.packs
        for sequence in packs.sequence_ids[packs.offsets[index] : packs.offsets[index + 1]]:
            ids = np.array([sequence])
            tokens = source.view.read(ids).tokens.astype(np.int64)
            key = masking_keys(config.run.seed, epoch, np.array([source.key], dtype=np.uint64), ids)
            bounds = np.array([0, len(tokens)])
            masked = mask_sequences(tokens, bounds, key, config.masking, vocabulary)
            first = int(source.view.first_segment_lengths[sequence])  # type: ignore[attr-defined]
            pair = MaskedPair(
                tokens=masked.tokens.tolist(),
                token_types=[0] * first + [1] * (len(tokens) - first),
                masked=dict(zip(masked.positions.tolist(), masked.labels.tolist(), strict=True)),
                next_sentence_label=int(source.view.next_sentence_labels[sequence]),  # type: ignore[attr-defined]
            )
            pairs.append(pair)
    return pairs


@dataclass(frozen=True, kw_only=True)
class OneByOne:
    """Sums and their gradients of a step, computed from its pairs without packs, batches and an engine."""

    sequences: int
    targets: int
    loss_sums: dict[str, float]
    """By `mlm_reduction`, and `next_sentence`."""
    gradients: dict[str, torch.Tensor]
    correct: list[int]


def one_by_one(config: RunConfig) -> OneByOne:
    pairs = sequences_of_step(config)
    model = build_model(open_run(config), torch.device("cpu"))
    roughen(model)
    sums = [model(build_masked_batch([[pair]], "unpadded", max_sequence_length=48)[0]) for pair in pairs]
    losses = {
        "token": torch.stack([one["masked_token"].loss_sum for one in sums]).sum(),
        "sequence": torch.stack(
            [one["masked_token"].loss_sum / len(pair.masked) for one, pair in zip(sums, pairs, strict=True)]
        ).sum(),
        "next_sentence": torch.stack([one["next_sentence"].loss_sum for one in sums]).sum(),
    }
    parameters = list(model.parameters())
    gradients = {
        name: torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        for name, loss in losses.items()
    }
    return OneByOne(
        sequences=len(pairs),
        targets=sum(len(pair.masked) for pair in pairs),
        loss_sums={name: loss.item() for name, loss in losses.items()},
        gradients={name: torch.cat([part.flatten() for part in parts]) for name, parts in gradients.items()},
        correct=[
            sum(int(one["masked_token"].correct) for one in sums),
            sum(int(one["next_sentence"].correct) for one in sums),
        ],
    )


def denominators(config: RunConfig, step: OneByOne, setting: Setting) -> tuple[float, float]:
    """Returns the denominators of the token loss and the next-sentence loss by definition."""
    packs = config.training.packs_per_step
    targets, sequences = float(step.targets), float(step.sequences)
    if setting.balancing == "expected":
        prepared = PreparedData.open(config.prepared_dir, config.data)
        sources = packed_sources(prepared, "train", seed=config.run.seed)
        shares = np.array(prepared.weights) / sum(prepared.weights)
        factors = [source.view.count / source.plan.packs for source in sources]
        fills = [source.view.lengths().sum() / (source.plan.packs * config.data.pack_length) for source in sources]
        assert abs(factors[0] / factors[1] - 1.0) > 1e-3, "sources that are alike would hide wrong weights"
        of_a_full_pack = 2 * int(masked_count(np.array([48]), config.masking)[0])
        targets, sequences = packs * of_a_full_pack * float(shares @ fills), packs * float(shares @ factors)
    return (targets if setting.reduction == "token" else sequences), sequences


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2]))
def test_a_step_has_the_loss_and_the_gradient_of_its_pairs_one_by_one(config: RunConfig, ranks: int) -> None:
    expected = one_by_one(config)
    assert expected.gradients["next_sentence"].norm() > 0.01 * expected.gradients["token"].norm()
    for measured in run_ranks(measure, ranks, config):
        for setting, found in measured.items():
            of_tokens, of_sequences = denominators(config, expected, setting)
            of_reduction = expected.gradients[setting.reduction]
            wanted = of_reduction / of_tokens + expected.gradients["next_sentence"] / of_sequences
            assert (found.gradient - wanted).norm() <= 1e-5 * wanted.norm(), setting
            assert found.loss_sums == pytest.approx(
                [expected.loss_sums[setting.reduction], expected.loss_sums["next_sentence"]], rel=1e-5
            ), setting
            assert found.correct == expected.correct, setting


class Runs:
    """Runs over the same data, by name, that one launch of two ranks trains."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.all: dict[str, RunConfig] = {}
        for reduction, balancing in product(REDUCTIONS, BALANCINGS):
            model = {"mlm_reduction": reduction, "loss_balancing": balancing}
            self.add(f"{reduction}_{balancing}", model=model, training={"steps": 2})
        dropped = {"model": {"dropout": 0.1}, "training": {"evaluate_every_steps": 2}}
        self.add("straight", **dropped)
        self.add("stopped", **dropped)
        self.all["stopped"] = changed(self.all["stopped"], training={"stop_after_steps": 2})
        switches = {"reset_positions": False, "next_sentence": False}
        self.add("study", model=switches, attention={"isolate": False}, training={"steps": 1})
        self.said: list[str] = []

    def add(self, name: str, **sections: dict[str, Any]) -> None:
        self.all[name] = changed(
            self.config, **{**sections, "run": {"output_dir": self.config.prepared_dir.parent / name}}
        )


def train_and_listen(world: World, configs: list[RunConfig]) -> list[str]:
    """Trains one run after another; returns the warnings."""
    with logged(level=logging.WARNING) as said:
        train_all(world, configs)
    return said


@pytest.fixture(scope="module")
def trained(config: RunConfig) -> Runs:
    runs = Runs(config)
    runs.said = run_ranks(train_and_listen, 2, list(runs.all.values()))[0]
    return runs


EXACT = (
    *("step", "loss", "token_loss", "next_sentence_loss", "next_sentence_accuracy", "accuracy", "learning_rate"),
    *("gradient_norm", "tokens", "targets", "sequences", "order_hash", "validation"),
)


def exact(config: RunConfig) -> list[list[Any]]:
    return [[record.get(name) for name in EXACT] for record in records(config)]


def weights(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    return load_model_weights(read_manifest(config.run.output_dir / CHECKPOINTS / f"step_{step:06d}"))


def evaluate_alone(config: RunConfig, step: int) -> dict[str, Any]:
    """Evaluates a checkpoint in one process without DeepSpeed."""
    run = open_run(config)
    device = torch.device("cpu")
    model = build_model(run, device)
    model.load_state_dict(weights(config, step))
    world = World(rank=0, size=1, local_rank=0, device=device)
    return dict(evaluations_to_json(run.prepared, evaluate_model(model, run, world)))


def test_a_stopped_run_resumes_bit_for_bit_with_dropout(trained: Runs) -> None:
    straight, stopped = trained.all["straight"], trained.all["stopped"]
    assert [record["step"] for record in records(stopped)] == [1, 2]
    run_ranks(train_and_listen, 2, [changed(stopped, training={"stop_after_steps": None})])
    assert exact(stopped) == exact(straight)
    assert [record["step"] for record in records(straight)] == [1, 2, 3, 4]
    expected, found = weights(straight, 4), weights(stopped, 4)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(expected["token_embedding.weight"], weights(stopped, 2)["token_embedding.weight"])


def test_one_rank_evaluates_as_two_do(trained: Runs) -> None:
    config = trained.all["straight"]
    by_two_ranks, alone = records(config)[-1]["validation"], evaluate_alone(config, 4)
    assert by_two_ranks.keys() == alone.keys() == {"wiki", "code"}
    for source, values in alone.items():
        assert {"next_sentence_loss", "next_sentence_accuracy", "targets", "accuracy"} <= values.keys()
        assert by_two_ranks[source] == pytest.approx(values, rel=1e-5), source


def test_a_record_has_both_losses_and_their_sum(trained: Runs) -> None:
    for reduction, balancing in product(REDUCTIONS, BALANCINGS):
        found = records(trained.all[f"{reduction}_{balancing}"])
        assert len(found) == 2
        for record in found:
            assert record["loss"] == record["token_loss"] + record["next_sentence_loss"]
            correct = record["next_sentence_accuracy"] * record["sequences"]
            assert 0 < correct <= record["sequences"]
            assert correct == pytest.approx(round(correct))
        assert found[0]["token_loss"] == pytest.approx(np.log(120), rel=0.05), "weights at the start know nothing"
        assert found[0]["next_sentence_loss"] == pytest.approx(np.log(2), rel=0.1)


def test_the_loss_that_is_reported_is_exact_however_losses_are_balanced(trained: Runs) -> None:
    told = ("loss", "token_loss", "next_sentence_loss", "accuracy")
    for reduction in REDUCTIONS:
        by_exact, by_expected = (records(trained.all[f"{reduction}_{balancing}"])[0] for balancing in BALANCINGS)
        assert [by_expected[name] for name in told] == [by_exact[name] for name in told]
        assert by_expected["gradient_norm"] != pytest.approx(by_exact["gradient_norm"], rel=1e-4)
    of_tokens, of_sequences = (records(trained.all[f"{reduction}_exact"])[0] for reduction in REDUCTIONS)
    assert of_sequences["token_loss"] != of_tokens["token_loss"]
    assert of_sequences["next_sentence_loss"] == of_tokens["next_sentence_loss"]


def test_switches_for_study_train_and_say_loudly_what_they_are(trained: Runs) -> None:
    said = [message.split()[3] for message in trained.said if message.startswith("FOR STUDY ONLY")]
    assert said == ["attention.isolate", "model.reset_positions"], "and no other run is"
    (record,) = records(trained.all["study"])
    assert "next_sentence_loss" not in record
    assert record["loss"] == pytest.approx(np.log(120), rel=0.05), "of tokens alone"
    assert record["order_hash"] == records(trained.all["token_exact"])[0]["order_hash"]
