"""What a run says that it is doing: each batch of an evaluation is progress, as each micro-batch of a step is.

Work without the other ranks is marked, and nothing that waits for them is.
"""

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
from noted_moves import noted_moves
from tiny_training import changed, never, numbered_lines

from evenpack.engine.activity import ACTIVITIES, Activity, current_own_work
from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.testing import prepared, run_config, run_ranks, run_values, text_sources


def said_by(world: World, config: RunConfig) -> list[tuple[Activity, int]]:
    with noted_moves() as said:
        train_in(world, config, stop_requested=never)
    return said


def test_each_batch_of_an_evaluation_is_progress(tmp_path: Path) -> None:
    data = {"sources": text_sources(tmp_path, {"lines": numbered_lines(80)}), "validation_fraction": 0.4}
    training = {"steps": 2, "evaluate_every_steps": 2, "evaluation_packs": 6, "checkpoint_every_steps": 2}
    config = prepared(run_config(run_values("gpt2", tmp_path, data=data, training=training)))
    (said,) = run_ranks(said_by, 1, config)
    batches = 6 // config.training.items_per_micro_batch
    assert batches > 1
    assert said.count(("evaluating", 2)) == 1 + batches
    assert said.index(("evaluating", 2)) > said.index(("summing over the ranks", 2))
    assert said[-1] == ("writing the summary", 2)
    places = [(step, ACTIVITIES.index(activity)) for activity, step in said]
    assert places == sorted(places)


OWN = (
    "evenpack.engine.train.open_run",
    "evenpack.engine.build.build_model",
    "evenpack.data.batches.pipeline.select_packs",
    "evenpack.engine.reporting.metrics.MetricsLog.resume",
    "evenpack.engine.reporting.metrics.MetricsLog.append",
    "evenpack.engine.reporting.metrics.MetricsLog.commit",
    "evenpack.engine.parts.metrics_writer.MetricsWriter.summarise",
    "evenpack.engine.checkpoints.saving.commit_files",
    "evenpack.engine.checkpoints.saving.CheckpointWriter.publish",
    "evenpack.engine.checkpoints.background._Flight.join",
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine.save",
    "evenpack.engine.checkpoints.loading.find_wrong_content",
    "evenpack.engine.checkpoints.loading.find_classes",
    "torch.load",
    "evenpack.engine.checkpoints.universal._write_parameter",
)
"""What may take long on one rank, and shows no progress before it ends."""

COLLECTIVE = tuple(
    f"torch.distributed.{name}" for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier")
)


def marks_of(world: World, config: RunConfig) -> tuple[dict[str, set[bool]], list[tuple[Activity, int]]]:
    """Returns whether the calls of OWN and COLLECTIVE were marked as own work, in a run and its resume at ZeRO 0."""
    marks: dict[str, set[bool]] = {}

    def probe(patch: pytest.MonkeyPatch, path: str) -> None:
        module, _, name = path.rpartition(".")
        try:
            holder: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, owner = module.rpartition(".")
            holder = getattr(importlib.import_module(module), owner)
        call = getattr(holder, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                marks.setdefault(path, set()).add(current_own_work() is not None)
            return call(*arguments, **named)

        patch.setattr(holder, name, noting)

    with pytest.MonkeyPatch.context() as patch:
        for path in (*OWN, *COLLECTIVE):
            probe(patch, path)
        train_in(world, changed(config, training={"stop_after_steps": 4}), stop_requested=never)
        resumed = changed(config, deepspeed={"zero_stage": 0})
        with noted_moves() as said:
            train_in(world, resumed, stop_requested=never)
    assert current_own_work() is None
    return marks, said


def test_long_work_without_the_other_ranks_is_marked_and_no_wait_for_them_is(tmp_path: Path) -> None:
    data = {"sources": text_sources(tmp_path, {"lines": numbered_lines(80)}), "validation_fraction": 0.4}
    training = {"steps": 6, "evaluate_every_steps": 4, "evaluation_packs": 6, "checkpoint_every_steps": 2}
    values = run_values("gpt2", tmp_path, data=data, training=training)
    config = prepared(run_config(values | {"deepspeed": {"zero_stage": 1}}))
    (main, said), (other, said_by_other) = run_ranks(marks_of, 2, config)
    assert main == {path: {path in OWN} for path in (*OWN, *COLLECTIVE)}
    assert other.items() <= main.items()
    for of_rank in (said, said_by_other):
        assert ("loading the checkpoint", 4) in of_rank
        assert ("converting the checkpoint", 4) in of_rank
        assert ("verifying the data", 6) in of_rank
        places = [(step, ACTIVITIES.index(activity)) for activity, step in of_rank]
        start = places[: places.index((5, ACTIVITIES.index("waiting for a batch"))) + 1]
        assert start == sorted(start)
