"""A run whose packs or model change is a sequence of ordinary runs; what cannot be one is refused before it starts."""

import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_files import changed, prepared, run_config, run_values, text_sources
from tiny_run import train_state

from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.manifest import Manifest
from evenpack.data.prepared import PreparedData
from evenpack.engine.checkpoints.continuation import continued
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run, resolve
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, ConfigError, DataError, NotPreparedError
from evenpack.studies.plan.plan import PlanOptions, plan_run

ONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def form(length: int) -> dict[str, Any]:
    return {"data.pack_length": length, "data.recipe.max_sequence_length": length}


LONGER = {**form(64), "training.packs_per_step": 4}
STAGES: list[dict[str, Any]] = [
    {"step": 3, **LONGER},
    {"step": 4, "data.sources.words.weight": 2},
    {"step": 5, "model.rotary_base": 500.0},
]


def values(folder: Path, **sections: Any) -> dict[str, Any]:
    texts = {name: [f"{name} {number * 7919}" for number in range(40)] for name in ("lines", "words")}
    data = {"sources": text_sources(folder, texts)}
    return run_values("gpt2", folder, data=data, **{"model": {"positions": "rotary"}, **sections})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return prepared(run_config({**values(tmp_path_factory.mktemp("parts")), "stages": STAGES}))


def test_a_part_is_the_run_file_of_its_steps(config: RunConfig):
    parts = [one for _, one in config.parts]
    assert [one.span for one in parts] == [range(2), range(2, 4), range(4, 6)]
    assert [one.training.stop_step for one in parts] == [2, 4, 6]
    assert [[stage.step for stage in one.stages] for one in parts] == [[], [4], []]
    assert [one.data.pack_length for one in parts] == [32, 64, 64]
    assert [one.at("model.rotary_base") for one in parts] == [10_000.0, 10_000.0, 500.0]
    assert changed(config, training={"stop_after_steps": 3}).parts[1][1].training.stop_step == 3
    assert changed(config, stages=[]).parts == ((0, changed(config, stages=[])),)
    assert changed(config, stages=[{"step": 2, "optimizer.learning_rate": 0.1}]).parts[0][1].stages


def test_forms_share_their_tokens_and_have_folders_of_their_own(config: RunConfig):
    first, longer = config.forms
    assert (first.prepared_dir, longer.prepared_dir.name) == (config.prepared_dir, "data_64_64")
    assert first.tokens_dir == longer.tokens_dir == config.prepared_dir.with_name("data_tokens")
    runs = open_run(config).parts
    files = [run.prepared.manifest.files["sources/lines/tokens.bin"] for run in runs]
    assert len({one.locate(run.prepared.directory) for one, run in zip(files, runs, strict=True)}) == 1
    assert [run.prepared.pack_length for run in runs] == [32, 64, 64]


