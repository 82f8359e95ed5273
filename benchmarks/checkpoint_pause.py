"""Measures what saving a checkpoint costs a run: the pause, and the steps while the checkpoint is written.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_pause.py RUN.yaml [--folder DIR] [--json FILE] [key=value ...]

The run is trained twice in one process, with saves in the background and in the foreground, into folders below DIR
(default: a temporary one; its disk is the one that is measured). From each run's own metrics.jsonl: the pause of each
save, the seconds until it was whole on disk, and the ratio of the step right after a save to the median of the run's
steps during which nothing was written. The last save of a run is left out, because it is always in the foreground, and
so are the first two steps. The run must be prepared; between the end of a save and the next must lie a step or more.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring

_WARMUP = 2


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True, json_file=True)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = measured(arguments.run_file, arguments.overrides, Path(folder))
    measuring.write_report(result, arguments.json)


def measured(run_file: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns the measurements of both ways to save, and prints them."""
    from evenpack.config import load_run_file
    from evenpack.engine.config import RunConfig
    from evenpack.engine.reporting.metrics import read_metrics
    from evenpack.engine.train import train_in
    from evenpack.engine.world.distributed import joined_world
    from evenpack.testing import changed

    config = load_run_file(run_file, RunConfig, overrides)
    result: dict[str, Any] = {"load_average_before": os.getloadavg()}
    with joined_world() as world:
        for name, in_background in (("background", True), ("foreground", False)):
            run = changed(
                config,
                run={"output_dir": folder / name},
                data={"prepared_dir": config.prepared_dir.absolute()},
                training={"checkpoint_in_background": in_background, "evaluate_every_steps": None},
            )
            train_in(world, run, stop_requested=lambda: False)
            result[name] = costs(read_metrics(folder / name / "metrics.jsonl"))
            show(name, result[name])
    return result | {"load_average_after": os.getloadavg()}


def costs(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the steps and saves of one run."""
    seconds = {record["step"]: record["step_seconds"] for record in records[_WARMUP:]}
    saves = [(record["step"], record["checkpoint"]) for record in records if "checkpoint" in record]
    # A save that a record shows was being written until some moment of that record's step.
    writing = {step for shown, save in saves for step in range(save["step"] + 1, shown + 1)}
    quiet = [value for step, value in seconds.items() if step not in writing]
    median = statistics.median(quiet)
    return {
        "step_seconds_median": median,
        "step_seconds_quartiles": statistics.quantiles(quiet, n=4),
        "quiet_steps": len(quiet),
        "step_after_save_ratios": [seconds[save["step"] + 1] / median for _, save in saves],
        "steps_while_writing_ratios": [seconds[step] / median for step in sorted(writing)],
        "saves": [save for _, save in saves],
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Prints the medians of a run."""
    low, _, high = found["step_seconds_quartiles"]
    saves = found["saves"]
    print(
        f"{name}: step {found['step_seconds_median']:.3f} s (middle half {low:.3f} to {high:.3f}), {len(saves)} saves"
    )
    print(f"  pause           {statistics.median(save['pause_seconds'] for save in saves):.3f} s")
    print(
        f"  until on disk   {statistics.median(save['seconds'] for save in saves):.3f} s, {saves[0]['bytes']:,} bytes"
    )
    ratios = found["step_after_save_ratios"]
    print(f"  step after save {statistics.median(ratios):.3f} of the median ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"  steps while writing {statistics.median(found['steps_while_writing_ratios']):.3f} of the median")


if __name__ == "__main__":
    main()
