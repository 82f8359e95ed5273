"""Compares evenpack with packers that pip can install, on the same shuffled lengths: from lengths to packs.

    python benchmarks/peers/packing.py --histogram wikipedia_512 --sequences 1e6 [--json]

README.md in this folder describes how to install them; one that is not installed is listed as such. Every packer has a
process of its own, and its packs are checked: each sequence is in exactly one pack, and no pack is too full or too
deep. `over` counts packs above ceil(tokens / pack length). evenpack's time includes everything from counting the
lengths to the sequences of every pack of an epoch. If a packer takes less than 5 CPU seconds, the median of `--repeats`
processes is shown.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product

from contenders import CONTENDERS, Contender
from own_process import Measured, OverTimeError, PackerFailedError, measure
from task import TaskName

from evenpack.studies.lengths.reading import published_names

Row = dict[str, str | int | float | bool | None]

_REPEATED_BELOW_CPU_SECONDS = 5

_COLUMNS = ("packer", "sequences", "depth", "packs", "over %", "efficiency %", "CPU s", "peak MB", "packs hold")


def main() -> None:
    arguments = _parse_arguments()
    rows = []
    for histogram in arguments.histogram:
        title = f"\n{histogram}\n\n| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}"
        print(title, file=sys.stderr if arguments.json else sys.stdout, flush=True)
        for contender, name in _cases(histogram, arguments):
            rows.append(_row(contender, name, arguments))
            print(_line(rows[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        report = {"python": platform.python_version(), "machine": arguments.machine, "seed": arguments.seed}
        report |= {name: importlib.metadata.version(name) for name in ("numpy", "scipy")}
        print(json.dumps(report | {"rows": rows}, indent=2))


def _cases(histogram: str, arguments: argparse.Namespace) -> list[tuple[Contender, TaskName]]:
    """Returns the tasks without duplicates, which a packer's limit of sequences can cause."""
    chosen = [contender for contender in CONTENDERS if any(word in contender.name for word in arguments.only)]
    cases = [
        (
            contender,
            TaskName(
                histogram=histogram,
                sampled=max(arguments.sequences),
                sequences=min(sequences, contender.most_sequences or sequences),
                seed=arguments.seed,
                max_sequences_per_pack=depth,
            ),
        )
        for sequences, depth, contender in product(arguments.sequences, arguments.depth, chosen)
        if depth is None or contender.limits_depth
    ]
    return list(dict.fromkeys(cases))


def _row(contender: Contender, name: TaskName, arguments: argparse.Namespace) -> Row:
    row: Row = {
        "packer": contender.name,
        "version": contender.version,
        "histogram": name.histogram,
        "depth": name.max_sequences_per_pack,
        "sequences": name.sequences,
        "moves_tokens": contender.moves_tokens,
    }
    if contender.version is None:
        return row | {"status": f"not installed: {contender.how_to_install}"}
    try:
        runs = _measure(contender, name, arguments)
    except (OverTimeError, PackerFailedError) as error:
        return row | {"status": str(error)}
    return row | {"status": "checked"} | _figures(runs)


def _measure(contender: Contender, name: TaskName, arguments: argparse.Namespace) -> list[Measured]:
    runs = [measure(contender.load, name, limit_seconds=arguments.limit_seconds)]
    while len(runs) < arguments.repeats and runs[0].cpu_seconds < _REPEATED_BELOW_CPU_SECONDS:
        runs.append(measure(contender.load, name, limit_seconds=arguments.limit_seconds))
    return runs


def _figures(runs: Sequence[Measured]) -> Row:
    median = replace(
        runs[0],
        cpu_seconds=round(statistics.median(run.cpu_seconds for run in runs), 4),
        peak_megabytes=round(statistics.median(run.peak_megabytes for run in runs), 1),
    )
    return asdict(median) | {
        "over_percent": round(median.over_percent, 4),
        "efficiency_percent": round(median.efficiency_percent, 4),
        "repeats": len(runs),
    }


def _line(row: Row) -> str:
    name, depth = f"{row['packer']} ({row['version']})", row["depth"] or "none"
    if row["status"] != "checked":
        return f"| {row['packer']} | {row['sequences']:,} | {depth} | {row['status']} |" + " |" * (len(_COLUMNS) - 4)
    values = (
        f"{row['packs']:,}",
        f"{row['over_percent']:.4f}",
        f"{row['efficiency_percent']:.3f}",
        f"{row['cpu_seconds']:.3g}" if row["cpu_seconds"] < 100 else f"{row['cpu_seconds']:.0f}",
        f"{row['peak_megabytes']:,.0f}",
        "tokens" if row["moves_tokens"] else row["holds"],
    )
    return f"| {name} | {row['sequences']:,} | {depth} | {' | '.join(map(str, values))} |"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histogram", nargs="+", choices=published_names(), default=["wikipedia_512"])
    parser.add_argument("--sequences", nargs="+", type=_count, default=[1_000_000], help="such as 1e6; less: the first")
    parser.add_argument("--depth", nargs="+", type=_depth, default=[None, 3], help="sequences a pack, or none")
    parser.add_argument("--only", nargs="+", default=[""], help="packers whose name has one of these words in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=_count, default=3, help="of fast packers (default: %(default)s)")
    parser.add_argument("--limit-seconds", type=float, default=600, help="by the clock, for each packer")
    parser.add_argument("--machine", help="noted in the JSON")
    parser.add_argument("--json", action="store_true", help="figures on stdout, the table on stderr")
    return parser.parse_args()


def _count(text: str) -> int:
    number = float(text)
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, such as 1e6, found {text}")
    return int(number)


def _depth(text: str) -> int | None:
    return None if text == "none" else _count(text)


if __name__ == "__main__":
    main()
