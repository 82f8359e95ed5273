"""What is measured side by side: one run's sequences in different layouts, assignments and packs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evenpack.config import nearest, validate
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.config import PackingConfig
from evenpack.data.order.step_shape import POLICIES, AssignmentPolicy, BatchForm, Batching, Layout
from evenpack.data.prepared import PreparedData
from evenpack.engine.build import cost_weights, pipeline_settings
from evenpack.engine.config import RunConfig
from evenpack.engine.distributed import World
from evenpack.errors import ConfigError

LAYOUTS: tuple[Layout, ...] = ("padded", "unpadded", "packed")

DEPTHS: tuple[int | None, ...] = (1, 2, 3, 4, 8, None)
"""Of table 1 of PackedBERT; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How steps are formed, assigned and laid out."""

    batching: Batching
    layout: Layout
    policy: AssignmentPolicy | None
    """None: what a run file that names none gets."""

    @property
    def name(self) -> str:
        """As on the command line: `packed`, `unpadded/max_tokens`."""
        return self.layout if self.batching == "packs" else f"{self.layout}/{self.policy}"


FORMS: dict[str, Form] = {
    **{layout: Form(batching="packs", layout=layout, policy=None) for layout in LAYOUTS},
    **{
        f"{layout}/{policy}": Form(batching=batching, layout=layout, policy=policy)
        for (batching, layout), policies in POLICIES.items()
        for policy in policies
        if batching == "sequences"
    },
}
"""A layout alone lays out the run's packs, the same sequences in each; with a policy, single sequences."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to lay a step out."""

    name: str
    dataset: MicroBatchDataset

    @property
    def packing_factor(self) -> float:
        """Sequences a pack over an epoch of each source, the sources weighted as the run draws them."""
        weights, sources = self.dataset.prepared.weights, self.dataset.planner.sources
        drawn = zip(weights, sources, strict=True)
        return sum(weight * one.plan.sequences / one.plan.packs for weight, one in drawn) / sum(weights)


def parse_forms(given: str) -> tuple[Form, ...]:
    """`padded,unpadded/max_tokens` as forms. Raises: ConfigError for another word, or one given twice."""
    words = [word.strip() for word in given.split(",")]
    for word in words:
        if word not in FORMS:
            raise ConfigError(f"--layouts {given}: there is no layout '{word}'; {nearest(word, list(FORMS))}")
    if len(set(words)) < len(words):
        raise ConfigError(f"--layouts {given}: a layout is given twice")
    return tuple(FORMS[word] for word in words)


def contender(form: Form, config: RunConfig, prepared: PreparedData, world: World) -> Contender:
    """The run in another form; its steps have as many rows, packs or sequences, as the run file says."""
    return _contender(form.name, formed(config, form), prepared, world)


def formed(config: RunConfig, form: Form) -> RunConfig:
    """The run file as it would be for this form."""
    training, other = config.training, {"packs": "sequences", "sequences": "packs"}[form.batching]
    return changed(
        config,
        training={
            "batching": form.batching,
            "layout": form.layout,
            "assignment": form.policy,
            f"{form.batching}_per_step": training.items_per_step,
            f"{form.batching}_per_micro_batch": training.items_per_micro_batch,
            f"{other}_per_step": None,
            f"{other}_per_micro_batch": None,
        },
    )


def depth_contenders(
    config: RunConfig, prepared: PreparedData, world: World, depths: tuple[int | None, ...]
) -> tuple[Contender, Contender, dict[int | None, Contender]]:
    """Padding, the unmasked model, and packs of each depth: as many rows in each.

    Padding has a sequence a row. The unmasked model attends over whole packs, those of no limit of depth, with
    positions that run through: it does what it would do on rows that are one long sequence each.
    """
    padding = replace(contender(FORMS["padded/arrival"], config, prepared, world), name="padding")
    packed_run = formed(config, FORMS["packed"])
    packings = {depth: prepared.repacked(_limited(config.data.packing, depth)) for depth in depths}
    full = packings.get(None) or prepared.repacked(_limited(config.data.packing, None))
    unmasked = BatchForm(layout="packed", isolate=False, reset_positions=False)
    twin = _contender("unmasked", packed_run, full, world, form=unmasked)
    packed = {
        depth: _contender(f"depth {depth or 'max'}", packed_run, packing, world) for depth, packing in packings.items()
    }
    return padding, twin, packed


def run_to_measure(config: RunConfig, prepared: PreparedData) -> RunConfig:
    """The run without what is about its course, and with rows for positions that run through a pack."""
    changes: dict[str, dict[str, Any]] = {"training": {"packing_adjustment": "none"}}
    if config.model.positions == "learned":
        needed = max(config.model.max_positions or 0, config.positions_needed, prepared.pack_length)
        changes["model"] = {"max_positions": needed}
    return changed(config, **changes)


def changed(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """The run with some values changed, section by section. Raises: ConfigError if it is not sound then."""
    values = config.model_dump()
    for name, section in sections.items():
        values[name] |= section
    return validate(values, RunConfig, origin="the run as it is measured")


def _limited(packing: PackingConfig, depth: int | None) -> PackingConfig:
    """The run's packing at another limit of depth."""
    algorithm, options = (packing.algorithm, packing.options) if packing.algorithm != "none" else ("auto", {})
    return PackingConfig(algorithm=algorithm, max_sequences_per_pack=depth, options=options)


def _contender(
    name: str, config: RunConfig, prepared: PreparedData, world: World, *, form: BatchForm | None = None
) -> Contender:
    settings = pipeline_settings(config, prepared, world, cost_weights=cost_weights(config, prepared))
    return Contender(name=name, dataset=MicroBatchDataset(prepared, replace(settings, form=form or settings.form)))
