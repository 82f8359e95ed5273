"""The jobs that a study file asks for: trainings, and what follows each of them with its weights.

expand               one training for each phase, arm and seed
expand_finetunings   fine-tunings of the last checkpoint for tasks, with several seeds each
evaluation_of        the evaluation of the last checkpoint on other data

Each is one command of evenpack on a checked run file, with a folder of its own.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import xxhash

from evenpack.config import Section, load_run_file
from evenpack.data.manifest import data_section
from evenpack.data.recipes import atom_of
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS
from evenpack.engine.resolving.resolve import open_run
from evenpack.errors import ConfigError, EvenpackError
from evenpack.files import parse_json_object
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.results import ResultFolder
from evenpack.finetuning.tasks import require_metrics
from evenpack.models.common.encoder import PackedEncoder
from evenpack.models.families import family_of
from evenpack.studies.runs.study_file import FinetuneSection, PhaseSection, RunsStudyConfig, Settings

_OWNED = ("run", "run.name", "run.output_dir", "run.seed")
"""Keys that a study sets for each training itself."""
_OWNED_OF_FINETUNING = ("run", "run.name", "run.output_dir", "run.seeds", "data.folder", "training.initialize_from")
"""Keys that a study sets for each fine-tuning itself, or for which it has keys of its own."""

ROWS_SEED = "data.recipe.seed"
"""Key of the order of rows whose recipe has an atom."""
_TAIL_BYTES = 1 << 14
"""Bytes read at the end of the log; more than a record of metrics.jsonl has."""

ConfigT = TypeVar("ConfigT", bound=Section)


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """One command of evenpack on one run file."""

    command: ClassVar[str]
    unit: ClassVar[str]
    """Unit of `planned` and `done`: steps, or seeds."""
    phase: str
    arm: str
    seed: int
    """Seed of the pretraining."""
    key: str
    """Name within the study, and its folder."""
    run_file: Path
    overrides: tuple[str, ...]
    """Overrides that turn the run file into this job, as arguments of the command line."""
    config: Section
    """The run file with the overrides applied."""
    output_dir: Path
    prepared_dir: Path | None
    """Data that must be prepared before it starts; None: none."""
    starts_from: str | None
    """Key of the job with whose weights it begins; None: no job of this study."""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of its command, and of none that prepares its data."""
        return ()

    @abstractmethod
    def planned(self) -> int:
        """Returns the planned number of units; 1 where it is unknown before the start."""

    @abstractmethod
    def done(self) -> int:
        """Returns the number of units that its folder records as done."""


@dataclass(frozen=True, kw_only=True)
class StudyRun(Job):
    """The training of one arm with one seed; its key is PHASE/ARM/seed_N."""

    command: ClassVar[str] = "train"
    unit: ClassVar[str] = "step"
    config: RunConfig

    def planned(self) -> int:
        """Returns the planned steps; a run that cannot be resolved reports the error when it is started."""
        try:
            return open_run(self.config, verify="later").config.training.stop_step
        except EvenpackError:
            return 1

    def done(self) -> int:
        return steps_done(self.output_dir)


@dataclass(frozen=True, kw_only=True)
class FinetuneRun(Job):
    """The fine-tuning of one run's weights for one task with each of its seeds.

    Its folder is within the run's folder: removing that folder to train again removes its fine-tunings too.
    """

    command: ClassVar[str] = "finetune"
    unit: ClassVar[str] = "seed"
    config: FinetuneConfig
    task: str
    """Name of the task in the study file."""
    pretraining: StudyRun

    def planned(self) -> int:
        return len(self.config.run.seeds)

    def done(self) -> int:
        return ResultFolder(self.output_dir).seeds_done(self.config.run.seeds)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Job):
    """The evaluation of one run's last checkpoint by `evenpack evaluate`, in a folder within the run's folder."""

    command: ClassVar[str] = "evaluate"
    unit: ClassVar[str] = "step"
    config: RunConfig
    name: str

    @property
    def result(self) -> Path:
        return self.output_dir / "evaluation.json"

    @property
    def options(self) -> tuple[str, ...]:
        return ("--save", str(self.result))

    def planned(self) -> int:
        """Returns 1: an evaluation counts as one step."""
        return 1

    def done(self) -> int:
        return int(self.result.exists())


