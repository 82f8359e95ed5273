"""Checkpoints on real processes: killed at every write border, resumed bit for bit, agreed on by all ranks."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from batches import build_batch
from forked_ranks import RanksFailed, run_ranks
from killed_saves import NEW, OLD, kill_everywhere, train_state
from run_files import run_config, run_values
from torch import nn

from evenpack.batch import PackedBatch
from evenpack.engine.checkpoints import files as checkpoint_files
from evenpack.engine.checkpoints.files import checkpoint_name, find_candidates, read_manifest
from evenpack.engine.checkpoints.loading import load_checkpoint, newest_whole
from evenpack.engine.checkpoints.saving import CheckpointWriter, KeepPolicy
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, UnjudgedCheckpointError
from evenpack.models.common.loss_sums import LossOutput, LossOutputs, exact_denominators

if TYPE_CHECKING:  # imports DeepSpeed, which the ranks do once they have their environment
    from evenpack.engine.engine import TrainingEngine


def test_rank_0_killed_before_any_write_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path):
    found = kill_everywhere(tmp_path, old_step=1, new_step=2, ranks=2, watched_rank=0)
    assert found[OLD] > 10  # as many writes lie before the commit ...
    assert found[NEW] > 8  # ... and as many after it: `latest` and the removal of the old one


def test_another_rank_killed_before_any_write_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path):
    found = kill_everywhere(tmp_path, old_step=1, new_step=2, ranks=2, watched_rank=1)
    assert found[OLD] > 3


def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one(tmp_path: Path):
    found = kill_everywhere(tmp_path, old_step=2, new_step=2, ranks=1, watched_rank=0)
    assert found[OLD] > 10
    assert found[NEW] > 8


# ---------------------------------------------------------------------------------------------------------------------
# Resume, through DeepSpeed itself.

STEPS, SAVED_STEP = 6, 3
STAGES = (0, 3, 1)
"""In the last one a rank is killed in a save; 2 has the files of 1."""
SLOTS = 32
VOCABULARY = 50


class PackModel(nn.Module):
    """The smallest model over packs with dropout; its initial weights differ from those of all other runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int.from_bytes(os.urandom(4)))
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, batch: PackedBatch) -> LossOutputs:
        logits = self.head(self.dropout(self.embedding(batch.tokens)))
        losses = F.cross_entropy(logits, batch.targets["next_token"].labels, reduction="none")
        correct = (logits.argmax(-1) == batch.targets["next_token"].labels).sum()
        return {"next_token": LossOutput(losses.sum(), correct)}


def training_engine(
    world: World, *, zero_stage: int, weight_decay: float = 0.1, clipping: float = 1.0
) -> "TrainingEngine":
    from evenpack.engine.engine import TrainingEngine

    values = run_values(
        "gpt2",
        Path("nowhere"),
        training={"packs_per_step": 4, "packs_per_micro_batch": 1, "steps": STEPS, "gradient_clipping": clipping},
        optimizer={"learning_rate": 1e-2, "weight_decay": weight_decay},
        deepspeed={"zero_stage": zero_stage},
    )
    config = run_config(values)
    return TrainingEngine(PackModel(), config, world, denominators=partial(exact_denominators, config.model.losses))


def batch_of(step: int, slot: int) -> PackedBatch:
    """Returns micro-batch `slot` of the step's four, which does not depend on the number of ranks."""
    tokens = torch.randint(VOCABULARY, (SLOTS,), generator=torch.Generator().manual_seed(4 * step + slot))
    batch, _ = build_batch([[tokens.tolist()]], "unpadded", max_sequence_length=SLOTS)
    counts = batch.local_counts
    return replace(batch, step_counts=counts + counts + counts + counts)


def train(engine: "TrainingEngine", world: World, start: int, stop: int) -> list[float]:
    """Returns the loss of each step, summed over all ranks."""
    losses = []
    for step in range(start, stop):
        first = world.rank * engine.micro_batches
        local = engine.train_step(step, [batch_of(step, first + index) for index in range(engine.micro_batches)])
        losses.append(world.all_sum(local.loss_sums["next_token"].double().sum().view(1)).item())
    return losses


def weights_of(engine: "TrainingEngine") -> dict[str, torch.Tensor]:
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(engine.model.parameters()), enabled=engine.sharding.gathers_parameters):
        return {name: value.detach().clone() for name, value in engine.model.named_parameters()}


