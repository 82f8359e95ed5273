"""Options of the command line that several studies have."""

from pathlib import Path
from typing import Annotated

import typer

Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw a figure.")]
Clock = Annotated[
    str,
    typer.Option(help="wall, or cpu: seconds of this process only, for a busy machine with OMP_NUM_THREADS=1."),
]
DevicesPerRun = Annotated[
    int | None,
    typer.Option(help="GPUs, or CPU cores, per run; as many runs at once as fit. Default: all for one run."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the runs without starting any.")]
OnlyReport = Annotated[bool, typer.Option("--only-report", help="Start nothing: report what has finished so far.")]