def expand(study: RunsStudyConfig, overrides: Sequence[str] = ()) -> tuple[StudyRun, ...]:
    """Returns all trainings, in the order of their start: phase by phase, seed by seed, arm by arm.

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
        _training(study, name, arm, seed, overrides)
        for name, phase in study.phases.items()
        for seed in phase.seeds
        for arm in phase.arms
    )


def expand_finetunings(sections: Mapping[str, FinetuneSection], runs: Sequence[StudyRun]) -> tuple[FinetuneRun, ...]:
    """Returns the fine-tunings for every task and every run, in the order of the runs.

    Raises: ConfigError that names a fine-tuning with an invalid run file.
    """
    for name, section in sections.items():
        for key in section.settings:
            if key in _OWNED_OF_FINETUNING:
                raise ConfigError(
                    f"finetune.{name}.settings: {key} is set by the study itself, for each run: leave it out; seeds "
                    f"are in finetune.{name}.seeds, the task's files are in finetune.{name}.folder"
                )
    return tuple(_finetuning(run, name, section) for run in runs for name, section in sections.items())


def evaluation_of(run: StudyRun, name: str, settings: Settings, *, study_dir: Path) -> Evaluation:
    """Evaluates `run` on its data with `settings` applied. Raises: ConfigError if they make an invalid run."""
    label = f"{run.key}, evaluated on {name},"
    overrides = [*run.overrides, *_as_overrides(settings)]
    if settings:
        overrides += _shared_data(study_dir, _load(RunConfig, run.run_file, label, overrides))
    config = _load(RunConfig, run.run_file, label, overrides)
    return Evaluation(
        **_following(run, f"held_out/{name}"),
        name=name,
        run_file=run.run_file,
        overrides=tuple(overrides),
        config=config,
        output_dir=run.output_dir / "held_out" / name,
        prepared_dir=config.prepared_dir,
    )


def interleaved(runs: Sequence[StudyRun], evaluations: Sequence[Evaluation]) -> tuple[Job, ...]:
    """Returns each run, followed by its evaluations, so that they are done before the next run is started."""
    return tuple(job for run in runs for job in (run, *(one for one in evaluations if one.starts_from == run.key)))


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


def steps_done(output_dir: Path) -> int:
    """Returns the updates in the run's log, reading only its end."""
    try:
        with (output_dir / METRICS).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines[:-1]):  # what follows the last line feed is still being written
        try:
            return int(parse_json_object(line)["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return 0


def _training(study: RunsStudyConfig, phase_name: str, arm: str, seed: int, overrides: Sequence[str]) -> StudyRun:
    phase = study.phases[phase_name]
    key = _run_key(phase_name, arm, seed)
    output_dir = study.study.output_dir / key
    own = [
        *_as_overrides(phase.settings),
        *overrides,
        *_as_overrides(phase.arms[arm]),
        *_as_overrides({"run.name": f"{study.study.name}/{key}", "run.output_dir": str(output_dir), "run.seed": seed}),
    ]
    start = None
    if phase.starts_from is not None:
        start = _start(study.phases[phase.starts_from], phase.starts_from, arm, seed)
        own += _as_overrides({"training.initialize_from": str(study.study.output_dir / start)})
    config = _load(RunConfig, phase.base, key, own)
    if phase.draws_rows_by_seed and not _states_seed(phase.arms[arm]) and atom_of(config.data.recipe) is not None:
        own += _as_overrides({ROWS_SEED: seed})
        config = _load(RunConfig, phase.base, key, own)
    if config.data.prepared_dir is None:
        own += _shared_data(study.study.output_dir, config)
        config = _load(RunConfig, phase.base, key, own)
    return StudyRun(
        phase=phase_name,
        arm=arm,
        seed=seed,
        key=key,
        run_file=phase.base,
        overrides=tuple(own),
        config=config,
        output_dir=config.run.output_dir,
        prepared_dir=config.prepared_dir,
        starts_from=start,
    )


def _states_seed(settings: Settings) -> bool:
    """Returns whether an arm fixes the order of its rows itself, by a key or in a whole recipe."""
    recipe = settings.get("data.recipe")
    return ROWS_SEED in settings or (isinstance(recipe, dict) and "seed" in recipe)


def _finetuning(run: StudyRun, task: str, section: FinetuneSection) -> FinetuneRun:
    identity = _following(run, f"finetune/{task}")
    own = {
        "run.name": f"{run.config.run.name}/finetune/{task}",
        "run.output_dir": str(run.output_dir / "finetune" / task),
        "run.seeds": section.seeds,
        "training.initialize_from": str(run.output_dir),
        **({} if section.folder is None else {"data.folder": str(section.folder)}),
    }
    overrides = (*_as_overrides(section.settings), *_as_overrides(own))
    config = _load(FinetuneConfig, section.base, identity["key"], overrides)
    return FinetuneRun(
        **identity,
        task=task,
        pretraining=run,
        run_file=section.base,
        overrides=overrides,
        config=config,
        output_dir=config.run.output_dir,
        prepared_dir=None,
    )


def _following(run: StudyRun, folder: str) -> dict[str, Any]:
    """Returns the fields of a job that begins with a training's weights, in a folder within the training's folder."""
    return {
        "phase": run.phase,
        "arm": run.arm,
        "seed": run.seed,
        "key": f"{run.key}/{folder}",
        "starts_from": run.key,
    }


def _run_key(phase: str, arm: str, seed: int) -> str:
    return f"{phase}/{arm}/seed_{seed}"


def _start(earlier: PhaseSection, name: str, arm: str, seed: int) -> str:
    """Returns the run with the same arm and seed if there is one, else the first."""
    return _run_key(
        name,
        arm if arm in earlier.arms else next(iter(earlier.arms)),
        seed if seed in earlier.seeds else earlier.seeds[0],
    )


def _load(schema: type[ConfigT], run_file: Path, key: str, overrides: Sequence[str]) -> ConfigT:
    """Loads the file of a job, checked. Raises: ConfigError that names the job by its key."""
    try:
        return load_run_file(run_file, schema, overrides)
    except ConfigError as error:
        raise ConfigError(f"run {key} of the study: {error}") from error


def _shared_data(output_dir: Path, config: RunConfig) -> list[str]:
    """Returns overrides with the paths of a run's data, which runs with equal prepared files or equal tokens share."""
    content = json.dumps(data_section(config.data), sort_keys=True)
    folder = output_dir / "data"
    prepared_dir = folder / xxhash.xxh3_64_hexdigest(content.encode())[:8]
    tokens_dir = config.data.tokens_dir or folder / "tokens"
    return _as_overrides({"data.prepared_dir": str(prepared_dir), "data.tokens_dir": str(tokens_dir)})


def _as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Returns overrides with their values as JSON, which is valid YAML in one line."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def _refuse_owned(phase: str, arm: str, settings: Iterable[str], overrides: Sequence[str]) -> None:
    for key in [*settings, *(override.partition("=")[0] for override in overrides)]:
        if key in _OWNED:
            raise ConfigError(
                f"{key} is set by the study itself, for each run: leave it out (phase {phase}, arm {arm}); seeds are "
                "in phases.PHASE.seeds, the folder is study.output_dir"
            )


def _refuse_undoing(phase: str, arm: str, settings: Iterable[str], overrides: Sequence[str]) -> None:
    """Checks overrides for every run that an arm sets too: one of the two would have no effect."""
    for override in overrides:
        name = override.partition("=")[0]
        for key in settings:
            if key == name or key.startswith(f"{name}.") or name.startswith(f"{key}."):
                raise ConfigError(
                    f"{override}: arm {arm} of phase {phase} sets {key} itself, which defines the arm. To "
                    "change it, change the study file"
                )


def _require_files(one: FinetuneRun) -> None:
    definition, folder = one.config.data.definition, one.config.data.task_folder
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
    positions = run.max_positions
    if positions < length:
        raise ConfigError(
            f"finetune.{one.task}: data.max_sequence_length is {length}, and run {one.starts_from} trains {positions} "
            "positions: lower the one or raise model.max_positions"
        )
