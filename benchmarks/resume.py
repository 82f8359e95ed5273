"""Measures a resume, from the joined ranks to the first batch: what evenpack adds to DeepSpeed's own loading.

    OMP_NUM_THREADS=2 python benchmarks/resume.py RUN.yaml [--positions 1 1000000] [--rounds 3] [--then KEY=VALUE]
                                                  [key=value ...]

The run must be prepared. A first process trains one step and saves it. Each round then resumes in a process of its
own: `open` reads the run and its data, `find` reads the newest checkpoint's manifest and compares its checksums,
`model` builds the model and DeepSpeed's engine, `load` is DeepSpeed's own loading, `first batch` starts the loader and
takes the first step's batches. The last is measured at each of `--positions` as well, because a run may stand anywhere:
the order of packs is computed, not replayed. `--then` is a value with which alone the resumes differ from the run that
saved, such as deepspeed.zero_stage=2: `convert` rewrites the checkpoint, in every round. Wall-clock seconds,
medians over the rounds.
"""

import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import measuring

from evenpack.engine.config import RunConfig

Seconds = dict[str, float]


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True, json_file=True)
    parser.add_argument("--positions", type=int, nargs="+", default=[1, 1_000_000], help="steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--then", action="append", default=[], metavar="KEY=VALUE", help="of the resumes alone")
    arguments = parser.parse_intermixed_args()
    planned = f"training.steps={max(arguments.positions) + 1}"
    overrides = (*arguments.overrides, planned, "training.stop_after_steps=1")
    measuring.in_own_process(train_one_step, arguments.run_file, overrides)
    given = (arguments.run_file, (*overrides, *arguments.then), tuple(arguments.positions))
    rounds = [measuring.in_own_process(resume, *given) for _ in range(arguments.rounds)]
    medians = {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}
    for part, seconds in medians.items():
        print(f"{part:32} {seconds:8.3f} s")
    measuring.write_report({"medians": medians, "rounds": rounds}, arguments.json)


def _config(run_file: Path, overrides: tuple[str, ...]) -> RunConfig:
    from evenpack.config import load_run_file

    return load_run_file(run_file, RunConfig, overrides)


def train_one_step(run_file: Path, overrides: tuple[str, ...]) -> Seconds:
    from evenpack.engine.train import train

    train(_config(run_file, overrides), stop_requested=lambda: False)
    return {}


def resume(run_file: Path, overrides: tuple[str, ...], positions: tuple[int, ...]) -> Seconds:
    """Returns the seconds of each part of a resume."""
    from evenpack.data.batches.pipeline import training_batches
    from evenpack.engine import build
    from evenpack.engine.checkpoints import loading
    from evenpack.engine.checkpoints.files import CHECKPOINTS, UNIVERSAL
    from evenpack.engine.resolving.resolve import open_run
    from evenpack.engine.world.distributed import joined_world

    config = _config(run_file, overrides)
    found: Seconds = {}
    with joined_world() as world:
        started = time.perf_counter()
        with timing(found, "open"):
            run = open_run(config)
        with (
            timed_method(found, "find", build, "newest_whole"),
            timed_method(found, "convert", loading, "make_universal"),
            timed_method(found, "load", "deepspeed.DeepSpeedEngine", "load_checkpoint"),
        ):
            resumed = build.build_at(build.find_start(run, world)).start
        shutil.rmtree(config.run.output_dir / CHECKPOINTS / UNIVERSAL, ignore_errors=True)
        if resumed.steps_done != 1:
            raise SystemExit(f"expected to resume after step 1, found step {resumed.steps_done}")
        settings = resumed.resolved.pipeline_settings(world)
        found["model"] = time.perf_counter() - started - sum(found.values())
        for position in (1, *positions):
            steps = training_batches(resumed.prepared, settings, start_step=position, stop_step=position + 1)
            name = "first batch" if "first batch" not in found else f"first batch, step {position:,}"
            with timing(found, name):
                next(steps)
            del steps  # ends its loader
    parts = ("open", "find", "convert", "model", "first batch")
    return found | {"beyond DeepSpeed's loading": sum(found.get(part, 0.0) for part in parts)}


@contextmanager
def timing(found: Seconds, part: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    found[part] = time.perf_counter() - started


@contextmanager
def timed_method(found: Seconds, part: str, holder: object, name: str) -> Iterator[None]:
    """Times one call of a method; `holder` is a class, or where one is."""
    if isinstance(holder, str):
        module, _, attribute = holder.rpartition(".")
        holder = getattr(__import__(module), attribute)
    whole = getattr(holder, name)

    def call(*arguments: object, **options: object) -> object:
        with timing(found, part):
            return whole(*arguments, **options)

    with mock.patch.object(holder, name, call):
        yield


if __name__ == "__main__":
    main()