def train_throughout_then_die(world: World, directory: Path) -> None:
    """Trains at each stage without a stop and saves on the way; rank 1 is killed during the last save."""
    for stage in STAGES:
        engine = training_engine(world, zero_stage=stage)
        writer = CheckpointWriter(directory / f"stage_{stage}", world, KeepPolicy(newest=2))
        losses = train(engine, world, 0, SAVED_STEP)
        writer.save(engine.deepspeed, train_state(SAVED_STEP, world_size=world.size, zero_stage=stage))
        losses += train(engine, world, SAVED_STEP, STEPS)
        if world.is_main:
            torch.save((losses, weights_of(engine)), directory / f"throughout_{stage}.pt")
        world.barrier()
        if stage == STAGES[-1]:
            torch.save = write_half_and_die if world.rank == 1 else torch.save
        if stage in (0, STAGES[-1]):
            writer.save(engine.deepspeed, train_state(STEPS, world_size=world.size, zero_stage=stage))


def write_half_and_die(_: Any, path: str, **options: Any) -> None:
    Path(path).write_bytes(b"PK" + bytes(100))
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(world: World, directory: Path, zero_stage: int) -> tuple[int, list[float], dict[str, torch.Tensor]]:
    """Resumes and trains to the end; returns the first step, the losses and the weights."""
    engine = training_engine(world, zero_stage=zero_stage)
    checkpoint = newest_whole(directory / f"stage_{zero_stage}", world)
    assert checkpoint is not None
    load_checkpoint(engine.deepspeed, checkpoint, world)
    losses = train(engine, world, checkpoint.step, STEPS)
    return checkpoint.step, losses, weights_of(engine)


def hide(hidden_part: str, number: int = errno.ENOENT) -> None:
    """Hides files whose path contains `hidden_part`, as on a node with another folder, or a bad mount."""

    def hidden(call: Callable[..., Any]) -> Callable[..., Any]:
        def look_elsewhere(path: Path, *arguments: Any, **options: Any) -> Any:
            if hidden_part in str(path):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *arguments, **options)

        return look_elsewhere

    Path.stat, Path.open = hidden(Path.stat), hidden(Path.open)


def refusals_of_what_only_rank_1_misses(world: World, directory: Path) -> list[str]:
    """Returns the errors where rank 1 does not see a file of the newest checkpoint, and where its disk has an error.

    The last is of rank 0's manifest.
    """
    seeing, found = (Path.stat, Path.open), []
    for name, number in (("mp_rank_00", errno.ENOENT), ("mp_rank_00", errno.EIO), ("manifest", errno.EACCES)):
        if world.rank == (0 if name == "manifest" else 1):
            hide(f"{checkpoint_name(STEPS)}/{name}", number)
        with pytest.raises(UnjudgedCheckpointError) as caught:
            newest_whole(directory, world)
        found.append(str(caught.value))
        Path.stat, Path.open = seeing
    return found


def read_wrongly_on_rank_1(world: World, directory: Path) -> str:
    """Returns the result of `newest_whole` if rank 1 reads other bytes than were written."""
    read = checkpoint_files.file_checksum
    if world.rank == 1:
        checkpoint_files.file_checksum = lambda path: read(path)[::-1]
    with pytest.raises(CheckpointError) as caught:
        newest_whole(directory, world)
    checkpoint_files.file_checksum = read
    return str(caught.value)


def resume_at_the_same_size(world: World, directory: Path) -> dict[str, Any]:
    newest = newest_whole(directory / "stage_0", world)
    assert newest is not None
    refusals = refusals_of_what_only_rank_1_misses(world, directory / "stage_0")
    hide(f"stage_0/{checkpoint_name(STEPS)}/mp_rank_00")
    return {
        "newest": newest.step,
        "refusals": refusals,
        "read_wrongly": read_wrongly_on_rank_1(world, directory / "stage_1"),
        **{f"stage_{stage}": go_on(world, directory, stage) for stage in STAGES},
        "settings": [settings_after_load(world, directory, stage) for stage in STAGES],
        "code": refusal_of_code(world, directory),
    }


