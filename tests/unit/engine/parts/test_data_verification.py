"""Training on damaged or changed data stops before anything is saved, and names the file."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import numpy as np
import pytest
from noted_moves import noted_moves
from run_files import changed
from tiny_run import tiny_gpt2_run

from evenpack.data.checksums import Damage, find_damage
from evenpack.data.prepared import PreparedData
from evenpack.data.verification import Verified, Verifier, explained_damage
from evenpack.engine.build import Start
from evenpack.engine.checkpoints.saving import CheckpointWriter
from evenpack.engine.config import RunConfig
from evenpack.engine.parts.part import Step
from evenpack.engine.parts.verification import DataVerification
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.train import TrainOutcome, train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import DataError, EvenpackError, RunError
from evenpack.launcher.planning import plan_training


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return tiny_gpt2_run(tmp_path)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("evenpack"), "propagate", True)
    caplog.set_level(logging.INFO, logger="evenpack")
    return caplog


def with_data(config: RunConfig, **changes: Any) -> RunConfig:
    return changed(config, data=changes)


def train(world: World, config: RunConfig) -> TrainOutcome:
    return train_in(world, config, stop_requested=lambda: False)


def swap_tokens(config: RunConfig) -> Path:
    """Damages a file in a way that no check of size or range of ids detects."""
    path = config.prepared_dir / "sources" / "one" / "tokens.bin"
    tokens = np.fromfile(path, np.uint16)
    tokens[40:80] = tokens[40:80][::-1].copy()
    tokens.tofile(path)
    return path


def checkpoints(config: RunConfig) -> list[str]:
    return [path.name for path in (config.run.output_dir / "checkpoints").glob("step_*")]


def test_training_on_damaged_tokens_names_the_file_and_saves_nothing(world: World, config: RunConfig) -> None:
    path = swap_tokens(config)
    with pytest.raises(DataError, match=rf"is damaged .*nothing learned.*:\n  {path} is not as it was written"):
        train(world, config)
    assert checkpoints(config) == []


def test_training_that_does_not_verify_continues_over_the_same_damage(world: World, config: RunConfig) -> None:
    swap_tokens(config)
    assert train(world, with_data(config, verify_in_training=False)).state == "finished"
    assert checkpoints(config) == ["step_000006"]


def test_sound_data_is_said_to_be_sound_with_the_rate(
    world: World, config: RunConfig, told: pytest.LogCaptureFixture
) -> None:
    train(world, config)
    (line,) = [line for line in told.messages if line.startswith("the prepared data is as it was written")]
    assert "GB/s" in line


def after_verifying(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Calls `do` once a rank has read its share."""
    verify = Verifier.verify_share

    def verify_and_do(self: Verifier, *given: Any, **options: Any) -> Verified:
        found = verify(self, *given, **options)
        do()
        return found

    monkeypatch.setattr(Verifier, "verify_share", verify_and_do)


