"""Draws a study's figure again from the JSON that its --save wrote, without its runs.

python scripts/draw_study.py FILE.json OUT.png [--data WORDS] [--commits A,B] [--device WORDS] [--controls A,B]
    [--without-times]

For `evenpack study equivalence`, `shuffle` and `packing --residuals`. The options say what a file of an earlier
version does not.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from evenpack.studies.equivalence.compare import Curve, TaskComparison, compare
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.equivalence.presentation import plot_equivalence
from evenpack.studies.packing.presentation import plot_residuals
from evenpack.studies.packing.residuals import ResidualRow
from evenpack.studies.provenance import COMPUTED, provenance_line
from evenpack.studies.shuffle.config import ShuffleStudyConfig
from evenpack.studies.shuffle.held_out import HeldOutRow
from evenpack.studies.shuffle.study import plot_shuffle


def main() -> None:
    arguments = _parse_arguments()
    values = json.loads(arguments.file.read_text(encoding="utf-8"))
    if "packing_matrix" in values:
        rows = TypeAdapter(list[ResidualRow]).validate_python(values["settings"])
        plot_residuals(rows, arguments.out, footer=[_origin(values["origin"], {}, arguments)])
    elif "equivalence" in values["study"]:
        _draw_equivalence(values, arguments)
    else:
        _draw_shuffle(values, arguments)


def _draw_equivalence(values: dict[str, Any], arguments: argparse.Namespace) -> None:
    study = EquivalenceConfig.model_validate(values["study"])
    added: dict[str, Any] = {"compares_times": False} if arguments.without_times else {}
    if arguments.controls is not None:  # of the study file today: one that had no run then has told nothing
        added["controls"] = arguments.controls.split(",")
    study = study.model_copy(update={"equivalence": study.equivalence.model_copy(update=added)})
    curves = TypeAdapter(dict[str, dict[int, Curve]]).validate_python(values["curves"])
    tasks = TypeAdapter(list[TaskComparison]).validate_python(values["finetuned"])
    origin = values.get("origin") or _origin(study.study.name, values["measured_on"], arguments)
    plot_equivalence(curves, compare(curves, study.equivalence), tasks, study, arguments.out, origin=origin)


def _draw_shuffle(values: dict[str, Any], arguments: argparse.Namespace) -> None:
    study = ShuffleStudyConfig.model_validate(values["study"])
    jumps = TypeAdapter(dict[str, dict[int, float]]).validate_python(values["jumps"])
    losses = {
        arm: {int(seed): np.array(steps, dtype=np.float64) for seed, steps in of_seed.items()}
        for arm, of_seed in values["losses"].items()
    }
    origin = values.get("origin") or _origin(study.study.name, values["measured_on"], arguments)
    held_out = TypeAdapter(list[HeldOutRow]).validate_python(values.get("held_out", []))
    plot_shuffle(losses, jumps, values["borders"], study, arguments.out, held_out=held_out, origin=origin)


def _origin(name: str, measured_on: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Returns the line of a file that has none."""
    return provenance_line(
        name,
        data=arguments.data or "not recorded",
        commits=arguments.commits.split(",") if arguments.commits else [measured_on.get("commit")],
        device=arguments.device or ", ".join(measured_on.get("devices", [COMPUTED])),
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("--data", "--commits", "--device", "--controls"):
        parser.add_argument(name)
    parser.add_argument("--without-times", action="store_true", help="the runs shared a machine with other programs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
