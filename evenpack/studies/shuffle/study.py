"""The study `evenpack study shuffle`, from a study file to its results."""

from collections.abc import Sequence
from pathlib import Path

from evenpack import console
from evenpack.console import Report
from evenpack.studies.plotting import require_plot
from evenpack.studies.runs.config import load_study
from evenpack.studies.runs.expansion import StudyRun, expand
from evenpack.studies.runs.frame import (
    conclude,
    devices_of,
    ended_jobs,
    finished_runs,
    measured_on,
    origin_of_study,
    run_states,
)
from evenpack.studies.runs.machine import Machine
from evenpack.studies.runs.runner import EndedRun
from evenpack.studies.runs.tables import arms_text, run_rows, runs_table, unfinished_text
from evenpack.studies.shuffle.config import ShuffleStudyConfig
from evenpack.studies.shuffle.measure import (
    ArmOrder,
    check_run,
    jumps_at,
    measure_order,
    measure_simulated,
    read_losses,
)
from evenpack.studies.shuffle.plots import LossesOfArms, plot_shuffle
from evenpack.studies.shuffle.tables import jump_table, order_tables


def describe_study(
    study_file: Path, overrides: Sequence[str], machine: Machine, *, devices_per_run: int | None
) -> Report:
    """Lists the runs for `--dry-run`. Raises: ConfigError."""
    study, runs = _expanded(study_file, overrides)
    places = machine.places(devices_per_run)
    rows = run_rows(runs, ranks=places[0].ranks)
    title = f"{study.study.name}: {len(runs)} runs, {len(places)} at a time, {places[0].ranks} ranks each"
    return Report(value={"study": study, "runs": rows}, shown=[arms_text(study), runs_table(rows, title=title)])


def run_study(
    study_file: Path,
    overrides: Sequence[str],
    machine: Machine,
    *,
    devices_per_run: int | None,
    only_report: bool,
    plot: Path | None,
) -> Report:
    """Trains unfinished runs, measures and compares finished ones. Raises: ConfigError, RunError, DataError."""
    study, runs = _expanded(study_file, overrides)
    if plot is not None:
        require_plot(plot)
    ended = ended_jobs(runs, study.study.output_dir, machine, devices_per_run=devices_per_run, only_report=only_report)
    return conclude(_report(study, ended, plot), ended, machine)


def _report(study: ShuffleStudyConfig, ended: Sequence[EndedRun], plot: Path | None) -> Report:
    trained = finished_runs(ended, study.last_phase)
    finished = _by_arm(study, trained)
    origin = origin_of_study(study.study.name, trained)
    orders = _orders(study, finished)
    borders = _borders_of_corpus(orders, finished)
    losses = {arm: {run.seed: read_losses(run.config) for run in runs} for arm, runs in finished.items()}
    around = study.shuffle.steps_around_border
    jumps = {arm: jumps_at(of_seed, borders, around=around) for arm, of_seed in losses.items()}
    report = Report(
        value={
            "study": study,
            "origin": origin,
            "measured_on": measured_on(devices_of(trained)),
            "runs": run_states(ended),
            "orders": orders,
            "borders": borders,
            "jumps": jumps,
            "losses": _as_lists(losses),
        },
        shown=[
            *(order_tables(orders, study.shuffle) if orders else []),
            *jump_table(jumps, study.shuffle, borders=borders),
            *unfinished_text(ended),
        ],
    )
    if plot is not None and any(finished.values()):
        plot_shuffle(losses, jumps, borders, study, plot, origin=origin)
        report.shown.append(console.text(f"Drew {plot}"))
    return report


def _expanded(study_file: Path, overrides: Sequence[str]) -> tuple[ShuffleStudyConfig, tuple[StudyRun, ...]]:
    study, run_overrides = load_study(study_file, ShuffleStudyConfig, overrides)
    runs = expand(study, run_overrides)
    for run in runs:
        check_run(run.config)
    return study, runs


def _by_arm(study: ShuffleStudyConfig, trained: Sequence[StudyRun]) -> dict[str, list[StudyRun]]:
    found: dict[str, list[StudyRun]] = {arm: [] for arm in study.phases[study.last_phase].arms}
    for run in trained:
        found[run.arm].append(run)
    return found


def _orders(study: ShuffleStudyConfig, finished: dict[str, list[StudyRun]]) -> list[ArmOrder]:
    """Returns the order of each arm with a finished run, by its first seed, and the simulated orders."""
    orders = [measure_order(arm, runs[0].config, study.shuffle) for arm, runs in finished.items() if runs]
    reference = finished[study.shuffle.reference]
    return [*orders, *(measure_simulated(reference[0].config, study.shuffle) if reference else ())]


def _borders_of_corpus(orders: Sequence[ArmOrder], finished: dict[str, list[StudyRun]]) -> tuple[int, ...]:
    """Returns the starts of blocks of the corpus in its own order, from the first arm of the kind `blocks`.

    Else none.
    """
    for one in orders:
        if one.borders and finished[one.arm][0].config.data.shuffle.kind == "blocks":
            return one.borders
    return ()


def _as_lists(losses: LossesOfArms) -> dict[str, dict[int, list[float]]]:
    return {
        arm: {seed: values.round(6).tolist() for seed, values in of_seed.items()} for arm, of_seed in losses.items()
    }
