"""Options of the command line that several studies have."""

from pathlib import Path
from typing import Annotated

import typer

Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw a figure, too.")]
Clock = Annotated[
    str,
    typer.Option(help="wall, or cpu: seconds of this process alone, on a busy machine with OMP_NUM_THREADS=1."),
]
