"""The results of fine-tuning, from which an interrupted command continues."""

from pathlib import Path

import pytest
from study_files import seed_result

from evenpack.errors import DataError
from evenpack.finetuning.results import ResultFolder


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
