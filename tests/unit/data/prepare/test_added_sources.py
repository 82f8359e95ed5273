"""A source is added to a prepared directory without touching the others, whose runs stay as they were."""

from pathlib import Path
from typing import Any

import pytest
from prepared_files import contents
from run_files import changed, prepared, run_config, run_values, text_sources
from tiny_run import train_state

from evenpack.data.manifest import MANIFEST, Manifest
from evenpack.data.prepare.directory import hold_lock
from evenpack.data.prepare.prepare import prepare
from evenpack.engine.checkpoints.continuation import continued
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.where import open_where
from evenpack.errors import CheckpointError, DataError, NotPreparedError

STAGES = [{"step": 4, "data.sources.new.weight": 2}]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares two sources; a third is written beside them."""
    folder = tmp_path_factory.mktemp("added")
    texts = {name: [f"{name} {number * 37}" for number in range(60)] for name in ("wiki", "code")}
    return prepared(run_config(run_values("gpt2", folder, data={"sources": text_sources(folder, texts)})))


@pytest.fixture(scope="module")
def joined(alone: RunConfig) -> RunConfig:
    """Adds a source, which the run file names first, to the directory of the run."""
    folder = alone.prepared_dir.parent
    (new,) = text_sources(folder, {"new": [f"new {number * 91}" for number in range(50)]}).values()
    before, fingerprint = contents(alone.prepared_dir), open_run(alone).fingerprint()
    sources = {"new": {**new, "weight": 0}, **alone.data.model_dump()["sources"]}
    config = changed(alone, data={"sources": sources}, stages=STAGES)
    with pytest.raises(NotPreparedError, match=r"without source 'new': run `evenpack prepare`.* adds it"):
        open_run(config)
    with pytest.raises(DataError, match="pack_length"):
        open_run(changed(config, data={"pack_length": 64}))
    prepared(config)
    after = contents(alone.prepared_dir)
    added = {path for path in after if path.startswith("sources/new/")}
    assert added
    assert {path for path in after if before.get(path) != after[path]} == {MANIFEST, *added}
    assert open_run(alone).fingerprint() == fingerprint
    return config


def test_a_source_that_joins_changes_no_step_before(alone: RunConfig, joined: RunConfig):
    assert list(joined.data.sources) == ["wiki", "code", "new"]
    hashes, others = ([open_where(run).step(step).order_hash for step in range(1, 7)] for run in (alone, joined))
    assert hashes[:3] == others[:3]
    assert not set(hashes[3:]) & set(others[3:])


def test_a_run_goes_on_with_a_source_that_joins_after_it_and_not_before(alone: RunConfig, joined: RunConfig):
    state = train_state(open_run(alone), step=3)
    assert continued(open_run(joined), state).fingerprint(3) == state.fingerprint
    with pytest.raises(CheckpointError, match=r"(?s)step 3 would be the first that differs.*none -> .*new 2"):
        continued(open_run(changed(joined, stages=[{**STAGES[0], "step": 3}])), state)
    sources = joined.data.model_dump()["sources"]
    sources["new"]["weight"] = 1
    from_the_start = open_run(changed(joined, data={"sources": sources}, stages=[]))
    with pytest.raises(CheckpointError, match="fingerprint"):
        continued(from_the_start, state)


def test_a_source_that_has_changed_is_named_with_the_step_that_first_draws_it(joined: RunConfig, tmp_path: Path):
    state = train_state(open_run(joined), step=5)
    other = joined.data.sources["new"].model_dump() | {"path": tmp_path / "other.txt"}
    (tmp_path / "other.txt").write_text("\n".join(f"other {number}" for number in range(40)))
    fresh = changed(joined, data={"prepared_dir": tmp_path / "fresh"})
    first = {name: one for name, one in joined.data.model_dump()["sources"].items() if name != "new"}
    prepare(changed(fresh, data={"sources": first}, stages=[]).data, fresh.prepared_dir)
    fresh = prepared(changed(fresh, data={"sources": {**first, "new": other}}))
    with pytest.raises(CheckpointError, match=r"(?s)step 4 would be the first that differs.*source 'new' are others"):
        continued(open_run(fresh), state)


def test_a_source_that_another_call_adds_at_the_same_time_stays(
    joined: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody is told to remove a directory that other runs read."""
    sources = text_sources(tmp_path, {"mine": ["my one document"], "theirs": ["their one", "and only document"]})
    both = [{**joined.data.model_dump()["sources"], name: one} for name, one in sources.items()]
    mine, theirs = (changed(joined, data={"sources": one, "prepared_dir": tmp_path / "set"}).data for one in both)
    prepare(changed(joined, data={"prepared_dir": tmp_path / "set"}).data, tmp_path / "set")

    def lock_after_another(directory: Path) -> Any:
        monkeypatch.setattr("evenpack.data.prepare.prepare.hold_lock", hold_lock)
        prepare(theirs, directory)
        return hold_lock(directory)

    monkeypatch.setattr("evenpack.data.prepare.prepare.hold_lock", lock_after_another)
    with pytest.raises(DataError, match=r"another call has just prepared .*: run the same command again"):
        prepare(mine, tmp_path / "set")
    prepare(mine, tmp_path / "set")
    assert {"mine", "theirs", *joined.data.sources} == Manifest.read(tmp_path / "set").sources.keys()


def test_a_second_call_changes_nothing_and_other_data_is_refused(joined: RunConfig, tmp_path: Path):
    before = contents(joined.prepared_dir)
    prepare(joined.data, joined.prepared_dir)
    assert contents(joined.prepared_dir) == before
    sources = text_sources(tmp_path, {"third": ["one document", "and another"]})
    with pytest.raises(DataError, match="was prepared from another data section"):
        prepare(changed(joined, data={"sources": sources}, stages=[]).data, joined.prepared_dir)
