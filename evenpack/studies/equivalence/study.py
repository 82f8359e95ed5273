"""The study `evenpack study equivalence`, from a study file to its results."""

from collections.abc import Sequence
from pathlib import Path

from evenpack import console
from evenpack.console import Report
from evenpack.progress import Progress
from evenpack.studies.equivalence.compare import CurvesOfArms, compare
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.equivalence.curves import Curve, read_curve
from evenpack.studies.equivalence.plots import plot_equivalence
from evenpack.studies.equivalence.tables import comparison_tables, tuned_tables
from evenpack.studies.equivalence.tuned import TaskComparison, Tuned, compare_tuned, read_tuned
from evenpack.studies.plotting import require_plot
from evenpack.studies.runs.config import load_study
from evenpack.studies.runs.expansion import StudyRun, expand
from evenpack.studies.runs.finetunings import FinetuneRun, expand_finetunings, require_tasks
from evenpack.studies.runs.frame import conclude, devices_of, finished_runs, measured_on, origin_of_study, run_states
from evenpack.studies.runs.machine import Machine
from evenpack.studies.runs.runner import EndedRun, recorded, train_runs
from evenpack.studies.runs.tables import (
    arms_text,
    finetune_rows,
    finetunings_table,
    run_rows,
    runs_table,
    unfinished_text,
)


def describe_study(
    study_file: Path, overrides: Sequence[str], machine: Machine, *, devices_per_run: int | None
) -> Report:
    """Lists the runs for `--dry-run`. Raises: ConfigError."""
    study, runs, finetunings = _expanded(study_file, overrides)
    places = machine.places(devices_per_run)
    rows = run_rows(runs, ranks=places[0].ranks)
    title = f"{study.study.name}: {len(runs)} runs, {len(places)} at a time, {places[0].ranks} ranks each"
    section = study.equivalence
    rule = console.text(
        f"Compared with {section.reference} by held-out {section.measure}; differences within ± {section.margin:g} "
        "count as none"
    )
    shown = [arms_text(study), runs_table(rows, title=title), rule]
    if any(row.sequences is None for row in rows):
        shown.append(console.text("Values that depend on data that is not prepared yet are shown as -"))
    tuned_rows = finetune_rows(finetunings)
    if tuned_rows:
        shown.append(finetunings_table(tuned_rows, title=f"Then {len(tuned_rows)} fine-tunings, a device each"))
    return Report(value={"study": study, "runs": rows, "finetunings": tuned_rows}, shown=shown)


def run_study(
    study_file: Path,
    overrides: Sequence[str],
    machine: Machine,
    *,
    devices_per_run: int | None,
    only_report: bool,
    plot: Path | None,
) -> Report:
    """Trains unfinished runs and compares finished ones. Raises: ConfigError, RunError; DataError for a damaged log."""
    study, runs, finetunings = _expanded(study_file, overrides)
    if plot is not None:
        require_plot(plot)
    if only_report:
        ended, tuned = recorded(runs), recorded(finetunings)
    else:
        require_tasks(finetunings)
        places = machine.places(devices_per_run)
        with machine.held(study.study.output_dir), Progress(console.messages()) as progress:
            ended = train_runs(runs, machine, places, progress)
            tuned = _finetune(finetunings, machine, ended, progress)
    return conclude(_report(study, ended, finetunings, tuned, plot=plot), (*ended, *tuned), machine)


def _report(
    study: EquivalenceConfig,
    ended: Sequence[EndedRun],
    finetunings: Sequence[FinetuneRun],
    tuned: Sequence[EndedRun],
    *,
    plot: Path | None,
) -> Report:
    curves = _curves(study, ended)
    comparison = compare(curves, study.equivalence)
    tasks = _tasks(study, finetunings, tuned)
    every = (*ended, *tuned)
    origin = origin_of_study(study.study.name, finished_runs(ended, study.last_phase))
    report = Report(
        value={
            "study": study,
            "origin": origin,
            "measured_on": measured_on(devices_of(finished_runs(ended))),
            "runs": run_states(every),
            "comparison": comparison,
            "curves": curves,
            "finetuned": tasks,
        },
        shown=[
            *comparison_tables(comparison, study.equivalence),
            *tuned_tables(tasks, study.equivalence),
            *unfinished_text(every),
        ],
    )
    if plot is not None and comparison.rows:
        plot_equivalence(curves, comparison, tasks, study, plot, origin=origin)
        report.shown.append(console.text(f"Drew {plot}"))
    return report


def _expanded(
    study_file: Path, overrides: Sequence[str]
) -> tuple[EquivalenceConfig, tuple[StudyRun, ...], tuple[FinetuneRun, ...]]:
    study, run_overrides = load_study(study_file, EquivalenceConfig, overrides)
    runs = expand(study, run_overrides)
    return study, runs, expand_finetunings(study.finetune, runs, phase=study.last_phase)


def _finetune(
    finetunings: Sequence[FinetuneRun], machine: Machine, ended: Sequence[EndedRun], progress: Progress
) -> tuple[EndedRun, ...]:
    """Fine-tunes on one device each, because a fine-tuning is one process."""
    return train_runs(finetunings, machine, machine.places(1), progress, earlier=ended) if finetunings else ()


def _curves(study: EquivalenceConfig, ended: Sequence[EndedRun]) -> CurvesOfArms:
    """Returns the curves of the finished runs of the last phase."""
    found: dict[str, dict[int, Curve]] = {arm: {} for arm in study.phases[study.last_phase].arms}
    for run in finished_runs(ended, study.last_phase):
        found[run.arm][run.seed] = read_curve(run.output_dir)
    return found


def _tasks(
    study: EquivalenceConfig, finetunings: Sequence[FinetuneRun], ended: Sequence[EndedRun]
) -> list[TaskComparison]:
    """Returns the results of each task for which a fine-tuning has finished."""
    arms = study.phases[study.last_phase].arms
    found: dict[str, dict[str, dict[int, Tuned]]] = {task: {arm: {} for arm in arms} for task in study.finetune}
    for run, one in zip(finetunings, ended, strict=True):
        if one.state == "finished":
            found[run.task][run.arm][run.seed] = read_tuned(run.output_dir)
    comparisons = (compare_tuned(task, of_arms, study.equivalence) for task, of_arms in found.items())
    return [comparison for comparison in comparisons if comparison is not None]
