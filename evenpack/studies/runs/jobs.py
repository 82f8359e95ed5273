"""What the runner of studies starts: a command of evenpack with a folder of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from evenpack.config import Section


@runtime_checkable
class Job(Protocol):
    """One command on one run file: a pretraining (`StudyRun`), or what follows it (`FinetuneRun`, `Evaluation`)."""

    @property
    def phase(self) -> str: ...

    @property
    def arm(self) -> str: ...

    @property
    def seed(self) -> int:
        """Of the pretraining."""

    @property
    def key(self) -> str:
        """Its name within the study, and its folder."""

    @property
    def command(self) -> str:
        """Of evenpack: `train`, `finetune`, `evaluate`."""

    @property
    def run_file(self) -> Path: ...

    @property
    def overrides(self) -> Sequence[str]:
        """What makes of the run file this job, as words of the command line."""

    @property
    def options(self) -> Sequence[str]:
        """Of its command, and of none that prepares its data."""

    @property
    def config(self) -> Section:
        """The run file as it is run."""

    @property
    def output_dir(self) -> Path: ...

    @property
    def prepared_dir(self) -> Path | None:
        """Data that must have been prepared before it starts; None: none."""

    @property
    def starts_from(self) -> str | None:
        """The key of the job whose weights it begins with; None: no job of this study."""

    @property
    def unit(self) -> str:
        """What the next two count: steps, or seeds."""

    def planned(self) -> int:
        """How many there will be; 1 where that cannot be told before it starts."""

    def done(self) -> int:
        """How many its folder tells of."""
