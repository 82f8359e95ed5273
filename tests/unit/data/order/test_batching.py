"""Steps of packs or of single sequences: the options of a run file, and that assignment changes no step."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import run_config, run_values
from sources import packed_source
from step_shapes import PACKS, step_shape

from evenpack.config import validate
from evenpack.data.batches.objectives import NextTokens
from evenpack.data.order.selection import order_hash
from evenpack.data.order.step_plan import StepPlan, StepPlanner
from evenpack.data.order.step_shape import POLICIES, AssignmentPolicy, Layout
from evenpack.engine.checkpoints.continuation import compare_run_files, require_fingerprint
from evenpack.engine.checkpoints.files import TrainState
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.errors import CheckpointError, ConfigError

OF_SEQUENCES = {"batching": "sequences", "layout": "unpadded", "sequences_per_step": 24, "sequences_per_micro_batch": 3}
OF_PACKS = {"packs_per_step": 8, "packs_per_micro_batch": 2}


def run_of(**training: Any) -> RunConfig:
    data = {"recipe": {"kind": "documents", "max_sequence_length": 128}, "pack_length": 512}
    values = run_values("gpt2", Path("runs"), data=data)
    common = {"steps": 10}
    return run_config(values | {"training": common | training, "optimizer": {"kind": "lamb", "learning_rate": 1e-3}})


def test_items_are_packs_or_sequences() -> None:
    packs, sequences = run_of(**OF_PACKS), run_of(**OF_SEQUENCES)
    assert (packs.training.items_per_step, packs.training.items_per_micro_batch) == (8, 2)
    assert (sequences.training.items_per_step, sequences.training.items_per_micro_batch) == (24, 3)
    settings = deepspeed_config(sequences, 4)
    assert [settings[name] for name in ("train_batch_size", "train_micro_batch_size_per_gpu")] == [24, 3]
    assert settings["gradient_accumulation_steps"] == 2
    assert validate(sequences.model_dump(), RunConfig, origin="written out") == sequences


@pytest.mark.parametrize(
    ("training", "policy"),
    [
        (OF_PACKS, "cost_balanced"),
        ({**OF_PACKS, "layout": "padded"}, "cost_balanced"),
        ({**OF_PACKS, "assignment": "arrival"}, "arrival"),
        (OF_SEQUENCES, "cost_balanced"),
        ({**OF_SEQUENCES, "layout": "padded"}, "arrival"),
        ({**OF_SEQUENCES, "layout": "padded", "assignment": "max_tokens"}, "max_tokens"),
    ],
)
def test_null_stands_for_a_suitable_assignment(training: dict[str, Any], policy: str) -> None:
    assert run_of(**training).training.policy == policy


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, "batching is packs: packs_per_step is required"),
        ({"packs_per_step": 8}, "packs_per_micro_batch is required"),
        ({**OF_SEQUENCES, "packs_per_step": 8}, "leave packs_per_step out.*give sequences_per_step"),
        ({**OF_PACKS, "sequences_per_micro_batch": 3}, "leave sequences_per_micro_batch out"),
        ({**OF_SEQUENCES, "layout": "packed"}, "batching sequences has no layout packed"),
        ({**OF_SEQUENCES, "sequences_per_micro_batch": 5}, "must divide"),
        ({**OF_SEQUENCES, "assignment": "sorted"}, "choose arrival, sorted_serpentine, cost_balanced, max_tokens"),
        ({**OF_SEQUENCES, "packing_adjustment": "lamb_betas"}, "lamb_betas requires batching packs"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(training: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        run_of(**training)


def test_ranks_that_cannot_divide_a_step_of_sequences_get_a_message_about_sequences() -> None:
    odd = run_of(**OF_SEQUENCES)
    with pytest.raises(ConfigError, match=r"sequences_per_micro_batch \(3\) must divide .*_per_step \(24\)") as caught:
        deepspeed_config(odd, 3 * 5)
    assert "pack" not in str(caught.value)


def test_validation_is_of_packs_that_take_the_room_of_a_micro_batch() -> None:
    assert run_of(**OF_PACKS).evaluation_packs_per_micro_batch == 2
    assert run_of(**OF_SEQUENCES).evaluation_packs_per_micro_batch == 1
    wide = run_of(**{**OF_SEQUENCES, "sequences_per_micro_batch": 12})
    assert wide.evaluation_packs_per_micro_batch == 12 * 128 // 512


def test_a_run_resumes_with_steps_of_the_same_size_however_they_are_assigned() -> None:
    saved = {"layout": "unpadded", "skip_steps": [], **OF_SEQUENCES, "assignment": None}
    state = TrainState(
        step=7,
        fingerprint="f",
        world_size=1,
        zero_stage=0,
        cost_weights=PACKS.cost_weights,
        config={"run": {"name": "a", "seed": 1}, "training": saved},
        samples=0,
        reached_accuracy=None,
    )
    compare_run_files(state, {"training": {**saved, "assignment": "max_tokens"}})
    with pytest.raises(CheckpointError, match=r"7 steps of 24, .*sequences_per_step is 48"):
        compare_run_files(state, {"training": {**saved, "sequences_per_step": 48}})
    with pytest.raises(CheckpointError, match=r"seed 1, steps of sequences.*training\.batching"):
        require_fingerprint(state, "g", state.config)


RANKS, MICRO_BATCHES = 3, 2


def step_plan(policy: AssignmentPolicy, layout: Layout, step: int, *, ranks: int = RANKS) -> StepPlan:
    lengths = np.random.default_rng(1).integers(1, 33, size=100)
    source = packed_source([[int(length)] for length in lengths], pack_length=32, longest=32, algorithm="none")
    shape = step_shape(
        items_per_step=36, items_per_micro_batch=36 // (ranks * MICRO_BATCHES), policy=policy, layout=layout
    )
    return StepPlanner([source], [1], shape=shape, ranks=ranks, objective=NextTokens()).plan(step)


@pytest.mark.parametrize("step", [0, 2, 10**9])  # the third step crosses the end of an epoch
def test_every_assignment_has_the_same_set_and_the_same_hash(step: int) -> None:
    alone = step_plan("arrival", "unpadded", step, ranks=1)
    divisions = set()
    for layout, policies in ((layout, policies) for (batching, layout), policies in POLICIES.items()):
        for policy in policies:
            plan = step_plan(policy, layout, step)
            assert plan.counts == alone.counts
            hashes, ids = [], []
            for rank, index in product(range(RANKS), range(MICRO_BATCHES)):
                packs = plan.micro_batch(rank, index)
                hashes.append(order_hash(packs))
                ids += packs.sequence_ids.tolist()
            assert sum(hashes) % 2**64 == order_hash(alone.packs)
            assert sorted(ids) == sorted(alone.packs.sequence_ids.tolist())
            divisions.add((tuple(ids), tuple(plan.assignment.offsets.tolist())))
    assert len(divisions) == 6, "arrival, cost_balanced, serpentine, sorted, and max_tokens in two layouts"
