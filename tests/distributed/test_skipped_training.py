"""Skipped steps advance only the step and the learning rate, on ranks and across any resume."""

from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from tiny_training import changed, never, numbered_lines, prepare_run, records, saved_everything

from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.where import open_where
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError
from evenpack.files import read_json_object

STEPS = 5
SKIPPED = {2, 3, 5}
EXACT = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "samples", "order_hash", "skipped")
LATER_WEIGHTS = [{"step": 3, "data.sources.words.weight": 9}]
RUNS = {
    "plain": ("adamw", 0),
    "skipping": ("adamw", 0),
    "stopped": ("adamw", 0),
    "lamb": ("lamb", 0),
    "muon": ("muon", 0),
    "muon_stopped": ("muon", 0),
}
SHARDED = {"sharded": ("adamw", 1), "sharded_stopped": ("adamw", 1), "zero_3": ("adamw", 3)}
"""Optimizer and ZeRO stage."""
MATRICES = ("attention.query_key_value", "attention.output", "feed_forward.expand", "feed_forward.contract")
"""What Muon updates in a block."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Returns a run without skipped steps, and some with them, two of which are stopped within them and resumed."""
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
            optimizer={"kind": kind, "learning_rate": 3e-3},
            deepspeed={"zero_stage": stage},
            training={"skip_steps": [] if name == "plain" else [(2, 3), 5]},
            stages=[{"step": 3, "data.sources.words.weight": 4}],
        )
        for name, (kind, stage) in (RUNS | SHARDED).items()
    }
    run_ranks(train_all, 2, runs)
    return runs


def train_all(world: World, runs: dict[str, RunConfig]) -> None:
    for name, config in runs.items():
        if name.endswith("stopped"):  # between two skipped steps, and before other weights than are planned there
            begun = changed(config, stages=LATER_WEIGHTS, training={"stop_after_steps": 2})
            train_in(world, begun, stop_requested=never)
        train_in(world, config, stop_requested=never)
    with pytest.raises(CheckpointError, match=r"(?s)step 3 would be the first.*words 4 -> .*words 9"):
        train_in(world, changed(config, stages=LATER_WEIGHTS), stop_requested=never)
    with pytest.raises(CheckpointError, match="skipped already, but not named now: 5"):
        train_in(world, changed(config, training={"skip_steps": [(2, 3)]}), stop_requested=never)


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[place], other[place]) for place in one)


@pytest.mark.parametrize("name", ["skipping", "lamb", "muon", "sharded", "zero_3"])
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
    record = read_json_object(skipping.run.output_dir / "run.json")
    assert record is not None
    assert record["muon_parameters"] == [
        f"blocks.{number}.{layer}.weight"
        for number in range(skipping.model.shape["layers"])
        for layer in MATRICES
        if name == "muon"
    ]
    counts = [tensor.item() for place, tensor in saved_everything(skipping, STEPS).items() if place.endswith(".step")]
    assert set(counts) == {float(STEPS - len(SKIPPED))}


@pytest.mark.parametrize(
    ("name", "stopped_name"), [("skipping", "stopped"), ("muon", "muon_stopped"), ("sharded", "sharded_stopped")]
)
def test_a_run_that_stops_within_skipped_steps_resumes_bit_for_bit(
    trained: dict[str, RunConfig], name: str, stopped_name: str
):
    skipping, stopped = trained[name], trained[stopped_name]
    straight, gone_on = ([[one.get(name) for name in EXACT] for one in records(run)] for run in (skipping, stopped))
    assert straight == gone_on
    assert are_equal(saved_everything(skipping, STEPS), saved_everything(stopped, STEPS))


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
