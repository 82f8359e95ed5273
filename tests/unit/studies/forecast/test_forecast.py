"""`study forecast`: expected maxima in known cases, and the study on ranks whose times are known."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_run import lone_world, tiny_gpt2_run

from evenpack.batch import PackedBatch
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import resolve
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError, DataError
from evenpack.models.common.batch_work import performed_work
from evenpack.studies.forecast import forecast
from evenpack.studies.forecast.command import ForecastCommand
from evenpack.studies.forecast.forecast import ForecastOptions, RanksRow, study_forecast
from evenpack.studies.forecast.logged_ranks import read_logged_ranks
from evenpack.studies.forecast.options import parse_options, read_log
from evenpack.studies.forecast.tables import forecast_tables
from evenpack.studies.throughput.contenders import VirtualRanks, formed, run_to_measure
from evenpack.studies.throughput.measure import MeasuredStep, StepTimer


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with lone_world() as alone:
        yield alone


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("gpt2"))


def options(**given: Any) -> ForecastOptions:
    values: dict[str, Any] = {
        "forms": ("unpadded/arrival",),
        "ranks": (2, 6),
        "steps": 10,
        "fit_steps": 40,
        "warmup": 1,
        "simulated_steps": 20,
        "clock": "wall",
    }
    return ForecastOptions(**(values | given))


def known_cost(batch: PackedBatch) -> float:
    work = performed_work(batch)
    return 1e-3 + 2e-6 * work.slots + 3e-8 * work.squared_lengths


@pytest.fixture
def by_known_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the time of micro-batches by that of a formula."""
    real = StepTimer.time_step

    def time_step(self: StepTimer, batches: list[PackedBatch], *, loader_seconds: float = 0.0) -> MeasuredStep:
        step = real(self, batches, loader_seconds=loader_seconds)
        step.micro_batches.seconds[:] = [known_cost(batch) for batch in batches]
        return step

    monkeypatch.setattr(StepTimer, "time_step", time_step)


@pytest.mark.usefixtures("by_known_cost")
def test_ranks_whose_times_follow_the_lengths_are_predicted(world: World, config: RunConfig) -> None:
    said: list[tuple[str, int, int]] = []
    study = study_forecast(config, world, options(), progress=lambda *state: said.append(state))
    (found,) = study.forms
    assert said[-1] == ("unpadded/arrival", 10 * (2 + 6) + 40, 10 * (2 + 6) + 40)
    assert [row.ranks for row in found.rows] == [2, 6]
    for row in found.rows:
        assert set(row.forecasts) == {"order statistics", "fitted law", "cost model"}
        for name, error in row.errors.items():
            assert abs(error) < 0.1, (row.ranks, name)
    assert 1.0 < found.rows[0].measured_wait < found.rows[1].measured_wait
    assert found.rows[1].measured_seconds > 1.02 * found.one_rank_seconds
    assert found.cost_model is not None
    assert found.cost_model.held_out_95_percent_error < 0.01
    assert study.rows_per_rank == 8
    for row in found.rows:
        for name, seconds in row.forecasts.items():
            assert row.intervals[name].low < seconds < row.intervals[name].high, (row.ranks, name)
            assert row.mean_forecasts[name] == pytest.approx(found.one_rank_seconds, rel=0.1), (row.ranks, name)

    console = Console(width=200, record=True, file=io.StringIO())
    logged = read_logged_ranks(LOG, warmup=1)
    for shown in forecast_tables(study, logged):
        console.print(shown)
    text = console.export_text()
    assert text.count("within 10 % everywhere") == 3
    assert "NOT" not in text
    assert "2 real ranks" in text


