"""How random the orders of `data.shuffle` are, against a true permutation: displacement, adjacency, and windows."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from token_files import numbered_tokens

from evenpack.data.order.blocked_plan import BlockedPlan, Blocks
from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.recipes import DocumentsRecipe
from evenpack.data.sequences.documents import DocumentsView, build_documents
from evenpack.data.sequences.shuffled import SHUFFLED, ShuffledView
from evenpack.data.shuffle.grid import Grid
from evenpack.data.shuffle.shuffle import GridShuffler
from evenpack.data.tokens.file import TokenFile

N = 4000
STRETCHES, WINDOWS, FILES, BLOCKS, PACKS_PER_STEP = 20, 10, 4, 8, 16
VOCABULARY = 1_000_000
LONGEST = 32


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Measures of the order of one epoch."""

    displacement: float
    """Mean distance between a sequence's places in the corpus and in training, in corpora; 1/3 if uniform."""
    pack_mates: float
    """Share of the pairs of a pack from one stretch of the corpus, over that of chance."""
    step_mates: float
    """The same of the pairs of a step that share no pack."""
    window_distance: float
    """Greatest total variation distance between the files of a window of the epoch and of the whole."""


def quality(positions: np.ndarray, packs: np.ndarray) -> Quality:
    """`positions`: of each sequence in the corpus, in the order of training; `packs`: the pack of each."""
    stretches, files = positions * STRETCHES // N, positions * FILES // N
    same_pack, pairs_of_packs = equal_pairs(packs, stretches)
    same_step, pairs_of_steps = equal_pairs(packs // PACKS_PER_STEP, stretches)
    windows = [np.bincount(window, minlength=FILES) / len(window) for window in np.array_split(files, WINDOWS)]
    return Quality(
        displacement=float(np.abs(positions - np.arange(N)).mean() / N),
        pack_mates=STRETCHES * same_pack / pairs_of_packs,
        step_mates=STRETCHES * (same_step - same_pack) / (pairs_of_steps - pairs_of_packs),
        window_distance=max(float(np.abs(window - 1 / FILES).sum() / 2) for window in windows),
    )


def equal_pairs(groups: np.ndarray, values: np.ndarray) -> tuple[int, int]:
    """Returns the pairs within a group that have the same value, and all pairs within a group."""
    sizes = [np.unique(keys, return_counts=True)[1] for keys in (groups * STRETCHES + values, groups)]
    same, every = (int((counts * (counts - 1) // 2).sum()) for counts in sizes)
    return same, every


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> DocumentsView:
    lengths = np.random.default_rng(1).integers(2, LONGEST + 1, N)
    token_file = numbered_tokens(tmp_path_factory.mktemp("tokens") / "tokens", lengths.tolist())
    return build_documents(DocumentsRecipe(kind="documents", max_sequence_length=LONGEST), token_file, np.arange(N))


def blocked(lengths: np.ndarray, *, shuffles_blocks: bool) -> BlockedPlan:
    bounds = np.linspace(0, N, BLOCKS + 1).astype(int).tolist()
    parts = [lengths[first:stop] for first, stop in pairwise(bounds)]
    histograms = [LengthHistogram.from_lengths(part, longest=LONGEST) for part in parts]
    packings = [pack(one, "longest_pack_first", pack_length=4 * LONGEST) for one in histograms]
    ids = [sort_by_length(part, histogram) for part, histogram in zip(parts, histograms, strict=True)]
    return BlockedPlan(Blocks.of(packings), np.concatenate(ids), key=3, shuffles_blocks=shuffles_blocks)


def first_epoch(plan: PackPlan | BlockedPlan, positions: np.ndarray) -> Quality:
    """`positions`: in the corpus, of the sequence with each id."""
    drawn = plan.draw(np.arange(plan.packs))
    return quality(positions[drawn.sequence_ids], np.repeat(np.arange(plan.packs), np.diff(drawn.offsets)))


def test_the_permutation_and_the_grid_are_as_random_as_a_true_permutation(view: DocumentsView, tmp_path: Path) -> None:
    histogram = LengthHistogram.from_lengths(view.lengths(), longest=LONGEST)
    packing = pack(histogram, "longest_pack_first", pack_length=4 * LONGEST)
    plan = PackPlan(packing, sort_by_length(view.lengths(), histogram), key=3)
    GridShuffler(
        view=view,
        grid=Grid(rows=5, columns=5, seed=7),
        folder=tmp_path,
        vocabulary_size=VOCABULARY,
        origin={},
        report_progress=lambda sequences, bytes_read: None,
    ).run()
    shuffled = ShuffledView(view, TokenFile(tmp_path / SHUFFLED))
    packs = np.repeat(np.arange(N // 8), 8)
    found = {
        "true permutation": quality(np.random.default_rng(0).permutation(N), packs),
        "permutation": first_epoch(plan, np.arange(N)),
        "grid": first_epoch(blocked(shuffled.lengths(), shuffles_blocks=True), shuffled.source_ids.astype(np.int64)),
    }
    for name, one in found.items():
        assert one.displacement == pytest.approx(1 / 3, abs=0.015), name
        assert one.pack_mates == pytest.approx(1, abs=0.12), name
        assert one.step_mates == pytest.approx(1, abs=0.05), name
        assert one.window_distance < 0.08, name


def test_orders_that_are_less_random_have_other_figures(view: DocumentsView) -> None:
    corpus = quality(np.arange(N), np.repeat(np.arange(N // 8), 8))
    assert (corpus.displacement, corpus.window_distance) == (0, 0.75)
    assert min(corpus.pack_mates, corpus.step_mates) > 0.7 * STRETCHES
    blocks = first_epoch(blocked(view.lengths(), shuffles_blocks=False), np.arange(N))
    assert blocks.displacement < 0.06
    assert min(blocks.pack_mates, blocks.step_mates) > 5
    assert blocks.window_distance > 0.7
    moved = first_epoch(blocked(view.lengths(), shuffles_blocks=True), np.arange(N))
    assert moved.displacement > 0.15
    assert moved.pack_mates > 5, "blocks in another order keep their neighbours"
