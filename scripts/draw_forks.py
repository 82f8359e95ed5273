"""Trains a trunk at a constant rate and decays that are forked from it, draws them, and prints a table.

python scripts/draw_forks.py OUT.png FOLDER [--ranks 2]

The runs are those of the shipped `demo`, in FOLDER; what is there is trained no second time.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.studies.plotting import COLOURS, figure_as_png, smooth, write_footer, write_title
from evenpack.studies.provenance import provenance_of_runs

FORKS, DECAY, STEPS = (120, 240, 360), 40, 400
EVENPACK = (sys.executable, "-m", "evenpack.launcher.cli")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", default="2")
    arguments = parser.parse_args()
    runs = train(arguments.folder, ranks=arguments.ranks)
    records = [read_metrics(run / METRICS) for run in runs]
    for line in table(records):
        print(line)
    origin = provenance_of_runs("demo", [read_run_record(run) for run in runs])
    draw(records, arguments.out, origin=origin)


def train(folder: Path, *, ranks: str) -> list[Path]:
    """Trains the trunk and its decays, each by the commands of a user; returns their folders, the trunk's first."""
    trunk = (
        "demo",
        *("run.name=trunk", f"run.output_dir={folder / 'trunk'}", f"training.steps={STEPS}"),
        *("schedule.kind=wsd", "schedule.decay_steps=0", f"training.evaluate_every_steps={DECAY}"),
        f"training.keep_checkpoint_steps={list(FORKS)}",
    )
    _evenpack("train", *trunk, "--prepare", "--cpu-ranks", ranks)
    for step in FORKS:
        child = folder / f"decay_{step}.yaml"
        if not child.exists():
            overrides = (f"training.steps={step + DECAY}", f"schedule.decay_steps={DECAY}", "schedule.final_fraction=0")
            _evenpack("fork", str(folder / "trunk"), "--at", str(step), str(child), *overrides)
        _evenpack("train", str(child), "--cpu-ranks", ranks)
    return [folder / "trunk", *(folder / f"decay_{step}" for step in FORKS)]


def _evenpack(*words: str) -> None:
    print("evenpack", *words, file=sys.stderr)
    subprocess.run([*EVENPACK, *words], check=True, stdout=sys.stderr)


def table(records: list[list[dict[str, Any]]]) -> list[str]:
    """Returns, as Markdown, the validation losses at each fork, and after the same steps of the trunk and the decay."""
    trunk, *decays = (dict(validation(run)) for run in records)
    rows = [
        f"| {step} | {trunk[step]:.3f} | {trunk[step + DECAY]:.3f} | {decay[step + DECAY]:.3f} | "
        f"{trunk[step + DECAY] - decay[step + DECAY]:.3f} |"
        for step, decay in zip(FORKS, decays, strict=True)
    ]
    head = f"| step | trunk there | trunk after {DECAY} more | decayed over these {DECAY} | difference |"
    return [head, "| --- | --- | --- | --- | --- |", *rows]


def validation(run: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Returns the steps of a run that were evaluated, with the validation losses."""
    return [(one["step"], one["validation"]["builtin"]["loss"]) for one in run if one.get("validation")]


def draw(records: list[list[dict[str, Any]]], out: Path, *, origin: str) -> None:
    """Draws the losses of all runs, and below them the learning rates."""
    trunk, *decays = (dict(validation(run)) for run in records)
    with figure_as_png(out, width=9.0, height=6.0) as figure:
        losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for index, run in enumerate(records):
            colour, name = COLOURS[index], "trunk" if index == 0 else f"decay from {FORKS[index - 1]}"
            steps = [record["step"] for record in run]
            line = smooth(np.array([record["loss"] for record in run]))
            losses.plot(steps, line, color=colour, linewidth=1.2, alpha=0.6)
            rates.plot(steps, [record["learning_rate"] for record in run], color=colour, linewidth=1.5)
            points = validation(run) if index == 0 else [(FORKS[index - 1], trunk[FORKS[index - 1]]), *validation(run)]
            losses.plot(*zip(*points, strict=True), color=colour, linewidth=1.0, marker="o", markersize=4, label=name)
        losses.set_ylim(min(min(decay.values()) for decay in decays) - 0.2, trunk[FORKS[0]] + 0.6)
        losses.set_ylabel("loss (nats/token)")
        losses.legend(frameon=False)
        rates.set_ylabel("learning rate")
        rates.set_xlabel("step (optimizer updates)")
        rates.set_xlim(0, STEPS)
        gains = [trunk[step + DECAY] - decay[step + DECAY] for step, decay in zip(FORKS, decays, strict=True)]
        ends = ", ".join(f"{-gain:+.3f}" for gain in gains)
        write_title(losses, f"Validation loss after {DECAY} steps of decay, against the trunk's: {ends}")
        write_footer(figure, [origin, "Dots: held-out documents; lines: training, smoothed."])


if __name__ == "__main__":
    main()