@pytest.mark.usefixtures("by_known_cost")
def test_a_forecast_that_is_wrong_is_seen(world: World, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two ranks were slow for a reason other than their lengths, no forecast from one rank could predict it."""
    monkeypatch.setattr(forecast, "expected_maximum", lambda law, draws: 2.0)
    study = study_forecast(config, world, options(steps=2, fit_steps=20), progress=lambda *_: None)
    error = study.forms[0].largest_error("fitted law")
    assert error is not None
    assert error > 0.1


def test_virtual_ranks_share_the_step_that_real_ones_would(world: World, config: RunConfig) -> None:
    """All ranks together hold each sequence of the step once, and no sequence is in two shares."""
    run = run_to_measure(config)
    virtual = VirtualRanks(resolve(formed(run.config, "unpadded/arrival"), run.prepared), world)
    shares = [virtual.share(4, 3, rank) for rank in range(4)]
    assert [len(share) for share in shares] == [2] * 4  # micro-batches, as the run file's step has
    ids = [batch.sequence_ids[batch.sequence_ids >= 0].tolist() for share in shares for batch in share]
    assert [len(each) for each in ids] == [4] * 8
    together = [one for each in ids for one in each]
    assert len(set(together)) == 32
    assert shares[0][0].step_counts.sequences == 32
    alone = [virtual.share(1, 12 + step, 0) for step in range(4)]  # arrival: the same 32, as four steps of one rank
    assert together == [
        one for share in alone for batch in share for one in batch.sequence_ids[batch.sequence_ids >= 0].tolist()
    ]


def test_errors_are_forecast_over_measured() -> None:
    row = RanksRow(
        ranks=2,
        measured_seconds=2.0,
        standard_error=0.1,
        measured_wait=1.1,
        forecasts={"a": 2.2, "b": 1.0},
        intervals={},
        mean_forecasts={"a": 1.0, "b": 1.0},
    )
    assert row.errors == pytest.approx({"a": 0.1, "b": -0.5})


RANKS = {"ranks": {"steps": 2, "compute_seconds": [3.0, 4.0]}}
LOG: list[dict[str, Any]] = [
    {"step": 1, "compute_seconds_mean": 100.0, "compute_seconds_max": 100.0},
    {"step": 2, "compute_seconds_mean": 1.0, "compute_seconds_max": 1.2, **RANKS},
    {"step": 3, "compute_seconds_mean": 3.0, "compute_seconds_max": 3.4},
]


def test_a_log_says_how_its_ranks_waited() -> None:
    logged = read_logged_ranks(LOG, warmup=1)
    assert (logged.ranks, logged.steps) == (2, 2)
    assert logged.wait == pytest.approx(4.6 / 4.0)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "does not contain the number of ranks"),
        (LOG[:1], "does not contain the number of ranks"),
        ([{**LOG[0], "ranks": {"compute_seconds": [1.0]}}], "a run on one rank"),
        ([{**LOG[0], **RANKS}], "has 1 steps, and the first 1 are left out"),
        ([{**LOG[0], "ranks": 4}], "does not contain the number of ranks"),
        ([{"step": 1, **RANKS}] * 2, "step 1 must have a compute_seconds_mean above 0, found None"),
        ([{**LOG[0], **RANKS, "compute_seconds_max": 0.0}] * 2, "a compute_seconds_max above 0, found 0.0"),
    ],
)
def test_a_log_without_waiting_times_is_refused(records: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_logged_ranks(records, warmup=1)


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_log(tmp_path / "metrics.jsonl", warmup=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": "2,x"}, "'x' is not a number of ranks"),
        ({"ranks": "0,2"}, "numbers of 2 or more"),
        ({"ranks": "1"}, "numbers of 2 or more"),
        ({"ranks": "-2"}, "'-2' is not a number"),
        ({"steps": 1}, "--steps must be 2 or more"),
        ({"fit_steps": 5}, "--fit-steps must be 20 or more, found 5"),
        ({"layouts": "unpadded/later"}, "no layout 'unpadded/later'"),
        ({"clock": "sun"}, "no such clock"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "layouts": "unpadded/arrival",
        "ranks": "1,2",
        "steps": 2,
        "fit_steps": 20,
        "warmup": 0,
        "simulated_steps": 10,
        "clock": "wall",
    }
    assert parse_options(ForecastCommand(**values)).ranks == (2,)
    with pytest.raises(ConfigError, match=message):
        parse_options(ForecastCommand(**(values | given)))


def test_several_real_ranks_are_refused(config: RunConfig, world: World) -> None:
    two = World(rank=0, size=2, local_rank=0, device=world.device)
    with pytest.raises(ConfigError, match="on one device, but 2 processes were started"):
        study_forecast(config, two, options(), progress=lambda *_: None)
