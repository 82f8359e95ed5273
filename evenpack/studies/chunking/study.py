"""The study `evenpack study chunking`, from a study file to its results."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenpack import console
from evenpack.console import Report
from evenpack.studies.budget.options import BudgetOptions
from evenpack.studies.chunking.arms import ArmsByName, describe_arms
from evenpack.studies.chunking.compare import Finished, FinishedRuns, compare
from evenpack.studies.chunking.config import ChunkingConfig
from evenpack.studies.chunking.curves import read_curve
from evenpack.studies.chunking.held_out import held_out_evaluations, read_held_out
from evenpack.studies.chunking.plan import planned_runs, planned_table, prepare_command, unknown_text
from evenpack.studies.chunking.plots import plot_lengths, require_plots
from evenpack.studies.chunking.tables import comparison_tables
from evenpack.studies.runs.config import load_study
from evenpack.studies.runs.evaluations import Evaluation, interleaved
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
from evenpack.studies.runs.jobs import Job
from evenpack.studies.runs.machine import Machine, Place
from evenpack.studies.runs.runner import EndedRun
from evenpack.studies.runs.tables import unfinished_text


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    study: ChunkingConfig
    runs: tuple[StudyRun, ...]
    arms: ArmsByName
    evaluations: tuple[Evaluation, ...]

    @property
    def jobs(self) -> tuple[Job, ...]:
        return interleaved(self.runs, self.evaluations)


def describe_study(
    study_file: Path, overrides: Sequence[str], places: Sequence[Place], options: BudgetOptions
) -> Report:
    """Lists the runs for `--dry-run`. Raises: ConfigError."""
    loaded = _load(study_file, overrides)
    study, runs = loaded.study, loaded.runs
    planned = planned_runs(runs, options)
    title = f"{study.study.name}: {len(runs)} runs, {len(places)} at a time, {places[0].ranks} ranks each"
    reference = console.text(f"Compared with {study.chunking.reference}, at the same length")
    command = prepare_command(planned, runs)
    shown = [planned_table(planned, title=title), reference, *unknown_text(planned, command)]
    return Report(value={"study": study, "runs": planned, "prepare_first": command}, shown=shown)


def run_study(
    study_file: Path,
    overrides: Sequence[str],
    machine: Machine,
    *,
    devices_per_run: int | None,
    only_report: bool,
    plot: Path | None,
) -> Report:
    """Trains and evaluates unfinished runs, and compares the finished ones.

    Raises: ConfigError, RunError; DataError for a damaged log.
    """
    loaded = _load(study_file, overrides)
    if plot is not None:
        require_plots(plot)
    output_dir = loaded.study.study.output_dir
    ended = ended_jobs(loaded.jobs, output_dir, machine, devices_per_run=devices_per_run, only_report=only_report)
    return conclude(_report(loaded, ended, plot), ended, machine)


def _report(loaded: _Loaded, ended: Sequence[EndedRun], plot: Path | None) -> Report:
    """Returns the finished runs, compared, as tables and figures."""
    study, finished = loaded.study, _finished(loaded, ended)
    rows = compare(finished, loaded.arms, study)
    trained = finished_runs(ended, study.last_phase)
    origin = origin_of_study(study.study.name, trained)
    report = Report(
        value={
            "study": study,
            "origin": origin,
            "measured_on": measured_on(devices_of(trained)),
            "runs": run_states(ended),
            "arms": rows,
            "segments": _segments(finished, loaded.arms),
        },
        shown=[*comparison_tables(rows, study.chunking), *unfinished_text(ended)],
    )
    if plot is not None and rows:
        drawn = plot_lengths(finished, rows, study, plot, origin=origin)
        report.shown.append(console.text("\n".join(f"Drew {path}" for path in drawn)))
    return report


def _load(study_file: Path, overrides: Sequence[str]) -> _Loaded:
    """Loads the study. Raises: ConfigError for settings that make runs invalid, or not comparable."""
    study, run_overrides = load_study(study_file, ChunkingConfig, overrides)
    study = study.with_arms_of_grid()
    runs = expand(study, run_overrides)
    arms = describe_arms(study, runs)
    return _Loaded(study=study, runs=runs, arms=arms, evaluations=held_out_evaluations(study, runs))


def _finished(loaded: _Loaded, ended: Sequence[EndedRun]) -> FinishedRuns:
    """Returns the finished runs of the last phase."""
    found: dict[str, dict[int, Finished]] = {arm: {} for arm in loaded.arms}
    for run in finished_runs(ended, loaded.study.last_phase):
        curve = read_curve(run.output_dir)
        evaluations = [evaluation for evaluation in loaded.evaluations if evaluation.starts_from == run.key]
        held_out = read_held_out(curve, evaluations)
        found[run.arm][run.seed] = Finished(curve=curve, held_out=held_out)
    return found


def _segments(finished: FinishedRuns, arms: ArmsByName) -> dict[str, dict[int, list[float]]]:
    """Returns the perplexity of each hundredth of the last epoch, by arm and seed."""
    return {
        name: {seed: one.curve.segments(arms[name].epochs).tolist() for seed, one in of_seed.items()}
        for name, of_seed in finished.items()
    }
