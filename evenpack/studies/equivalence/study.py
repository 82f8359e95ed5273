"""`evenpack study equivalence`: from a study file to what was found."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import evenpack
from evenpack import console
from evenpack.console import Report
from evenpack.engine.reporting.journal import SUMMARY
from evenpack.errors import EXIT_STOPPED
from evenpack.files import read_json_object
from evenpack.progress import Progress
from evenpack.studies.equivalence.compare import CurvesOfArms, compare
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.equivalence.curves import Curve, read_curve
from evenpack.studies.equivalence.plots import plot_equivalence
from evenpack.studies.equivalence.tables import comparison_tables
from evenpack.studies.plotting import require_plot
from evenpack.studies.runs.config import load_study
from evenpack.studies.runs.expansion import expand
from evenpack.studies.runs.machine import Machine
from evenpack.studies.runs.runner import EndedRun, recorded, train_runs
from evenpack.studies.runs.tables import arms_text, run_rows, runs_table, unfinished_text
from evenpack.studies.throughput.provenance import commit_of_source


def describe_study(study_file: Path, words: Sequence[str], machine: Machine, *, devices_per_run: int | None) -> Report:
    """`--dry-run`. Raises: ConfigError."""
    study, run_words = load_study(study_file, EquivalenceConfig, words)
    runs = expand(study, run_words)
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
        shown.append(console.text("What follows from data that is not prepared yet is left out: -"))
    return Report(value={"study": study, "runs": rows}, shown=shown)


def run_study(
    study_file: Path,
    words: Sequence[str],
    machine: Machine,
    *,
    devices_per_run: int | None,
    only_report: bool,
    plot: Path | None,
) -> Report:
    """Trains what is not finished, and compares what is. Raises: ConfigError, RunError; DataError for a spoilt log."""
    study, run_words = load_study(study_file, EquivalenceConfig, words)
    runs = expand(study, run_words)
    if plot is not None:
        require_plot(plot)
    if only_report:
        ended = recorded(runs)
    else:
        places = machine.places(devices_per_run)
        with machine.held(study.study.output_dir), Progress(console.messages()) as progress:
            ended = train_runs(runs, machine, places, progress)
    curves = _curves(study, ended)
    comparison = compare(curves, study.equivalence)
    report = Report(
        value={
            "study": study,
            "measured_on": _measured_on(ended),
            "runs": [{"run": one.run.key, "state": one.state, "message": one.message} for one in ended],
            "comparison": comparison,
            "curves": curves,
        },
        shown=[*comparison_tables(comparison, study.equivalence), *unfinished_text(ended)],
    )
    if plot is not None and comparison.rows:
        plot_equivalence(curves, comparison, study, plot)
        report.shown.append(console.text(f"Drew {plot}"))
    failed = sum(one.state == "failed" for one in ended)
    if failed:
        report.unmet = f"{failed} of {len(ended)} runs failed; what they said stands above"
    if machine.is_asked_to_stop:
        report.exit_code = EXIT_STOPPED
    return report


def _curves(study: EquivalenceConfig, ended: Sequence[EndedRun]) -> CurvesOfArms:
    """Of the finished runs of the last phase."""
    found: dict[str, dict[int, Curve]] = {arm: {} for arm in study.phases[study.last_phase].arms}
    for one in ended:
        if one.run.phase == study.last_phase and one.state == "finished":
            found[one.run.arm][one.run.seed] = read_curve(one.run.output_dir)
    return found


def _measured_on(ended: Sequence[EndedRun]) -> dict[str, Any]:
    """What a figure must carry."""
    summaries = [read_json_object(one.run.output_dir / SUMMARY) or {} for one in ended if one.state == "finished"]
    return {
        "devices": sorted({f"{one.get('ranks')} x {one.get('device')}" for one in summaries}),
        "processor": platform.processor() or platform.machine(),
        "evenpack": evenpack.__version__,
        "torch": torch.__version__,
        "commit": commit_of_source(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