class RunsWhenRead:
    """Creates a folder if DeepSpeed's reader executes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def refusal_of_code(world: World, directory: Path) -> tuple[str, bool]:
    """Returns rank 1's error for its forged optimizer state with a matching checksum, and whether its code was run."""
    ran, forged = directory / "ran", directory / "forged"
    if world.is_main:
        shutil.copytree(directory / "stage_1" / checkpoint_name(SAVED_STEP), forged / checkpoint_name(SAVED_STEP))
        checkpoint = read_manifest(forged / checkpoint_name(SAVED_STEP))
        torch.save(RunsWhenRead(ran), checkpoint.path / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
        names = checkpoint_files.list_files(checkpoint.path)
        records = checkpoint_files.commit_files(checkpoint.path, names)
        checkpoint_files.write_manifest(checkpoint.path, checkpoint.state, records)
    world.barrier()
    engine, checkpoint = training_engine(world, zero_stage=1), newest_whole(forged, world)
    assert checkpoint is not None
    message = ""
    try:
        load_checkpoint(engine.deepspeed, checkpoint, world)
    except CheckpointError as error:
        message = str(error)
    world.barrier()
    return message, ran.exists()


def settings_after_load(world: World, directory: Path, zero_stage: int) -> tuple[list[float], float | None]:
    """Returns the weight decay of both groups, and DeepSpeed's clipping, after the run file has changed them."""
    engine = training_engine(world, zero_stage=zero_stage, weight_decay=0.5, clipping=0.25)
    checkpoint = newest_whole(directory / f"stage_{zero_stage}", world)
    assert checkpoint is not None
    load_checkpoint(engine.deepspeed, checkpoint, world)
    optimizer = engine.deepspeed.optimizer
    return [group["weight_decay"] for group in optimizer.param_groups], getattr(optimizer, "clip_grad", None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of two processes that were killed, and of two that continued."""
    directory = tmp_path_factory.mktemp("runs")
    with pytest.raises(RanksFailed, match="rank 1: exited without an error message"):
        run_ranks(train_throughout_then_die, 2, directory)
    throughout = {stage: torch.load(directory / f"throughout_{stage}.pt") for stage in STAGES}
    after = run_ranks(resume_at_the_same_size, 2, directory)
    return {"directory": directory, "throughout": throughout, "after": after}


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(runs: dict[str, Any], stage: int):
    losses, weights = runs["throughout"][stage]
    for rank in range(2):
        step, resumed_losses, resumed_weights = runs["after"][rank][f"stage_{stage}"]
        assert step == SAVED_STEP
        assert resumed_losses == losses[SAVED_STEP:]
        assert weights.keys() == resumed_weights.keys()
        assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)


def test_a_rank_refuses_a_checkpoint_in_which_its_file_would_run_code(runs: dict[str, Any]):
    messages, has_run = zip(*(result["code"] for result in runs["after"]), strict=True)
    assert not any(has_run)
    assert "cannot be read without running code" in messages[1]
    assert "posix.mkdir" in messages[1]


def test_all_ranks_pass_over_a_checkpoint_that_they_find_broken(runs: dict[str, Any]):
    assert [result["newest"] for result in runs["after"]] == [STEPS, STEPS]
    assert [result["stage_0"][0] for result in runs["after"]] == [SAVED_STEP, SAVED_STEP]


def test_all_ranks_refuse_to_go_on_without_a_checkpoint_that_a_single_rank_does_not_see(runs: dict[str, Any]):
    """The next save would remove it."""
    for result in runs["after"]:
        missing, broken_disk, forbidden = result["refusals"]
        assert f"{checkpoint_name(STEPS)}: mp_rank_00_model_states.pt cannot be found" in missing
        assert "seen by rank 1" in missing
        assert "but rank 0 reads the same files as they were saved" in missing
        assert "mp_rank_00_model_states.pt cannot be read on" in broken_disk
        assert "Input/output error" in broken_disk
        assert "manifest.json cannot be read on" in forbidden
        assert "Permission denied" in forbidden


def test_all_ranks_refuse_what_a_single_rank_reads_wrongly_and_name_it(runs: dict[str, Any]):
    for result in runs["after"]:
        assert "step_000003: zero_pp_rank_0_mp_rank_00_optim_states.pt has checksum" in result["read_wrongly"]
        assert "seen by rank 1" in result["read_wrongly"]


def test_a_rank_killed_inside_deepspeeds_save_leaves_the_older_checkpoint(runs: dict[str, Any]):
    assert [path.name for path in find_candidates(runs["directory"] / "stage_1")] == [checkpoint_name(SAVED_STEP)]
    assert (runs["directory"] / "stage_1" / "latest").read_text() == "step_000003\n"
    assert list((runs["directory"] / "stage_1").glob(f".{checkpoint_name(STEPS)}.*.partial"))


def test_changed_weight_decay_and_clipping_hold_after_resuming(runs: dict[str, Any]):
    clipping = [None if stage == 0 else 0.25 for stage in STAGES]
    expected = [([0.5, 0.0], norm) for norm in clipping]
    assert [result["settings"] for result in runs["after"]] == [expected] * 2
