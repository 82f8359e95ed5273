"""The commands `evenpack study NAME`, one for each study in `evenpack.studies.registry`."""

from collections.abc import Callable
from typing import Any

from evenpack.launcher.cli.arguments import (
    AsJson,
    LengthsInput,
    Overrides,
    RunFile,
    Save,
    StudyFile,
    StudyOverrides,
    load,
    reporting,
)
from evenpack.launcher.cli.subject_options import takes, takes_subject
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.registry import (
    LENGTHS_STUDIES,
    RUN_STUDIES,
    STUDIES_OF_RUNS,
    LengthsStudy,
    RunStudy,
    StudyOfRuns,
)


def lengths_command(study_class: type[LengthsStudy]) -> Callable[..., None]:
    """Makes a command of a study of lengths."""

    def command(
        lengths: LengthsInput,
        overrides: Overrides = None,
        *,
        options: SubjectOptions,
        study: LengthsStudy,
        save: Save = None,
        as_json: AsJson = False,
    ) -> None:
        with reporting(as_json, save=save) as report:
            from evenpack.launcher.studying import study_lengths

            report.take(study_lengths(study, lengths, overrides or [], options))

    return takes_subject(_explained(takes("study", study_class)(command), study_class))


def run_command(study_class: type[RunStudy]) -> Callable[..., None]:
    """Makes a command of a study of a prepared run."""

    def command(
        run_file: RunFile,
        overrides: Overrides = None,
        *,
        study: RunStudy,
        save: Save = None,
        as_json: AsJson = False,
    ) -> None:
        config = load(run_file, overrides)
        with reporting(as_json, save=save) as report:
            from evenpack.launcher.studying import study_run

            report.take(study_run(study, config))

    return _explained(takes("study", study_class)(command), study_class)


def runs_command(study_class: type[StudyOfRuns]) -> Callable[..., None]:
    """Makes a command of a study of training runs."""

    def command(
        study_file: StudyFile,
        overrides: StudyOverrides = None,
        *,
        study: StudyOfRuns,
        save: Save = None,
        as_json: AsJson = False,
    ) -> None:
        with reporting(as_json, save=save) as report:
            from evenpack.launcher.studying import study_runs

            report.take(study_runs(study, study_file, overrides or []))

    return _explained(takes("study", study_class)(command), study_class)


def _explained(command: Callable[..., None], study_class: type[Any]) -> Callable[..., None]:
    command.__doc__ = study_class.__doc__
    return command


STUDIES: dict[str, Callable[..., None]] = {
    **{name: lengths_command(study_class) for name, study_class in LENGTHS_STUDIES.items()},
    **{name: run_command(study_class) for name, study_class in RUN_STUDIES.items()},
    **{name: runs_command(study_class) for name, study_class in STUDIES_OF_RUNS.items()},
}
"""The studies in the order of `evenpack study --help`."""
