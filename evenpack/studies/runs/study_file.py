"""The file of a study of trained runs: phases, arms and seeds. Each study adds a section of its own."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from evenpack.config import Section, UserPath, find_run_file, load_run_file
from evenpack.errors import ConfigError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Name of a phase or an arm, and of its folder."""

Settings = dict[str, Any]
"""Dotted keys of a run file with their values, as on the command line: `training.layout: padded`."""


def _different(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"expected seeds that differ, found {', '.join(map(str, seeds))}")
    return seeds


Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 63)]], Field(min_length=1), AfterValidator(_different)]


class StudySection(Section):
    """Name and output folder of the study."""

    name: str = Field(min_length=1)
    """Name of the study, with which the names of its runs begin."""
    output_dir: UserPath
    """Folder of the study, with a folder PHASE/ARM/seed_N for each run, and data/ for prepared data."""


class RunFileSection(Section):
    """A run file and the settings that override its values."""

    base: UserPath
    """The run file, relative to the study file."""
    settings: Settings = Field(default_factory=dict)
    """Settings for all these runs that override the run file: dotted keys with their values."""


class PhaseSection(RunFileSection):
    """Runs that differ in their arm and their seed."""

    seeds: Seeds
    """`run.seed` of each arm's runs; runs of two arms with equal seeds are a pair."""
    starts_from: Name | None = None
    """An earlier phase from whose last checkpoints these runs start: from the same arm, or its first arm if there is no
    such arm; from the same seed, or its first seed. Null: initial weights, or training.initialize_from of the run
    file."""
    draws_rows_by_seed: bool = False
    """Whether runs whose rows are shuffled in atoms take `data.recipe.seed` from their own seed, so that the spread
    over seeds holds that of the order of rows. An arm that states the key keeps it. Each seed then prepares its own
    data."""
    arms: dict[Name, Settings] = Field(default_factory=dict)
    """Arms by name, each with the settings in which it differs: dotted keys with their values."""


class FinetuneSection(RunFileSection):
    """Fine-tuning of every run of the last phase for one task; the run file is one of `evenpack finetune`."""

    folder: UserPath | None = None
    """Folder of the task's files; null: data.folder of the run file."""
    seeds: Seeds
    """Seeds of the trainings that start from each run's weights; the result is their median."""


class RunsStudyConfig(Section):
    """Base of the files of all studies of runs."""

    may_lack_arms: ClassVar[bool] = False
    """Whether the last phase may have no arms because they are defined elsewhere in the file."""

    study: StudySection
    phases: dict[Name, PhaseSection] = Field(min_length=1)
    """Phases by name, in the order in which they are run; the arms of the last one are compared."""

    @model_validator(mode="after")
    def _check_starts(self) -> "RunsStudyConfig":
        earlier: list[str] = []
        for name, phase in self.phases.items():
            if phase.starts_from is not None and phase.starts_from not in earlier:
                known = ", ".join(earlier) or "none"
                raise ValueError(
                    f"phases.{name}.starts_from: expected an earlier phase ({known}), found '{phase.starts_from}'"
                )
            earlier.append(name)
        return self

    @model_validator(mode="after")
    def _check_arms(self) -> "RunsStudyConfig":
        for name, phase in self.phases.items():
            if not phase.arms and not (self.may_lack_arms and name == self.last_phase):
                raise ValueError(f"phases.{name}.arms: expected at least one arm, found none")
        return self

    @property
    def last_phase(self) -> str:
        """Name of the phase whose arms are compared."""
        return next(reversed(self.phases))

    @property
    def arms(self) -> dict[str, Settings]:
        """The arms that are compared, by name."""
        return self.phases[self.last_phase].arms

    def require_arm(self, key: str, name: str) -> None:
        """Checks that the section's `key` names an arm that is compared. Raises: ValueError."""
        if name not in self.arms:
            raise ValueError(
                f"{key}: expected an arm of the last phase, {self.last_phase} ({', '.join(self.arms)}), found '{name}'"
            )

    def located(self, folder: Path) -> dict[str, Any]:
        """Returns the fields that name run files, with paths relative to the current directory.

        `folder` is the study file's folder.
        """
        return {"phases": beside(folder, self.phases)}


FileT = TypeVar("FileT", bound=RunFileSection)


def beside(folder: Path, sections: Mapping[str, FileT]) -> dict[str, FileT]:
    """Returns the sections with `base` paths relative to the current directory; they were relative to `folder`."""
    return {
        name: section.model_copy(update={"base": Path(os.path.normpath(folder / section.base))})
        for name, section in sections.items()
    }


StudyT = TypeVar("StudyT", bound=RunsStudyConfig)


def load_study(path: Path, schema: type[StudyT], overrides: Sequence[str]) -> tuple[StudyT, tuple[str, ...]]:
    """Reads a study file; run files are found relative to it.

    Args:
        overrides: `section.key=value`. Those of sections of the study file change it; the others are for every run.

    Returns: the study, and the overrides for its runs.

    Raises: ConfigError with the key, the expected and the given value.
    """
    own = [one for one in overrides if one.partition("=")[0].partition(".")[0] in schema.model_fields]
    path = find_run_file(path)
    study = load_run_file(path, schema, own)
    if not study.study.output_dir.parts:
        raise ConfigError(f"{path}: study.output_dir must be a folder of the study's own, not the current directory")
    study = study.model_copy(update=study.located(path.parent))
    return study, tuple(override for override in overrides if override not in own)
