"""Training on a grid shuffle: the same packs on any number of ranks, and a resume in the middle of a block."""

from typing import Any

import pytest
from forked_ranks import run_ranks
from tiny_training import changed, prepare_run, train_all

from evenpack.data.prepare.prepare import prepare
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import read_metrics

EXACT = ("step", "loss", "tokens", "targets", "gradient_norm", "order_hash")
STEPS = 12
"""More than an epoch, over all blocks."""


def records(config: RunConfig, *names: str) -> list[dict[str, Any]]:
    return [{name: record[name] for name in names} for record in read_metrics(config.run.output_dir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("grid")
    sources = {
        "letters": ["abcdefgh"[: 3 + number % 6] * (1 + number % 3) for number in range(90)],
        "digits": [str(number**7) for number in range(40)],
    }
    plain = prepare_run(folder, sources, steps=STEPS, packs_per_step=8, packs_per_micro_batch=2)
    shuffle = {"kind": "grid", "rows": 2, "columns": 2, "block_tokens": 250}
    shuffled = changed(plain, data={"shuffle": shuffle, "prepared_dir": folder / "shuffled"})
    prepare(shuffled.data, shuffled.prepared_dir)
    return shuffled


def run_of(config: RunConfig, name: str, **training: Any) -> RunConfig:
    return changed(config, run={"output_dir": config.prepared_dir.parent / name}, training=training)


def test_packs_are_those_of_one_rank_and_a_stopped_run_resumes_bit_for_bit(config: RunConfig) -> None:
    one, straight = run_of(config, "one"), run_of(config, "straight")
    stopped = [run_of(config, "stopped", stop_after_steps=step) for step in (5, None)]
    run_ranks(train_all, 1, [one])
    run_ranks(train_all, 2, [straight, *stopped])
    assert records(straight, "order_hash", "tokens") == records(one, "order_hash", "tokens")
    assert [record["loss"] for record in records(straight, "loss")] == pytest.approx(
        [record["loss"] for record in records(one, "loss")], rel=1e-5
    )
    assert records(stopped[1], *EXACT) == records(straight, *EXACT)
    assert len(records(straight, "step")) == STEPS
    assert len({record["order_hash"] for record in records(straight, "order_hash")}) == STEPS
