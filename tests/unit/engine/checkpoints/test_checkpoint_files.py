"""Checkpoints with one rank: which are whole, which one is loaded, and which are kept."""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import run_config, run_values

from evenpack.data.order.step_shape import CostWeights
from evenpack.data.recipes import PaddingRecipe
from evenpack.engine.checkpoints.continuation import compare_run_files, require_fingerprint
from evenpack.engine.checkpoints.files import (
    Checkpoint,
    TrainState,
    checkpoint_name,
    commit_files,
    find_candidates,
    find_wrong_size,
    list_files,
    read_manifest,
    remove_checkpoint,
    whole_by_size,
    write_manifest,
)
from evenpack.engine.checkpoints.loading import load_checkpoint, newest_whole, whole_at
from evenpack.engine.checkpoints.saving import CheckpointWriter, KeepPolicy
from evenpack.engine.checkpoints.shards import saved_tensors
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, RunError, SaveError, UnjudgedCheckpointError

SOLO = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
WEIGHTS = {"embedding.weight": torch.arange(12.0).view(3, 4), "head.bias": torch.ones(3, dtype=torch.bfloat16)}


class FileEngine:
    """Writes and reads what a DeepSpeed engine of one rank does."""

    def __init__(self, zero_stage: int = 0) -> None:
        self.zero_stage = zero_stage
        self.loaded: str | None = None
        self.checkpoint_engine = None
        self.optimizer = torch.optim.AdamW([torch.ones(1, requires_grad=True)])

    def zero_optimization_stage(self) -> int:
        return self.zero_stage

    def _copy_recovery_script(self, save_path: str) -> None:
        raise NotImplementedError

    def save_checkpoint(self, save_dir: str, *, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        assert not save_latest
        states = {"module": WEIGHTS, "ds_config": {"train_batch_size": 8}, **client_state}
        torch.save(states, Path(save_dir) / tag / "mp_rank_00_model_states.pt")
        torch.save({"step": 1}, Path(save_dir) / tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt")

    def load_checkpoint(self, load_dir: str, *, tag: str) -> tuple[str | None, Any]:
        self.loaded = tag
        return f"{load_dir}/{tag}", {}


def train_state(step: int) -> TrainState:
    return TrainState(
        step=step,
        fingerprint="f" * 32,
        world_size=1,
        zero_stage=0,
        cost_weights=CostWeights(per_token=1.0, per_squared_length=0.1 + 0.2, per_segment=0.0),
        config={"run": {"name": "small", "seed": 42}, "training": {"gradient_clipping": None, "batching": "packs"}},
        samples=0,
        reached_accuracy=None,
    )


def save_steps(directory: Path, *steps: int, keep: int = 9) -> CheckpointWriter:
    writer = CheckpointWriter(directory, SOLO, KeepPolicy(newest=keep))
    for step in steps:
        writer.save(FileEngine(), train_state(step))
    return writer


class RunsWhenRead:
    """Makes a folder when a reader of pickles takes it at its word."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def forged(path: Path, name: str, content: object) -> Checkpoint:
    """Replaces the content of one file in the checkpoint, and the manifest with matching checksums."""
    state = read_manifest(path).state
    if isinstance(content, bytes):
        (path / name).write_bytes(content)
    else:
        torch.save({"module": content}, path / name)
    write_manifest(path, state, commit_files(path, list_files(path)))
    return read_manifest(path)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def newest_step(directory: Path) -> int | None:
    found = newest_whole(directory, SOLO)
    return found and found.step


def files_of(directory: Path) -> list[str]:
    return [record.name for record in read_manifest(directory / "step_000001").files]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {"truncated": truncate, "one bit flipped": flip_a_bit, "gone": Path.unlink}


class TestSave:
    def test_what_was_saved_is_found_as_it_was(self, tmp_path: Path):
        save_steps(tmp_path / "checkpoints", 200)
        found = newest_whole(tmp_path / "checkpoints", SOLO)
        assert found is not None
        assert found.path == tmp_path / "checkpoints" / "step_000200"
        assert found.state == train_state(200)
        files = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
        assert [record.name for record in found.files] == files
        assert names(found.path) == sorted([*files, "manifest.json"])
        assert names(tmp_path / "checkpoints") == ["latest", "step_000200"]

    @pytest.mark.parametrize("damage", ["truncated", "gone"])
    def test_a_file_that_goes_before_the_checkpoint_has_its_name_leaves_the_older_one(
        self, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
    ):
        writer = save_steps(tmp_path, 1, keep=1)
        publish = CheckpointWriter.publish

        def publish_without(writer: Any, partial: Path, state: TrainState, files: Any) -> Checkpoint:
            DAMAGE[damage](partial / files[0].name)
            return publish(writer, partial, state, files)

        monkeypatch.setattr(CheckpointWriter, "publish", publish_without)
        with pytest.raises(SaveError, match=rf"{files_of(tmp_path)[0]}"):
            writer.save(FileEngine(), train_state(2))
        assert names(tmp_path) == ["latest", "step_000001"]

    def test_the_newest_are_kept_and_latest_names_the_newest(self, tmp_path: Path):
        save_steps(tmp_path, 1, 2, 10, 9_999_999, keep=2)
        assert names(tmp_path) == ["latest", "step_000010", "step_9999999"]
        assert (tmp_path / "latest").read_text() == "step_9999999\n"

    def test_steps_are_ordered_as_numbers(self, tmp_path: Path):
        save_steps(tmp_path, 999_999, 1_000_000)
        assert [path.name for path in find_candidates(tmp_path)] == ["step_1000000", "step_999999"]

    def test_one_that_was_moved_aside_counts_until_another_has_its_name(self, tmp_path: Path):
        save_steps(tmp_path, 1, 2)
        (tmp_path / "step_000002").rename(tmp_path / ".step_000002.replaced")
        assert [path.name for path in find_candidates(tmp_path)] == [".step_000002.replaced", "step_000001"]
        shutil.copytree(tmp_path / ".step_000002.replaced", tmp_path / "step_000002")
        assert [path.name for path in find_candidates(tmp_path)] == ["step_000002", "step_000001"]

    def test_a_file_that_has_grown_is_as_wrong_as_one_that_is_cut_short(self, tmp_path: Path):
        save_steps(tmp_path, 1)
        checkpoint = read_manifest(tmp_path / "step_000001")
        assert find_wrong_size(checkpoint) is None
        record = checkpoint.files[0]
        for size in (record.size + 1, record.size - 1):
            os.truncate(checkpoint.path / record.name, size)
            assert find_wrong_size(checkpoint) == f"{record.name} has {size} bytes, expected {record.size}"

    def test_a_broken_checkpoint_does_not_count_among_those_kept(self, tmp_path: Path):
        save_steps(tmp_path, 1, 2, 3, keep=3)
        for step in (2, 3):
            truncate(tmp_path / checkpoint_name(step) / "mp_rank_00_model_states.pt")
        assert newest_step(tmp_path) == 1
        CheckpointWriter(tmp_path, SOLO, KeepPolicy(newest=2)).save(FileEngine(), train_state(4))
        assert names(tmp_path) == ["latest", "step_000001", "step_000004"]

    def test_later_steps_of_a_run_that_went_back_are_removed(self, tmp_path: Path):
        writer = save_steps(tmp_path, 1, 5, keep=2)
        flip_a_bit(tmp_path / "step_000005" / "mp_rank_00_model_states.pt")  # its size stays right
        writer.save(FileEngine(), train_state(3))
        assert names(tmp_path) == ["latest", "step_000001", "step_000003"]

    def test_one_that_the_resume_has_passed_over_displaces_no_whole_one(self, tmp_path: Path):
        save_steps(tmp_path, 4, 5)
        flip_a_bit(tmp_path / "step_000005" / "mp_rank_00_model_states.pt")  # its size stays right
        assert newest_step(tmp_path) == 4
        writer = CheckpointWriter(tmp_path, SOLO, KeepPolicy(newest=2), steps_done=4)
        writer.save(FileEngine(), train_state(6))
        assert names(tmp_path) == ["latest", "step_000004", "step_000006"]
        writer.save(FileEngine(), train_state(8))
        assert names(tmp_path) == ["latest", "step_000006", "step_000008"]

    def test_the_same_step_can_be_saved_again(self, tmp_path: Path):
        writer = save_steps(tmp_path, 1)
        writer.save(FileEngine(), replace(train_state(1), fingerprint="other"))
        found = newest_whole(tmp_path, SOLO)
        assert found is not None
        assert found.state.fingerprint == "other"
        assert names(tmp_path) == ["latest", "step_000001"]

    def test_leftovers_of_killed_saves_are_removed_and_files_of_others_are_not(self, tmp_path: Path):
        for leftover in (".step_000001.partial", ".step_000002.replaced", ".step_000003.removed", "step_3", "notes"):
            (tmp_path / leftover / "inner").mkdir(parents=True)
        (tmp_path / ".latest.123.partial").touch()
        (tmp_path / ".latest.swp").touch()
        save_steps(tmp_path, 7)
        assert names(tmp_path) == [".latest.swp", "latest", "notes", "step_000007", "step_3"]

    def test_a_conversion_makes_room_before_the_first_save_writes(self, tmp_path: Path):
        (tmp_path / ".universal" / "3f" / "zero").mkdir(parents=True)
        seen: list[bool] = []

        class Looking(FileEngine):
            def save_checkpoint(self, save_dir: str, **options: Any) -> None:
                seen.append((tmp_path / ".universal").exists())
                super().save_checkpoint(save_dir, **options)

        CheckpointWriter(tmp_path, SOLO, KeepPolicy(newest=2)).save(Looking(), train_state(2))
        assert seen == [False]

    def test_a_full_disk_is_named_in_the_error_and_leaves_the_older_checkpoint(self, tmp_path: Path):
        class FullDisk(FileEngine):
            def save_checkpoint(self, save_dir: str, **_: Any) -> None:
                (Path(save_dir) / "half").touch()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        writer = save_steps(tmp_path, 1, keep=1)
        with pytest.raises(RunError, match=rf"(?s)rank 0 .*{tmp_path}.*GB free.*No space left.*continues from"):
            writer.save(FullDisk(), train_state(2))
        assert newest_step(tmp_path) == 1
        assert (tmp_path / "latest").read_text() == "step_000001\n"

    def test_a_file_that_torch_could_not_write_to_its_end_is_told_in_one_line(
        self, tmp_path: Path, files_of_at_most: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        class LargeFiles(FileEngine):
            def save_checkpoint(self, save_dir: str, **_: Any) -> None:
                torch.save(torch.zeros(1_000_000), Path(save_dir) / "weights.pt")

        writer = save_steps(tmp_path, 1)
        with files_of_at_most(400_000), pytest.raises(SaveError, match=r"GB free there\).*unexpected pos") as caught:
            writer.save(LargeFiles(), train_state(2))
        assert "\n" not in str(caught.value)
        assert names(tmp_path) == ["latest", "step_000001"]

    def test_everything_is_on_disk_before_what_makes_it_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """A power cut keeps only what was flushed: the files, then the manifest, then the name, then `latest`."""
        save_steps(tmp_path / "runs", 1)
        events: list[str] = []
        fsync, rename, replace_file, rmtree = os.fsync, os.rename, os.replace, shutil.rmtree

        def note(event: str, path: Any) -> None:
            name = re.sub(r"\.[0-9a-f]{32}\.partial", ".partial", str(Path(path).relative_to(tmp_path)))
            events.append(f"{event} {name}")

        def note_fsync(descriptor: int) -> None:
            note("flush", Path(f"/proc/self/fd/{descriptor}").readlink())
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(os, "rename", lambda old, new: (note("name", new), rename(old, new)))
        monkeypatch.setattr(os, "replace", lambda old, new: (note("name", new), replace_file(old, new)))
        monkeypatch.setattr(shutil, "rmtree", lambda path, **options: (note("delete", path), rmtree(path, **options)))
        CheckpointWriter(tmp_path / "runs", SOLO, KeepPolicy(newest=1)).save(FileEngine(), train_state(2))
        partial = "runs/.step_000002.partial"
        first = events.index(f"flush {partial}/mp_rank_00_model_states.pt")
        assert events[first:] == [
            f"flush {partial}/mp_rank_00_model_states.pt",
            f"flush {partial}/zero_pp_rank_0_mp_rank_00_optim_states.pt",
            f"flush {partial}",
            f"flush {partial}/.manifest.json.partial",
            f"name {partial}/manifest.json",
            f"flush {partial}",
            "name runs/step_000002",
            "flush runs",
            "flush runs/.latest.partial",
            "name runs/latest",
            "flush runs",
            "delete runs/.step_000001.removed",  # left by an earlier kill, perhaps
            "name runs/.step_000001.removed",
            "delete runs/.step_000001.removed",
        ]


class TestNewest:
    def test_there_is_none_before_the_first_save(self, tmp_path: Path):
        assert newest_step(tmp_path / "checkpoints") is None
        (tmp_path / "checkpoints" / ".step_000001.partial").mkdir(parents=True)
        assert newest_step(tmp_path / "checkpoints") is None

    @pytest.mark.parametrize("damage", DAMAGE)
    @pytest.mark.parametrize(
        "name", ["manifest.json", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    )
    def test_a_damaged_file_is_named_and_the_older_checkpoint_taken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
    ):
        save_steps(tmp_path, 1, 2)
        DAMAGE[damage](tmp_path / "step_000002" / name)
        before = names(tmp_path)
        assert newest_step(tmp_path) == 1
        (warning,) = caplog.records
        assert warning.levelno == logging.WARNING
        assert "step_000002" in caplog.text
        assert name in caplog.text
        assert names(tmp_path) == before, "looking changes nothing"

    def test_every_byte_of_the_manifest_counts(self, tmp_path: Path):
        save_steps(tmp_path, 1)
        path = tmp_path / "step_000001" / "manifest.json"
        whole = path.read_bytes()
        content = json.loads(whole)
        for place in range(len(whole)):
            changed = bytearray(whole)
            changed[place] ^= 2
            path.write_bytes(changed)
            try:
                found = read_manifest(tmp_path / "step_000001")
            except CheckpointError:
                continue
            assert json.loads(bytes(changed)) == content  # white space only
            assert found.state == train_state(1)

    def test_a_directory_renamed_to_another_step_is_broken(self, tmp_path: Path):
        save_steps(tmp_path, 1, 2)
        (tmp_path / "step_000002").rename(tmp_path / "step_000020")
        assert newest_step(tmp_path) == 1

    def test_if_none_is_whole_the_run_does_not_start_from_zero(self, tmp_path: Path):
        save_steps(tmp_path, 1, 2)
        truncate(tmp_path / "step_000001" / "manifest.json")
        (tmp_path / "step_000002" / "mp_rank_00_model_states.pt").unlink()
        with pytest.raises(CheckpointError) as caught:
            newest_whole(tmp_path, SOLO)
        for part in ("2 checkpoints", "step_000001: manifest.json", "step_000002: mp_rank_00", "move"):
            assert part in str(caught.value)

    def test_one_moved_aside_by_a_killed_save_still_counts(self, tmp_path: Path):
        save_steps(tmp_path, 1, 2)
        (tmp_path / "step_000002").rename(tmp_path / ".step_000002.replaced")
        found = newest_whole(tmp_path, SOLO)
        assert found is not None
        assert found.path.name == ".step_000002.replaced"
        engine = FileEngine()
        load_checkpoint(engine, found, SOLO)
        assert engine.loaded == ".step_000002.replaced"


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, part: str, number: int) -> None:
    """Makes a method of `Path` fail for paths that end so."""
    method = getattr(Path, call)

    def refusing(path: Path, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(part):
            raise OSError(number, os.strerror(number))
        return method(path, *arguments, **options)

    monkeypatch.setattr(Path, call, refusing)


UNREADABLE = [("open", "step_000003/manifest.json"), ("stat", "mp_rank_00_model_states.pt"), ("iterdir", "checkpoints")]
SYSTEM_ERRORS = [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE]


class TestUnjudged:
    """What cannot be read now, or is of another version, may be complete: no older one is taken in its place."""

    @pytest.mark.parametrize("number", SYSTEM_ERRORS, ids=errno.errorcode.get)
    @pytest.mark.parametrize(("call", "part"), [*UNREADABLE, ("open", "step_000003/mp_rank_00_model_states.pt")])
    def test_a_start_ends_with_the_file_and_the_cause_and_changes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, part: str, number: int
    ):
        directory = tmp_path / "checkpoints"
        save_steps(directory, 1, 2, 3)
        before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
        looks: list[Callable[[], Any]] = [lambda: newest_whole(directory, SOLO), lambda: whole_at(directory, 3, SOLO)]
        if (call, part) in UNREADABLE:  # it reads no file to its end
            looks.append(lambda: whole_by_size(directory))
        for look in looks:
            with monkeypatch.context() as patch:
                refuse(patch, call, part, number)
                with pytest.raises(UnjudgedCheckpointError) as caught:
                    look()
            assert part in str(caught.value)
            assert os.strerror(number) in str(caught.value)
            assert "left alone" in str(caught.value)
        assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("number", SYSTEM_ERRORS, ids=errno.errorcode.get)
    @pytest.mark.parametrize("place", UNREADABLE)
    def test_a_save_removes_none_of_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: tuple[str, str], number: int
    ):
        call, part = place
        directory = tmp_path / "checkpoints"
        save_steps(directory, 1, 2, 3)
        writer = CheckpointWriter(directory, SOLO, KeepPolicy(newest=1), steps_done=3)
        publish = writer.publish

        def publish_without(*arguments: Any) -> Checkpoint:
            with pytest.MonkeyPatch.context() as patch:
                refuse(patch, call, part.replace("mp_rank", "step_000003/mp_rank"), number)
                return publish(*arguments)

        writer.publish = publish_without  # type: ignore[method-assign]
        writer.save(FileEngine(), train_state(4))
        assert {"step_000003", "step_000004"} <= set(names(directory))
        assert os.strerror(number) in caplog.text
        assert [checkpoint.step for checkpoint in whole_by_size(directory)][:2] == [4, 3]

    @pytest.mark.parametrize("changes", [{"format": 3}, {"format": 3, "checksum": "of another kind"}])
    def test_a_later_format_is_neither_broken_nor_removed(self, tmp_path: Path, changes: dict[str, Any]):
        save_steps(tmp_path, 1, 2)
        path = tmp_path / "step_000002" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(UnjudgedCheckpointError, match=r"step_000002/manifest.json has format 3, which a later"):
            newest_whole(tmp_path, SOLO)
        CheckpointWriter(tmp_path, SOLO, KeepPolicy(newest=1), steps_done=2).save(FileEngine(), train_state(4))
        assert names(tmp_path) == ["latest", "step_000002", "step_000004"]

    def test_a_file_that_may_not_be_opened_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        save_steps(tmp_path, 1)
        checkpoint = read_manifest(tmp_path / "step_000001")

        def refuse_to_open(file: Any, mode: str = "r", *_: Any, **__: Any) -> Any:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(file))

        monkeypatch.setattr("torch.serialization._open_file_like", refuse_to_open)
        monkeypatch.setattr("torch._C.PyTorchFileReader", refuse_to_open)
        with pytest.raises(UnjudgedCheckpointError, match=r"mp_rank_00_model_states.pt cannot be read .*Too many open"):
            saved_tensors(checkpoint).weights()


class TestOfOthers:
    """Checkpoints that another process has written since this start."""

    @pytest.mark.parametrize("steps_done", [None, 1])
    def test_a_save_removes_no_later_one_and_latest_goes_on_to_name_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, steps_done: int | None
    ):
        save_steps(tmp_path, 1)
        writer = CheckpointWriter(tmp_path, SOLO, KeepPolicy(newest=1), steps_done=steps_done)
        save_steps(tmp_path, 8, 10)
        for step in (2, 3):
            writer.save(FileEngine(), train_state(step))
        assert names(tmp_path) == ["latest", "step_000003", "step_000008", "step_000010"]
        assert (tmp_path / "latest").read_text() == "step_000010\n"
        assert caplog.text.count("step_000010 is left alone") == 1

    def test_one_between_the_resumed_and_the_saved_step_stays_unless_it_is_broken(self, tmp_path: Path):
        save_steps(tmp_path, 1)
        writer = CheckpointWriter(tmp_path, SOLO, KeepPolicy(newest=1), steps_done=1)
        save_steps(tmp_path, 2, 3)
        flip_a_bit(tmp_path / "step_000002" / "mp_rank_00_model_states.pt")
        writer.save(FileEngine(), train_state(4))
        assert names(tmp_path) == ["latest", "step_000003", "step_000004"]


class TestLoad:
    @pytest.mark.parametrize(
        ("error", "told", "message"),
        [
            (OSError(errno.EIO, "Input/output error"), UnjudgedCheckpointError, "states.pt cannot be read .*Input"),
            (RuntimeError("size mismatch for embedding"), CheckpointError, "(?s)this run's model.*size mismatch"),
            (None, CheckpointError, "nothing to load"),
        ],
        ids=["an error of the disk is no wrong model", "another model", "nothing there"],
    )
    def test_what_deepspeed_cannot_load_is_told_apart(
        self, tmp_path: Path, error: Exception | None, told: type[CheckpointError], message: str
    ):
        class Failing(FileEngine):
            def load_checkpoint(self, load_dir: str, *, tag: str) -> tuple[str | None, Any]:
                if isinstance(error, OSError):
                    error.filename = f"{load_dir}/{tag}/mp_rank_00_model_states.pt"
                if error is not None:
                    raise error
                return None, None

        save_steps(tmp_path, 1)
        with pytest.raises(CheckpointError, match=message) as caught:
            load_checkpoint(Failing(), read_manifest(tmp_path / "step_000001"), SOLO)
        assert type(caught.value) is told

    def test_no_code_is_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        save_steps(tmp_path, 1)
        checkpoint = forged(tmp_path / "step_000001", "unlisted.bin", RunsWhenRead(tmp_path / "ran"))
        engine = FileEngine()

        def load_as_deepspeed_does(load_dir: str, *, tag: str) -> Any:
            return tag, torch.load(Path(load_dir) / tag / "unlisted.bin", weights_only=False)

        engine.load_checkpoint = load_as_deepspeed_does  # type: ignore[method-assign]
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with pytest.raises(CheckpointError, match="step_000001: a file of it cannot be read without running code"):
            load_checkpoint(engine, checkpoint, SOLO)
        assert not (tmp_path / "ran").exists()
        assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
        assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
        load_as_deepspeed_does(str(tmp_path), tag="step_000001")
        assert (tmp_path / "ran").exists()  # so the file does what it is said to do

    @pytest.mark.parametrize(
        ("number", "expected"),
        [(1, r"format 1, of an earlier version.*initialize_from"), (99, r"format 99, which a later version.*upgrade")],
    )
    def test_another_format_is_refused_with_what_to_do(
        self, tmp_path: Path, number: int, expected: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("evenpack.engine.checkpoints.files.FORMAT", number)
        save_steps(tmp_path, 1)
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match=expected):
            newest_whole(tmp_path, SOLO)

    def test_other_data_is_refused_with_both_fingerprints_and_a_way_out(self):
        config = train_state(7).config
        require_fingerprint(train_state(7), "f" * 32, config)
        with pytest.raises(CheckpointError) as caught:
            require_fingerprint(train_state(7), "e" * 32, config)
        assert all(part in str(caught.value) for part in ("step 7", "f" * 32, "e" * 32, "run.output_dir"))


class TestWeights:
    def test_weights_come_out_as_they_went_in_and_outlive_the_checkpoint(self, tmp_path: Path):
        save_steps(tmp_path, 1)
        path = tmp_path / "step_000001"
        weights = saved_tensors(read_manifest(path)).weights()
        file = path / "mp_rank_00_model_states.pt"
        file.write_bytes(bytes(file.stat().st_size))
        assert weights.keys() == WEIGHTS.keys()
        for name, tensor in weights.items():
            assert tensor.dtype == WEIGHTS[name].dtype
            assert torch.equal(tensor, WEIGHTS[name])

    def test_code_in_the_file_is_not_run(self, tmp_path: Path):
        save_steps(tmp_path, 1)
        evil = {"module": RunsWhenRead(tmp_path / "ran")}
        torch.save(evil, tmp_path / "step_000001" / "mp_rank_00_model_states.pt")
        with pytest.raises(CheckpointError, match="not in the form of DeepSpeed"):
            saved_tensors(read_manifest(tmp_path / "step_000001")).weights()
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_damaged_file_is_named(self, tmp_path: Path, damage: str):
        save_steps(tmp_path, 1)
        path = tmp_path / "step_000001" / "mp_rank_00_model_states.pt"
        checkpoint = read_manifest(path.parent)
        if damage == "one bit flipped":
            torch.save([1], path)
        else:
            DAMAGE[damage](path)
        with pytest.raises(CheckpointError, match="mp_rank_00_model_states"):
            saved_tensors(checkpoint).weights()


class TestOfAStep:
    def test_it_is_found_also_where_it_stepped_aside_for_a_new_one(self, tmp_path: Path):
        assert whole_at(tmp_path / "none", 2, SOLO) is None
        save_steps(tmp_path, 1, 2, 3)
        for name in ("step_000002", ".step_000002.replaced"):
            (tmp_path / "step_000002").rename(tmp_path / name)
            found = whole_at(tmp_path, 2, SOLO)
            assert found is not None
            assert found.path.name == name

    def test_one_that_is_not_there_is_refused_with_those_that_are(self, tmp_path: Path):
        save_steps(tmp_path, 1, 2, 30)
        with pytest.raises(CheckpointError, match="no checkpoint of step 3; it has steps 1, 2, 30 "):
            whole_at(tmp_path, 3, SOLO)

    @pytest.mark.parametrize("name", ["manifest.json", "mp_rank_00_model_states.pt"])
    def test_one_that_is_broken_is_refused_and_no_other_taken(self, tmp_path: Path, name: str):
        save_steps(tmp_path, 1, 2)
        flip_a_bit(tmp_path / "step_000002" / name)
        with pytest.raises(CheckpointError, match=rf"step_000002 is broken: {name}"):
            whole_at(tmp_path, 2, SOLO)
        assert whole_at(tmp_path, 1, SOLO) is not None


def test_a_kill_between_taking_the_name_and_deleting_leaves_no_checkpoint_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_steps(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert not remove_checkpoint(tmp_path / "step_000001")
    assert find_candidates(tmp_path) == []


def test_steps_of_another_size_are_refused_and_other_changes_are_reported_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    training = {"layout": "packed", "batching": "packs", "skip_steps": [], "packs_per_step": 64}
    state = replace(train_state(7), config={"training": training, "optimizer": {"weight_decay": 0.1}})
    compare_run_files(state, state.config)
    assert not caplog.records
    compare_run_files(state, state.config | {"optimizer": {"weight_decay": 0.2}})
    (record,) = caplog.records
    assert "optimizer.weight_decay: 0.1 -> 0.2" in record.getMessage()
    with pytest.raises(CheckpointError, match=r"steps of 64, .*training.packs_per_step is 128.*{step: 8, "):
        compare_run_files(state, state.config | {"training": training | {"packs_per_step": 128}})
    with pytest.raises(CheckpointError, match=r"(?s)another network or optimizer.*optimizer\.kind: None -> lamb"):
        compare_run_files(state, state.config | {"optimizer": {"kind": "lamb", "weight_decay": 0.1}})


def run_file_values() -> dict[str, Any]:
    return run_config(run_values("gpt2", Path("out"))).model_dump(mode="json")


def test_a_key_that_is_newer_than_the_checkpoint_counts_as_having_had_its_default(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    saved, present = run_file_values(), run_file_values()
    for section, key in (("model", "activation_checkpointing"), ("model", "positions"), ("training", "compile")):
        del saved[section][key]
    state = replace(train_state(7), config=saved)
    compare_run_files(state, present)
    assert not caplog.records
    present["model"]["positions"] = "alibi"
    with pytest.raises(CheckpointError, match=r"model\.positions: learned -> alibi"):
        compare_run_files(state, present)


def test_what_decides_the_order_or_the_targets_is_named_where_it_has_changed():
    saved, present = run_file_values(), run_file_values()
    padding = PaddingRecipe(kind="padding", max_sequence_length=32, atom=32).model_dump()
    saved["data"]["recipe"] = padding
    present["data"] |= {"recipe": padding | {"end_of_text_in_loss": "none"}, "prepared_dir": "elsewhere"}
    present["run"] |= {"seed": 5, "name": "other"}
    with pytest.raises(CheckpointError) as caught:
        require_fingerprint(replace(train_state(7), config=saved), "e" * 32, present)
    named = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert named == ["  data.recipe.end_of_text_in_loss: all -> none", "  run.seed: 3 -> 5"]
