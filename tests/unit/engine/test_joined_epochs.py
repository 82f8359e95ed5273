"""Where packs change their form, each source still comes in whole epochs; with `restart`, but for what is counted."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import changed, pair_run_values, prepared, run_config, run_values, text_sources
from slow_cases import slow_but

from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.order.selection import PackedSource, order_hash
from evenpack.data.sequences.joined import JoinedView
from evenpack.data.sequences.view import SequenceOrigins
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.engine.where import open_where
from evenpack.engine.world.distributed import World

FORMS = ((16, 16), (32, 16), (32, 32), (64, 32), (96, 64))
"""Lengths of packs and of sequences; 96 is no multiple of 64."""
BASES = ("documents packs", "concat packs", "documents sequences")
STEPS = 16
ONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
Tokens = Counter[tuple[int, int]]
"""How often each token comes: (document, offset)."""


@pytest.fixture(scope="module", params=slow_but(["concat packs"], BASES))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("joined")
    recipe, batching = request.param.split()
    sizes = {f"{batching}_per_step": 3, f"{batching}_per_micro_batch": 1}
    if batching == "sequences":
        sizes |= {"batching": "sequences", "layout": "unpadded", "packs_per_step": None, "packs_per_micro_batch": None}
    numbers = np.random.default_rng(1)
    texts = {
        name: [f"{name} {'x' * int(size)}" for size in numbers.integers(1, 60, size=documents)]
        for name, documents in (("lines", 14), ("words", 23))
    }
    config = run_config(
        run_values(
            "gpt2",
            folder,
            data={
                "sources": text_sources(folder, texts),
                "recipe": {"kind": recipe, "max_sequence_length": FORMS[0][1]},
                "pack_length": FORMS[0][0],
            },
            model={"positions": "rotary"},
            training={"steps": STEPS, **sizes},
        )
    )
    return prepared(changed(config, stages=[stage(at, form, restart=True) for at, form in enumerate(FORMS[1:], 2)]))


def stage(step: int, form: tuple[int, int], *, restart: bool, **others: Any) -> dict[str, Any]:
    lengths = {"data.pack_length": form[0], "data.recipe.max_sequence_length": form[1]}
    return {"step": step, **({"restart": True} if restart else {}), **lengths, **others}


@st.composite
def stages(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draws stages of which each may follow the one before, with other weights and sizes of steps."""
    now, found = FORMS[0], []
    for step in sorted(draw(st.sets(st.integers(2, STEPS), max_size=4))):
        form = draw(st.sampled_from(FORMS))
        goes_on = form[0] % now[0] == 0 and form[1] >= now[1]
        restart = form != now and (not goes_on or draw(st.booleans()))
        weights = draw(st.sampled_from([(1, 1), (3, 1), (1, 0), (0, 2)]))
        others = {f"data.sources.{name}.weight": one for name, one in zip(("lines", "words"), weights, strict=True)}
        sizes = {"training.ITEMS_per_step": draw(st.integers(1, 5))}
        found.append(stage(step, form, restart=restart, **others, **sizes))
        now = form
    return found


def tokens_of(source: PackedSource, sequence_ids: np.ndarray) -> Tokens:
    """Reads the sequences and returns their tokens, which are compared with those of the documents."""
    view = source.view
    assert isinstance(view, SequenceOrigins)
    if not len(sequence_ids):
        return Counter()
    origins, file = view.origins(sequence_ids), view.document_file
    parts = list(zip(origins.documents.tolist(), origins.starts.tolist(), origins.tokens.tolist(), strict=True))
    begins = file.spans(origins.documents)[0] + origins.starts
    content = view.read(sequence_ids)
    assert content.tokens.tolist() == file.gather(begins, origins.tokens).tolist()
    assert content.lengths.sum() == origins.tokens.sum()
    return Counter((document, start + at) for document, start, size in parts for at in range(size))


def trained(run: ResolvedRun) -> list[list[Tokens]]:
    """Returns the tokens of each epoch of each source, over all steps of the run."""
    found: list[list[Tokens]] = [[] for _ in run.prepared.source_names]
    for part in run.parts:
        planner = MicroBatchDataset(part.prepared, part.pipeline_settings(ONE)).planner
        for step in part.config.span:
            packs = planner.plan(step).packs
            assert np.add.reduceat(packs.lengths, packs.offsets[:-1]).max() <= part.prepared.pack_length
            for index, source in enumerate(planner.sources):
                own = packs.sources == index
                epochs = np.full(packs.packs, -1)
                epochs[own] = source.plan.epochs(packs.stream_positions[own])
                for epoch in sorted(set(epochs[own].tolist())):
                    found[index] += [Counter() for _ in range(len(found[index]), epoch + 1)]
                    found[index][epoch] += tokens_of(
                        source, packs.sequence_ids[np.repeat(epochs == epoch, packs.sizes)]
                    )
    return found


