"""The common frame of all studies of runs: it runs unfinished jobs, and reports their states."""

import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from evenpack import console
from evenpack.console import Report
from evenpack.engine.provenance import commit_of_source
from evenpack.engine.reporting.journal import SUMMARY
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.errors import EXIT_STOPPED
from evenpack.files import read_json_object
from evenpack.progress import Progress
from evenpack.studies.origins import origin_of_runs
from evenpack.studies.runs.expansion import StudyRun
from evenpack.studies.runs.jobs import Job
from evenpack.studies.runs.machine import Machine
from evenpack.studies.runs.runner import EndedRun, recorded, train_runs
from evenpack.version import VERSION


def ended_jobs(
    jobs: Sequence[Job], output_dir: Path, machine: Machine, *, devices_per_run: int | None, only_report: bool
) -> tuple[EndedRun, ...]:
    """Returns the state of each job, either recorded by an earlier call or after it has been run.

    Raises: ConfigError, RunError.
    """
    if only_report:
        return recorded(jobs)
    places = machine.places(devices_per_run)
    with machine.held(output_dir), Progress(console.messages()) as progress:
        return train_runs(jobs, machine, places, progress)


def conclude(report: Report, ended: Sequence[EndedRun], machine: Machine) -> Report:
    """Sets the report's outcome: unmet if a job failed, stopped if the user asked for that."""
    failed = sum(one.state == "failed" for one in ended)
    if failed:
        report.unmet = f"{failed} of {len(ended)} runs failed; their errors are above"
    if machine.is_stop_requested:
        report.exit_code = EXIT_STOPPED
    return report


def run_states(ended: Sequence[EndedRun]) -> list[dict[str, Any]]:
    """Returns the state of each job, for the JSON."""
    return [{"run": one.run.key, "state": one.state, "message": one.message} for one in ended]


def finished_runs(ended: Sequence[EndedRun], phase: str | None = None) -> list[StudyRun]:
    """Returns the trainings that have finished, of one phase or of all."""
    return [
        one.run
        for one in ended
        if isinstance(one.run, StudyRun) and one.state == "finished" and phase in (None, one.run.phase)
    ]


def devices_of(runs: Sequence[StudyRun]) -> list[str]:
    """Returns ranks and device of each finished run, as its summary names them."""
    summaries = [read_json_object(run.output_dir / SUMMARY) or {} for run in runs]
    return [f"{one.get('ranks')} x {one.get('device')}" for one in summaries]


def origin_of_study(name: str, runs: Sequence[StudyRun]) -> str:
    """Returns the line below figures of finished runs: data, commits and devices as the runs recorded them.

    Without any record, as of earlier versions, sources come from the settings and devices from the summaries.
    """
    records = [read_run_record(run.output_dir) for run in runs]
    if any(record is not None for record in records):
        return origin_of_runs(name, records)
    sources = dict.fromkeys(source for run in runs for source in run.config.data.sources)
    return f"{name}: data {', '.join(sources)}; commit not recorded; {', '.join(dict.fromkeys(devices_of(runs)))}"


def measured_on(devices: Iterable[str]) -> dict[str, Any]:
    """Returns the provenance that a figure must carry. `devices`: as the runs name theirs."""
    return {
        "devices": sorted(set(devices)),
        "processor": platform.processor() or platform.machine(),
        "evenpack": VERSION,
        "torch": torch.__version__,
        "commit": commit_of_source(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
