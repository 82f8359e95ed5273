"""The studies of `evenpack study` in Python, with the same options."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

from evenpack.config import load_run_file, nearest
from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.files import expand_users
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.registry import LENGTHS_STUDIES, RUN_STUDIES, STUDIES_OF_RUNS

StudyT = TypeVar("StudyT")


def study(name: str, subject: str | Path, *overrides: str, **options: Any) -> Report:
    """Runs a study and returns its report, as `evenpack study NAME SUBJECT [section.key=value ...] --option value`.

    `report.value` is what `--json` prints, with dataclasses in place of objects; `report.show()` prints the tables.

    Args:
        name: `packing`, `imbalance`, `throughput`, ...: `evenpack study --help` lists them.
        subject: what is studied: lengths (a run file, a published name, a file), a run file, or a study file.
        overrides: `section.key=value`.
        options: the command's options, with underscores: `depths="2,3,none"`, `plot=Path("packing.png")`.

    Raises: ConfigError for an unknown study or option; and what the study itself raises.
    """
    from evenpack.launcher import studying

    name, subject = str(name), str(expand_users(subject))  # a library's user may give anything
    options = {key: expand_users(value) for key, value in options.items()}
    if name in LENGTHS_STUDIES:
        of_subject = {one.name for one in fields(SubjectOptions)} & options.keys()
        subject_options = SubjectOptions(**{key: options.pop(key) for key in of_subject})
        of_lengths = _made(name, LENGTHS_STUDIES[name], options, further=SubjectOptions)
        return studying.study_lengths(of_lengths, subject, overrides, subject_options)
    if name in RUN_STUDIES:
        of_run = _made(name, RUN_STUDIES[name], options)
        return studying.study_run(of_run, load_run_file(Path(subject), RunConfig, overrides))
    if name in STUDIES_OF_RUNS:
        return studying.study_runs(_made(name, STUDIES_OF_RUNS[name], options), Path(subject), overrides)
    raise ConfigError(
        f"there is no study '{name}'; {nearest(name, [*LENGTHS_STUDIES, *RUN_STUDIES, *STUDIES_OF_RUNS])}"
    )


def _made(
    name: str, study_class: type[StudyT], options: Mapping[str, Any], *, further: type[Any] | None = None
) -> StudyT:
    """Returns the study with its options; `further` is a dataclass whose fields are options too, for the message.

    Raises: ConfigError for an unknown option.
    """
    own = {one.name for one in fields(cast(Any, study_class))}
    known = own | ({one.name for one in fields(further)} if further is not None else set())
    for option in options:
        if option not in own:
            raise ConfigError(f"study {name} has no option '{option}'; {nearest(option, sorted(known))}")
    return study_class(**options)
