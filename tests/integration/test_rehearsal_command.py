"""`evenpack train --dry-run --ranks N --rank r` as a command."""

import json
from pathlib import Path

import pytest
from small_run import COMMAND, process

from evenpack.testing import run_values, text_sources, write_run_file

DOCUMENTS = [f"{number} {'pack ' * (number % 11)}{number * number}" for number in range(60)]


@pytest.mark.slow
def test_a_rank_of_many_is_rehearsed_by_the_command(tmp_path: Path) -> None:
    data = {"sources": text_sources(tmp_path, {"lines": DOCUMENTS})}
    training = {"packs_per_step": 128, "packs_per_micro_batch": 2}
    run_file = write_run_file(tmp_path / "run.yaml", run_values("gpt2", tmp_path, data=data, training=training))
    options = ["--prepare", "--dry-run", "--ranks", "64", "--rank", "63", "--json"]
    done = process([*COMMAND, "train", str(run_file), *options])
    values = json.loads(done.stdout)
    found = values["rehearsal"]
    assert (found["rank"], found["ranks"], found["items"]) == (63, 64, [2])
    assert found["faked_gradients"] == values["plan"]["parameters"]
    assert not (tmp_path / "out" / "ranks").exists()
