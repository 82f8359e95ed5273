"""Commands that measure and predict: `evenpack study NAME`, for each of `studies.registry`, and `probe`."""

from collections.abc import Callable
from typing import Annotated, Literal

import typer

from evenpack.console import Report
from evenpack.launcher.cli.arguments import LengthsInput, Overrides, RunFile, StudyFile, StudyOverrides, load, takes
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.registry import LENGTHS_STUDIES, RUN_STUDIES, STUDIES_OF_RUNS, LengthsStudy, RunStudy
from evenpack.studies.runs.command import TrainedStudyCommand


def lengths_command(study_class: type[LengthsStudy]) -> Callable[..., Report]:
    """Makes a command of a study of lengths."""

    def command(
        lengths: LengthsInput, overrides: Overrides = None, *, options: SubjectOptions, study: LengthsStudy
    ) -> Report:
        from evenpack.launcher.studying import study_lengths

        return study_lengths(study, lengths, overrides or [], options)

    command.__doc__ = study_class.__doc__
    return takes("options", SubjectOptions)(takes("study", study_class)(command))


def run_command(study_class: type[RunStudy]) -> Callable[..., Report]:
    """Makes a command of a study of a prepared run."""

    def command(run_file: RunFile, overrides: Overrides = None, *, study: RunStudy) -> Report:
        config = load(run_file, overrides)
        from evenpack.launcher.studying import study_run

        return study_run(study, config)

    command.__doc__ = study_class.__doc__
    return takes("study", study_class)(command)


def runs_command(study_class: type[TrainedStudyCommand]) -> Callable[..., Report]:
    """Makes a command of a study of training runs."""

    def command(study_file: StudyFile, overrides: StudyOverrides = None, *, study: TrainedStudyCommand) -> Report:
        from evenpack.launcher.studying import study_runs

        return study_runs(study, study_file, overrides or [])

    command.__doc__ = study_class.__doc__
    return takes("study", study_class)(command)


STUDIES: dict[str, Callable[..., Report]] = {
    **{name: lengths_command(study_class) for name, study_class in LENGTHS_STUDIES.items()},
    **{name: run_command(study_class) for name, study_class in RUN_STUDIES.items()},
    **{name: runs_command(study_class) for name, study_class in STUDIES_OF_RUNS.items()},
}
"""The studies in the order of `evenpack study --help`."""


def probe(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face directory, a config.json, a model type of transformers, or module:function.",
        ),
    ],
    *,
    backend: Annotated[
        Literal["eager", "sdpa", "flex", "flash"] | None, typer.Option(help="Only this attention.")
    ] = None,
    cache: Annotated[bool | None, typer.Option(help="Only with, or without, a cache.")] = None,
    mask: Annotated[
        Literal["none", "ones", "block"] | None,
        typer.Option(help="Only without a mask, with a 2-D mask of ones, or a 4-D block mask."),
    ] = None,
    mode: Annotated[Literal["eval", "train"] | None, typer.Option(help="Only evaluation, or training.")] = None,
) -> Report:
    """Probe whether a model keeps the sequences of a pack apart, in each way to run it.

    A directory with weights is loaded as it is; of a config, and of a model type, a tiny copy with random weights is
    made. A function of your own takes a batch with explicit boundaries (docs/probe.md). Exit code 0 if at least one of
    the combinations asked for is isolated and none leaks or cannot be told, otherwise 1.

    \b
    Examples:
      evenpack probe llama
      evenpack probe modernbert --backend sdpa --mask block
      evenpack probe my_stack:forward --mode train --json
    """
    from evenpack.studies.probe import probe as probe_model

    return probe_model(model, backend=backend, cache=cache, mask=mask, mode=mode)
