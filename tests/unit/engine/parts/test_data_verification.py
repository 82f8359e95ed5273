"""Training on damaged or changed data stops before anything is saved, and names the file."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from run_files import prepared
from tiny_run import tiny_gpt2_run

from evenpack.config import validate
from evenpack.data.checksums import Damage, find_damage
from evenpack.data.prepared import PreparedData
from evenpack.data.verification import Verified, Verifier, explained_damage
from evenpack.engine.activity import doing
from evenpack.engine.build import Start
from evenpack.engine.checkpoints.saving import CheckpointWriter
from evenpack.engine.config import RunConfig
from evenpack.engine.parts.part import Step
from evenpack.engine.parts.verification import DataVerification
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.train import TrainOutcome, train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import DataError, EvenpackError, RunError
from evenpack.launcher.planning import describe_plan, plan_training
from evenpack.launcher.processes.hangs import HangLimits, HangMonitor, Heartbeat
from evenpack.launcher.processes.identities import RankPlace
from evenpack.launcher.processes.ranks import RankFolder, RankStatus
from evenpack.launcher.trained import evaluate_run
from evenpack.studies.plan.options import PlanOptions


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return tiny_gpt2_run(tmp_path)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("evenpack"), "propagate", True)
    caplog.set_level(logging.INFO, logger="evenpack")
    return caplog


def with_data(config: RunConfig, **changes: Any) -> RunConfig:
    values = config.model_dump()
    values["data"] |= changes
    return validate(values, RunConfig, origin="test")


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
    assert "verified by 1 rank in" in line
    assert "GB/s" in line


def slow_verification(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], None], events: list[str]) -> None:
    verify, save = Verifier.verify_share, CheckpointWriter.save

    def verify_slowly(self: Verifier, share: int, shares: int, **options: Any) -> Verified:
        wait()
        found = verify(self, share, shares, **options)
        events.append("verified")
        return found

    def save_noting(self: CheckpointWriter, *arguments: Any) -> Any:
        events.append("saved")
        return save(self, *arguments)

    monkeypatch.setattr(Verifier, "verify_share", verify_slowly)
    monkeypatch.setattr(CheckpointWriter, "save", save_noting)


def test_the_first_checkpoint_waits_for_the_verification(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []
    metrics = config.run.output_dir / "metrics.jsonl"

    def until_the_last_step() -> None:
        while not metrics.exists() or len(read_metrics(metrics)) < config.training.steps:
            time.sleep(0.01)

    slow_verification(monkeypatch, until_the_last_step, events)
    train(world, config)
    assert events == ["verified", "saved"]


class WatchedVerification:
    """One rank and the monitor of its heartbeats, with a time-out of 100 s that only the verification makes pass."""

    def __init__(self, output_dir: Path, *, read_seconds: float) -> None:
        """`read_seconds`: what the check of one piece takes, from when the rank waits for it."""
        self.now = 0.0
        self.pieces = 0
        self.folder = RankFolder(output_dir, "now")
        self.folder.path.mkdir(parents=True)
        limits = HangLimits(step_seconds=100.0, start_seconds=100.0)
        status = RankStatus.starting("now", RankPlace.of_environment({}))
        self.folder.write_status(status)
        self.heartbeat = Heartbeat(self.folder, status, limits=limits, clock=lambda: self.now)
        self._monitor = HangMonitor(self.folder, 1, limits=limits, clock=lambda: self.now)
        self._read_seconds = read_seconds
        self._moves = 0

    def find_damage(self, *arguments: Any, **options: Any) -> Damage | None:
        """Replaces the verifier's `find_damage`; in place of the guard it keeps the heartbeat up, and looks at it."""
        while doing.activity != "verifying the data" or (self._read_seconds < 100.0 and doing.moves == self._moves):
            time.sleep(0.001)  # until the rank waits, and has seen the piece before
        self._moves = doing.moves
        for _ in range(round(self._read_seconds / 5.0)):
            self.now += 5.0
            self.heartbeat.keep_up()
            self._monitor.check()
        self.pieces += 1
        return find_damage(*arguments, **options)


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_run_that_waits_for_a_long_verification_hangs_only_if_nothing_is_read(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch, stands_still: bool
) -> None:
    watched = WatchedVerification(config.run.output_dir, read_seconds=150.0 if stands_still else 40.0)

    monkeypatch.setattr("evenpack.data.verification.find_damage", watched.find_damage)
    train_in(world, config, stop_requested=lambda: False)
    assert watched.pieces >= 5
    assert watched.now > 150.0, "longer than a run may hang"
    assert checkpoints(config) == ["step_000006"]
    failure = watched.folder.read_failure()
    assert (failure is not None) is stands_still
    if failure is not None and failure.error is not None:
        assert "(step 6, verifying the data)" in failure.error


