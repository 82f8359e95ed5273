"""Lists every value that a run logs: name, unit, reduction over the ranks, meaning.

A metric is one line where it is measured and one line here; the metrics of a loss follow from `evenpack.losses`.
`docs/metrics.md` holds this list as tables, and a record with a name that is not in it is refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

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

    def is_named(self, path: Path) -> bool:
        """Returns whether the value at `path` of a record is this metric."""
        mine = self.name.split("/")
        return len(path) == len(mine) and all(
            key in (*_PLACEHOLDERS, found) for key, found in zip(mine, path, strict=True)
        )


def _metric(
    name: str, unit: str, meaning: str, *, over_ranks: Reduction | None = None, when: str | None = None
) -> dict[str, Any]:
    """Returns the values of a metric; `when` is None for the records of `_group`."""
    return {"name": name, "unit": unit, "meaning": meaning, "over_ranks": over_ranks, "when": when}


def _group(group: Group, when: str, metrics: Iterable[dict[str, Any]]) -> list[Metric]:
    """Returns metrics of a group; `when`: the records that have those which name no others."""
    return [Metric(group=group, **metric | {"when": metric["when"] or when}) for metric in metrics]


_EVERY = "every step"
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


def _losses_apart() -> Iterator[dict[str, Any]]:
    """Yields the metrics of single losses in the records of steps."""
    for name, loss in LOSSES_BY_METRIC.items():
        yield _metric(name, loss.unit, f"{loss.title.capitalize()}.")
        meaning = f"The {loss.title} whose gradient was taken; it differs from {name} where model.loss_balancing is not"
        yield _metric(loss.optimised_metric, loss.unit, f"{meaning} exact.")
        yield from _accuracy_apart(loss)


def _evaluated_apart() -> Iterator[dict[str, Any]]:
    """Yields the metrics of single losses in evaluations, whose `loss` is the main one."""
    for loss in LOSSES_BY_METRIC.values():
        if loss.accuracy != "accuracy":
            meaning = f"{loss.title.capitalize()}: the mean over held-out {loss.counted_by}."
            yield _metric(f"validation/SOURCE/{loss.metric}", loss.unit, meaning, when=_EVALUATED_SEVERAL)
            yield from _accuracy_apart(loss, place="validation/SOURCE/", when=_EVALUATED_SEVERAL)


def _accuracy_apart(loss: Loss, *, place: str = "", when: str | None = None) -> Iterator[dict[str, Any]]:
    """Yields the metric of a loss's accuracy, if it has one of its own: that of the main loss is `accuracy`."""
    if loss.accuracy not in (None, "accuracy"):
        meaning = f"Share of the targets of the {loss.title} that were predicted correctly."
        yield _metric(f"{place}{loss.accuracy}", "share", meaning, when=when)


