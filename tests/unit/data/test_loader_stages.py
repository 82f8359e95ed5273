"""Stages of a Loader: one exact order on any number of ranks, a state that fits later changes and no earlier ones."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from evenpack import Loader
from evenpack.adapters.first_step import require_whole_step
from evenpack.data.order.selection import order_hash
from evenpack.errors import CheckpointError, ConfigError

Stages = list[dict[str, Any]]
STAGES: Stages = [{"step": 3, "packs_per_step": 8, "weights": {"b": 1}}, {"step": 5, "weights": {"a": 0}}]
DOCUMENTS = {
    name: [list(range(1, 2 + (at * step) % 7)) for at in range(1, 30)] for name, step in (("b", 3), ("a", 5), ("c", 2))
}


def loader(stages: Stages = STAGES, **settings: Any) -> Loader:
    values: dict[str, Any] = {"pack_length": 8, "packs_per_step": 4, "weights": {"b": 0, "a": 2, "c": 1}}
    return Loader(DOCUMENTS, seed=4, stages=stages, **{"arrays": "numpy", **values, **settings})


def hashes(found: Loader, steps: int = 8) -> list[int]:
    return [order_hash(found.plan(step).packs) for step in range(steps)]


def test_a_stage_changes_the_steps_from_its_own_on_and_no_others():
    whole = loader()
    assert whole.data.source_names == ("a", "c", "b")  # by their first stage
    assert [whole.plan(step).packs.packs for step in range(6)] == [4, 4, 4, 8, 8, 8]
    drawn = [set(whole.plan(step).packs.sources.tolist()) for step in range(7)]
    assert drawn == [{0, 1}] * 3 + [{0, 1, 2}] * 2 + [{1, 2}] * 2
    assert hashes(loader([]))[:3] == hashes(whole)[:3]
    assert hashes(loader(STAGES[:1]))[:5] == hashes(whole)[:5] != hashes(loader([]))[:5]
    without = {name: documents for name, documents in DOCUMENTS.items() if name != "b"}
    alone = Loader(without, arrays="numpy", seed=4, pack_length=8, packs_per_step=4, weights={"a": 2, "c": 1})
    assert hashes(alone, 3) == hashes(whole, 3)
    assert alone.fingerprint == whole.state_dict()["fingerprint"]
    assert alone.packs == loader([]).packs < whole.packs, "an epoch is of what is drawn"


def test_ranks_divide_the_steps_of_each_stage():
    one, two = loader(), [loader(rank=rank, ranks=2, micro_batches=2) for rank in range(2)]
    for step in range(7):
        whole = Counter(np.concatenate([batch.tokens for batch in one.batches_of(step)]).tolist())
        parts = [batch for each in two for batch in each.batches_of(step)]
        assert Counter(np.concatenate([batch.tokens for batch in parts]).tolist()) == whole
        assert sum(batch.order_hash for batch in parts) % (1 << 64) == hashes(one)[step]
    assert [len(step.micro_batches) for step, _ in zip(two[1].steps(), range(7), strict=False)] == [2] * 7


@pytest.mark.parametrize(
    ("at", "stages"), [(3, []), (4, STAGES[:1]), (5, [STAGES[0], {"step": 6, "packs_per_step": 2}]), (7, STAGES)]
)
def test_a_state_goes_on_under_other_later_stages(at: int, stages: Stages):
    before, after = loader(), loader(stages)
    before.step = at
    after.load_state_dict(before.state_dict())
    assert after.step == at


@pytest.mark.parametrize(
    "stages", [[], STAGES[:1], [{**STAGES[0], "step": 2}, STAGES[1]], [{"step": 3, "weights": {"b": 1}}]]
)
def test_a_state_is_refused_under_other_stages_before_it(stages: Stages):
    before = loader()
    before.step = 6
    with pytest.raises(CheckpointError, match="stages that begin before step 6"):
        loader(stages).load_state_dict(before.state_dict())


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([STAGES[1], STAGES[0]], "the step of a stage, after those before it, must be a whole number from 6"),
        ([{"step": 0, "packs_per_step": 2}], "from 1 to .*, found 0"),
        ([{"step": 3, "weights": {"d": 1}}], "step 3: there is no source 'd'"),
        ([{"step": 3, "weights": {"a": 0, "c": 0}}], "from step 3 every source has weight 0"),
        ([{"step": 3, "pack_length": 16}], "a stage has a step, and weights or packs_per_step"),
        ([{"step": 3, "packs_per_step": 3}], "3 packs_per_step cannot be divided equally over 2 ranks"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        loader(stages, ranks=2)


def test_hosts_of_equal_steps_refuse_others():
    torch_loader = loader(arrays="torch")
    with pytest.raises(ConfigError, match="stages change packs_per_step"):
        require_whole_step(torch_loader, 0, [], list)
    assert loader([STAGES[1]]).has_equal_steps
