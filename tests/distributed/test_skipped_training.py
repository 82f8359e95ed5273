"""Skipped steps advance only the step and the learning rate, on ranks and across any resume."""

from pathlib import Path

import pytest
from forked_ranks import run_ranks
from tiny_training import are_equal, changed, exact, never, numbered_lines, prepare_run, records, saved_everything

from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.where import open_where
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError
from evenpack.files import read_json_object

STEPS = 5
SKIPPED = {2, 3, 5}
LATER_WEIGHTS = [{"step": 3, "data.sources.words.weight": 9}]
RUNS = {"plain": 0, "skipping": 0, "sharded": 1, "stopped": 1, "zero_3": 3}
"""ZeRO stages."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Returns a run without skipped steps, and some with them, one of which is stopped within them and resumed."""
    folder = tmp_path_factory.mktemp("skipped")
    texts = {
        "lines": numbered_lines(40),
        "words": [f"word {number * 7919}" for number in range(30)],
    }
    config = prepare_run(folder, texts, steps=STEPS, checkpoint_every_steps=1, keep_checkpoints=STEPS)
    runs = {
        name: changed(
            config,
            run={"output_dir": folder / name},
            optimizer={"learning_rate": 3e-3},
            deepspeed={"zero_stage": stage},
            training={"skip_steps": [] if name == "plain" else [(2, 3), 5]},
            stages=[{"step": 3, "data.sources.words.weight": 4}],
        )
        for name, stage in RUNS.items()
    }
    run_ranks(train_all, 2, runs)
    return runs


def train_all(world: World, runs: dict[str, RunConfig]) -> None:
    for name, config in runs.items():
        if name == "stopped":  # between two skipped steps, and before other weights than are planned there
            begun = changed(config, stages=LATER_WEIGHTS, training={"stop_after_steps": 2})
            train_in(world, begun, stop_requested=never)
        train_in(world, config, stop_requested=never)
    with pytest.raises(CheckpointError, match=r"(?s)step 3 would be the first.*words 4 -> .*words 9"):
        train_in(world, changed(config, stages=LATER_WEIGHTS), stop_requested=never)
    with pytest.raises(CheckpointError, match="skipped already, but not named now: 5"):
        train_in(world, changed(config, training={"skip_steps": [(2, 3)]}), stop_requested=never)


@pytest.mark.parametrize("name", ["skipping", "sharded", "zero_3"])
def test_nothing_is_learned_from_skipped_steps_and_the_schedule_continues(trained: dict[str, RunConfig], name: str):
    plain, skipping = trained["plain"], trained[name]
    whole, found = records(plain), records(skipping)
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    assert [record["learning_rate"] for record in found] == [record["learning_rate"] for record in whole]
    for record, with_all in zip(found, whole, strict=True):
        if record["step"] in SKIPPED:
            assert record["loss"] is None
            assert record["skipped"] == {"packs": 8, **{name: with_all[name] for name in ("sequences", "tokens")}}
        else:
            assert "skipped" not in record
            assert record["order_hash"] == with_all["order_hash"]
    assert found[0]["loss"] == whole[0]["loss"]
    assert found[3]["loss"] != whole[3]["loss"]
    for step in range(2, STEPS + 1):
        assert are_equal(saved_everything(skipping, step), saved_everything(skipping, step - 1)) == (step in SKIPPED)
    counts = [tensor.item() for place, tensor in saved_everything(skipping, STEPS).items() if place.endswith(".step")]
    assert set(counts) == {float(STEPS - len(SKIPPED))}


def test_a_run_that_stops_within_skipped_steps_resumes_bit_for_bit(trained: dict[str, RunConfig]):
    straight, stopped = trained["sharded"], trained["stopped"]
    assert exact(stopped) == exact(straight)
    assert are_equal(saved_everything(straight, STEPS), saved_everything(stopped, STEPS))


def test_the_summary_adds_up_what_was_skipped_and_what_was_trained_on(trained: dict[str, RunConfig]):
    config = trained["skipping"]
    found = records(config)
    summary = read_json_object(Path(config.run.output_dir) / "summary.json")
    assert summary is not None
    skipped = [record["skipped"] for record in found if "skipped" in record]
    totals = {name: sum(one[name] for one in skipped) for name in ("packs", "sequences", "tokens")}
    assert summary["skipped"] == {"steps": len(SKIPPED), "not_finite": 0, **totals}
    assert summary["tokens"] == sum(record["tokens"] for record in found) > 0
    assert summary["sequences"] == found[-1]["samples"]
    assert summary["last_loss"] == found[3]["loss"]
    assert summary["tokens_per_second"] > 0


def test_what_the_ranks_trained_on_is_what_where_returns(trained: dict[str, RunConfig]):
    for name in ("plain", "skipping"):
        where = open_where(trained[name])
        for record in records(trained[name]):
            content = where.step(record["step"])
            assert content.skipped == ("skipped" in record)
            assert record.get("order_hash") in (None, content.order_hash)
            assert len(content.sequences) == record["sequences"] or content.skipped
