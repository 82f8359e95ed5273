"""A real run beside a forecast: refused if its steps are others than those that are timed; and the figure of both."""

from pathlib import Path
from typing import Any

import pytest
from drawn_figures import keep_figures, texts_of
from logged_runs import CPU, log_run
from tiny_run import tiny_gpt2_run

from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.cost_model import MeasuredOn
from evenpack.errors import ConfigError
from evenpack.studies.forecast import plots
from evenpack.studies.forecast.command import ForecastCommand
from evenpack.studies.forecast.forecast import ForecastOptions, ForecastStudy, FormForecast, RanksRow
from evenpack.studies.forecast.measured import _device_warnings
from evenpack.studies.forecast.options import parse_options, read_log
from evenpack.studies.forecast.real_run import RealRun, form_of, require_same_steps
from evenpack.studies.statistics.paired import Interval
from evenpack.studies.throughput.contenders import run_to_measure
from evenpack.testing import changed

ARRIVAL = "unpadded/arrival"
OPTIONS = ForecastOptions(
    forms=(ARRIVAL,), ranks=(2, 4), steps=10, fit_steps=40, warmup=0, simulated_steps=20, clock="wall"
)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The run file of the study: eight packs on each rank, four a micro-batch."""
    return tiny_gpt2_run(tmp_path_factory.mktemp("gpt2"))


def real_run(timed: RunConfig, folder: Path, *, ranks: int = 2, sections: dict[str, Any] | None = None) -> RealRun:
    """A run over the same data that trained un-padded by arrival with eight sequences on each of two ranks."""
    training = {
        "layout": "unpadded",
        "batching": "sequences",
        "assignment": "arrival",
        "packs_per_step": None,
        "packs_per_micro_batch": None,
        "sequences_per_step": 16,
        "sequences_per_micro_batch": 4,
    }
    given = sections or {}
    config = changed(
        timed,
        run={"name": "real", "output_dir": folder / "real"},
        data={"prepared_dir": timed.prepared_dir},
        training=training | given.get("training", {}),
        **{name: values for name, values in given.items() if name != "training"},
    )
    return read_log(log_run(config, ranks=ranks) / "metrics.jsonl", warmup=0)


def test_a_run_with_the_same_steps_is_taken(timed: RunConfig, tmp_path: Path) -> None:
    assert require_same_steps(real_run(timed, tmp_path), run_to_measure(timed), OPTIONS) == ()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"sequences_per_step": 32}},
            r"16 rows per rank \(training.sequences_per_step 32 on 2 ranks\), and the study times 8 rows per rank: set "
            r"training.packs_per_step=16",
        ),
        ({"training": {"sequences_per_micro_batch": 8}}, r"8 rows per micro-batch, .*packs_per_micro_batch=8"),
        ({"training": {"assignment": "sorted_serpentine"}}, "add --layouts unpadded/sorted_serpentine"),
        ({"model": {"layers": 3}}, r"another model than the run file \(model.layers 3 and 2"),
    ],
)
def test_a_run_with_other_steps_is_refused_by_name(
    sections: dict[str, Any], message: str, timed: RunConfig, tmp_path: Path
) -> None:
    real = real_run(timed, tmp_path, sections=sections)
    with pytest.raises(ConfigError, match=message):
        require_same_steps(real, run_to_measure(changed(timed, model={"layers": 2})), OPTIONS)


def test_the_study_times_packs_in_the_default_assignment_alone(timed: RunConfig) -> None:
    assert form_of(timed.training) == "packed"
    assert form_of(changed(timed, training={"assignment": timed.training.policy}).training) == "packed"
    assert form_of(changed(timed, training={"assignment": "arrival"}).training) is None


def test_ranks_that_are_not_predicted_and_other_data_are_refused(timed: RunConfig, tmp_path: Path) -> None:
    eight = real_run(timed, tmp_path, ranks=8, sections={"training": {"sequences_per_step": 64}})
    with pytest.raises(ConfigError, match="is of 8 ranks, and --ranks 2,4 does not predict that number: add 8"):
        require_same_steps(eight, run_to_measure(timed), OPTIONS)
    real = real_run(timed, tmp_path)
    path = tmp_path / "real" / "run.json"
    assert real.record is not None
    path.write_text(path.read_text().replace(real.record.data.fingerprint, "0" * 64))
    other = read_log(path.with_name("metrics.jsonl"), warmup=0)
    with pytest.raises(ConfigError, match="over other data"):
        require_same_steps(other, run_to_measure(timed), OPTIONS)


def test_what_is_not_recorded_or_matters_less_is_a_warning(timed: RunConfig, tmp_path: Path) -> None:
    other = real_run(timed, tmp_path, sections={"attention": {"backend": "sdpa"}})
    (settings,) = require_same_steps(other, run_to_measure(timed), OPTIONS)
    assert settings.startswith("real had other settings than the run file has: attention.backend sdpa and ")
    (tmp_path / "real" / "run.json").unlink()
    (unknown,) = require_same_steps(
        read_log(tmp_path / "real" / "metrics.jsonl", warmup=0), run_to_measure(timed), OPTIONS
    )
    assert "there is no run.json beside" in unknown


def study_of(device: str) -> ForecastStudy:
    """Two layouts with round numbers; the second has no cost model."""
    rows = tuple(
        RanksRow(
            ranks=ranks,
            measured_seconds=1.0 + 0.1 * ranks,
            standard_error=0.02,
            measured_wait=1.0 + 0.05 * ranks,
            forecasts={"order statistics": 1.2, "fitted law": 1.3},
            mean_forecasts={"order statistics": 1.0, "fitted law": 1.0},
            intervals={"order statistics": Interval(low=1.1, high=1.25), "fitted law": Interval(low=1.2, high=1.4)},
        )
        for ranks in (2, 4)
    )
    forms = tuple(
        FormForecast(
            form=form,
            one_rank_seconds=1.0,
            one_rank_deviation=0.1,
            law="gumbel",
            rows=rows,
            cost_model=None,
            cost_model_refusal="too few",
        )
        for form in (ARRIVAL, "packed")
    )
    origin = MeasuredOn(
        device=device,
        family="gpt2",
        model="gpt2 tiny",
        causal=True,
        layers=2,
        hidden_size=64,
        vocabulary_size=400,
        rows_per_micro_batch=4,
        layouts=(ARRIVAL,),
        precision="fp32",
        attention="auto",
        evenpack="0.0",
        torch="2.0",
        commit="abc123",
        date="2026-01-01T00:00:00+00:00",
    )
    return ForecastStudy(
        run="timed", measured_on=origin, options=OPTIONS, rows_per_rank=8, data="one (0123)", forms=forms
    )


def test_the_figure_tells_forecasts_from_measurements_and_names_its_origin(
    timed: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = real_run(timed, tmp_path)
    study = study_of("NVIDIA H100")
    warnings = _device_warnings(study, real)
    figures = keep_figures(monkeypatch, plots)
    path = tmp_path / "forecast.png"
    plots.plot_forecast(study, path, real=real, warnings=warnings)
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    for words in (
        "ESTIMATED by order statistics from 40 steps of one rank; band: 95 %",
        "MEASURED: 10 steps of the ranks, in turn on one device; bar: 95 %",
        "MEASURED: real run real, 80 steps on 2 ranks at once",
        f"WARNING: the real run was measured on {CPU}, and the study on NVIDIA H100",
        "timed: data one (0123); evenpack 0.0, commit abc123; 1 x NVIDIA H100",
        "Real run real: data one (",
    ):
        assert words in texts_of(figure), words
    assert "cost model" not in texts_of(figure)
    seconds, waiting, _, of_packs = figure.axes
    assert seconds.get_title(loc="left") == f"{ARRIVAL}: forecasts are -14.3 to +8.3 % off"
    (point,) = [line for line in waiting.lines if line.get_marker() == "D"]
    assert point.get_xydata()[0] == pytest.approx([2.0, 0.9 / 0.8])
    assert not [line for line in of_packs.lines if line.get_marker() == "D"]  # the run was not in packs
    bands = [band.get_paths()[0].vertices[:, 1] for band in seconds.collections[:2]]
    assert [(min(band), max(band)) for band in bands] == [(1.1, 1.25), (1.2, 1.4)]


def test_devices_that_are_the_same_are_no_warning(timed: RunConfig, tmp_path: Path) -> None:
    assert _device_warnings(study_of(CPU), real_run(timed, tmp_path)) == ()
    assert _device_warnings(study_of(CPU), None) == ()


def test_a_plot_that_is_no_png_is_refused_before_anything_is_timed() -> None:
    with pytest.raises(ConfigError, match="a plot is a PNG file"):
        parse_options(ForecastCommand(plot=Path("forecast.svg")))
