"""Lists every value that a run logs: name, unit, reduction over the ranks, meaning.

A metric is one line where it is measured and one line here; the metrics of a loss follow from `evenpack.losses`.
`docs/metrics.md` holds this list as tables, and a record with a name that is not in it is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from evenpack.losses import LOSSES_BY_METRIC, Loss

Reduction = Literal["sum", "mean", "max", "same"]
"""How the values of all ranks become one; `same`: all ranks have the same value, and the value of rank 0 is taken."""

Group = Literal["progress", "training", "data", "throughput", "waiting", "checkpoint", "ranks", "validation"]

Path = tuple[str, ...]
"""The keys that lead from a record to a value, one for each level."""

SOURCE = "SOURCE"
"""Stands in a metric's name for the name of each source."""

_WINDOW = "WINDOW"
"""Stands for each window of the model's layers."""

_PLACEHOLDERS = (SOURCE, _WINDOW)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Defines one named value of a record."""

    name: str
    """The key in metrics.jsonl; each `/` goes one object deeper."""
    group: Group
    """The heading under which trackers and the documentation show it."""
    unit: str
    over_ranks: Reduction | None
    """None if it is computed from values that every rank has."""
    meaning: str
    when: str
    """Which records have it."""

    @property
    def path(self) -> Path:
        return tuple(self.name.split("/"))

    def is_named(self, path: Path) -> bool:
        """Returns whether the value at `path` of a record is this metric."""
        return len(path) == len(self.path) and self.begins_with(path)

    def begins_with(self, path: Path) -> bool:
        """Returns whether the value at `path` is this metric, or an object that holds it."""
        return all(mine in (*_PLACEHOLDERS, key) for mine, key in zip(self.path, path, strict=False))


def _metric(
    name: str, unit: str, over_ranks: Reduction | None, meaning: str, *, when: str = "every step"
) -> dict[str, Any]:
    return {"name": name, "unit": unit, "over_ranks": over_ranks, "meaning": meaning, "when": when}


_TRAINED = "every step that is not skipped"
_SEVERAL = "models with several losses"
_PADDING = "steps with predicted padding"
_SKIPPED = "skipped steps"
_REBUILT = "the first step of a stage with `restart`"
_EVALUATED = "steps with an evaluation"
_EVALUATED_SEVERAL = "evaluations of models with several losses"
_SAVED = "the first step that ends after a save has ended"
_WRITTEN = "the same, if the checkpoint is complete"
_GATHERED = "every training.log_rank_times_every_steps steps"
_SPLIT = "several ranks at ZeRO 0 or 1, from the 31st step of a start on"
_GATHERED_SPLIT = "the same records, with waits that are split"

WAIT_CAUSES = {
    "plan": "because the plan gave the last rank more work",
    "machine": "because the last rank is slower than its work, by the steps before",
    "noise": "by whatever else the step had",
    "loader": "because a rank waited for its batches",
}
"""The causes of a wait, in the order in which they are charged (`rank_waits.py`), with a reason for people."""


def _losses_apart() -> list[dict[str, Any]]:
    """Returns the metrics of single losses in the records of steps."""
    return [
        *(
            _metric(name, loss.unit, None, f"{_sentence(loss)}.", when=_SEVERAL)
            for name, loss in LOSSES_BY_METRIC.items()
        ),
        *(
            _metric(loss.optimised_metric, loss.unit, None, f"The {loss.title} whose gradient was taken; it differs "
                    f"from {name} where model.loss_balancing is not exact.", when=_SEVERAL)
            for name, loss in LOSSES_BY_METRIC.items()
        ),
        *(metric for loss in LOSSES_BY_METRIC.values() for metric in _accuracy_apart(loss, when=_SEVERAL)),
    ]  # fmt: skip


def _evaluated_apart() -> list[dict[str, Any]]:
    """Returns the metrics of single losses in evaluations, whose `loss` is the main one."""
    found = []
    for loss in LOSSES_BY_METRIC.values():
        if loss.accuracy != "accuracy":
            meaning = f"{_sentence(loss)}: the mean over held-out {loss.counted_by}."
            found.append(_metric(f"validation/SOURCE/{loss.metric}", loss.unit, None, meaning, when=_EVALUATED_SEVERAL))
            found += _accuracy_apart(loss, when=_EVALUATED_SEVERAL, place="validation/SOURCE/")
    return found


def _accuracy_apart(loss: Loss, *, when: str, place: str = "") -> list[dict[str, Any]]:
    """Returns the metric of a loss's accuracy, if it has one of its own: that of the main loss is `accuracy`."""
    if loss.accuracy in (None, "accuracy"):
        return []
    meaning = f"Share of the targets of the {loss.title} that were predicted correctly."
    return [_metric(f"{place}{loss.accuracy}", "share", None, meaning, when=when)]


