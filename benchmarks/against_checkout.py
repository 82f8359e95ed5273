"""Compares the speed of this checkout with another one of evenpack, such as an older commit, in pairs.

    git worktree add ../older 790ab14 && make -C ../older .venv/installed
    python benchmarks/against_checkout.py configs/gpt2_mini_wiki.yaml --other ../older [--rounds 5] [--steps 30]
                                          [--json FILE] [section.key=value ...]

Both checkouts read their own file of that name with the same overrides, each in its own folder and environment. A round
takes each measure of both, one directly after the other, and in the other order in the next round:

    help          `evenpack --help`
    prepare       `evenpack prepare`, into a new folder
    first step    `evenpack train` on one CPU rank, from the command to its first recorded step
    step          the median of the later steps of that run, as metrics.jsonl records them
    loader        `benchmarks/loader.py`: CPU seconds for a million tokens of micro-batches

A ratio is the seconds of this checkout divided by those of the other in the same pair; the table has the median and the
range.
Measure on a quiet machine; on a busy one only the CPU seconds say something.
"""

import json
import resource
import statistics
import subprocess
import tempfile
import time
from argparse import Namespace
from contextlib import chdir
from pathlib import Path

import measuring
import start_and_end

HERE = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True, json_file=True)
    parser.add_argument("--other", type=Path, required=True, help="the other checkout, with its environment in .venv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_intermixed_args()
    checkouts = {"this": HERE, "other": arguments.other.resolve()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for number in range(1 + arguments.rounds):
        for name in sorted(checkouts, reverse=number % 2 == 0):
            seconds = measure(checkouts[name], arguments)
            if number > 0:  # the first fills the caches of files
                found[name].append(seconds)
                rounded = {key: round(value, 3) for key, value in seconds.items()}
                print(f"round {number}, {name}: {json.dumps(rounded)}", flush=True)
    show(found)
    commits = {
        name: output_of(["git", "-C", str(folder), "rev-parse", "HEAD"]).strip() for name, folder in checkouts.items()
    }
    report = {"machine": start_and_end.machine(), "commits": commits, "steps": arguments.steps, "seconds": found}
    measuring.write_report(report, arguments.json)


def measure(checkout: Path, arguments: Namespace) -> dict[str, float]:
    """Returns the seconds of each measure of one checkout."""
    evenpack = str(checkout / ".venv/bin/evenpack")
    run_file = str(checkout / arguments.run_file)
    # Python finds the package of the folder that it is started in before the installed one.
    with chdir(checkout), tempfile.TemporaryDirectory() as folder:
        values = [f"data.prepared_dir={folder}/data", f"run.output_dir={folder}/run", *arguments.overrides]
        help_wall, help_cpu = seconds_of([evenpack, "--help"])
        prepare_wall, prepare_cpu = seconds_of([evenpack, "prepare", run_file, *values])
        train = [evenpack, "train", run_file, "--cpu-ranks=1", f"training.stop_after_steps={arguments.steps}", *values]
        log = Path(folder) / "run/metrics.jsonl"
        trained = start_and_end.timed(train, log, steps=arguments.steps, environment={})
        records = [json.loads(line) for line in log.read_text().splitlines()]
        loader = [str(checkout / ".venv/bin/python"), str(checkout / "benchmarks/loader.py"), run_file, *values]
        rate = json.loads(output_of(loader))["batches_tokens_per_cpu_second"]
    return {
        "help": help_wall,
        "help, CPU": help_cpu,
        "prepare": prepare_wall,
        "prepare, CPU": prepare_cpu,
        "first step": trained[start_and_end.PARTS[0]],
        "step": statistics.median(record["step_seconds"] for record in records[1:]),
        "train, CPU": trained["CPU"],
        "loader": 1e6 / rate,
    }


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Returns the wall-clock seconds of a command, and the CPU seconds of all its processes."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    output_of(command)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def output_of(command: list[str]) -> str:
    """Returns what a command prints; one that fails ends the benchmark with what it said."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def show(found: dict[str, list[dict[str, float]]]) -> None:
    """Prints the medians of both, and the ratios of the pairs."""
    print(f"{'medians, s':16}{'this':>9}{'other':>9}{'ratio':>8}  range")
    for name in found["this"][0]:
        pairs = [(a[name], b[name]) for a, b in zip(found["this"], found["other"], strict=True)]
        ratios = [this / other for this, other in pairs]
        this, other = (statistics.median(side) for side in zip(*pairs, strict=True))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:16}{this:9.3f}{other:9.3f}{statistics.median(ratios):8.2f}  {spread}")


if __name__ == "__main__":
    main()
