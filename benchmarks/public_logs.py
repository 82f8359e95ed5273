"""What the public MLPerf logs of BERT say about stragglers: derives the numbers from the logs, and draws them.

    python benchmarks/public_logs.py derive LOGS --json FILE    LOGS has training_results_v0.7 to training_results_v5.0
    python benchmarks/public_logs.py draw FIGURES               figures of docs/imbalance.md, from committed numbers

The repositories are github.com/mlcommons/training_results_ROUND at the commits in the committed file. `derive` reads
the systems that this file lists, without those whose logs are not there. Round v0.7 has steps, others evaluations.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import numpy as np
from scipy import stats

from evenpack.console import plain
from evenpack.errors import DataError
from evenpack.files import parse_json_object
from evenpack.studies.imbalance.extrapolation import published_curve
from evenpack.studies.imbalance.measurement import LoggedRun, measure, pooled, read_logged_run
from evenpack.studies.imbalance.regimes import divide, forecast_from_regimes
from evenpack.studies.imbalance.step_cost import DEFAULT_COST, find_cost
from evenpack.studies.plotting import (
    COLOURS,
    INK,
    figure_as_png,
    label_ends,
    logarithmic_counts,
    write_footer,
    write_title,
)
from evenpack.studies.statistics.laws import Gumbel

RESULTS = Path(__file__).parent / "results"
COMMITTED = RESULTS / "public_mlperf_bert_logs.json"
PACKS = RESULTS / "imbalance_wikipedia_512_estimate_2026-11-29.json"
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
STEPS = {  # round v0.7: steps after which all ranks change shards; None: padded, so that levels do not matter
    "dgxa100_ngc20.06_pytorch": 2398,
    "dgxa100_n2_ngc20.06_pytorch": 2842,
    "dgx2h_ngc20.06_pytorch": 2842,
    "dgx1_ngc20.06_pytorch": 2131,
    "dgxa100_n32_ngc20.06_pytorch": None,
    "dgx2h_n32_ngc20.06_pytorch": None,
}
SHOWN = "dgxa100_ngc20.06_pytorch"
LAYOUTS = {
    "padded": COLOURS[2],
    "unpadded": COLOURS[1],
    "unpadded+exchange": COLOURS[7],
    "unpadded+stratified+exchange within 8": COLOURS[5],
    "packed": COLOURS[0],
}
FEWEST_INTERVALS = 3
"""Intervals between evaluations, after the first, which has the warm-up; a drift needs some."""
PREFIX = ":::MLLOG "
"""Prefix of each event line."""
FIELDS = ("key", "value", "time_ms", "metadata")
LICENCE = "From logs under Apache-2.0, github.com/mlcommons/training_results_*; not verified by MLCommons."


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("action", choices=["derive", "draw"])
    parser.add_argument("folder", type=Path, help="of the logs, or of the figures")
    given = parser.parse_args()
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    if given.action == "draw":
        draw(committed, given.folder)
        return
    found = derive(committed, given.folder)
    if given.json is not None:
        given.json.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    print(json.dumps({name: value["forecast"]["share_between"] for name, value in found["systems"].items()}, indent=1))


def derive(committed: dict[str, Any], logs: Path) -> dict[str, Any]:
    """Returns the same file, its numbers read again from logs."""
    systems, one_run = {}, committed["one_run"]
    for name, entry in committed["systems"].items():
        paths = _logs(logs, entry)
        run = pooled([read_logged_run(path) for path in paths])
        systems[name] = entry | _steps(run, entry["gpus"], STEPS[name])
        if name == SHOWN:
            shown = [round(rate, 1) for rate in run.parts[0].every_rate.tolist()]
            one_run = {"system": name, "log": paths[0].name, "rates": shown}
    census = []
    for entry in committed["census"]:
        runs = [one for path in _logs(logs, entry) if (one := _intervals(path)) is not None]
        if runs:
            rates, drifts = ([_short(getattr(one, name)) for one in runs] for name in ("sequences_per_second", "drift"))
            census.append(entry | {"rates": rates, "drifts": drifts, "with_evaluation": runs[0].has_evaluation})
    return committed | {"systems": systems, "one_run": one_run, "census": census}


def _logs(logs: Path, entry: dict[str, Any]) -> list[Path]:
    folder = logs / f"training_results_{entry['round']}" / entry["path"]
    return sorted(folder.glob("result_*.txt"), key=lambda path: int(path.stem.rpartition("_")[2]))


def _intervals(path: Path) -> Any:
    try:
        return read_intervals(path)
    except DataError as error:  # a run that was stopped early
        print(f"left out: {error}")
        return None


@dataclass(frozen=True, kw_only=True)
class IntervalRates:
    """Rates of a run between two evaluations, without the interval before the first, which has the warm-up."""

    rates: tuple[float, ...]
    """Sequences/s over all devices."""
    has_evaluation: bool
    """Whether the seconds of an evaluation are in each interval, because the log does not say how long it took."""

    @property
    def sequences_per_second(self) -> float:
        """Returns the rate of the run: the harmonic mean, as intervals have equal sequences."""
        return statistics.harmonic_mean(self.rates)

    @property
    def drift(self) -> float:
        """Returns the standard deviation of the intervals' rates over their mean."""
        return statistics.stdev(self.rates) / statistics.fmean(self.rates)


