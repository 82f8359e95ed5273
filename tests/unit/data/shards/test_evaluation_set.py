"""The evaluation set: evenly spaced samples, the same from each layout, and no half-written files."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from shard_files import random_rows, write_fixed, write_packed, write_variable

from evenpack.data.shards.reading import ShardSet, read_slices
from evenpack.data.shards.writing import evenly_spaced, pick_evaluation_set
from evenpack.errors import ConfigError, DataError
from evenpack.progress import Progress

SAMPLES = 10_000
"""MLPerf's number, which the command takes unless it is told another."""


@pytest.fixture
def progress() -> Progress:
    return Progress(Console(), silent=True)


@pytest.mark.parametrize("candidates", [10_000, 10_008, 10_288, 20_000, 136_527])
def test_ten_thousand_samples_are_those_of_the_reference_s_loop(candidates: int) -> None:
    """10,008 and 10,288 are numbers of rows for which exact integers would choose others."""
    ratio = candidates / SAMPLES
    expected = [int(sample * ratio) for sample in range(SAMPLES)]
    chosen = evenly_spaced(candidates, SAMPLES)
    assert chosen.tolist() == expected
    assert len(np.unique(chosen)) == SAMPLES


def test_each_layout_gives_the_same_set(tmp_path: Path, progress: Progress) -> None:
    rows = random_rows(41, seed=4)
    packs = [rows[:2], rows[2:5], *([row] for row in rows[5:])]
    inputs = (
        write_fixed(tmp_path / "a.hdf5", rows),
        write_variable(tmp_path / "b.hdf5", rows),
        write_packed(tmp_path / "c.hdf5", packs),
    )
    found = []
    for path, layout in zip(inputs, ("fixed", "variable", "variable"), strict=True):
        output = tmp_path / f"eval_{path.name}"
        assert pick_evaluation_set((path,), output, samples=7, progress=progress).layout == layout
        found.append(next(read_slices(ShardSet.open((output,)))).sequences)
    chosen = [int(sample * (41 / 7)) for sample in range(7)]
    assert found[0].tokens.tolist() == [token for row in chosen for token in rows[row].tokens]
    arrays = [one.__dict__ | one.masks.__dict__ for one in found]
    for name in arrays[0].keys() - {"masks"}:
        assert np.array_equal(arrays[0][name], arrays[1][name]), name
        assert np.array_equal(arrays[0][name], arrays[2][name]), name


def test_too_few_rows_and_a_file_that_is_there_are_refused(tmp_path: Path, progress: Progress) -> None:
    path = write_fixed(tmp_path / "a.hdf5", random_rows(5, seed=1))
    output = tmp_path / "eval.hdf5"
    with pytest.raises(DataError, match="6 samples cannot be picked from 5"):
        pick_evaluation_set((path,), output, samples=6, progress=progress)
    assert not output.exists()
    with pytest.raises(ConfigError, match="exists; name another file"):
        pick_evaluation_set((path,), path, samples=5, progress=progress)
    with pytest.raises(ConfigError, match="is not a folder"):
        pick_evaluation_set((path,), path / "eval.hdf5", samples=5, progress=progress)
