"""summary.json has the results of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from run_files import run_config, run_values

from evenpack.engine.build import Start
from evenpack.engine.parts.metrics_writer import MetricsWriter
from evenpack.engine.reporting.metrics import METRICS
from evenpack.engine.reporting.summary import computed_alike
from evenpack.errors import DataError


def test_a_rate_is_of_the_steps_that_as_many_ranks_computed_as_the_last() -> None:
    records = [{"step": step, "world_size": 1 if step < 6 else 2} for step in range(1, 9)]
    assert [record["step"] for record in computed_alike(records)] == [6, 7, 8]
    assert computed_alike([]) == []


def test_a_record_in_whose_keys_a_bit_has_changed_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1, "tokens": 9, "slotr": 10, "sequences": 2}\n')
    writer = object.__new__(MetricsWriter)
    writer._run = object.__new__(Start)
    config = run_config(run_values("gpt2", tmp_path, run={"output_dir": str(tmp_path)}))
    object.__setattr__(writer._run, "resolved", SimpleNamespace(config=config))
    writer._metrics = cast(Any, "open")
    with pytest.raises(DataError, match=r"metrics\.jsonl is damaged .*'slots'.*: mend or remove its line"):
        writer.summarise("finished", 1, reached_accuracy=None)
