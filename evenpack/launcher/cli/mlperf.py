"""The command `evenpack mlperf`: the logs that runs with a section `mlperf:` write."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.launcher.cli.arguments import SETTINGS, AsJson, reporting

if TYPE_CHECKING:
    from evenpack.studies.mlperf import MlperfResult

EXIT_REFUSED = 1
"""Exit code if a log violates the rules, or a set of logs has no score."""

mlperf_app = typer.Typer(help="Check MLPerf logs, score sets of ten.", no_args_is_help=True, context_settings=SETTINGS)


@mlperf_app.command()
def check(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="OUTPUT_DIR/mlperf.log.", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Check a log by MLPerf Training's rules, with the compliance checker of its package mlperf-logging.

    The division is the one that the log names: an open run need not reach the target. Exit code 0 if it passes, 1 if it
    is refused.

    \b
    Example:
      evenpack mlperf check runs/mlperf_bert_large_packed/mlperf.log
    """
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.studies.mlperf import check_log

        found = check_log(log)
        report.value = {
            "log": found.log,
            "ruleset": found.ruleset,
            "division": found.result.division,
            "passed": found.passed,
            "messages": found.messages,
        }
        verdict = "passes" if found.passed else "is refused"
        report.shown = [
            console.text(f"{log} {verdict}: rules {found.ruleset}, {found.result.division or 'unnamed'} division")
        ]
        if found.messages:
            report.shown.append(console.text(found.messages))
    raise typer.Exit(0 if found.passed else EXIT_REFUSED)


@mlperf_app.command()
def report(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="mlperf.log of each run.", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Score a set of runs: the mean time to train of ten, without the fastest and the slowest.

    A run that missed the target counts as the slowest. Exit code 1 if there is no score.

    \b
    Example:
      evenpack mlperf report runs/mlperf_bert_large_packed_seed*/mlperf.log
    """
    with reporting(as_json) as shown:
        from evenpack import console
        from evenpack.studies.mlperf import read_result, score

        results = [read_result(log) for log in logs]
        found = score(results)
        shown.value = {"minutes": found.minutes, "reason": found.reason, "runs": results}
        line = f"Score: {found.minutes:.3f} minutes" if found.minutes is not None else f"No score: {found.reason}"
        shown.shown = [console.table([_row(result) for result in results], title="Time to train"), console.text(line)]
    raise typer.Exit(0 if found.minutes is not None else EXIT_REFUSED)


def _row(result: "MlperfResult") -> dict[str, object]:
    return {
        "log": result.log,
        "division": result.division,
        "status": result.status or "not ended",
        "minutes": None if result.minutes is None else f"{result.minutes:.3f}",
        "samples": result.samples,
        "accuracy": None if result.accuracy is None else f"{result.accuracy:.4f}",
        "batch (samples)": result.global_batch_size,
    }
