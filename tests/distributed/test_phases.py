"""Phase 2 on real ranks starts with the weights of phase 1, and with nothing else of it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from prepared_files import sentence_documents
from run_files import pair_run_values, prepared, run_config
from tiny_training import changed, never, refusal

from evenpack.engine.build import build_at, find_start
from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.shards import saved_tensors
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World

PHASE_1_LENGTH, PHASE_2_LENGTH = 24, 48


def prepare_phase(folder: Path, number: int, length: int, **training: Any) -> RunConfig:
    values = pair_run_values(
        "bert",
        folder / f"phase{number}",
        run={"seed": number},
        data={
            "sources": {"text": {"kind": "text", "path": folder / "text.txt", "document_separator": "line"}},
            "recipe": {"kind": "sentence_pairs", "max_sequence_length": length, "duplication_factor": 1},
            "pack_length": length,
        },
        model={"max_positions": PHASE_2_LENGTH},
        training={"packs_per_step": 4, "steps": 2, **training},
        optimizer={"learning_rate": 1e-2},
        schedule={"kind": "cosine", "warmup_steps": 0},
    )
    return prepared(run_config(values))


def begin_phase_2(world: World, phase1: RunConfig, phase2: RunConfig) -> dict[str, Any]:
    train_in(world, phase1, stop_requested=never)
    run = build_at(find_start(open_run(phase2), world))
    trained = saved_tensors(read_manifest(phase1.run.output_dir / "checkpoints" / "step_000002")).weights()
    first = {
        "trained": trained,
        "step": run.start.steps_done,
        "weights": {name: tensor.clone() for name, tensor in run.engine.model.state_dict().items()},
        "optimizer": len(run.engine.deepspeed.optimizer.state),
    }
    train_in(world, phase2, stop_requested=never)
    world.on_main(lambda: shutil.rmtree(phase1.run.output_dir))  # needed once, not to go on
    again = build_at(find_start(open_run(changed(phase2, training={"initialize_from": Path("elsewhere")})), world))
    return first | {
        "step_again": again.start.steps_done,
        "weights_again": {name: tensor.clone() for name, tensor in again.engine.model.state_dict().items()},
        "told_again": again.state(2, samples=0, reached_accuracy=None).config["training"]["initialize_from"],
        "begun_from": read_manifest(phase2.run.output_dir / "checkpoints" / "step_000002").state.config["training"][
            "initialize_from"
        ],
    }


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = sentence_documents(60, seed=1)
    lines = (" ".join(text.split()) for text in texts)
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def test_phase_2_begins_with_the_weights_of_phase_1_and_resumes_with_its_own(folder: Path) -> None:
    phase1 = prepare_phase(folder, 1, PHASE_1_LENGTH)
    phase2 = prepare_phase(folder, 2, PHASE_2_LENGTH, initialize_from=phase1.run.output_dir)
    found = run_ranks(begin_phase_2, 2, phase1, phase2)
    for rank in found:
        assert same(rank["weights"], rank["trained"])
        assert (rank["step"], rank["optimizer"]) == (0, 0), "neither steps nor moments come along"
        assert rank["step_again"] == 2
        assert not same(rank["weights_again"], rank["trained"])
        assert rank["begun_from"] == rank["told_again"] == str(phase1.run.output_dir)


def test_every_rank_gets_the_reason_why_weights_are_refused(folder: Path) -> None:
    config = prepare_phase(folder, 1, PHASE_1_LENGTH, initialize_from=folder / "nowhere")
    first, second = run_ranks(refusal, 2, config)
    assert first == second
    assert f"{folder / 'nowhere'} does not exist" in first