DEFINITIONS: tuple[Metric, ...] = (
    *_group("progress", _EVERY, (
        _metric("step", "updates", "Updates done, this one included; numbered from 1."),
        _metric("samples", "sequences", "Sequences trained on so far, earlier starts included."),
        _metric("source_epochs/SOURCE", "epochs", "Passes over the source so far, skipped steps included."),
        _metric("left_out/SOURCE/packs", "packs", "Packs (or sequences) of an unfinished epoch, not read: the stage "
                "restarts with packs of another form.", when=_REBUILT),
        _metric("left_out/SOURCE/epochs", "epochs", "Their share of an epoch in the old form.", when=_REBUILT),
        _metric("world_size", "ranks", "Ranks that computed the step.", when=_TRAINED),
        _metric("order_hash", "hexadecimal", "64-bit sum of hash(source, pack, slot, sequence id) over what was "
                "collated: equal for the same data order, whatever the assignment to ranks.",
                over_ranks="sum", when=_TRAINED),
        _metric("skipped/packs", "packs", "Amount that the step would have held.", when=_SKIPPED),
        _metric("skipped/sequences", "sequences", "Amount that the step would have held.", when=_SKIPPED),
        _metric("skipped/tokens", "tokens", "Amount that the step would have held.", when=_SKIPPED),
        _metric("skipped/not_finite", "steps", "1: the step was computed, and its update left out (`training.on_nan`).",
                when="steps whose gradient is not finite"),
    )),
    *_group("training", _EVERY, (
        _metric("loss", "nats", "Exact global mean of the step: the loss per target, or the sum of the losses of a "
                "model with several, which are logged apart too. Null for a skipped step."),
        _metric("accuracy", "share", "Share of the targets whose label had the highest logit.", when=_TRAINED),
        _metric("learning_rate", "1", "Learning rate of this update."),
        _metric("gradient_norm", "1", "L2 norm of the global mean gradient before clipping.",
                over_ranks="same", when=_TRAINED),
        _metric("loss_per_real_target", "nats/token", "Loss sum divided by the targets that are not padding.",
                when=_PADDING),
    )),
    *_group("training", _SEVERAL, _losses_apart()),
    *_group("data", _EVERY, (
        _metric("tokens", "tokens", "Real tokens, padding left out.", over_ranks="sum"),
        _metric("targets", "targets", "Positions that count in the loss.", over_ranks="sum"),
        _metric("sequences", "sequences", "Documents, pieces of documents, or sentence pairs: whatever attends to "
                "itself.", over_ranks="sum"),
        _metric("slots", "slots", "Positions that were computed, padding included.", over_ranks="sum"),
        _metric("segment_room", "segments", "Segments that a micro-batch has room for, empty ones included: for each "
                "of them a kernel starts blocks.", over_ranks="max", when=_TRAINED),
        _metric("padding_share", "share", "Share of the slots that hold no real token.", when=_TRAINED),
        _metric("padding_targets", "targets", "Targets that are padding within sequences.",
                over_ranks="sum", when=_PADDING),
        _metric("source_tokens/SOURCE", "tokens", "Real tokens of the source.", over_ranks="sum"),
        _metric("host_to_device_bytes", "bytes", "Size of the batches copied from the hosts to the devices.",
                over_ranks="sum"),
    )),
    *_group("throughput", _TRAINED, (
        _metric("step_seconds", "s", "Wall time of the step on rank 0, waiting for data included; evaluation and "
                "saving are not."),
        _metric("tokens_per_second", "tokens/s", "Real tokens over step_seconds."),
        _metric("targets_per_second", "targets/s", "Targets over step_seconds."),
        _metric("slots_per_second", "slots/s", "Slots over step_seconds."),
        _metric("sequences_per_second", "sequences/s", "Sequences over step_seconds."),
        _metric("mfu", "share", "Model FLOPs utilization: operations on real tokens over the dense peak of all "
                "devices.", when="devices whose peak is known"),
        _metric("left_eager", "functions", "Functions that torch.compile has given up so far on a rank, which run "
                "uncompiled and slower; 0 is right.", over_ranks="max", when="runs with training.compile"),
    )),
    *_group("waiting", _TRAINED, (
        _metric("loader_seconds", "s", "Time for which a rank waited for its batches.", over_ranks="mean"),
        _metric("compute_seconds_mean", "s", "Forward and backward passes of a rank, without the all-reduce after "
                "them. At ZeRO 2 and 3 ranks wait for one another in each backward pass, and that counts here.",
                over_ranks="mean"),
        _metric("compute_seconds_max", "s", "Forward and backward passes of the slowest rank, for which the others "
                "wait.", over_ranks="max"),
    )),
    *_group("waiting", _SPLIT, (
        *(_metric(f"wait_{cause}_seconds", "s", f"Time for which the mean rank waited {reason}.")
          for cause, reason in WAIT_CAUSES.items()),
        _metric("slow_ranks", "ranks", "Ranks that are named as slow, by the steps before."),
    )),
    *_group("checkpoint", _SAVED, (
        _metric("checkpoint/step", "updates", "The step after which the checkpoint was saved."),
        _metric("checkpoint/pause_seconds", "s", "Time for which training stood still on rank 0: a wait for the save "
                "before, the copy to host memory; without `checkpoint_in_background` all of the save."),
        _metric("checkpoint/seconds", "s", "Time until the checkpoint was complete on disk, and obsolete ones were "
                "removed.", when=_WRITTEN),
        _metric("checkpoint/bytes", "bytes", "Size of its files, of all ranks.", when=_WRITTEN),
        _metric("checkpoint/failed", "checkpoints", "1: it could not be written, and the run went on without it.",
                when="the same, if it failed"),
    )),
    *_group("ranks", _GATHERED, (
        _metric("ranks/steps", "steps", "Steps since the previous such record; the values below are over them."),
        _metric("ranks/compute_seconds", "s", "Sum over these steps; a list in the order of ranks, as are the next "
                "ones."),
        _metric("ranks/compute_seconds_max", "s", "Compute time of the longest of these steps."),
        _metric("ranks/compute_seconds_deviation", "s", "Standard deviation over these steps."),
        _metric("ranks/sequences", "sequences", "Sequences that the rank computed."),
        _metric("ranks/tokens", "tokens", "Real tokens that the rank computed."),
        _metric("ranks/slots", "slots", "Slots that the rank computed, padding included."),
        _metric("ranks/squared_lengths", "tokens²", "Σ length² over real segments."),
        _metric("ranks/pairs_within/WINDOW", "tokens²", "Pairs of tokens of a real segment that are at most so far "
                "apart, for each window of the model's layers.", when=f"{_GATHERED}, models with windows"),
    )),
    *_group("ranks", _GATHERED_SPLIT, (
        _metric("ranks/split_steps", "steps", "Steps of these whose waits are split; the values below are over them."),
        _metric("ranks/cost", "1", "Planned cost of the rank's work, in the unit of its assignment."),
        _metric("ranks/work_seconds", "s", "Time for which the rank's device computed: on a GPU compute_seconds, on a "
                "CPU the time that the process had of it."),
        *(_metric(f"ranks/wait_{cause}_seconds", "s", f"Time for which the rank waited {reason}.")
          for cause, reason in WAIT_CAUSES.items()),
        _metric("ranks/waited_for_seconds", "s", "Time for which all others together waited for this rank."),
        _metric("ranks/slowness", "share", "By how much more than the mean rank it needs for the same work, over its "
                "last steps."),
        *(_metric(f"ranks/{kind}_{name}", unit, meaning)
          for kind in ("compute", "loader")
          for name, unit, meaning in (
              ("slow_since", "step", f"Step since which its {kind} is slow; null if it is not."),
              ("slow_by", "share", f"By how much more than the others its {kind} takes since then, as a share of "
               "their compute; null if it is not slow."),
              ("least_slowdown", "share", f"Smallest slowdown of its {kind} that is named; null before it is learned."),
          )),
    )),
    *_group("validation", _EVALUATED, (
        _metric("validation/SOURCE/loss", "nats/token", "Mean over held-out targets: next tokens, or masked ones "
                "(without next sentences)."),
        _metric("validation/SOURCE/perplexity", "1", "exp(loss)."),
        _metric("validation/SOURCE/accuracy", "share", "Share of the held-out targets that were predicted correctly."),
        *_evaluated_apart(),
        _metric("validation/SOURCE/targets", "targets", "Held-out targets that the means are over."),
        _metric("validation/SOURCE/sequences", "sequences", "Held-out sequences that were evaluated."),
        _metric("validation/SOURCE/packs", "packs", "Held-out packs that were evaluated."),
        _metric("evaluation_seconds", "s", "Time that the evaluation took."),
    )),
)  # fmt: skip
"""All metrics, in the order in which `docs/metrics.md` lists them."""


@cache
def find_metric(path: Path) -> Metric:
    """Returns the metric at a path. Raises: ValueError if there is none."""
    found = next((metric for metric in DEFINITIONS if metric.is_named(path)), None)
    if found is None:
        raise ValueError(f"'{'/'.join(path)}' is not a metric: add its line to {__name__.replace('.', '/')}.py")
    return found


def values_of(record: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields each value of a record with its path; an object that is null has none.

    Args:
        above: path of the record, if it is an object in another.
    """
    for key, value in record.items():
        path = (*above, key)
        if isinstance(value, Mapping):
            yield from values_of(value, path)
        elif value is not None or any(metric.is_named(path) for metric in DEFINITIONS):
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
