"""Steps of single sequences have one loss under every layout and assignment, and resume exactly (GPT-2, BERT)."""

from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from masked_batches import roughen
from pair_sources import pair_run
from tiny_training import changed, never, prepare_run, records, refusal, train_all

from evenpack.data.order.assignment import PADDED_WIDTH_MULTIPLE
from evenpack.data.order.step_shape import POLICIES
from evenpack.data.prepare.prepare import prepare
from evenpack.engine.build import CHECKPOINTS, build_at, find_start
from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.weights import load_model_weights
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World

STEP = 1
"""The step that is looked at."""
PER_STEP = 24
WORDS = ("one", "word", "or", "two", "make", "a", "line", "of", "more", "less", "any", "length", "we", "like")
WAYS = [
    (layout, policy)
    for (batching, layout), policies in POLICIES.items()
    if batching == "sequences"
    for policy in policies
]
TRAINED = [("gpt2", "unpadded", "max_tokens"), ("gpt2", "padded", "sorted"), ("bert", "padded", "max_tokens")]


def lines() -> list[str]:
    """Returns documents of 1 to about 30 tokens, most of them short."""
    counts = np.random.default_rng(4).geometric(0.25, size=70).clip(1, 7)
    return [" ".join(WORDS[(number + place) % len(WORDS)] for place in range(n)) for number, n in enumerate(counts)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Returns a run of each model, by name, in steps of sequences."""
    gpt2 = prepare_run(tmp_path_factory.mktemp("gpt2"), {"lines": lines()})
    bert = pair_run(tmp_path_factory.mktemp("bert"))
    recipe = bert.data.recipe.model_dump() | {"short_target_probability": 0.9}
    bert = changed(bert, data={"recipe": recipe})
    prepare(bert.data, bert.prepared_dir)
    return {"gpt2": of_sequences(gpt2), "bert": of_sequences(bert)}


def of_sequences(
    config: RunConfig, layout: str = "unpadded", assignment: str | None = None, **training: Any
) -> RunConfig:
    values = {
        "batching": "sequences",
        "layout": layout,
        "assignment": assignment,
        "packs_per_step": None,
        "packs_per_micro_batch": None,
        "sequences_per_step": PER_STEP,
        "sequences_per_micro_batch": PER_STEP // 4,
    }
    return changed(config, training={**values, **training})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step on one rank, with its loss and gradient over all ranks."""

    loss_sums: list[float]
    gradient: torch.Tensor
    ids: list[list[int]]
    """Of each micro-batch."""
    slots: list[int]
    tokens: list[int]
    sizes: list[int]
    """Of the index array of targets, for BERT."""


Measures = dict[tuple[str, str, str], Measured]
"""By model, layout and assignment."""


def measure(world: World, configs: dict[str, RunConfig]) -> Measures:
    return {
        (name, *way): measure_one(world, of_sequences(config, *way)) for name, config in configs.items() for way in WAYS
    }


def measure_one(world: World, config: RunConfig) -> Measured:
    run = build_at(find_start(open_run(config), world))
    roughen(run.engine.model)
    micro_batches = list(run.start.batches(stop_step=STEP + 1))[STEP].micro_batches
    assert len(micro_batches) == 4 // world.size
    loss_sums, _, _ = run.engine.compute_gradients(STEP, micro_batches)
    run.engine.reduction.finish()
    gradients = [parameter.grad for parameter in run.engine.model.parameters()]
    measured = Measured(
        loss_sums=world.all_sum(torch.stack([sums.double().sum() for sums in loss_sums.values()])).tolist(),
        gradient=torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]),
        ids=[batch.sequence_ids[batch.sequence_ids >= 0].tolist() for batch in micro_batches],
        slots=[batch.slots for batch in micro_batches],
        tokens=[batch.local_counts.tokens for batch in micro_batches],
        sizes=[batch.head_rows for batch in micro_batches if "masked_token" in batch.targets],
    )
    run.engine.deepspeed.destroy()
    return measured


@pytest.fixture(scope="module")
def alone(prepared: dict[str, RunConfig]) -> Measures:
    """Computes the steps on one rank."""
    found: Measures = run_ranks(measure, 1, prepared)[0]
    return found


def test_layouts_and_assignments_give_one_loss_and_one_gradient(
    prepared: dict[str, RunConfig], alone: Measures
) -> None:
    together = run_ranks(measure, 2, prepared)
    for name in ("gpt2", "bert"):
        expected = alone[name, "unpadded", "arrival"]
        assert expected.gradient.norm() > 0
        divisions = []
        for way in WAYS:
            ranks = [found[name, *way] for found in together]
            for found in [*ranks, alone[name, *way]]:
                assert found.loss_sums == pytest.approx(expected.loss_sums, rel=1e-5), way
                assert (found.gradient - expected.gradient).norm() <= 1e-5 * expected.gradient.norm(), way
            divisions.append([ids for rank in ranks for ids in rank.ids])
            assert sorted(chain(*divisions[-1])) == sorted(chain(*expected.ids)), way
        assert divisions[WAYS.index(("padded", "arrival"))] == divisions[WAYS.index(("unpadded", "arrival"))]
        assert len({str(division) for division in divisions}) >= len(WAYS) - 2, "the other ways divide otherwise"