def epoch_of(source: PackedSource, positions: np.ndarray) -> int:
    (epoch,) = set(source.plan.epochs(positions).tolist())
    return epoch


@settings(max_examples=15)
@given(changes=stages())
def test_each_token_comes_once_an_epoch_but_for_what_is_left_out(base: RunConfig, changes: list[dict[str, Any]]):
    batching = base.training.batching
    of_batching = [{key.replace("ITEMS", batching): one for key, one in stage.items()} for stage in changes]
    run = open_run(changed(base, stages=of_batching))
    found = trained(run)
    missed: list[list[Tokens]] = [[Counter() for _ in epochs] for epochs in found]
    for before, part in pairwise(run.parts):
        border = part.config.span.start
        sources = before.prepared.training_sources(seed=base.run.seed, batching=batching)
        for name, left in run.left_out(border).items():
            index = run.prepared.source_names.index(name)
            position = run.order.drawn_before(index, border)
            positions = np.arange(position, position + int(left["packs"]))
            tokens = tokens_of(sources[index], sources[index].plan.draw(positions).sequence_ids)
            missed[index][epoch_of(sources[index], positions)] += tokens
    for source, epochs, left_out in zip(everything(base), found, missed, strict=True):
        *whole, last = [trained + left for trained, left in zip(epochs, left_out, strict=True)] or [Counter()]
        assert whole == [source] * len(whole)
        assert last <= source
    where = open_where(run.config)
    assert [where.step(step).order_hash for step in (1, STEPS)] == [hash_of(run, step) for step in (1, STEPS)]


def everything(config: RunConfig) -> list[Tokens]:
    """Returns the tokens of each source."""
    sources = open_run(changed(config, stages=[])).prepared.training_sources(seed=1, batching="packs")
    return [tokens_of(source, np.arange(source.view.count)) for source in sources]


def hash_of(run: ResolvedRun, step: int) -> str:
    part = run.part_of(step)
    planner = MicroBatchDataset(part.prepared, part.pipeline_settings(ONE)).planner
    return f"{order_hash(planner.plan(step - 1).packs):016x}"


def test_pairs_and_their_stored_masks_go_on_too(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("pairs")
    recipe = {
        "kind": "sentence_pairs",
        "max_sequence_length": 48,
        "duplication_factor": 1,
        "static_masks": {"max_predictions": 15},
    }
    documents = [" ".join(f"word number {one} of {size} ends here." for one in range(size)) for size in range(2, 40)]
    sources = text_sources(folder, {"one": documents})
    values = pair_run_values("bert", folder, data={"recipe": recipe, "sources": sources}, model={"max_positions": 96})
    run = open_run(prepared(run_config({**values, "stages": [stage(3, (96, 96), restart=False)]})))
    part, where = run.parts[1], open_where(run.config)
    (source,) = part.prepared.training_sources(seed=run.config.run.seed, batching="packs")
    planner = MicroBatchDataset(part.prepared, part.pipeline_settings(ONE)).planner
    ids = planner.plan(2).packs.sequence_ids
    assert isinstance(source.view, JoinedView)
    assert ids.max() < source.view.before.count, "the step is of what is left"
    mixed = np.array([ids[0], source.view.before.count + 1, ids[1], source.view.count - 1])
    content, masks = source.view.read(mixed), 0
    for index, one in enumerate(mixed.tolist()):
        is_new = one >= source.view.before.count
        alone = (source.view.after if is_new else source.view.before).read(
            np.array([one - is_new * source.view.before.count])
        )
        start, count = content.starts[index], int(content.counts.targets[index])
        assert content.tokens[start : start + content.lengths[index]].tolist() == alone.tokens.tolist()
        for name in ("mask_places", "mask_labels"):
            assert getattr(content, name)[masks : masks + count].tolist() == getattr(alone, name).tolist()
        assert content.labels is not None
        assert content.labels[index] == alone.labels[0]
        masks += count
    placed = where.step(3).sequences[0]
    visits = where.document(placed.parts[0].document).visits
    assert any((visit.step, visit.sequence, visit.slot) == (3, placed.sequence, placed.slot) for visit in visits)