def test_damage_that_is_found_early_stops_a_long_run_at_the_next_step(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_tokens(config)
    values = config.model_dump()
    values["training"] |= {"steps": 10_000, "checkpoint_every_steps": None}
    with pytest.raises(DataError, match=r"tokens\.bin is not as it was written"):
        train(world, validate(values, RunConfig, origin="test"))
    assert 1 <= len(read_metrics(config.run.output_dir / "metrics.jsonl")) < 10_000


def test_an_error_that_the_damage_caused_names_the_damage(
    world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_tokens(config)
    found: list[Verified] = []
    verify = Verifier.verify_share

    def verify_noting(self: Verifier, share: int, shares: int, **options: Any) -> Verified:
        found.append(verify(self, share, shares, **options))
        return found[-1]

    def fail(self: Start, **_: object) -> Iterator[object]:
        while not found:
            time.sleep(0.01)
        time.sleep(0.2)
        raise IndexError("slices leave the file")
        yield

    monkeypatch.setattr(Verifier, "verify_share", verify_noting)
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
    return [
        record.getMessage()
        for record in told.records
        if record.levelno == logging.WARNING and record.name == "evenpack.engine.parts.verification"
    ]


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
    verify = Verifier.verify_share

    def verify_and_overwrite(self: Verifier, *given: Any, **options: Any) -> Verified:
        found = verify(self, *given, **options)
        overwrite(path)
        return found

    monkeypatch.setattr(Verifier, "verify_share", verify_and_overwrite)
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
    values = config.model_dump()
    values["training"] |= {"steps": steps, "checkpoint_every_steps": 2}
    return validate(values, RunConfig, origin="test")


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


def damage_ids(config: RunConfig, split: str = "train") -> Path:
    """Makes ids of sequences larger than there are sequences."""
    (path,) = (config.prepared_dir / "sources" / "one" / split).glob("sorted_sequences.npy")
    ids = np.load(path, mmap_mode="r+")
    ids[:] = np.iinfo(ids.dtype).max
    ids.flush()
    return path


def test_ids_that_no_sequence_has_are_damage_of_a_file_not_a_traceback(world: World, config: RunConfig) -> None:
    path = damage_ids(config)
    unverified = with_data(config, verify_in_training=False)
    with pytest.raises(DataError, match=rf"is damaged:\n  {path} is not as it was written") as raised:
        train(world, unverified)
    assert isinstance(raised.value.__cause__, IndexError)


def test_an_evaluation_and_a_rehearsal_name_damage_too(world: World, config: RunConfig) -> None:
    config = prepared(with_data(config, prepared_dir=config.run.output_dir / "other", validation_fraction=0.3))
    train(world, config)
    for split, use in {
        "validation": lambda: evaluate_run(config),
        "train": lambda: describe_plan(config, PlanOptions(), launch=None, ranks=2, rank=1),
    }.items():
        path = damage_ids(config, split)
        with pytest.raises(DataError, match=rf"is damaged.*:\n  {path} is not as it was written") as raised:
            use()
        assert isinstance(raised.value.__cause__, IndexError) == (split == "train")  # an evaluation verifies before
        shutil.rmtree(config.prepared_dir)
        prepared(config)


def test_an_error_over_sound_data_stays_as_it_is(config: RunConfig) -> None:
    with pytest.raises(IndexError, match="not of the data"), explained_damage(config.prepared_dir):
        raise IndexError("not of the data")


def test_lost_connections_are_not_explained_by_damage(config: RunConfig) -> None:
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
