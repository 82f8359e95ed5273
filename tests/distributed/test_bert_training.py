"""BERT from prepared pairs to gradients (invariants 3 and 6), and the metrics of its two losses."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from masked_batches import MaskedPair, build_masked_batch, roughen
from pair_sources import pair_run
from step_shapes import step_shape
from tiny_training import beside, changed, logged, records, train_all

from evenpack.batch import PackedBatch
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.data.sequences.masking import mask_sequences, masked_count, masking_keys
from evenpack.engine.build import build_at, build_model, find_start
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run, resolve
from evenpack.engine.world.distributed import World

STEP = 2
"""The step that is looked at; others before it are only planned."""
LAYOUTS = ("packed", "unpadded", "padded")
REDUCTIONS = ("token", "sequence")
BALANCINGS = ("exact", "expected")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares a run of two sources, whose packs hold very unequal numbers of tokens and of pairs."""
    recipe = {
        "kind": "sentence_pairs",
        "max_sequence_length": 48,
        "duplication_factor": 2,
        "short_target_probability": 0.9,
    }
    data = {"recipe": recipe, "packing": {"algorithm": "next_fit"}}
    config = pair_run(tmp_path_factory.mktemp("pairs"), data=data)
    prepare(config.data, config.prepared_dir)
    return config


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of one step over all ranks."""

    loss_sums: list[float]
    optimised: list[float]
    """The losses whose gradient is taken."""
    correct: list[int]
    gradients: list[torch.Tensor]
    """Of each parameter."""
    means: list[float]
    """Of the losses, of what each micro-batch divides by what it holds itself; where that is the balancing alone."""
    gradient_of_means: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The division, layout and denominators of a step."""

    accumulation: int
    layout: str = "packed"
    reduction: str = "token"
    balancing: str = "exact"


def settings() -> list[Setting]:
    """Returns splits of both reductions, layouts, and balancings."""
    splits = [Setting(accumulation=number, reduction=one) for number, one in product((1, 2, 4), REDUCTIONS)]
    layouts = [Setting(accumulation=2, layout=layout) for layout in LAYOUTS[1:]]
    expected = [Setting(accumulation=2, reduction=one, balancing="expected") for one in REDUCTIONS]
    return [*splits, *layouts, *expected, Setting(accumulation=2, balancing="micro_batch")]


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
    optimised = run.engine.optimised_losses(loss_sums, batches.micro_batches)
    added = [*map(torch.Tensor.sum, loss_sums.values()), *correct.values(), *optimised.values()]
    sums = world.all_sum(torch.stack(added).double()).tolist()
    is_plain = setting.balancing == "micro_batch"
    means, gradient_of_means = plain_means(world, config, batches.micro_batches) if is_plain else ([], [])
    measured = Measured(
        loss_sums=sums[:2],
        optimised=sums[4:],
        correct=[round(number) for number in sums[2:4]],
        gradients=[parameter.grad for parameter in run.engine.model.parameters()],
        means=means,
        gradient_of_means=gradient_of_means,
    )
    run.engine.deepspeed.destroy()
    return measured


def plain_means(
    world: World, config: RunConfig, micro_batches: Sequence[PackedBatch]
) -> tuple[list[float], list[torch.Tensor]]:
    """Returns the means over all micro-batches of their own mean losses, and the gradient of both together."""
    model = build_model(open_run(config), torch.device("cpu"))
    roughen(model)
    losses = torch.zeros(2)
    for batch in micro_batches:
        sums, counts = model(batch), batch.local_counts
        own = [sums["masked_token"].loss_sum / counts.targets, sums["next_sentence"].loss_sum / counts.sequences]
        losses = losses + torch.stack(own) / (world.size * len(micro_batches))
    gradients = torch.autograd.grad(losses.sum(), list(model.parameters()))
    summed = [world.all_sum(one.double().flatten()).view(one.shape) for one in gradients]
    return world.all_sum(losses.detach().double()).tolist(), summed


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
    gradients: dict[str, tuple[torch.Tensor, ...]]
    """Of each parameter, by the same."""
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
        gradients=gradients,
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


def test_a_step_has_the_loss_and_the_gradient_of_its_pairs_one_by_one(config: RunConfig) -> None:
    expected = one_by_one(config)
    for measured in run_ranks(measure, 2, config):
        for setting, found in measured.items():
            sums = [expected.loss_sums[setting.reduction], expected.loss_sums["next_sentence"]]
            assert found.loss_sums == pytest.approx(sums, rel=1e-5), setting
            assert found.correct == expected.correct, setting
            of_tokens, of_sequences = denominators(config, expected, setting)
            parts = zip(expected.gradients[setting.reduction], expected.gradients["next_sentence"], strict=True)
            wanted = [first / of_tokens + second / of_sequences for first, second in parts]
            losses = [sums[0] / of_tokens, sums[1] / of_sequences]
            if setting.balancing == "micro_batch":
                assert largest_error(found.gradients, wanted) > 1e-2, "shares are unequal, and it is no exact mean"
                wanted, losses = found.gradient_of_means, found.means
            assert largest_error(found.gradients, wanted) <= 1e-5, setting
            assert found.optimised == pytest.approx(losses, rel=1e-5), setting


def largest_error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Returns the largest relative error (L2) of a parameter."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))


def train_and_listen(world: World, configs: list[RunConfig]) -> list[str]:
    """Trains one run after another; returns the warnings."""
    with logged(level=logging.WARNING) as said:
        train_all(world, configs)
    return said


def test_records_have_the_exact_losses_however_they_are_balanced_and_say_loudly_what_is_for_study(
    config: RunConfig,
) -> None:
    of_one_step = {"training": {"steps": 1}}
    ways = {
        (reduction, balancing): beside(
            config,
            f"{reduction}_{balancing}",
            model={"mlm_reduction": reduction, "loss_balancing": balancing},
            **of_one_step,
        )
        for reduction, balancing in product(REDUCTIONS, BALANCINGS)
    }
    switches = {"reset_positions": False, "next_sentence": False}
    study = beside(config, "study", model=switches, attention={"isolate": False}, **of_one_step)
    said, _ = run_ranks(train_and_listen, 2, [*ways.values(), study])
    found = {way: records(run)[0] for way, run in ways.items()}
    for record in found.values():
        assert record["loss"] == record["token_loss"] + record["next_sentence_loss"]
        correct = record["next_sentence_accuracy"] * record["sequences"]
        assert 0 < correct <= record["sequences"]
        assert correct == pytest.approx(round(correct))
    for reduction in REDUCTIONS:
        by_exact, by_expected = (found[reduction, balancing] for balancing in BALANCINGS)
        told = ("loss", "token_loss", "next_sentence_loss", "accuracy")
        assert [by_expected[name] for name in told] == [by_exact[name] for name in told]
        assert by_expected["gradient_norm"] != pytest.approx(by_exact["gradient_norm"], rel=1e-4)
    of_tokens, of_sequences = (found[reduction, "exact"] for reduction in REDUCTIONS)
    assert of_sequences["token_loss"] != of_tokens["token_loss"]
    assert of_sequences["next_sentence_loss"] == of_tokens["next_sentence_loss"]
    for_study = [message.split()[3] for message in said if message.startswith("FOR STUDY ONLY")]
    assert for_study == ["attention.isolate", "model.reset_positions"], "and no other run is"
    assert "next_sentence_loss" not in records(study)[0]
