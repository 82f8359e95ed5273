"""Errors of the system at each kind of file that a run reads and writes, and of memory: they name cause and remedy."""

import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from tiny_training import changed, never, numbered_lines, prepare_run

from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import EvenpackError, RunError

PLACES: dict[str, tuple[Any, str, str, int]] = {
    "the proof of a shared directory": (io, "open", ".seen_by_all", errno.EACCES),
    "the list of checkpoints": (os, "listdir", "checkpoints", errno.EACCES),
    "a manifest": (io, "open", "step_000001/manifest.json", errno.EIO),
    "a checkpoint's file": (io, "open", "step_000001/mp_rank_00_model_states.pt", errno.EMFILE),
    "the log, read": (io, "open", "metrics.jsonl", errno.EMFILE),
    "the log, replaced": (os, "replace", "metrics.jsonl", errno.ENOSPC),
    "the log, flushed": (os, "fsync", "metrics.jsonl", errno.EIO),
    "the record, read": (io, "open", "run.json", errno.EACCES),
    "the record, written": (os, "replace", "run.json", errno.EROFS),
    "the last checkpoint": (os, "rename", "step_000002", errno.EDQUOT),
    "the summary": (os, "replace", "summary.json", errno.ENOSPC),
}
"""A function, the end of the path that it gets last, and the error that it raises then."""


def failing(call: Callable[..., Any], name: str, end: str, number: int) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        path = arguments[1] if name in ("replace", "rename") else arguments[0]
        if name == "fsync":
            path = Path(f"/proc/self/fd/{path}").readlink()
        if str(path).endswith(end):
            raise OSError(number, os.strerror(number))  # as of a read or write, which name no file
        return call(*arguments, **options)

    return fail


def train_with_errors(world: World, config: RunConfig) -> dict[str, str]:
    """Trains to step 1, and then goes on to step 2 with each of the errors; returns how that ended."""
    begun = config.run.output_dir / "begun"
    train_in(world, changed(config, run={"output_dir": begun}, training={"stop_after_steps": 1}), stop_requested=never)
    ends = {}
    for what, (module, name, end, number) in PLACES.items():
        output_dir = config.run.output_dir / what.replace(" ", "_")
        shutil.copytree(begun, output_dir)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, failing(getattr(module, name), name, end, number))
            try:
                train_in(world, changed(config, run={"output_dir": output_dir}), stop_requested=never)
            except EvenpackError as error:
                ends[what] = str(error)
            except Exception as error:  # it would be a traceback
                ends[what] = repr(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingEngine, "train_step", without_memory)
        with pytest.raises(RunError) as caught:
            train_in(world, changed(config, run={"output_dir": config.run.output_dir / "memory"}), stop_requested=never)
        ends["memory"] = str(caught.value)
    return ends


def without_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about the allocator")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("system_errors")
    config = prepare_run(folder, {"lines": numbered_lines()}, steps=2, checkpoint_every_steps=1)
    return run_ranks(train_with_errors, 1, config)[0]


@pytest.mark.parametrize("what", PLACES)
def test_an_error_of_the_system_names_the_file_and_the_cause(ends: dict[str, str], what: str) -> None:
    _, _, end, number = PLACES[what]
    last = ends[what].splitlines()[-1]
    assert os.strerror(number) in last
    assert (end if what != "the last checkpoint" else "checkpoints") in last or what.startswith("the proof")
    assert not last.startswith(("OSError", "PermissionError"))


def test_a_run_whose_summary_alone_is_missing_says_so(ends: dict[str, str]) -> None:
    assert "the last checkpoint of this run is complete, and only its summary is missing" in ends["the summary"]


def test_a_run_without_memory_ends_with_what_to_change(ends: dict[str, str]) -> None:
    first, remedy = ends["memory"].splitlines()
    assert first.endswith("has too little memory for this step: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "training.packs_per_micro_batch" in remedy
    assert "model.activation_checkpointing=true" in remedy