def test_the_first_checkpoint_waits_for_the_verification(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    metrics, save = config.run.output_dir / "metrics.jsonl", CheckpointWriter.save

    def until_the_last_step() -> None:
        while not metrics.exists() or len(read_metrics(metrics)) < config.training.steps:
            time.sleep(0.01)
        events.append("verified")

    def save_noting(self: CheckpointWriter, *arguments: Any) -> Any:
        events.append("saved")
        return save(self, *arguments)

    after_verifying(monkeypatch, until_the_last_step)
    monkeypatch.setattr(CheckpointWriter, "save", save_noting)
    train(world, config)
    assert events == ["verified", "saved"]


def test_each_piece_that_is_read_while_a_run_waits_is_progress(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = 0

    def find_when_seen(*arguments: Any, **options: Any) -> Damage | None:
        nonlocal pieces
        deadline = time.monotonic() + 30.0
        while said.count(("verifying the data", 6)) <= pieces and time.monotonic() < deadline:
            time.sleep(0.001)  # until the rank waits, and has seen the piece before
        pieces += 1
        return find_damage(*arguments, **options)

    monkeypatch.setattr("evenpack.data.verification.find_damage", find_when_seen)
    with noted_moves() as said:
        train(world, config)
    assert 5 <= pieces <= said.count(("verifying the data", 6))
    assert checkpoints(config) == ["step_000006"]


def test_damage_that_is_found_early_stops_a_long_run_at_the_next_step(world: World, config: RunConfig) -> None:
    swap_tokens(config)
    with pytest.raises(DataError, match=r"tokens\.bin is not as it was written"):
        train(world, changed(config, training={"steps": 10_000}))
    assert 1 <= len(read_metrics(config.run.output_dir / "metrics.jsonl")) < 10_000


def test_an_error_that_the_damage_caused_names_the_damage(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_tokens(config)
    found = Event()

    def fail(self: Start, **_: object) -> Iterator[object]:
        found.wait()
        time.sleep(0.2)
        raise IndexError("slices leave the file")
        yield

    after_verifying(monkeypatch, found.set)
    monkeypatch.setattr(Start, "batches", fail)
    with pytest.raises(DataError, match=r"tokens\.bin is not as it was written") as caught:
        train(world, config)
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_verification_that_fails_itself_ends_the_run(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Verifier, share: int, shares: int, **_: object) -> Verified:
        raise MemoryError("no buffer")

    monkeypatch.setattr(Verifier, "verify_share", fail)
    with pytest.raises(RunError, match=r"rank 0 on .* could not verify the prepared data: MemoryError: no buffer"):
        train(world, config)
    assert checkpoints(config) == []


def warnings(told: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in told.records if record.name == "evenpack.engine.parts.verification"]
    return [record.getMessage() for record in ours if record.levelno == logging.WARNING]


# --- changes after the verification --------------------------------------------------------------------------------


def overwrite(path: Path) -> None:
    """Writes zeros into the file, as it lies."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(64))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "overwritten": (overwrite, "was written to since this run began"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"more"), r"has [\d,]+ bytes, expected [\d,]+"),
    "removed": (Path.unlink, "cannot be found"),
}


@pytest.mark.parametrize(("change", "verifies"), [("overwritten", False), *((change, True) for change in CHANGES)])
def test_data_that_changes_during_a_run_ends_it_before_the_next_save(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch, change: str, verifies: bool
) -> None:
    change_file, finding = CHANGES[change]
    path = config.prepared_dir / "sources" / "one" / "document_hashes.npy"
    after_each_save(monkeypatch, lambda: change_file(path))
    with pytest.raises(DataError, match=rf"the checkpoint of step 4 is not saved\):\n  {path} {finding}"):
        train(world, saving_twice(with_data(config, verify_in_training=verifies)))
    assert checkpoints(config) == ["step_000002"]


def test_data_that_changes_between_its_verification_and_the_first_save_is_not_saved(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config.prepared_dir / "sources" / "one" / "tokens.bin"
    after_verifying(monkeypatch, lambda: overwrite(path))
    with pytest.raises(DataError, match=rf"{path} was written to since this run began"):
        train(world, saving_twice(config))
    assert checkpoints(config) == []


def test_other_links_permissions_and_copies_of_a_file_end_no_run(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config.prepared_dir / "sources" / "one" / "tokens.bin"

    def change() -> None:
        if not path.with_name("link").exists():
            other = Path(shutil.copy2(path, path.with_name("other")))
            other.chmod(0o600)
            other.replace(path)
            path.with_name("link").hardlink_to(path)

    after_each_save(monkeypatch, change)
    assert train(world, saving_twice(config, steps=6)).state == "finished"


def after_each_save(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Calls `change` each time that the data was found to be as it was."""
    saving = DataVerification.saving

    def save_and_change(self: DataVerification, step: Step) -> None:
        saving(self, step)
        change()

    monkeypatch.setattr(DataVerification, "saving", save_and_change)


def saving_twice(config: RunConfig, *, steps: int = 4) -> RunConfig:
    return changed(config, training={"steps": steps, "checkpoint_every_steps": 2})


# --- changed sources ----------------------------------------------------------------------------------------------


def test_changed_source_text_is_a_warning_and_training_continues(
    world: World, config: RunConfig, told: pytest.LogCaptureFixture
) -> None:
    source = config.prepared_dir.parent / "one.txt"
    os.utime(source, ns=(1, 1))
    assert train(world, config).state == "finished"
    (line,) = warnings(told)
    assert f"input file {source} has changed since {config.prepared_dir} was prepared from it" in line
    assert "continues with the packs as they were prepared" in line


def test_sources_that_are_gone_are_not_missed(world: World, config: RunConfig, told: pytest.LogCaptureFixture) -> None:
    (config.prepared_dir.parent / "one.txt").unlink()
    assert train(world, config).state == "finished"
    assert warnings(told) == []


def test_whether_it_is_verified_does_not_change_what_the_data_is(config: RunConfig) -> None:
    other = with_data(config, verify_in_training=False)
    first, second = (PreparedData.open(run.prepared_dir, run.data).fingerprint(1) for run in (config, other))
    assert first == second


def test_ids_that_no_sequence_has_are_damage_of_a_file_not_a_traceback(world: World, config: RunConfig) -> None:
    path = config.prepared_dir / "sources" / "one" / "train" / "sorted_sequences.npy"
    ids = np.load(path, mmap_mode="r+")
    ids[:] = np.iinfo(ids.dtype).max
    ids.flush()
    with pytest.raises(DataError, match=rf"is damaged:\n  {path} is not as it was written") as raised:
        train(world, with_data(config, verify_in_training=False))
    assert isinstance(raised.value.__cause__, IndexError)


def test_an_error_over_sound_data_and_a_lost_connection_stay_as_they_are(config: RunConfig) -> None:
    with pytest.raises(IndexError, match="not of the data"), explained_damage(config.prepared_dir):
        raise IndexError("not of the data")
    swap_tokens(config)
    with pytest.raises(RuntimeError, match="closed by peer"), explained_damage(config.prepared_dir):
        raise RuntimeError("connection closed by peer")


def test_a_bit_of_any_prepared_file_is_explained_or_does_not_matter_to_a_plan(config: RunConfig) -> None:
    random = Random(5)
    refused = 0
    for path in sorted(config.prepared_dir.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        for _ in range(4 if content else 0):
            damaged = bytearray(content)
            damaged[random.randrange(len(content))] ^= 1 << random.randrange(8)
            path.write_bytes(damaged)
            try:
                plan_training(config, ranks=2)
            except EvenpackError:
                refused += 1
        if content:
            path.write_bytes(content)
    assert refused > 3  # it reads lengths and no token
    plan_training(config, ranks=2)