def _sentence(loss: Loss) -> str:
    return loss.title[:1].upper() + loss.title[1:]


_DEFINED: dict[Group, tuple[dict[str, Any], ...]] = {
    "progress": (
        _metric("step", "updates", None, "Updates done, this one included; numbered from 1."),
        _metric("samples", "sequences", None, "Sequences trained on so far, earlier starts included."),
        _metric("source_epochs/SOURCE", "epochs", None, "Passes over the source so far, skipped steps included."),
        _metric("left_out/SOURCE/packs", "packs", None, "Packs (or sequences) of an unfinished epoch, not read: "
                "the stage restarts with packs of another form.", when=_REBUILT),
        _metric("left_out/SOURCE/epochs", "epochs", None, "Their share of an epoch in the old form.", when=_REBUILT),
        _metric("world_size", "ranks", None, "Ranks that computed the step.", when=_TRAINED),
        _metric("order_hash", "hexadecimal", "sum", "64-bit sum of hash(source, pack, slot, sequence id) over what was "
                "collated: equal for the same data order, whatever the assignment to ranks.", when=_TRAINED),
        _metric("skipped/packs", "packs", None, "Amount that the step would have held.", when=_SKIPPED),
        _metric("skipped/sequences", "sequences", None, "Amount that the step would have held.", when=_SKIPPED),
        _metric("skipped/tokens", "tokens", None, "Amount that the step would have held.", when=_SKIPPED),
        _metric("skipped/not_finite", "steps", None, "1: the step was computed, and its update left out "
                "(`training.on_nan`).", when="steps whose gradient is not finite"),
    ),
    "training": (
        _metric("loss", "nats", None, "Exact global mean of the step: the loss per target, or the sum of the losses of "
                "a model with several, which are logged apart too. Null for a skipped step."),
        _metric("accuracy", "share", None, "Share of the targets whose label had the highest logit.", when=_TRAINED),
        _metric("learning_rate", "1", None, "Learning rate of this update."),
        _metric("gradient_norm", "1", "same", "L2 norm of the global mean gradient before clipping.", when=_TRAINED),
        _metric("loss_per_real_target", "nats/token", None, "Loss sum divided by the targets that are not padding.",
                when=_PADDING),
        *_losses_apart(),
    ),
    "data": (
        _metric("tokens", "tokens", "sum", "Real tokens, padding left out."),
        _metric("targets", "targets", "sum", "Positions that count in the loss."),
        _metric("sequences", "sequences", "sum",
                "Documents, pieces of documents, or sentence pairs: whatever attends to itself."),
        _metric("slots", "slots", "sum", "Positions that were computed, padding included."),
        _metric("segment_room", "segments", "max", "Segments that a micro-batch has room for, empty ones included: for "
                "each of them a kernel starts blocks.", when=_TRAINED),
        _metric("padding_share", "share", None, "Share of the slots that hold no real token.", when=_TRAINED),
        _metric("padding_targets", "targets", "sum", "Targets that are padding within sequences.", when=_PADDING),
        _metric("source_tokens/SOURCE", "tokens", "sum", "Real tokens of the source."),
        _metric("host_to_device_bytes", "bytes", "sum", "Size of the batches copied from the hosts to the devices."),
    ),
    "throughput": (
        _metric("step_seconds", "s", None, "Wall time of the step on rank 0, waiting for data included; evaluation and "
                "saving are not.", when=_TRAINED),
        _metric("tokens_per_second", "tokens/s", None, "Real tokens over step_seconds.", when=_TRAINED),
        _metric("targets_per_second", "targets/s", None, "Targets over step_seconds.", when=_TRAINED),
        _metric("slots_per_second", "slots/s", None, "Slots over step_seconds.", when=_TRAINED),
        _metric("sequences_per_second", "sequences/s", None, "Sequences over step_seconds.", when=_TRAINED),
        _metric("mfu", "share", None, "Model FLOPs utilization: operations on real tokens over the dense peak of all "
                "devices.", when="devices whose peak is known"),
        _metric("left_eager", "functions", "max", "Functions that torch.compile has given up so far on a rank, which "
                "run uncompiled and slower; 0 is right.", when="runs with training.compile"),
    ),
    "waiting": (
        _metric("loader_seconds", "s", "mean", "Time for which a rank waited for its batches.", when=_TRAINED),
        _metric("compute_seconds_mean", "s", "mean", "Forward and backward passes of a rank, without "
                "the all-reduce after them. At ZeRO 2 and 3 ranks wait for one another in each backward pass, and that "
                "counts here.",
                when=_TRAINED),
        _metric("compute_seconds_max", "s", "max",
                "Forward and backward passes of the slowest rank, for which the others wait.",
                when=_TRAINED),
        *(_metric(f"wait_{cause}_seconds", "s", None, f"Time for which the mean rank waited {reason}.", when=_SPLIT)
          for cause, reason in WAIT_CAUSES.items()),
        _metric("slow_ranks", "ranks", None, "Ranks that are named as slow, by the steps before.", when=_SPLIT),
    ),
    "checkpoint": (
        _metric("checkpoint/step", "updates", None, "The step after which the checkpoint was saved.", when=_SAVED),
        _metric("checkpoint/pause_seconds", "s", None, "Time for which training stood still on rank 0: a wait for the "
                "save before, the copy to host memory; without `checkpoint_in_background` all of the save.",
                when=_SAVED),
        _metric("checkpoint/seconds", "s", None, "Time until the checkpoint was complete on disk, and obsolete ones "
                "were removed.", when=_WRITTEN),
        _metric("checkpoint/bytes", "bytes", None, "Size of its files, of all ranks.", when=_WRITTEN),
        _metric("checkpoint/failed", "checkpoints", None, "1: it could not be written, and the run went on without it.",
                when="the same, if it failed"),
    ),
    "ranks": (
        _metric("ranks/steps", "steps", None, "Steps since the previous such record; the values below are over them.",
                when=_GATHERED),
        _metric("ranks/compute_seconds", "s", None,
                "Sum over these steps; a list in the order of ranks, as are the next ones.",
                when=_GATHERED),
        _metric("ranks/compute_seconds_max", "s", None, "Compute time of the longest of these steps.", when=_GATHERED),
        _metric("ranks/compute_seconds_deviation", "s", None, "Standard deviation over these steps.", when=_GATHERED),
        _metric("ranks/sequences", "sequences", None, "Sequences that the rank computed.", when=_GATHERED),
        _metric("ranks/tokens", "tokens", None, "Real tokens that the rank computed.", when=_GATHERED),
        _metric("ranks/slots", "slots", None, "Slots that the rank computed, padding included.", when=_GATHERED),
        _metric("ranks/squared_lengths", "tokens²", None, "Σ length² over real segments.", when=_GATHERED),
        _metric("ranks/pairs_within/WINDOW", "tokens²", None, "Pairs of tokens of a real segment that are at most so "
                "far apart, for each window of the model's layers.", when=f"{_GATHERED}, models with windows"),
        _metric("ranks/split_steps", "steps", None, "Steps of these whose waits are split; the values below are over "
                "them.", when=_GATHERED_SPLIT),
        _metric("ranks/cost", "1", None, "Planned cost of the rank's work, in the unit of its assignment.",
                when=_GATHERED_SPLIT),
        _metric("ranks/work_seconds", "s", None, "Time for which the rank's device computed: on a GPU compute_seconds, "
                "on a CPU the time that the process had of it.", when=_GATHERED_SPLIT),
        *(_metric(f"ranks/wait_{cause}_seconds", "s", None, f"Time for which the rank waited {reason}.",
                  when=_GATHERED_SPLIT) for cause, reason in WAIT_CAUSES.items()),
        _metric("ranks/waited_for_seconds", "s", None, "Time for which all others together waited for this rank.",
                when=_GATHERED_SPLIT),
        _metric("ranks/slowness", "share", None, "By how much more than the mean rank it needs for the same work, over "
                "its last steps.", when=_GATHERED_SPLIT),
        *(_metric(f"ranks/{kind}_{name}", unit, None, meaning, when=_GATHERED_SPLIT)
          for kind in ("compute", "loader")
          for name, unit, meaning in (
              ("slow_since", "step", f"Step since which its {kind} is slow; null if it is not."),
              ("slow_by", "share", f"By how much more than the others its {kind} takes since then, as a share of "
               "their compute; null if it is not slow."),
              ("least_slowdown", "share", f"Smallest slowdown of its {kind} that is named; null before it is learned."),
          )),
    ),
    "validation": (
        _metric("validation/SOURCE/loss", "nats/token", None, "Mean over held-out targets: next tokens, or masked ones "
                "(without next sentences).", when=_EVALUATED),
        _metric("validation/SOURCE/perplexity", "1", None, "exp(loss).", when=_EVALUATED),
        _metric("validation/SOURCE/accuracy", "share", None,
                "Share of the held-out targets that were predicted correctly.", when=_EVALUATED),
        *_evaluated_apart(),
        _metric("validation/SOURCE/targets", "targets", None, "Held-out targets that the means are over.",
                when=_EVALUATED),
        _metric("validation/SOURCE/sequences", "sequences", None, "Held-out sequences that were evaluated.",
                when=_EVALUATED),
        _metric("validation/SOURCE/packs", "packs", None, "Held-out packs that were evaluated.", when=_EVALUATED),
        _metric("evaluation_seconds", "s", None, "Time that the evaluation took.", when=_EVALUATED),
    ),
}  # fmt: skip

