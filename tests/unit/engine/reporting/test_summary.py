"""summary.json has the results of a run."""

import pytest

from evenpack.engine.reporting.summary import computed_alike, whole_steps


def test_a_rate_is_of_the_steps_that_as_many_ranks_computed_as_the_last() -> None:
    records = [{"step": step, "world_size": 1 if step < 6 else 2} for step in range(1, 9)]
    assert [record["step"] for record in computed_alike(records)] == [6, 7, 8]
    assert computed_alike([]) == []


def test_a_record_in_whose_keys_a_bit_has_changed_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    every = {"tokens": 9, "slots": 10, "sequences": 2}
    trained = {**every, "loss": 1.0, "tokens_per_second": 3.0, "step_seconds": 3.0}
    whole = [{"step": 1, **trained}, {"step": 2, **every, "skipped": {"packs": 1, "sequences": 2, "tokens": 9}}]
    damaged = [
        {"step": 3, **{key.replace("lot", "lou"): value for key, value in trained.items()}},
        {"step": 4, **every},
        {"step": 5, **every, "skipped": {"packr": 1, "sequences": 2, "tokens": 9}},
    ]
    assert whole_steps([*whole, *damaged]) == whole
    assert "the record of step 3 in the log is damaged" in caplog.text
    assert "step 4" in caplog.text
    assert "step 5" in caplog.text
