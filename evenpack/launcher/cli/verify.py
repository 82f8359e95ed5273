"""The command `evenpack verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting

if TYPE_CHECKING:
    from evenpack.console import Report
    from evenpack.data.config import DataConfig
    from evenpack.data.prepare.verification import Verified

EXIT_DAMAGED = 1
"""Exit code if a file is not as it was written."""


def verify(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Compare every file of the prepared data with its checksum.

    Names each damaged file and the start of its damage. Exit code 0 if all are as they were written, 1 if one is not, 2
    if the data is not prepared.

    \b
    Example:
      evenpack verify gpt2_mini_wiki
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        is_sound = _verify(config.prepared_dir, config.data, report)
    raise typer.Exit(0 if is_sound else EXIT_DAMAGED)


def _verify(prepared_dir: Path, config: "DataConfig", report: "Report") -> bool:
    """Verifies the files.

    Raises: NotPreparedError without prepared data; DataError for a damaged manifest or other data.
    """
    from evenpack import console
    from evenpack.data.prepare.manifest import Manifest, data_section, refuse_differences
    from evenpack.data.prepare.shown import PrepareProgress
    from evenpack.data.prepare.verification import Verifier

    directory = prepared_dir.expanduser().absolute()
    manifest = Manifest.read(directory)
    refuse_differences(manifest.data, data_section(config), directory)
    with PrepareProgress(console.messages()) as progress:
        verifier = Verifier(directory, manifest)
        verified = verifier.verify_all(progress)
    report.value = {"directory": directory, "files": len(manifest.files), **_figures(verified)}
    lines = [f"{directory}: all {len(manifest.files)} files are as they were written; {_rate(verified)}"]
    if verified.damages:
        report.value["remedy"] = verifier.remedy(verified.damages)
        lines = [
            f"{directory}: {len(verified.damages)} of {len(manifest.files)} files are damaged; {_rate(verified)}",
            *(f"  {damage.describe()}" for damage in verified.damages),
            report.value["remedy"],
        ]
    report.shown.append(console.text("\n".join(lines)))
    return not verified.damages


def _figures(verified: "Verified") -> dict[str, Any]:
    return {
        "bytes": verified.bytes,
        "elapsed_seconds": verified.elapsed_seconds,
        "bytes_per_second": verified.bytes_per_second,
        "damaged": [
            {"file": damage.path, "problem": damage.problem, "first_bad_byte": damage.first_bad_byte}
            for damage in verified.damages
        ],
    }


def _rate(verified: "Verified") -> str:
    return (
        f"{verified.bytes / 1e6:,.1f} MB read in {verified.elapsed_seconds:,.2f} s "
        f"({verified.bytes_per_second / 1e9:.2f} GB/s)"
    )
