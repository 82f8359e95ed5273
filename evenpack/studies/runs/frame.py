"""What every study of runs does around its own comparison: it runs what is not finished, and says how that ended."""

import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import evenpack
from evenpack import console
from evenpack.console import Report
from evenpack.errors import EXIT_STOPPED
from evenpack.progress import Progress
from evenpack.studies.runs.jobs import Job
from evenpack.studies.runs.machine import Machine
from evenpack.studies.runs.runner import EndedRun, recorded, train_runs
from evenpack.studies.throughput.provenance import commit_of_source


def ended_jobs(
    jobs: Sequence[Job], output_dir: Path, machine: Machine, *, devices_per_run: int | None, only_report: bool
) -> tuple[EndedRun, ...]:
    """How each job has ended: as an earlier call left it, or after it has been started and waited for.

    Raises: ConfigError, RunError.
    """
    if only_report:
        return recorded(jobs)
    places = machine.places(devices_per_run)
    with machine.held(output_dir), Progress(console.messages()) as progress:
        return train_runs(jobs, machine, places, progress)


def conclude(report: Report, ended: Sequence[EndedRun], machine: Machine) -> Report:
    """Gives the report its outcome: unmet if a job failed, stopped if the user asked for that."""
    failed = sum(one.state == "failed" for one in ended)
    if failed:
        report.unmet = f"{failed} of {len(ended)} runs failed; what they said stands above"
    if machine.is_asked_to_stop:
        report.exit_code = EXIT_STOPPED
    return report


def run_states(ended: Sequence[EndedRun]) -> list[dict[str, Any]]:
    """How each job has ended, for the JSON."""
    return [{"run": one.run.key, "state": one.state, "message": one.message} for one in ended]


def measured_on(devices: Iterable[str]) -> dict[str, Any]:
    """What a figure must carry. `devices`: as the runs name theirs."""
    return {
        "devices": sorted(set(devices)),
        "processor": platform.processor() or platform.machine(),
        "evenpack": evenpack.__version__,
        "torch": torch.__version__,
        "commit": commit_of_source(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
