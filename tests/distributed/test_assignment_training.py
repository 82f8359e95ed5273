"""Steps of single sequences have one loss under every layout and assignment, and resume exactly (GPT-2, BERT)."""

from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from masked_batches import roughen
from pair_sources import pair_run
from tiny_training import changed, prepare_run, records, train_all

from evenpack.data.order.step_shape import POLICIES
from evenpack.data.prepare.prepare import prepare
from evenpack.engine.build import CHECKPOINTS, build_at, find_start
from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.shards import saved_tensors
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
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
TRAINED = [("gpt2", "unpadded", "max_tokens"), ("bert", "padded", "max_tokens")]


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
    )
    run.engine.deepspeed.destroy()
    return measured


def test_layouts_and_assignments_give_one_loss_and_one_gradient(prepared: dict[str, RunConfig]) -> None:
    (alone,), together = (run_ranks(measure, ranks, prepared) for ranks in (1, 2))
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


@pytest.fixture(scope="module")
def trained(prepared: dict[str, RunConfig]) -> dict[str, RunConfig]:
    """Trains pairs of runs, `straight ...` and `stopped ...`; the latter are resumed in new processes."""
    found, first = {}, []
    for (name, layout, assignment), stop in product(TRAINED, (None, 2)):
        every = 2 if name == "bert" else None
        times = {"steps": 4, "evaluate_every_steps": every, "log_rank_times_every_steps": 3}
        config = changed(of_sequences(prepared[name], layout, assignment, **times), model={"dropout": 0.1})
        label = f"{'stopped' if stop else 'straight'} {name}"
        found[label] = changed(config, run={"output_dir": config.prepared_dir.parent / label.replace(" ", "_")})
        first.append(changed(found[label], training={"stop_after_steps": stop}))
    run_ranks(train_all, 2, first)
    longer = {"assignment": "sorted_serpentine", "steps": 5}  # another assignment of the same sequences is no other run
    run_ranks(
        train_all, 2, [found["stopped gpt2"], found["stopped bert"], changed(found["straight gpt2"], training=longer)]
    )
    return found


TIMES = ("seconds", "per_second", "ranks", "mfu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_stopped_run_of_sequences_resumes_bit_for_bit(trained: dict[str, RunConfig], name: str) -> None:
    straight, stopped = (trained[f"{kind} {name}"] for kind in ("straight", "stopped"))
    exact = [
        [{name: value for name, value in one.items() if not any(word in name for word in TIMES)} for one in records(of)]
        for of in (straight, stopped)
    ]
    assert exact[0][:4] == exact[1]
    assert [one["step"] for one in exact[0]] == [1, 2, 3, 4, *[5] * (name == "gpt2")]
    assert {one["sequences"] for one in exact[0]} == {PER_STEP}
    assert all(one["loss"] != other["loss"] for one, other in pairwise(exact[0]))
    saved = [read_manifest(of.run.output_dir / CHECKPOINTS / "step_000004") for of in (straight, stopped)]
    weights = [saved_tensors(checkpoint).weights() for checkpoint in saved]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


@pytest.mark.slow
def test_ranks_gather_what_they_did_since_the_last_gather(trained: dict[str, RunConfig]) -> None:
    found = records(trained["straight bert"])
    assert ["ranks" in record for record in found] == [False, False, True, True], "every third step, and at the end"
    for record, steps in ((found[2], found[:3]), (found[3], found[3:])):
        ranks = record["ranks"]
        assert ranks["steps"] == len(steps)
        for name in ("sequences", "tokens", "slots"):
            assert len(ranks[name]) == 2
            assert sum(ranks[name]) == sum(step[name] for step in steps)
        mean = sum(step["compute_seconds_mean"] for step in steps)
        assert sum(ranks["compute_seconds"]) / 2 == pytest.approx(mean, abs=1e-5)
    resumed = records(trained["stopped bert"])
    assert [record.get("ranks", {}).get("steps") for record in resumed] == [None, 2, 1, 1]
