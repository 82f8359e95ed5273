"""`evenpack verify`: every file of a prepared set against the checksums of its manifest."""

from typing import Any

from rich.console import RenderableType

from evenpack.data.checksums import Damage
from evenpack.data.prepare.manifest import Manifest, data_section, refuse_differences
from evenpack.data.prepare.verification import Verifier, remedy
from evenpack.engine.config import RunConfig
from evenpack.launcher import console

EXIT_DAMAGED = 1
"""Of `evenpack verify`, where a file is not as it was written."""


def verify_prepared(config: RunConfig) -> tuple[dict[str, Any], list[RenderableType], int]:
    """Reads all files; the result as a value for JSON, as what rich can print, and the exit code.

    Raises: NotPreparedError if there is nothing to verify; DataError for a manifest that is damaged or of other data.
    """
    directory = config.prepared_dir.expanduser().absolute()
    manifest = Manifest.read(directory)
    refuse_differences(manifest.data, data_section(config.data), directory)
    with console.PrepareProgress(console.messages()) as progress:
        verified = Verifier(directory, manifest).verify_all(progress)
    value = {
        "directory": directory,
        "files": len(manifest.files),
        "bytes": verified.bytes,
        "elapsed_seconds": verified.elapsed_seconds,
        "bytes_per_second": verified.bytes_per_second,
        "damaged": [_as_json(damage) for damage in verified.damages],
    }
    read = (
        f"{verified.bytes / 1e6:,.1f} MB read in {verified.elapsed_seconds:,.2f} s "
        f"({verified.bytes_per_second / 1e9:.2f} GB/s)"
    )
    if not verified.damages:
        return (
            value,
            [console.text(f"{directory}: all {len(manifest.files)} files are as they were written; {read}")],
            0,
        )
    lines = [
        f"{directory}: {len(verified.damages)} of {len(manifest.files)} files are damaged; {read}",
        *(f"  {damage.describe()}" for damage in verified.damages),
        remedy(directory),
    ]
    return value | {"remedy": remedy(directory)}, [console.text("\n".join(lines))], EXIT_DAMAGED


def _as_json(damage: Damage) -> dict[str, Any]:
    return {"file": damage.path, "problem": damage.problem, "first_bad_byte": damage.first_bad_byte}
