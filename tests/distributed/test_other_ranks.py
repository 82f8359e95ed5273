"""A run goes on with another number of ranks and at another ZeRO stage: same packs, same losses (invariant 7)."""

import shutil
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from tiny_training import changed, numbered_lines, prepare_run, records, refusal, saved_everything, train_all

from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.shards import STATES, saved_tensors
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.engine.sharding import SHARDINGS
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.launcher.planning import plan_training

STEPS, SAVED = 6, 2
PARTITIONED = [stage for stage in SHARDINGS if stage]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Returns a run that one rank has trained at ZeRO 0 without a stop."""
    first = prepare_run(
        tmp_path_factory.mktemp("other_ranks"),
        {"lines": numbered_lines()},
        packs_per_step=8,
        packs_per_micro_batch=1,
        steps=STEPS,
        checkpoint_every_steps=SAVED,
        gradient_clipping=0.5,
    )
    config = changed(
        first,
        run={"output_dir": first.run.output_dir.parent / "whole"},
        data={"prepared_dir": first.prepared_dir},
        optimizer={"learning_rate": 3e-3, "epsilon": 1e-3},
    )
    run_ranks(train_all, 1, [config])
    return config


def begun(whole: RunConfig, stage: int, *, ranks: int) -> RunConfig:
    """Returns a run at this stage, stopped after its first steps."""
    config = changed(
        whole,
        run={"output_dir": whole.run.output_dir.parent / f"begun_{stage}_{ranks}"},
        deepspeed={"zero_stage": stage},
        training={"stop_after_steps": SAVED},
    )
    if not config.run.output_dir.exists():
        run_ranks(train_all, ranks, [config])
    return config


def copy_of(config: RunConfig, name: str, *, stage: int, stop: int | None = None) -> RunConfig:
    """Returns the run as it goes on in a folder of its own."""
    folder = config.run.output_dir.parent / name
    shutil.copytree(config.run.output_dir, folder)
    return changed(
        config, run={"output_dir": folder}, deepspeed={"zero_stage": stage}, training={"stop_after_steps": stop}
    )


def require_same(whole: RunConfig, config: RunConfig) -> None:
    expected, found = (records(run) for run in (whole, config))
    assert [record["order_hash"] for record in found] == [record["order_hash"] for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6), config.run.output_dir.name
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-5), config.run.output_dir.name
    states = [saved_tensors(read_manifest(newest(run))) for run in (whole, config)]
    assert states[0].steps == states[1].steps == {STEPS}
    for name in states[0].shapes:
        for state in STATES:
            here, there = (saved.read(name, state) for saved in states)
            assert (here - there).norm() <= 1e-4 * there.norm(), (config.run.output_dir.name, name, state)
    assert not (config.run.output_dir / "checkpoints" / ".universal").exists()


def newest(config: RunConfig, step: int = STEPS) -> Path:
    return config.run.output_dir / "checkpoints" / f"step_{step:06d}"


def test_a_run_goes_on_with_one_rank_instead_of_two_and_at_other_stages(whole: RunConfig) -> None:
    begins = {stage: begun(whole, stage, ranks=2) for stage in (1, 3)}
    runs = [copy_of(begins[old], f"one_{old}_{new}", stage=new) for old, new in ((1, 3), (3, 0))]
    run_ranks(train_all, 1, runs)
    for config in runs:
        require_same(whole, config)


@pytest.mark.slow
def test_muon_goes_on_with_other_ranks(whole: RunConfig) -> None:
    """Its state has another name than the others' and is in no conversion: ZeRO 0 takes checkpoints as they are."""
    folder = whole.run.output_dir.parent
    muon = changed(whole, run={"output_dir": folder / "muon"}, optimizer={"kind": "muon"})
    stopped = changed(muon, run={"output_dir": folder / "muon_two"}, training={"stop_after_steps": SAVED})
    run_ranks(train_all, 1, [muon])
    run_ranks(train_all, 2, [stopped])
    resumed = changed(stopped, training={"stop_after_steps": None})
    run_ranks(train_all, 1, [resumed])
    record = read_run_record(muon.run.output_dir)
    assert record is not None
    layers = ("attention.query_key_value", "attention.output", "feed_forward.expand", "feed_forward.contract")
    blocks = range(muon.model.shape["layers"])
    assert list(record.muon_parameters) == [f"blocks.{block}.{layer}.weight" for block in blocks for layer in layers]
    expected, found = (records(run) for run in (muon, resumed))
    assert [record["world_size"] for record in found] == [2] * SAVED + [1] * (STEPS - SAVED)
    assert [record["order_hash"] for record in found] == [record["order_hash"] for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    there, here = (saved_everything(run, STEPS) for run in (muon, resumed))
    assert any("momentum_buffer" in place for place in there)
    for place, tensor in there.items():
        if tensor.is_floating_point():
            assert (here[place] - tensor).norm() <= 1e-4 * tensor.norm(), place


@pytest.mark.slow
def test_any_stage_goes_on_at_any_other(whole: RunConfig) -> None:
    begins = {stage: begun(whole, stage, ranks=2) for stage in SHARDINGS}
    runs = [copy_of(begins[old], f"all_{old}_{new}", stage=new) for old, new in product(SHARDINGS, repeat=2)]
    run_ranks(train_all, 2, runs)
    for config in runs:
        require_same(whole, config)


@pytest.mark.slow
def test_four_ranks_become_two_and_then_eight(whole: RunConfig) -> None:
    begins = [begun(whole, stage, ranks=4) for stage in SHARDINGS]
    two = [copy_of(config, f"two_{stage}", stage=stage, stop=4) for stage, config in enumerate(begins)]
    run_ranks(train_all, 2, two)
    eight = [changed(config, training={"stop_after_steps": None}) for config in two]
    run_ranks(train_all, 8, eight)
    for config in eight:
        require_same(whole, config)


def convert_by_deepspeed(world: World, folders: list[tuple[Path, Path]]) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    for source, target in folders:
        main(
            Namespace(
                input_folder=str(source),
                output_folder=str(target),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


def test_whole_tensors_are_those_of_deepspeeds_own_converter(whole: RunConfig, tmp_path: Path) -> None:
    stages = [stage for stage in PARTITIONED if stage != 2]  # which has the layout of 1
    folders = [(newest(begun(whole, stage, ranks=2), SAVED), tmp_path / f"{stage}" / "universal") for stage in stages]
    run_ranks(convert_by_deepspeed, 1, folders)
    for source, target in folders:
        saved = saved_tensors(read_manifest(source))
        assert len(saved.shapes) > 10
        for name in saved.shapes:
            for state in STATES:
                theirs = torch.load(target / "zero" / name / f"{state}.pt", weights_only=True)
                theirs = theirs["param"] if isinstance(theirs, dict) else theirs
                assert torch.equal(saved.read(name, state), theirs.view(saved.shapes[name])), (name, state)


def test_ranks_that_cannot_divide_the_step_are_refused_and_those_that_can_named(whole: RunConfig) -> None:
    config = begun(whole, 3, ranks=2)
    with pytest.raises(ConfigError) as caught:
        plan_training(config, ranks=3)
    assert "the number of ranks can be 1, 2, 4, 8" in str(caught.value)
    assert plan_training(config, ranks=8).step.micro_batches == 1


def test_a_checkpoint_whose_ranks_files_are_missing_is_refused_by_all(whole: RunConfig) -> None:
    from evenpack.engine.checkpoints.files import commit_files, list_files, write_manifest

    config = copy_of(begun(whole, 1, ranks=2), "missing", stage=3)
    path = newest(config, SAVED)
    (path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    write_manifest(path, read_manifest(path).state, commit_files(path, list_files(path)))
    first, second = run_ranks(refusal, 2, config)
    assert first == second
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt does not exist, and no other file of the checkpoint" in first
