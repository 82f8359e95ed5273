"""What a run says that it is doing: each micro-batch, batch of an evaluation, file of a checkpoint and parameter of one
that is converted is progress.
"""

from pathlib import Path

from forked_ranks import run_ranks
from noted_moves import begin_again, noted_moves
from run_files import prepared, run_config, run_values, text_sources
from tiny_training import changed, never, numbered_lines

from evenpack.engine.activity import ACTIVITIES, START, Activity, doing
from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World


def said_in_a_resume(world: World, config: RunConfig) -> tuple[list[tuple[Activity, int]], list[str | None]]:
    """Returns what is said in a run that goes on at ZeRO 0, and in which black box each step ends."""
    train_in(world, changed(config, training={"stop_after_steps": 4}), stop_requested=never)
    begin_again()
    boxes: list[str | None] = []

    def note_black_box() -> bool:
        boxes.append(doing.black_box)
        return False

    with noted_moves() as said:
        train_in(world, changed(config, deepspeed={"zero_stage": 0}), stop_requested=note_black_box)
    return said, boxes


def test_long_loops_are_progress_and_the_start_ends_with_the_first_step(tmp_path: Path) -> None:
    data = {"sources": text_sources(tmp_path, {"lines": numbered_lines(80)}), "validation_fraction": 0.4}
    training = {"steps": 6, "evaluate_every_steps": 4, "evaluation_packs": 12, "checkpoint_every_steps": 2}
    values = run_values("gpt2", tmp_path, data=data, training=training)
    config = prepared(run_config(values | {"deepspeed": {"zero_stage": 1}}))
    batches = 12 // (2 * config.training.items_per_micro_batch)
    assert batches > 1
    outcomes = run_ranks(said_in_a_resume, 2, config)
    for said, boxes in outcomes:
        assert said.count(("building the model", 0)) > 1, "each file of the checkpoint that is verified"
        assert ("loading the checkpoint", 4) in said
        assert said.count(("converting the checkpoint", 4)) > 5, "each parameter"
        assert said.count(("evaluating", 6)) == 1 + batches
        assert said.count(("verifying the data", 6)) >= 1
        assert said.count(("waiting for verification", 6)) == 1, "to wait for others is no progress"
        assert ("waiting for a save", 6) in said
        assert said[-1] == ("writing the summary", 6)
        places = [(step, ACTIVITIES.index(activity)) for activity, step in said]
        start = places[: places.index((5, ACTIVITIES.index("waiting for a batch"))) + 1]
        assert start == sorted(start)
        assert boxes == [START, None], "a stop is asked for within the step"
    assert sum(said.count(("saving a checkpoint", 6)) for said, _ in outcomes) > 2 + 2, "each file that is written"
