"""The jobs that the runner of studies starts: a command of evenpack with a folder of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from evenpack.config import Section


@runtime_checkable
class Job(Protocol):
    """One command on one run file: a pretraining (`StudyRun`), or a job after it (`FinetuneRun`, `Evaluation`)."""

    @property
    def phase(self) -> str: ...

    @property
    def arm(self) -> str: ...

    @property
    def seed(self) -> int:
        """Seed of the pretraining."""

    @property
    def key(self) -> str:
        """Name within the study, and its folder."""

    @property
    def command(self) -> str:
        """Command of evenpack: `train`, `finetune`, `evaluate`."""

    @property
    def run_file(self) -> Path: ...

    @property
    def overrides(self) -> Sequence[str]:
        """Overrides that turn the run file into this job, as arguments of the command line."""

    @property
    def options(self) -> Sequence[str]:
        """Options of its command, and of none that prepares its data."""

    @property
    def config(self) -> Section:
        """The run file with the overrides applied."""

    @property
    def output_dir(self) -> Path: ...

    @property
    def prepared_dir(self) -> Path | None:
        """Data that must be prepared before it starts; None: none."""

    @property
    def starts_from(self) -> str | None:
        """Key of the job with whose weights it begins; None: no job of this study."""

    @property
    def unit(self) -> str:
        """Unit of the next two: steps, or seeds."""

    def planned(self) -> int:
        """Returns the planned number of units; 1 where it is unknown before the start."""

    def done(self) -> int:
        """Returns the number of units that its folder records as done."""