DEFINITIONS = tuple(Metric(group=group, **values) for group in get_args(Group) for values in _DEFINED[group])
"""All metrics, in the order in which `docs/metrics.md` lists them."""


def _parts_of(record: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields each value and each object of a record with its path."""
    for key, value in record.items():
        yield (*above, key), value
        if isinstance(value, Mapping):
            yield from _parts_of(value, (*above, key))


@cache
def find_metric(path: Path) -> Metric:
    """Returns the metric at a path. Raises: ValueError if there is none."""
    found = next((metric for metric in DEFINITIONS if metric.is_named(path)), None)
    if found is None:
        raise ValueError(f"'{'/'.join(path)}' is not a metric: add its line to {__name__.replace('.', '/')}.py")
    return found


def values_of(record: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields each value of a record with its path; an object that is null has none."""
    for path, value in _parts_of(record):
        is_null_object = value is None and not any(metric.is_named(path) for metric in DEFINITIONS)
        if not isinstance(value, Mapping) and not is_null_object:
            yield path, value


def scalars(record: Mapping[str, Any]) -> dict[str, int | float]:
    """Returns what trackers get beside the step: each single number under `group/name`.

    Lists, texts and what is null are left out. Raises: ValueError for a name that is not a metric.
    """
    found = {}
    for path, value in values_of(record):
        metric = find_metric(path)
        if isinstance(value, int | float) and metric.group != "ranks" and path != ("step",):
            name = "/".join(path)
            found[name if path[0] == metric.group else f"{metric.group}/{name}"] = value
    return found