@pytest.mark.parametrize(("name", "longest"), [("gpt2", 32), ("bert", 48)])
def test_rows_are_as_wide_as_the_assignment_says(alone: Measures, name: str, longest: int) -> None:
    by_arrival, by_sorting, by_slots = (alone[name, "padded", way] for way in ("arrival", "sorted", "max_tokens"))
    assert by_arrival.slots == [PER_STEP // 4 * longest] * 4
    widths = [slots // (PER_STEP // 4) for slots in by_sorting.slots]
    assert all(width % PADDED_WIDTH_MULTIPLE == 0 for width in widths)
    assert all(one >= other for one, other in pairwise(widths)), "the longest come first"
    assert sum(by_sorting.tokens) <= sum(by_sorting.slots) < sum(by_arrival.slots)
    counts = [len(ids) for ids in by_slots.ids]
    assert max(by_slots.slots) <= max(by_sorting.slots)
    assert min(counts) < PER_STEP // 4 < max(counts)


def test_index_arrays_follow_the_micro_batch_where_counts_vary(alone: Measures) -> None:
    assert len(set(alone["bert", "padded", "sorted"].sizes)) == 1
    for layout in ("unpadded", "padded"):
        assert set(alone["bert", layout, "max_tokens"].sizes) == {64}, "all hold 64 masked tokens or fewer"


def runs(prepared: dict[str, RunConfig], folder: Path) -> dict[str, RunConfig]:
    """Returns pairs of runs with equal ends: `straight ...` and `stopped ...`."""
    found = {}
    for name, layout, assignment in TRAINED:
        every = 2 if name == "bert" else None
        times = {"steps": 4, "evaluate_every_steps": every, "log_rank_times_every_steps": 3}
        config = changed(of_sequences(prepared[name], layout, assignment, **times), model={"dropout": 0.1})
        for kind in ("straight", "stopped"):
            label = f"{kind} {name} {layout} {assignment}"
            found[label] = changed(config, run={"output_dir": folder / label.replace(" ", "_")})
    return found


def try_others(world: World, wrong: list[RunConfig], right: RunConfig) -> list[str]:
    """Returns the reasons why wrong runs are refused; then trains."""
    told = [refusal(world, config) for config in wrong]
    train_in(world, right, stop_requested=never)
    return told


@pytest.fixture(scope="module")
def trained(prepared: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Trains the runs; the stopped ones are resumed in new processes."""
    found = runs(prepared, tmp_path_factory.mktemp("runs"))
    first = [
        changed(config, training={"stop_after_steps": 2}) if label.startswith("stopped") else config
        for label, config in found.items()
    ]
    run_ranks(train_all, 2, first)
    run_ranks(train_all, 2, [config for label, config in found.items() if label.startswith("stopped")])
    return found


TIMES = ("seconds", "per_second", "ranks", "mfu")


@pytest.mark.parametrize("way", TRAINED, ids=" ".join)
def test_a_stopped_run_of_sequences_resumes_bit_for_bit(trained: dict[str, RunConfig], way: tuple[str, ...]) -> None:
    straight, stopped = (trained[" ".join([kind, *way])] for kind in ("straight", "stopped"))
    exact = [
        [{name: value for name, value in one.items() if not any(word in name for word in TIMES)} for one in records(of)]
        for of in (straight, stopped)
    ]
    assert exact[0] == exact[1]
    assert [one["sequences"] for one in exact[0]] == [PER_STEP] * 4
    assert all(one["loss"] != other["loss"] for one, other in pairwise(exact[0]))
    weights = [
        load_model_weights(read_manifest(of.run.output_dir / CHECKPOINTS / "step_000004")) for of in (straight, stopped)
    ]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


def test_layouts_and_assignments_train_over_the_same_sequences(trained: dict[str, RunConfig]) -> None:
    one, other = (records(trained[" ".join(["straight", *way])]) for way in TRAINED[:2])
    assert [record["order_hash"] for record in one] == [record["order_hash"] for record in other]
    assert [record["slots"] for record in one] != [record["slots"] for record in other]


def test_ranks_gather_what_they_did_since_the_last_gather(trained: dict[str, RunConfig]) -> None:
    found = records(trained[" ".join(["straight", *TRAINED[0]])])
    assert ["ranks" in record for record in found] == [False, False, True, True], "every third step, and at the end"
    for record, steps in ((found[2], found[:3]), (found[3], found[3:])):
        ranks = record["ranks"]
        assert ranks["steps"] == len(steps)
        for name in ("sequences", "tokens", "slots"):
            assert len(ranks[name]) == 2
            assert sum(ranks[name]) == sum(step[name] for step in steps)
        mean = sum(step["compute_seconds_mean"] for step in steps)
        assert sum(ranks["compute_seconds"]) / 2 == pytest.approx(mean, abs=1e-5)
        assert max(ranks["compute_seconds_max"]) == pytest.approx(
            max(s["compute_seconds_max"] for s in steps), abs=1e-5
        )
        assert all(a < b < 32 * a for a, b in zip(ranks["tokens"], ranks["squared_lengths"], strict=True))
    resumed = records(trained[" ".join(["stopped", *TRAINED[0]])])
    assert [record.get("ranks", {}).get("steps") for record in resumed] == [None, 2, 1, 1]


def test_another_batching_or_step_is_refused_and_another_assignment_is_not(trained: dict[str, RunConfig]) -> None:
    config = trained[" ".join(["straight", *TRAINED[0]])]
    packs = {"packs_per_step": 8, "packs_per_micro_batch": 2, "sequences_per_step": None}
    of_packs = {**packs, "sequences_per_micro_batch": None, "batching": "packs", "assignment": None, "layout": "packed"}
    others = [
        changed(config, training=of_packs),
        changed(config, training={"sequences_per_step": 2 * PER_STEP}),
    ]
    longer = changed(config, training={"assignment": "sorted_serpentine", "steps": 5})
    batching, size = run_ranks(try_others, 1, others, longer)[0]
    assert "steps of sequences) was trained on data with fingerprint" in batching
    assert "4 steps of 24, this run's training.sequences_per_step is 48" in size
    assert [record["step"] for record in records(longer)] == [1, 2, 3, 4, 5]
