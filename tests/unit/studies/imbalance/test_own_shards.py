"""Ranks that read a shard each: drawn shards differ as they should, and a replay gives each rank a part of the data."""

import dataclasses
import itertools

import numpy as np
import pytest
from simulated_clusters import cost, histogram_of, run
from studied_runs import studied

from evenpack.data.packing import pack
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run, resolve
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.studies.imbalance.cluster import OWN_SHARDS, SCHEMES, UNPADDED_ARRIVAL, Cluster, ClusterOptions
from evenpack.studies.imbalance.replay import VirtualRanks
from evenpack.studies.imbalance.simulation import fit_shard_spread, make_cluster
from evenpack.studies.throughput.contenders import with_steps

COUNTS = {20: 50, 60: 30, 100: 15, 128: 5}


def cluster(spread: float, **options: int) -> Cluster:
    histogram = histogram_of(COUNTS)
    packing = pack(histogram, "longest_pack_first", pack_length=128)
    return make_cluster(
        histogram, packing, cost=cost(), options=ClusterOptions(**{"batch": 16, **options}, shard_spread=spread)
    )


def test_mean_lengths_of_shards_deviate_as_given() -> None:
    """A rank's mean over 4,000 sequences is its shard's."""
    spread, devices = 0.08, 2000
    some = cluster(spread, batch=4000)
    drawn = some._from_shards(np.random.default_rng(0), "sequences", devices)
    means = some.sequences.tokens[drawn].reshape(devices, -1).mean(axis=1)
    mean = some.sequences.probabilities @ some.sequences.tokens
    assert means.std() / mean == pytest.approx(spread, rel=0.06)
    assert means.mean() == pytest.approx(mean, rel=0.01)
    packs = some._from_shards(np.random.default_rng(0), "packs", devices)
    per_pack = (some.packs.tokens[packs].reshape(devices, -1).sum(axis=1)) / (
        some.packs.sequences[packs].reshape(devices, -1).sum(axis=1)
    )
    assert per_pack.std() / per_pack.mean() == pytest.approx(spread, rel=0.1), "packs hold the same shards' sequences"


def test_shards_make_un_padding_wait_and_packs_hardly() -> None:
    found = run(COUNTS, devices=(16,), batch=16, steps=200, shard_spread=0.1)
    packs, unpadded = (found.of(scheme)[0] for scheme in OWN_SHARDS)
    (arrival,) = found.of(UNPADDED_ARRIVAL)
    assert unpadded.wait_share > arrival.wait_share + 0.015
    assert unpadded.speed_up_high < arrival.speed_up_low
    assert packs.wait_share == pytest.approx(0.0, abs=1e-12), "the cost is of slots alone"


def test_without_a_spread_nothing_else_is_simulated() -> None:
    plain = run(COUNTS, devices=(2,), batch=4, steps=30)
    assert {(row.layout, row.policy, row.own_shard) for row in plain.rows} == {
        (scheme.layout, scheme.policy, False) for scheme in SCHEMES
    }
    spread = run(COUNTS, devices=(2,), batch=4, steps=30, shard_spread=0.05)
    assert spread.rows[: len(plain.rows)] == plain.rows, "the other schemes have the same draws"


@pytest.mark.slow
def test_the_spread_that_made_levels_is_fitted_to_them() -> None:
    some = cluster(0.1, steps=2000)
    alone, spread = (
        dataclasses.replace(some, options=dataclasses.replace(some.options, shard_spread=one)).steps(
            8, 0, 2000, OWN_SHARDS[1:]
        )[0, :, 0]
        for one in (1e-9, 0.1)
    )
    between = ((spread.std() / spread.mean()) ** 2 - (alone.std() / alone.mean()) ** 2) ** 0.5
    assert fit_shard_spread(some, float(between), devices=8) == pytest.approx(0.1, abs=0.002)
    with pytest.raises(ConfigError, match=r"no spread up to 0\.3 gives levels that deviate by 0\.9"):
        fit_shard_spread(some, 0.9, devices=8)


@pytest.mark.slow
def test_a_replayed_rank_has_a_part_of_the_data(config: RunConfig, world: World) -> None:
    prepared = open_run(config).prepared
    formed = resolve(with_steps(config, "sequences", "unpadded", "arrival", each=4, per_step=8), prepared)
    clusters = {1: range(12), 4: range(3)}
    own, arrival = VirtualRanks(formed, world, clusters), VirtualRanks(formed, world)
    ids = [
        [
            one
            for step in range(3)
            for batch in own.share(4, step, rank)
            for one in batch.sequence_ids.tolist()
            if one >= 0
        ]
        for rank in range(4)
    ]
    assert [len(each) for each in ids] == [24] * 4
    for first, second in itertools.pairwise(ids):
        assert max(first) < min(second)
    assert ids[0] != sorted(ids[0]), "shuffled within its part"
    every = [one for step in range(12) for batch in arrival.share(1, step, 0) for one in batch.sequence_ids.tolist()]
    assert sorted(one for each in ids for one in each) == sorted(one for one in every if one >= 0)
    assert [own.items(1, step, 0) for step in range(12)] == [arrival.items(1, step, 0) for step in range(12)]
    assert own.lengths(4, 1, 2).sum() == sum(
        int((batch.sequence_ids >= 0).sum() and batch.cu_seqlens[len(batch.sequence_ids[batch.sequence_ids >= 0])])
        for batch in own.share(4, 1, 2)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("simulated_once")
def test_a_spread_is_that_of_the_runs_parts_or_refused_by_name(packed: RunConfig) -> None:
    spread = studied(packed, shard_spread="run").simulation.options.shard_spread
    assert 0.0 <= spread < 0.3
    with pytest.raises(ConfigError, match=r"--shard-spread log needs --log"):
        studied(packed, shard_spread="log")
    with pytest.raises(ConfigError, match=r"is a share such as 0\.05, run or log, not wide"):
        studied(packed, shard_spread="wide")
    with pytest.raises(ConfigError, match=r"from 0 to 0\.3, not 0\.5"):
        studied(packed, shard_spread="0.5")
