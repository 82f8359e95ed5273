"""Evaluations after the runs of a study: last checkpoints evaluated on other data, as jobs of the same runner."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from evenpack.engine.config import RunConfig
from evenpack.studies.runs.config import Settings
from evenpack.studies.runs.expansion import StudyRun, as_overrides, load_run, shared_data_overrides
from evenpack.studies.runs.jobs import Job

_FOLDER = "held_out"
"""Name of the folder within that of a run."""
_RESULT = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of one run's last checkpoint by `evenpack evaluate`: a `Job` of the runner."""

    command: ClassVar[str] = "evaluate"
    unit: ClassVar[str] = "step"
    name: str
    training: StudyRun
    run_file: Path
    overrides: tuple[str, ...]
    """Overrides of the run, and those that change its data."""
    config: RunConfig

    @property
    def phase(self) -> str:
        return self.training.phase

    @property
    def arm(self) -> str:
        return self.training.arm

    @property
    def seed(self) -> int:
        return self.training.seed

    @property
    def key(self) -> str:
        """A key within the run's own folder: removing that folder to train again removes its evaluations too."""
        return f"{self.training.key}/{_FOLDER}/{self.name}"

    @property
    def starts_from(self) -> str:
        return self.training.key

    @property
    def output_dir(self) -> Path:
        return _folder(self.training, self.name)

    @property
    def prepared_dir(self) -> Path:
        """Folder of the other data; evaluations on the same data share it."""
        return self.config.prepared_dir

    @property
    def result(self) -> Path:
        return self.output_dir / _RESULT

    @property
    def options(self) -> tuple[str, ...]:
        """Options that set the path of the result."""
        return ("--save", str(self.result))

    def planned(self) -> int:
        """Returns 1: an evaluation counts as one step."""
        return 1

    def done(self) -> int:
        return int(self.result.exists())


def evaluation_of(run: StudyRun, name: str, settings: Settings, *, study_dir: Path) -> Evaluation:
    """Evaluates `run` on its data with `settings` applied. Raises: ConfigError if they make an invalid run."""
    key = f"{run.key}, evaluated on {name},"
    overrides = [*run.overrides, *as_overrides(settings)]
    overrides += shared_data_overrides(study_dir, load_run(run.run_file, key, overrides))
    return Evaluation(
        name=name,
        training=run,
        run_file=run.run_file,
        overrides=tuple(overrides),
        config=load_run(run.run_file, key, overrides),
    )


def interleaved(runs: Sequence[StudyRun], evaluations: Sequence[Evaluation]) -> tuple[Job, ...]:
    """Returns each run, followed by its evaluations, so that they are done before the next run is started."""

    def jobs() -> Iterator[Job]:
        for run in runs:
            yield run
            yield from (evaluation for evaluation in evaluations if evaluation.starts_from == run.key)

    return tuple(jobs())


def _folder(run: StudyRun, name: str) -> Path:
    return run.output_dir / _FOLDER / name
