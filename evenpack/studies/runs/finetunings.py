"""Fine-tunes the weights of each run of a study for tasks, as jobs of the same runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from evenpack.config import UserPath, load_run_file
from evenpack.errors import ConfigError
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.metrics import require_metrics
from evenpack.finetuning.results import ResultFolder
from evenpack.models.common.encoder import PackedEncoder
from evenpack.models.families import family_of
from evenpack.studies.runs.config import RunFileSection, Seeds
from evenpack.studies.runs.expansion import StudyRun, as_overrides

_OWNED = ("run", "run.name", "run.output_dir", "run.seeds", "data.folder", "training.initialize_from")
"""Keys that a study sets for each fine-tuning itself, or for which it has keys of its own."""

_FOLDER = "finetune"
"""Name of the folder within that of a run."""


class FinetuneSection(RunFileSection):
    """Fine-tuning of every run of the last phase for one task; the run file is one of `evenpack finetune`."""

    folder: UserPath | None = None
    """Folder of the task's files; null: data.folder of the run file."""
    seeds: Seeds
    """Seeds of the trainings that start from each run's weights; the result is their median."""


@dataclass(frozen=True, kw_only=True)
class FinetuneRun:
    """The fine-tuning of one run's weights for one task with each of its seeds: a `Job` of the runner."""

    command: ClassVar[str] = "finetune"
    unit: ClassVar[str] = "seed"
    options: ClassVar[tuple[str, ...]] = ()
    prepared_dir: ClassVar[None] = None
    task: str
    """Name of the task in the study file."""
    pretraining: StudyRun
    run_file: Path
    overrides: tuple[str, ...]
    config: FinetuneConfig

    @property
    def phase(self) -> str:
        return self.pretraining.phase

    @property
    def arm(self) -> str:
        return self.pretraining.arm

    @property
    def seed(self) -> int:
        return self.pretraining.seed

    @property
    def key(self) -> str:
        """A key within the run's own folder: removing that folder to train again removes its fine-tunings too."""
        return _key(self.pretraining, self.task)

    @property
    def starts_from(self) -> str:
        return self.pretraining.key

    @property
    def output_dir(self) -> Path:
        return self.config.run.output_dir

    def planned(self) -> int:
        return len(self.config.run.seeds)

    def done(self) -> int:
        return ResultFolder(self.output_dir).seeds_done(self.config.run.seeds)


def expand_finetunings(
    sections: Mapping[str, FinetuneSection], runs: Sequence[StudyRun], *, phase: str
) -> tuple[FinetuneRun, ...]:
    """Returns the fine-tunings for every task and every run of the phase, in the order of the runs.

    Raises: ConfigError that names a fine-tuning with an invalid run file.
    """
    for name, section in sections.items():
        _refuse_owned(name, section)
    return tuple(
        _expand_one(run, name, section) for run in runs if run.phase == phase for name, section in sections.items()
    )


def require_tasks(finetunings: Sequence[FinetuneRun]) -> None:
    """Checks everything that can be checked before the pretraining starts.

    Raises: ConfigError if a task's files are missing, a model is not an encoder or has too few positions, or
    scikit-learn is not installed.
    """
    if finetunings:
        require_metrics()
    for one in finetunings:
        _require_files(one)
        _require_encoder(one)


def _require_files(one: FinetuneRun) -> None:
    definition, folder = one.config.data.definition, one.config.folder
    for name in (definition.training_file, *definition.evaluation_files):
        if not (folder / name).is_file():
            raise ConfigError(
                f"finetune.{one.task}: {folder} has no {name}, a file of {definition.title}: give "
                f"finetune.{one.task}.folder=FOLDER, or leave all fine-tuning out with finetune={{}}"
            )


def _require_encoder(one: FinetuneRun) -> None:
    run, length = one.pretraining.config, one.config.data.max_sequence_length
    family = family_of(run.model)
    if not issubclass(family.load_model(), PackedEncoder):
        raise ConfigError(
            f"finetune.{one.task}: run {one.starts_from} trains a model of family '{family.name}', whose tokens see "
            "only earlier tokens; fine-tuning is for encoders"
        )
    positions = run.model.max_positions or run.positions_needed
    if positions < length:
        raise ConfigError(
            f"finetune.{one.task}: data.max_sequence_length is {length}, and run {one.starts_from} trains {positions} "
            "positions: lower the one or raise model.max_positions"
        )


def _expand_one(run: StudyRun, task: str, section: FinetuneSection) -> FinetuneRun:
    own = {
        "run.name": f"{run.config.run.name}/finetune/{task}",
        "run.output_dir": str(run.output_dir / _FOLDER / task),
        "run.seeds": section.seeds,
        "training.initialize_from": str(run.output_dir),
        **({} if section.folder is None else {"data.folder": str(section.folder)}),
    }
    overrides = (*as_overrides(section.settings), *as_overrides(own))
    try:
        config = load_run_file(section.base, FinetuneConfig, overrides)
    except ConfigError as error:
        raise ConfigError(f"run {_key(run, task)} of the study: {error}") from error
    return FinetuneRun(task=task, pretraining=run, run_file=section.base, overrides=overrides, config=config)


def _key(run: StudyRun, task: str) -> str:
    return f"{run.key}/{_FOLDER}/{task}"


def _refuse_owned(task: str, section: FinetuneSection) -> None:
    for key in section.settings:
        if key in _OWNED:
            raise ConfigError(
                f"finetune.{task}.settings: {key} is set by the study itself, for each run: leave it out; seeds are "
                f"in finetune.{task}.seeds, the task's files are in finetune.{task}.folder"
            )
