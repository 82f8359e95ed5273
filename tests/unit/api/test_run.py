"""A run in Python: its batches, its plan, and its errors. `integration/test_python_api.py` trains one."""

import random
from pathlib import Path

import pytest
import torch
from run_files import run_values, text_sources, write_run_file

import evenpack


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> evenpack.Run:
    """Prepares a run of six steps of eight packs."""
    folder = tmp_path_factory.mktemp("run")
    source = random.Random(4)
    documents = ["".join(source.choices("abcdefgh", k=source.randint(2, 30))) for _ in range(400)]
    data = {"sources": text_sources(folder, {"one": documents}), "validation_fraction": 0.1}
    write_run_file(folder / "run.yaml", run_values("gpt2", folder, data=data, training={"packs_per_micro_batch": 1}))
    run = evenpack.open(folder / "run.yaml", "training.skip_steps=[4]")
    assert run.prepare().summary()[0]["source"] == "one"
    return run


def sequences(batch: evenpack.PackedBatch) -> list[int]:
    return [int(number) for number in batch.sequence_ids if number >= 0]


def test_a_run_file_is_read_with_overrides_and_by_name() -> None:
    run = evenpack.open("demo", "training.steps=40", "run.name=mine")
    assert (run.config.training.steps, run.config.run.name) == (40, "mine")
    assert run.run_file.is_file()


def test_the_ranks_share_each_step_whatever_their_number(run: evenpack.Run) -> None:
    alone = {step.step: step.micro_batches for step in run.steps()}
    assert list(alone) == [0, 1, 2, 4, 5]  # step 4 of the run file, which counts from 1, is skipped
    for ranks in (2, 4):
        shares = [list(run.steps(rank=rank, ranks=ranks)) for rank in range(ranks)]
        for number, batches in enumerate(alone.values()):
            found = [one for share in shares for batch in share[number].micro_batches for one in sequences(batch)]
            assert sorted(found) == sorted(one for batch in batches for one in sequences(batch))
            assert {share[number].counts for share in shares} == {batches[0].step_counts}


def test_batches_are_the_micro_batches_of_the_steps_from_anywhere(run: evenpack.Run) -> None:
    whole = [sequences(batch) for batch in run.batches()]
    assert [sequences(batch) for step in run.steps() for batch in step.micro_batches] == whole
    assert [sequences(batch) for batch in run.batches(start_step=1, stop_step=3)] == whole[8:24]
    assert list(run.batches(start_step=6)) == []


def test_batches_have_the_shapes_of_training_wherever_they_end(run: evenpack.Run) -> None:
    whole = next(iter(run.batches()))
    for stop_step in (1, 2, 5):
        part = next(iter(run.batches(stop_step=stop_step)))
        assert [part.tokens.shape, part.cu_seqlens.shape] == [whole.tokens.shape, whole.cu_seqlens.shape]


def test_a_batch_is_what_its_documentation_says(run: evenpack.Run) -> None:
    batch = next(iter(run.batches()))
    starts = batch.cu_seqlens.tolist()
    assert (starts[0], starts[-1], starts) == (0, len(batch.tokens), sorted(starts))
    assert all(int(batch.position_ids[start]) == 0 for start in starts if start < len(batch.tokens))
    assert isinstance(batch.targets["next_token"], evenpack.SlotTargets)
    counts = batch.targets["next_token"].weights > 0
    following = batch.tokens.roll(-1)
    assert torch.equal(batch.targets["next_token"].labels[counts], following[counts])


def test_the_runs_own_model_takes_the_batches(run: evenpack.Run) -> None:
    model = run.new_model()
    step = next(iter(run.steps()))
    loss = sum(model(batch)["next_token"].loss_sum for batch in step.micro_batches) / step.counts.targets
    assert 4.0 < loss.item() < 7.0  # the vocabulary has 260 entries


def test_the_runs_own_model_has_the_residual_stream_of_the_run_file(run: evenpack.Run) -> None:
    half = evenpack.open(run.run_file, "training.precision=bf16_autocast", "training.residual_dtype=bf16")
    assert (run.new_model().residual_dtype, half.new_model().residual_dtype) == (None, torch.bfloat16)


def test_the_validation_packs_of_a_source_are_shared_by_the_ranks(run: evenpack.Run) -> None:
    alone = [one for batch in run.evaluation_batches("one") for one in sequences(batch)]
    shared = [
        one
        for rank in (0, 1)
        for batch in run.evaluation_batches("one", rank=rank, ranks=2)
        for one in sequences(batch)
    ]
    assert alone
    assert sorted(alone) == sorted(shared)


def test_what_there_is_not_is_refused_when_it_is_requested(run: evenpack.Run) -> None:
    for arguments, message in (
        ({"rank": 2, "ranks": 2}, "rank 2 is none of 2 ranks"),
        ({"rank": -1}, "rank -1 is none of 1 ranks"),
        ({"ranks": 0}, "rank 0 is none of 0 ranks"),
        ({"ranks": 3}, "number of ranks can be 1, 2, 4, 8"),
        ({"start_step": 7}, r"start_step \(7\) must lie between 0 and stop_step \(6\)"),
        ({"start_step": 3, "stop_step": 2}, r"stop_step \(2\)"),
        ({"stop_step": 7}, r"stop_step \(7\) must be at most training.steps \(6\)"),
    ):
        with pytest.raises(evenpack.ConfigError, match=message):
            run.batches(**arguments)
    with pytest.raises(evenpack.ConfigError, match="no source 'onne'; did you mean 'one'"):
        run.evaluation_batches("onne")


def test_what_has_to_be_done_before_is_said(run: evenpack.Run, tmp_path: Path) -> None:
    unprepared = evenpack.open(run.run_file, f"data.prepared_dir={tmp_path / 'none'}")
    for use in (lambda: unprepared.prepared, unprepared.batches, unprepared.plan, unprepared.new_model):
        with pytest.raises(evenpack.NotPreparedError, match="has not been prepared"):
            use()
    with pytest.raises(evenpack.CheckpointError, match="there is no checkpoint"):
        run.evaluate()
    with pytest.raises(evenpack.ConfigError, match="did you mean"):
        evenpack.open(run.run_file, "training.stepps=3")
