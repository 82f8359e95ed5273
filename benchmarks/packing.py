"""How near to the certified bound packing comes, and what it costs, on histograms of lengths.

    python benchmarks/packing.py --histogram FILE.json --case NAME[:DEPTH] ... [--json]

FILE.json maps names to counts (index i: sequences of length i + 1). Each case is packed by cutting_stock and by
longest_pack_first with packs as long as the histogram; CPU seconds are medians over the repeats.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

from evenpack.data.packing import LengthHistogram, pack

ALGORITHMS = ("longest_pack_first", "cutting_stock")


def main() -> None:
    arguments = _parse_arguments()
    histograms = json.loads(arguments.histogram.read_text())
    rows = []
    for case in arguments.case:
        name, _, depth = case.partition(":")
        rows += [
            _row(name, histograms[name], algorithm, int(depth) if depth else None, arguments.repeats)
            for algorithm in ALGORITHMS
        ]
        if not arguments.json:
            for row in rows[-2:]:
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))


def _row(name: str, counts: list[int], algorithm: str, depth: int | None, repeats: int) -> dict[str, object]:
    histogram = LengthHistogram(counts=np.array(counts))
    runs = [pack(histogram, algorithm, pack_length=len(counts), max_sequences_per_pack=depth) for _ in range(repeats)]
    packing = runs[0]
    return {
        "histogram": name,
        "depth": depth,
        "algorithm": algorithm,
        "packs": packing.packs,
        "lower_bound": packing.lower_bound,
        "over_bound_percent": round(packing.gap * 100, 6),
        "efficiency_percent": round(packing.efficiency * 100, 4),
        "cpu_seconds": round(statistics.median(run.cpu_seconds for run in runs), 3),
        "repeats": repeats,
    }


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histogram", type=Path, required=True)
    parser.add_argument("--case", nargs="+", required=True, help="NAME or NAME:DEPTH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