def test_what_an_epoch_has_left_goes_on_in_joined_packs(config: RunConfig):
    run = open_run(config)
    assert [run.left_out(step) for step in range(6)] == [{}] * 6
    old, new = (part.prepared.manifest.sources for part in run.parts[:2])
    sources = run.parts[1].prepared.training_sources(seed=run.config.run.seed, batching="packs")
    for index, (name, source) in enumerate(zip(run.prepared.source_names, sources, strict=True)):
        packs, drawn = old[name].train.packing.packs, run.order.drawn_before(index, 2)
        rest = -drawn % packs
        assert run.epochs(2)[name] == drawn / packs
        form = run.forms[1][name]
        assert (form.then, form.epoch) == (drawn + -(-rest // 2), -(-drawn // packs))
        assert form.epochs(form.then - 1) == form.epoch - Fraction(2 - rest % 2, packs)
        assert form.epochs(3) == Fraction(3, packs)
        assert form.epochs(form.then + 3) == form.epoch + Fraction(3, new[name].train.packing.packs)
        before, both = (source.plan.before.draw(np.arange(drawn, drawn + 2)), source.plan.draw(np.array([drawn])))
        assert both.sequence_ids.tolist() == before.sequence_ids.tolist()
    assert run.forms[2] == run.forms[1], "other rotary positions begin nothing"
    read = [[data.directory.name for data in run.part_after(step).data_after(step)] for step in (0, 2, 4)]
    assert read == [["data"], ["data_64_64", "data"], ["data_64_64", "data"]], "what is left is verified, too"
    settings = run.parts[1].pipeline_settings(ONE)
    dataset = MicroBatchDataset(run.parts[1].prepared, settings)
    again, index = pickle.loads(pickle.dumps(dataset)), dataset.planner.micro_batches.before(2)
    np.testing.assert_array_equal(again.arrays(index).tokens, dataset.arrays(index).tokens)
    longer = open_run(changed(config, training={"steps": 99}))
    assert [data.directory.name for data in longer.part_after(90).data_after(90)] == ["data_64_64"]


def test_a_plan_counts_what_is_left_as_the_run_does(config: RunConfig):
    run = open_run(config)
    plans = [plan_run(part.config, PlanOptions(), ranks=1, resolved=part) for part in run.parts]
    for name in run.prepared.source_names:
        epochs = [next(one.epochs for one in plan.data.sources if one.source == name) for plan in plans]
        assert sum(epochs) == pytest.approx(run.epochs(6)[name])


def test_a_restart_begins_with_new_epochs_and_what_is_left_is_counted(config: RunConfig):
    run = open_run(changed(config, stages=[{**STAGES[0], "restart": True}, *STAGES[1:]]))
    old, new = (part.prepared.manifest.sources for part in run.parts[:2])
    for index, name in enumerate(run.prepared.source_names):
        packs, drawn = old[name].train.packing.packs, run.order.drawn_before(index, 2)
        left = run.left_out(2).get(name, {"packs": 0, "epochs": 0.0})
        assert left == {"packs": -drawn % packs, "epochs": (-drawn % packs) / packs}
        assert run.epochs(2)[name] == drawn / packs
        here = run.order.drawn_before(index, 4) - drawn
        assert run.epochs(4)[name] == float(-(-drawn // packs) + Fraction(here, new[name].train.packing.packs))
    assert run.left_out(2)
    assert run.left_out(1) == run.left_out(3) == run.left_out(4) == {}
    assert run.fingerprint(2) == open_run(config).fingerprint(2)
    assert run.fingerprint(3) != open_run(config).fingerprint(3)


def test_no_step_depends_on_a_later_part(config: RunConfig):
    run, alone = open_run(config), open_run(changed(config, stages=[]))
    assert [run.fingerprint(step) == alone.fingerprint(step) for step in range(6)] == [True] * 3 + [False] * 3
    assert run.past(2) == alone.past(2)
    without = open_run(changed(config, stages=STAGES[:2]))
    assert run.past(4) == without.past(4)
    assert run.past(5) != without.past(5)


def test_a_part_that_has_begun_stays_as_it_was(config: RunConfig):
    state = train_state(open_run(config), step=5)
    assert continued(open_run(config), state).part == 2
    assert continued(open_run(config), train_state(open_run(config), step=2)).part == 1
    for stages, step in ((STAGES[:2], 5), ([{**STAGES[0], "step": 2}, *STAGES[1:]], 2)):
        with pytest.raises(CheckpointError, match=f"step {step} would be the first that differs"):
            continued(open_run(changed(config, stages=stages)), state)
    restarted = [{**STAGES[0], "restart": True}, *STAGES[1:]]
    with pytest.raises(CheckpointError, match=r"(?s)step 3 would be the first that differs.*restart True"):
        continued(open_run(changed(config, stages=restarted)), state)
    with pytest.raises(CheckpointError, match="rotary_base 500"):
        continued(open_run(changed(config, stages=[*STAGES[:2], {**STAGES[2], "model.rotary_base": 50.0}])), state)


def test_what_cannot_be_built_is_refused_with_the_stage(config: RunConfig, tmp_path: Path):
    learned = values(tmp_path, model={"positions": "learned"})
    with pytest.raises(ConfigError, match=r"(?s)step 3.*max_positions \(32\) is below what the data needs \(64\)"):
        run_config({**learned, "stages": STAGES[:1]})
    table = values(tmp_path, model={"positions": "learned", "max_positions": 64})
    assert [one.max_positions for _, one in run_config({**table, "stages": STAGES[:1]}).parts] == [64, 64]
    for stage, problem in (
        ({"model.hidden_size": 64}, "cannot change within a run"),
        ({"data.pack_length": 16}, "above pack_length"),
        ({"model.rotary_scaling": {"factor": 2.0}}, "rotary_scaling"),
    ):
        with pytest.raises(ConfigError, match=problem):
            changed(config, stages=[{"step": 3, **stage}])
    with pytest.raises(ConfigError, match="step 3: the model would be rebuilt, and DeepSpeed's ZeRO 3"):
        changed(config, deepspeed={"zero_stage": 3})
    with pytest.raises(ConfigError, match="the stage of step 3: 4 ranks"):
        open_run(config).require_divisible(4)
    with pytest.raises(NotPreparedError, match="data_48_48"):
        open_run(changed(config, stages=[{"step": 3, **form(48), "restart": True}]))


def test_what_an_epoch_has_left_is_refused_where_it_cannot_go_on(config: RunConfig, tmp_path: Path):
    for stage, problem in (
        (form(48), r"\(48\) is no multiple: give 32 or 64, or set restart: true"),
        ({"data.pack_length": 96, "data.recipe.max_sequence_length": 16}, "up to 32 tokens left"),
        ({"model.rotary_base": 50.0, "restart": True}, "restart is for another pack_length"),
    ):
        with pytest.raises(ConfigError, match=f"step 3: .*{problem}"):
            changed(config, stages=[{"step": 3, **stage}])
    limited = {**config.model_dump(mode="json")["data"], "packing": {"max_sequences_per_pack": 3}}
    with pytest.raises(ConfigError, match=r"2 together may hold more sequences than.*per_pack \(3\)"):
        changed(config, data=limited)
    assert len(changed(config, data=limited, stages=[{"step": 3, **form(64), "restart": True}]).parts) == 2


def test_a_form_of_other_documents_is_refused(tmp_path: Path):
    first = prepared(run_config(values(tmp_path)))
    (tmp_path / "lines.txt").write_text("\n".join(f"others {number}" for number in range(40)), encoding="utf-8")
    config = changed(first, stages=STAGES[:1])
    folder = config.forms[1].prepared_dir
    prepared(changed(first, data={"prepared_dir": str(folder), "pack_length": 64, "recipe": dict(LONGER_RECIPE)}))
    with pytest.raises(DataError, match="prepared from other documents"):
        open_run(config)


def test_finished_sequences_are_told_apart_by_the_files_they_were_read_from(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    """A source of HDF5 shards has no token file of documents."""

    def opened(folder: Path, *, more_bytes: int) -> PreparedData:
        manifest = Manifest.read(folder)
        files = {name: file for name, file in manifest.files.items() if not name.endswith("/tokens.bin")}
        sources = {
            name: record.model_copy(
                update={
                    "inputs": tuple(one.model_copy(update={"bytes": one.bytes + more_bytes}) for one in record.inputs)
                }
            )
            for name, record in manifest.sources.items()
        }
        return PreparedData(folder, config.data, manifest.model_copy(update={"files": files, "sources": sources}))

    first, later = (one.prepared_dir or config.prepared_dir for one in config.forms)
    for more_bytes in (0, 1):
        other = opened(later, more_bytes=more_bytes)
        monkeypatch.setattr(PreparedData, "open", lambda *_, other=other, **__: other)
        if more_bytes:
            with pytest.raises(DataError, match="prepared from other documents"):
                resolve(config, opened(first, more_bytes=0))
        else:
            resolve(config, opened(first, more_bytes=0))


LONGER_RECIPE = {"kind": "documents", "max_sequence_length": 64}
