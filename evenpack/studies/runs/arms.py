"""What studies of trained runs report about their arms: steps of a log, spreads over seeds, paired differences."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float64

from evenpack.data.checksums import with_checksum, without_checksum
from evenpack.engine.reporting.metrics import METRICS, read_metrics, trained_steps
from evenpack.errors import DataError
from evenpack.files import read_kept, write_json
from evenpack.studies.runs.jobs import Evaluation
from evenpack.studies.statistics.paired import PairedDifference, Spread, paired_difference, verdicts_of_family

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def read_steps(output_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the records of all steps of a finished run, and of those that were trained and not skipped.

    Raises: DataError if the log does not have each step once, or has no trained step.
    """
    path = output_dir / METRICS
    records = read_metrics(path) if path.exists() else []
    if not records or [record["step"] for record in records] != list(range(1, len(records) + 1)):
        raise DataError(
            f"{path} does not have each step once, from the first on, so its epochs and samples cannot be counted: "
            f"remove {output_dir} to train that run again"
        )
    trained = trained_steps(records)
    if not trained:
        raise DataError(
            f"all {len(records)} steps in {path} were skipped, so there is no loss to compare: see training.skip_steps"
        )
    return records, trained


def kept_values(
    kept: Path,
    sources: Sequence[Path],
    make: Callable[[], dict[str, Any]],
    build: Callable[[dict[str, Any]], ResultT],
) -> ResultT:
    """Returns what a report needs of a finished run: made from its files and kept, or as it was kept if one is gone.

    Args:
        sources: the files without which `make` has nothing to read.
        build: makes the result of the values, as JSON holds them.

    Raises: DataError if they can neither be made nor were kept, or if the kept file is damaged.
    """
    if all(path.is_file() for path in sources):
        values: dict[str, Any] | None = with_checksum(make())
        if read_kept(kept) != values:
            write_json(kept, values)
    else:
        values = read_kept(kept)
    if values is None:
        raise DataError(
            f"neither {kept} nor {' with '.join(map(str, sources))} exists, and what is reported of a finished run is "
            f"in one of them: restore it, or remove {kept.parent} to train that run again"
        )
    try:
        return build(without_checksum(values) if "checksum" in values else values)  # earlier versions wrote none
    except (KeyError, TypeError, ValueError) as error:  # pydantic's error is a ValueError
        raise DataError(
            f"{kept} is damaged or of another version: restore it, or remove {kept.parent} to train that run again"
        ) from error


def weighted_mean(records: Sequence[Mapping[str, Any]], name: str, weight: str) -> float:
    """Returns the mean of a value over records, each weighted by another of its values."""
    total: float = sum(values[weight] for values in records)
    weighted: float = sum(values[weight] * values[name] for values in records)
    return weighted / total


def mean_loss(sources: Mapping[str, Any]) -> float | None:
    """Returns the mean loss over the targets of all evaluated sources; None where nothing was held out.

    It is infinite if the loss of a source was not finite, which is written as null.
    """
    found = [values for values in sources.values() if values is not None and values["targets"]]
    if any(values["loss"] is None for values in found):
        return math.inf
    return weighted_mean(found, "loss", "targets") if found else None


def loss_of_evaluation(evaluation: Evaluation) -> float | None:
    """Returns the mean loss of an evaluation; None before it has ended.

    Raises: DataError for an incomplete result.
    """
    values = read_kept(evaluation.result)
    if values is None:
        return None
    try:
        return mean_loss(values["sources"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{evaluation.result} is not a result of `evenpack evaluate`: remove it, and that run is evaluated again"
        ) from error


def of_each_run(
    by_arm: Mapping[str, Mapping[int, ItemT]], read: Callable[[ItemT], ResultT]
) -> dict[str, dict[int, ResultT]]:
    """Applies a function to what each arm has for each seed."""
    return {arm: {seed: read(item) for seed, item in of_seed.items()} for arm, of_seed in by_arm.items()}


def over_seeds(values: Sequence[float | None]) -> Spread | None:
    """Returns the spread over seeds; None if one of them has no value."""
    found = [value for value in values if value is not None]
    return Spread.of(found) if found and len(found) == len(values) else None


def paired_values(
    reference: Mapping[int, ResultT], of_seed: Mapping[int, ResultT], measure: Callable[[ResultT], float | None]
) -> list[tuple[float, float]]:
    """Returns an arm's value and the reference's for each seed for which both have one."""
    pairs = [(measure(one), measure(reference[seed])) for seed, one in of_seed.items() if seed in reference]
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def difference_from(
    reference: Mapping[int, ResultT],
    of_seed: Mapping[int, ResultT],
    measure: Callable[[ResultT], float | None],
    *,
    significance: float,
) -> PairedDifference | None:
    """Returns the difference of an arm's results from the reference's results with the same seeds.

    None without a pair of values, and if any of them is not finite.
    """
    pairs = paired_values(reference, of_seed, measure)
    if not pairs or not all(map(math.isfinite, chain.from_iterable(pairs))):
        return None
    return paired_difference([one for one, _ in pairs], [other for _, other in pairs], significance=significance)


def with_verdicts(
    rows: Sequence[ResultT], effects: Callable[[ResultT], float], *, significance: float, prefix: str = ""
) -> list[ResultT]:
    """Returns the rows with the verdicts on their differences among each other, corrected for the number of these.

    Args:
        rows: frozen dataclasses with a `difference`, which may be None, and a `verdict`, each behind the `prefix`.
        effects: returns the smallest difference of a row that matters.
    """
    places = [place for place, row in enumerate(rows) if getattr(row, f"{prefix}difference") is not None]
    verdicts = verdicts_of_family(
        [getattr(rows[place], f"{prefix}difference") for place in places],
        effects=[effects(rows[place]) for place in places],
        significance=significance,
    )
    found: list[Any] = [*rows]
    for place, verdict in zip(places, verdicts, strict=True):
        found[place] = replace(found[place], **{f"{prefix}verdict": verdict})
    return found


def confidence_text(significance: float) -> str:
    """Returns the name of an interval that has `significance` on either side: `90 % interval`."""
    return f"{100 * (1 - 2 * significance):.3g} % interval"


def seeds_text(by_arm: Iterable[Iterable[int]]) -> str:
    """Returns the seeds of all arms: `seeds 1, 2, 3`."""
    return f"seeds {', '.join(map(str, sorted(set(chain.from_iterable(by_arm)))))}"


def arm_label(name: str) -> str:
    """Returns the name of an arm as figures write it."""
    return name.replace("_", " ")


def draw_runs(
    axes: Any, places: Float64[np.ndarray, " points"], lines: Sequence[Float64[np.ndarray, " points"]], **style: Any
) -> None:
    """Draws the mean of an arm's runs at the same places, and a band from the least to the greatest."""
    stacked = np.stack(lines)
    axes.plot(places, stacked.mean(axis=0), **style)
    if len(stacked) > 1:
        low, high = stacked.min(axis=0), stacked.max(axis=0)
        axes.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
