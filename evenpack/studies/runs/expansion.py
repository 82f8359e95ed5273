"""Expands a study file into its runs, each a checked run file with a folder of its own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from evenpack.config import load_run_file
from evenpack.data.prepare.manifest import data_section
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.errors import ConfigError, EvenpackError
from evenpack.studies.runs.config import PhaseSection, RunsStudyConfig
from evenpack.studies.runs.results import steps_done

_OWNED = ("run.name", "run.output_dir", "run.seed")
"""Keys that a study sets for each run itself."""


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run of a study: a `Job` of the runner."""

    command: ClassVar[str] = "train"
    unit: ClassVar[str] = "step"
    options: ClassVar[tuple[str, ...]] = ()
    phase: str
    arm: str
    seed: int
    run_file: Path
    overrides: tuple[str, ...]
    """Overrides that turn the run file into this run, as arguments of the command line."""
    config: RunConfig
    starts_from: str | None
    """Key of the run with whose weights it begins; None: no run of this study."""

    @property
    def key(self) -> str:
        """PHASE/ARM/seed_N: its name within the study, and its folder."""
        return run_key(self.phase, self.arm, self.seed)

    @property
    def output_dir(self) -> Path:
        return self.config.run.output_dir

    @property
    def prepared_dir(self) -> Path:
        return self.config.prepared_dir

    def planned(self) -> int:
        """Returns the planned steps; a run that cannot be resolved reports the error when it is started."""
        try:
            return open_run(self.config).config.training.last_step
        except EvenpackError:
            return 1

    def done(self) -> int:
        return steps_done(self.output_dir)


def run_key(phase: str, arm: str, seed: int) -> str:
    """Returns the name of a run within its study, which is also its folder."""
    return f"{phase}/{arm}/seed_{seed}"


def expand(study: RunsStudyConfig, overrides: Sequence[str] = ()) -> tuple[StudyRun, ...]:
    """Returns all runs, in the order of their start: phase by phase, seed by seed, arm by arm.

    An interrupted study therefore compares arms by equal numbers of seeds.

    Args:
        overrides: `section.key=value`, for every run.

    Raises: ConfigError that names a run with an invalid run file, and for overrides that would make arms equal.
    """
    for name, phase in study.phases.items():
        for arm, settings in phase.arms.items():
            _refuse_owned(name, arm, {**phase.settings, **settings}, overrides)
            _refuse_undoing(name, arm, settings, overrides)
    return tuple(
        _expand_one(study, name, arm, seed, overrides)
        for name, phase in study.phases.items()
        for seed in phase.seeds
        for arm in phase.arms
    )


def _expand_one(study: RunsStudyConfig, phase_name: str, arm: str, seed: int, overrides: Sequence[str]) -> StudyRun:
    phase = study.phases[phase_name]
    key = run_key(phase_name, arm, seed)
    output_dir = study.study.output_dir / key
    own = [
        *as_overrides(phase.settings),
        *overrides,
        *as_overrides(phase.arms[arm]),
        *as_overrides({"run.name": f"{study.study.name}/{key}", "run.output_dir": str(output_dir), "run.seed": seed}),
    ]
    start = None
    if phase.starts_from is not None:
        start = _start(study.phases[phase.starts_from], phase.starts_from, arm, seed)
        own += as_overrides({"training.initialize_from": str(study.study.output_dir / start)})
    config = load_run(phase.base, key, own)
    if config.data.prepared_dir is None:
        own += shared_data_overrides(study.study.output_dir, config)
        config = load_run(phase.base, key, own)
    return StudyRun(
        phase=phase_name,
        arm=arm,
        seed=seed,
        run_file=phase.base,
        overrides=tuple(own),
        config=config,
        starts_from=start,
    )


def load_run(run_file: Path, key: str, overrides: Sequence[str]) -> RunConfig:
    """Loads a run of the study, checked. Raises: ConfigError that names it by its key."""
    try:
        return load_run_file(run_file, RunConfig, overrides)
    except ConfigError as error:
        raise ConfigError(f"run {key} of the study: {error}") from error


def _start(earlier: PhaseSection, name: str, arm: str, seed: int) -> str:
    """Returns the run with the same arm and seed if there is one, else the first."""
    return run_key(
        name,
        arm if arm in earlier.arms else next(iter(earlier.arms)),
        seed if seed in earlier.seeds else earlier.seeds[0],
    )


def shared_data_overrides(output_dir: Path, config: RunConfig) -> list[str]:
    """Returns overrides with the paths of a run's data, which runs with equal prepared files or equal tokens share."""
    content = json.dumps(data_section(config.data), sort_keys=True)
    folder = output_dir / "data"
    prepared_dir = folder / xxhash.xxh3_64_hexdigest(content.encode())[:8]
    tokens_dir = config.data.tokens_dir or folder / "tokens"
    return as_overrides({"data.prepared_dir": str(prepared_dir), "data.tokens_dir": str(tokens_dir)})


def as_overrides(settings: dict[str, Any]) -> list[str]:
    """Returns overrides with their values as JSON, which is valid YAML in one line."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def _refuse_owned(phase: str, arm: str, settings: dict[str, Any], overrides: Sequence[str]) -> None:
    for key in [*settings, *(override.partition("=")[0] for override in overrides)]:
        if key in _OWNED or key == "run":
            raise ConfigError(
                f"{key} is set by the study itself, for each run: leave it out (phase {phase}, arm {arm}); seeds are "
                "in phases.PHASE.seeds, the folder is study.output_dir"
            )


def _refuse_undoing(phase: str, arm: str, settings: dict[str, Any], overrides: Sequence[str]) -> None:
    """Checks overrides for every run that an arm sets too: one of the two would have no effect."""
    for override in overrides:
        name = override.partition("=")[0]
        for key in settings:
            if key == name or key.startswith(f"{name}.") or name.startswith(f"{key}."):
                raise ConfigError(
                    f"{override}: arm {arm} of phase {phase} sets {key} itself, which defines the arm. To "
                    "change it, change the study file"
                )
