"""summary.json has the results of a run."""

from evenpack.engine.reporting.summary import computed_alike


def test_a_rate_is_of_the_steps_that_as_many_ranks_computed_as_the_last() -> None:
    records = [{"step": step, "world_size": 1 if step < 6 else 2} for step in range(1, 9)]
    assert [record["step"] for record in computed_alike(records)] == [6, 7, 8]
    earlier = [{"step": 1}, {"step": 2}]
    assert computed_alike(earlier) == earlier, "of a version that did not tell"
    assert computed_alike([]) == []