def parse_events(log: Path, lines: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the events of a log; lines of other programs are left out.

    Raises: DataError, with the number of the line, for an event that does not have the form of MLPerf's logger.
    """
    events = []
    for number, line in enumerate(lines, start=1):
        _, prefix, text = line.partition(PREFIX)
        if not prefix:
            continue
        try:
            found = parse_json_object(text)
            event = {name: found[name] for name in FIELDS}
            events.append(event | {"time_ms": int(event["time_ms"]), "metadata": dict(event["metadata"] or {})})
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DataError(
                f"{log}, line {number}: expected a JSON object with {', '.join(FIELDS)} after {PREFIX.strip()}, "
                f"found {text[:60].rstrip()!r}"
            ) from error
    return events


def read_intervals(path: Path) -> IntervalRates | None:
    """Reads an MLPerf log of evaluations; None if the log has steps, or is none.

    Where an evaluation does not say how many sequences were trained (before round v2.0), `train_samples` is divided
    evenly among them. Raises: DataError for too few evaluations.
    """
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    if any("'seq/s'" in line or '"seq/s"' in line for line in lines):
        return None
    events: dict[str, list[dict[str, Any]]] = {}
    for event in parse_events(path, lines):
        events.setdefault(event["key"], []).append(event)
    scores = events.get("eval_accuracy", [])
    if not scores:
        return None
    seconds = {
        key: [event["time_ms"] / 1e3 for event in events.get(key, [])]
        for key in ("eval_accuracy", "eval_start", "eval_stop")
    }
    sequences = [event["metadata"].get("epoch_num") for event in scores]
    total = events["train_samples"][0]["value"] if "train_samples" in events else None
    if any(np.diff([float(number or 0) for number in sequences]) <= 0):
        sequences = [(total or math.nan) * (number + 1) / len(scores) for number in range(len(scores))]
    says_evaluation = len(seconds["eval_start"]) == len(seconds["eval_stop"]) == len(scores)
    began, ended = ("eval_stop", "eval_start") if says_evaluation else ("eval_accuracy", "eval_accuracy")
    elapsed = np.array(seconds[ended][1:]) - np.array(seconds[began][:-1])
    rates = np.diff(np.array(sequences, dtype=np.float64)) / elapsed
    if len(rates) < FEWEST_INTERVALS or not (np.isfinite(rates) & (rates > 0)).all():
        raise DataError(
            f"{path}: {len(scores)} evaluations and no lines with 'seq/s'. Rates by interval need "
            f"{FEWEST_INTERVALS + 1} evaluations in order, with the sequences trained by then (epoch_num, or "
            "train_samples at the end): give the whole log of a finished run"
        )
    return IntervalRates(rates=tuple(rates.tolist()), has_evaluation=not says_evaluation)


def _steps(run: LoggedRun, devices: int, regime_steps: int | None) -> dict[str, Any]:
    division = divide([part.every_rate for part in run.parts], regime_steps)
    forecast = plain(forecast_from_regimes(division, log_devices=devices, counts=COUNTS))
    for row in forecast["rows"]:
        row["estimates"] = {one.pop("method"): one for one in row["estimates"]}
        del row["best"]
    pooled_rates = np.concatenate(division.rates)
    measured = measure(run, ranks=devices, baseline=None, cost=find_cost(DEFAULT_COST)).run
    return {
        "rate": {"value": measured.sequences_per_second, "interval": plain(measured.interval)},
        "pooled_gumbel": plain(Gumbel.fit(pooled_rates)),
        "pooled_mean": float(pooled_rates.mean()),
        "forecast": _shortened(forecast),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one) for one in value]
    return _short(value) if isinstance(value, float) else value


def draw(committed: dict[str, Any], folder: Path) -> None:
    """Draws the four figures."""
    draw_steps(committed, folder / "public_steps.png")
    draw_relative(committed, folder / "public_relative.png")
    draw_census(committed, folder / "public_census.png")
    draw_drift(committed, folder / "public_drift.png")


def draw_steps(committed: dict[str, Any], path: Path) -> None:
    """Step time of one run with its levels, and one regime's rates with both laws."""
    entry, rates = committed["systems"][SHOWN], np.array(committed["one_run"]["rates"])
    division = divide([rates], entry["forecast"]["regime_steps"])
    batch = entry["batch"]
    with figure_as_png(path, width=11.0, height=4.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        milliseconds = 1e3 * batch / rates
        left.plot(milliseconds, ".", color=COLOURS[1], markersize=1.5, alpha=0.35)
        for regime in division.regimes:
            ends = [regime.first_step, regime.first_step + regime.steps]
            left.plot(ends, [1e3 * batch / regime.mean] * 2, color=INK, linewidth=2.4)
        left.set_ylim(*np.quantile(milliseconds, (0.0005, 0.996)))
        left.set_xlabel("step")
        left.set_ylabel("step time (ms)")
        write_title(left, f"8 A100, one run: {len(division.regimes)} levels, one for each shard")
        regime, used = division.regimes[1], division.rates[1]
        right.hist(used, bins=60, density=True, color=COLOURS[1], alpha=0.4, label=f"{regime.steps:,} steps, shard 2")
        normal = stats.norm(regime.mean, regime.deviation)
        for law, name, distance, colour, style in (
            (normal, "normal", regime.normal_distance, COLOURS[0], "-"),
            (regime.gumbel.frozen, "Gumbel", regime.gumbel_distance, COLOURS[4], (0, (4, 1.5))),
        ):
            lowest, highest = law.ppf([0.0005, 0.9995])
            at = np.linspace(lowest, highest, 300)
            label = f"{name}: off by up to {100 * distance:.1f} %"
            right.plot(at, law.pdf(at), color=colour, linestyle=style, linewidth=2, label=label)
        right.set_ylim(top=1.35 * right.get_ylim()[1])
        right.set_yticks([])
        right.set_xlabel("sequences/s of a step")
        right.legend(frameon=False, loc="upper right", fontsize=9)
        write_title(right, "Steps within one shard")
        write_footer(figure, [f"{entry['path']}/{committed['one_run']['log']}, round v0.7. {LICENCE}"])


def draw_relative(committed: dict[str, Any], path: Path) -> None:
    """Sequences/s per GPU relative to 8: from the logs, as published, and packs as simulated."""
    eight, sixteen = committed["systems"][SHOWN], committed["systems"]["dgxa100_n2_ngc20.06_pytorch"]
    rows = eight["forecast"]["rows"]
    counts = [row["devices"] for row in rows]
    curve = published_curve(counts)
    packs = [
        (row["devices"], row["sequences_per_second"] / row["devices"])
        for row in json.loads(PACKS.read_text(encoding="utf-8"))["simulation"]["rows"]
        if (row["layout"], row["policy"], row["dense"]) == ("packed", "cost_balanced", False) and row["devices"] >= 8
    ]
    with figure_as_png(path, width=7.6, height=4.6) as figure:
        axes = figure.subplots()
        relative = zip(*[(n, rate / packs[0][1]) for n, rate in packs], strict=True)
        axes.plot(*relative, "o-", color=COLOURS[0], mfc="white", label="packs, simulated")
        for method, colour, name in (
            ("without_levels", COLOURS[7], "shuffled, from logs"),
            ("normal", COLOURS[1], "shard per rank, from logs"),
        ):
            found = [row["estimates"][method] for row in rows]
            low, high = ([one["interval"][end] for one in found] for end in ("low", "high"))
            axes.fill_between(counts, low, high, color=colour, alpha=0.2, linewidth=0)
            style = {"color": colour, "linewidth": 2.2, "linestyle": (0, (5, 2)), "label": name}
            axes.plot(counts, [one["expected"] for one in found], **style)
        published = [row.expected / curve.expected_at_fitted for row in curve.rows]
        axes.plot(counts, published, color=INK, linewidth=2, linestyle=(0, (1, 1.5)), label="published curve")
        measured = sixteen["rate"]["value"] / 16 / (eight["rate"]["value"] / 8)
        axes.plot([8], [1.0], "D", color=COLOURS[1], markersize=8, zorder=5)
        axes.plot([16], [measured], "D", color=COLOURS[1], markersize=8, mfc="white", mew=1.6, zorder=5)
        axes.annotate(
            "measured, with 27\nrows per GPU, not 32",
            (16, measured),
            (10, 0.825),
            fontsize=9,
            arrowprops={"arrowstyle": "-"},
        )
        axes.axvline(8 * len(eight["forecast"]["regimes"]), color="#9aa5b1", linewidth=1)
        axes.text(
            8 * len(eight["forecast"]["regimes"]) * 1.06,
            1.012,
            "more shards than\nthe logs show",
            fontsize=8.5,
            va="bottom",
        )
        axes.set_ylim(0.74, 1.06)
        axes.set_ylabel("sequences/s per GPU, relative to 8 GPUs")
        logarithmic_counts(axes, counts, label="GPUs")
        label_ends(axes)
        write_title(axes, "Un-padding waits for the slowest GPU: BERT-large, 32 rows per GPU")
        footer = "By arrival. Diamonds: measured, A100, MLPerf v0.7. Dashed: forecast, ideal network; bands: 95 %."
        write_footer(figure, [footer, LICENCE])


def _per_gpu(entry: dict[str, Any]) -> float:
    rates: list[float] = entry["rates"] if "rates" in entry else [entry["rate"]["value"]]
    return statistics.median(rates) / int(entry["gpus"])


def draw_census(committed: dict[str, Any], path: Path) -> None:
    """Sequences/s per GPU of all rounds; points of equal rows per GPU of one submitter, round and GPU are joined."""
    every = [*committed["systems"].values(), *committed["census"]]
    joined: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in every:
        key = tuple(entry[name] for name in ("round", "submitter", "gpu", "layout", "rows"))
        joined.setdefault(key, []).append(entry)
    with figure_as_png(path, width=10.0, height=6.2) as figure:
        axes = figure.subplots()
        for layout, colour in LAYOUTS.items():
            own = [entry for entry in every if entry["layout"] == layout]
            label = f"{layout.replace('+', ', ')}: {len(own)} systems"
            counts = [entry["gpus"] for entry in own]
            axes.plot(
                counts,
                [_per_gpu(entry) for entry in own],
                "o",
                color=colour,
                markersize=6,
                alpha=0.75,
                label=label,
                markeredgecolor="white",
            )
        for same in joined.values():
            by_count = {entry["gpus"]: _per_gpu(entry) for entry in same if entry["submitter"] in ("NVIDIA", "Azure")}
            counts = sorted(by_count)
            axes.plot(counts, [by_count[one] for one in counts], color=LAYOUTS[same[0]["layout"]], linewidth=1.6)
        labelled: set[tuple[int, int]] = set()
        for entry in sorted(every, key=lambda one: (one["submitter"] != "NVIDIA", one["round"])):
            at = entry["gpus"], _per_gpu(entry)
            place = round(1.5 * math.log2(at[0])), round(3 * math.log2(at[1]))
            if place not in labelled:
                labelled.add(place)
                axes.annotate(f"{entry['rows']:g}", at, (5, 2), textcoords="offset points", fontsize=7.5)
        axes.set_yscale("log", base=2)
        ticks = [32, 64, 128, 256, 512, 1024, 2048]
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_ylabel("sequences/s per GPU (logarithmic)")
        logarithmic_counts(axes, [2**power for power in range(13)], label="GPUs (logarithmic)")
        axes.legend(frameon=False, fontsize=9, loc="upper right")
        write_title(axes, "MLPerf BERT, rounds v0.7 to v5.0: rates per GPU follow the rows per GPU (numbers)")
        footer = "Joined: NVIDIA's or Azure's, one round, GPU and layout, equal rows per GPU. GPUs are V100 to GB200."
        write_footer(figure, [footer, LICENCE])


def drift_of(
    committed: dict[str, Any], submitters: Sequence[str], rounds: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Returns the median drift of 8 A100 un-padded with exchange, by submitter and round."""
    found: dict[str, dict[str, list[float]]] = {}
    for entry in committed["census"]:
        is_alike = (entry["gpus"], entry["layout"]) == (8, "unpadded+exchange") and "A100" in entry["gpu"]
        if is_alike and entry["submitter"] in submitters and entry["round"] in rounds:
            found.setdefault(entry["submitter"], {}).setdefault(entry["round"], []).extend(entry["drifts"])
    return {name: {one: statistics.median(all_) for one, all_ in sorted(of.items())} for name, of in found.items()}


def draw_drift(committed: dict[str, Any], path: Path) -> None:
    """Drift of the rate within a run, by round: before and after samples were shuffled over all shards."""
    submitters = ("NVIDIA", "GIGABYTE", "ASUSTeK", "Fujitsu")
    rounds = ("v2.0", "v2.1")
    found = drift_of(committed, submitters, rounds)
    with figure_as_png(path, width=6.4, height=3.8) as figure:
        axes = figure.subplots()
        for index, name in enumerate(submitters):
            values = found.get(name, {})
            if values:
                at = [rounds.index(one) for one in values]
                colour = COLOURS[(1, 5, 0, 3)[index]]
                axes.plot(at, [100 * value for value in values.values()], "o-", color=colour, linewidth=2, label=name)
        axes.set_yscale("log")
        axes.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
        axes.minorticks_off()
        axes.set_xticks(range(len(rounds)), rounds)
        axes.set_ylabel("drift of the rate within a run (% of its mean)")
        axes.set_xlabel("MLPerf round; 8 A100, un-padded with exchange")
        label_ends(axes)
        write_title(axes, "In round v2.1 the drift ended for two of these four")
        write_footer(figure, [f"Standard deviation between evaluations over the mean, median over runs. {LICENCE}"])


if __name__ == "__main__":
    main()
