"""Forms that are compared: layouts, packing depths, samples for the cost model."""

import pickle

import numpy as np
import pytest
import torch
from tiny_run import PACK_LENGTH

from evenpack.data.order.config import PackingConfig
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.world.distributed import World
from evenpack.studies.throughput.contenders import (
    changed,
    contender,
    depth_contenders,
    run_to_measure,
    sample_micro_batches,
    sequences_per_item,
)


def test_layouts_hold_the_same_sequences_and_padding_has_as_many_rows_as_packs(
    world: World, config: RunConfig, prepared: PreparedData
) -> None:
    run = run_to_measure(config)
    ids = [
        sorted(torch.cat([one[index].sequence_ids for index in range(2)]).tolist())
        for one in (contender(name, run, world) for name in ("padded", "packed"))
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) > 8
    padding, unmasked, single, packed = depth_contenders(run, world, (1, None)).values()
    rows = config.training.packs_per_micro_batch
    assert padding[0].slots == single[0].slots == packed[0].slots == rows * PACK_LENGTH
    assert padding[0].local_counts.sequences == rows
    assert sequences_per_item(padding) == sequences_per_item(single) == 1.0
    whole, apart = unmasked[0], packed[0]
    assert whole.tokens.tolist() == apart.tokens.tolist()
    assert whole.position_ids.max() == PACK_LENGTH - 1
    assert len(set(whole.cu_seqlens.tolist())) < len(set(apart.cu_seqlens.tolist()))


def test_repacked_data_holds_every_sequence_and_survives_pickling(prepared: PreparedData) -> None:
    two = prepared.repacked(PackingConfig(max_sequences_per_pack=2))
    again = pickle.loads(pickle.dumps(two))
    for one in (two, again):
        plan = one.plan("one", "train", seed=1)
        assert plan.max_sequences_per_pack == 2
        drawn = plan.draw(np.arange(plan.packs))
        assert sorted(drawn.sequence_ids.tolist()) == list(range(plan.sequences))
    assert prepared.plan("one", "train", seed=1).max_sequences_per_pack > 2
    assert (
        len({one.fingerprint(1) for one in (prepared, two, prepared.repacked(PackingConfig(max_sequences_per_pack=3)))})
        == 3
    )
    assert again.fingerprint(1) == two.fingerprint(1)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_samples_are_of_many_sizes_and_lengths(world: World, config: RunConfig, rows: int) -> None:
    of_rows = changed(config, training={"packs_per_step": rows, "packs_per_micro_batch": rows})
    singles = contender("unpadded/max_tokens", open_run(of_rows), world)
    batches = list(sample_micro_batches(singles, 40))
    counts = [batch.local_counts.sequences for batch in batches]
    shares = [batch.local_counts.tokens / (rows * PACK_LENGTH) for batch in batches]
    assert 0.5 - 1 / rows <= min(shares) < 0.6
    assert 0.9 < max(shares) <= 1.0
    for batch in batches:
        lengths = batch.cu_seqlens.diff()
        lengths = lengths[lengths > 0][: batch.local_counts.sequences]
        assert lengths.max() <= 1.5 * lengths.min()
    means = [batch.local_counts.tokens / count for batch, count in zip(batches, counts, strict=True)]
    assert min(means) < 0.25 * PACK_LENGTH
    assert max(means) > 0.9 * PACK_LENGTH
    again = [batch.order_hash for batch in sample_micro_batches(singles, 40)]
    assert again == [batch.order_hash for batch in batches]
