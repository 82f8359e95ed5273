"""The results of fine-tuning, from which an interrupted command continues."""

from pathlib import Path

import pytest
from study_files import seed_result

from evenpack.errors import DataError, RunError
from evenpack.finetuning.results import ResultFolder
from evenpack.studies.chunking.curves import CURVE, read_curve


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder, result = ResultFolder(tmp_path), seed_result(3, 0.625)
    folder.write(result)
    assert folder.read(3) == result
    assert folder.read(4) is None


@pytest.mark.parametrize("change", [("0.625", "0.675"), ('"accuracy"', '"accuraby"'), ('"seed": 3', '"seed": 7')])
def test_a_result_in_which_one_bit_has_changed_is_refused(tmp_path: Path, change: tuple[str, str]) -> None:
    folder, path = ResultFolder(tmp_path), tmp_path / "seed_3.json"
    folder.write(seed_result(3, 0.625))
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(DataError, match=rf"{path} is damaged.*remove it, and the seed is trained again"):
        folder.read(3)


def test_no_reader_of_results_takes_one_that_cannot_be_read_now_for_damaged_or_missing(tmp_path: Path) -> None:
    """The remedy for those is to remove what may be the result of days, or to train it again."""
    for name in ("seed_3.json", "results.json", "summary.json", CURVE):
        (tmp_path / name).symlink_to(name)  # every error but that there is no file; root may read all files
    readers = {
        "seed_3.json": lambda: ResultFolder(tmp_path).read(3),
        "results.json": ResultFolder(tmp_path).read_summary,
        CURVE: lambda: read_curve(tmp_path),
    }
    for name, read in readers.items():
        with pytest.raises(RunError, match=rf"{name} cannot be read: .*the file may be intact"):
            read()
