"""What is said before a run of what fits: each change was computed, and nothing is guessed."""

from dataclasses import replace
from fractions import Fraction
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from run_files import changed, pair_run_values, run_config, run_values

from evenpack.data.sequences.masking import masked_count
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import RunMemory, micro_batch_size, run_memory, training_memory, with_micro_batch
from evenpack.engine.resolving.data_facts import AverageItem
from evenpack.models.common.device_peaks import DevicePeak, find_device_peak
from evenpack.studies.plan.presentation import memory_shown

VOCABULARY, RANKS = 50_257, 8
ITEM = AverageItem(sequences=Fraction(2), tokens=Fraction(1000), row_slots=1024)
H100 = find_device_peak("h100")


def config_of(**sections: Any) -> RunConfig:
    data = {"recipe": {"kind": "documents", "max_sequence_length": 1024}, "pack_length": 1024}
    model = {"kind": "gpt2", "preset": "large", "layers": None, "hidden_size": None, "heads": None}
    training = {"packs_per_step": 512, "packs_per_micro_batch": 8, "precision": "bf16_autocast"}
    values = run_values("gpt2", Path("never_written"), data=data, model=model, training=training)
    return changed(run_config(values), **sections)


def memory_of(config: RunConfig, device: DevicePeak | None = H100) -> RunMemory:
    return run_memory(config, ITEM, vocabulary_size=VOCABULARY, ranks=RANKS, device=device)


def peak_with(config: RunConfig, packs: int) -> int:
    tried = with_micro_batch(config, packs)
    size = micro_batch_size(tried, ITEM)
    return training_memory(tried, size, vocabulary_size=VOCABULARY, ranks=RANKS).peak.total


def text_of(found: RunMemory) -> str:
    console = Console(file=StringIO(), width=160)
    for shown in memory_shown(found, batching="packs"):
        console.print(shown, soft_wrap=True)
    return console.file.getvalue()


def test_the_phases_are_a_table_that_marks_the_peak() -> None:
    found = memory_of(config_of())
    lines = text_of(found).splitlines()
    assert "in GB: 8 packs, 8,192 slots" in lines[0]
    rows = {row.phase: line.split() for row, line in zip(found.memory.phases, lines[2:], strict=False)}
    assert [phase for phase, row in rows.items() if row[-1] == "peak"] == [found.memory.peak.phase]
    numbers = [f"{getattr(found.memory.phases[-1], part) / 1e9:,.2f}" for part in lines[1].split()[1:]]
    assert rows["update"] == ["update", *numbers]


def test_the_largest_micro_batch_that_fits_is_followed_by_one_that_does_not() -> None:
    config = config_of()
    found = memory_of(config)
    assert found.fits
    assert found.usable == 72_000_000_000
    assert found.largest is not None
    packs, total = found.largest.items_per_micro_batch, found.largest.total
    assert (total, total <= found.usable) == (peak_with(config, packs), True)
    assert 512 // RANKS % (2 * packs) == 0
    assert peak_with(config, 2 * packs) > found.usable
    assert f"training.packs_per_micro_batch={packs}, {total / 1e9:.2f} GB" in text_of(found)


def test_what_does_not_fit_is_told_the_largest_that_does_or_that_none_does() -> None:
    found = memory_of(config_of(training={"packs_per_micro_batch": 64}))
    assert found.fits is False
    assert found.largest == memory_of(config_of()).largest
    shown = text_of(found)
    assert "does not fit" in shown
    assert "training.packs_per_micro_batch=32, " in shown
    found = memory_of(config_of(), replace(H100, memory_bytes=10**9))
    assert (found.fits, found.largest) == (False, None)
    assert "micro-batch of one" in text_of(found)


@pytest.mark.parametrize("device", [None, find_device_peak("gh200")])
def test_nothing_is_guessed_of_a_device_whose_memory_is_not_known(device: DevicePeak | None) -> None:
    found = memory_of(config_of(training={"packs_per_micro_batch": 64}), device)
    assert (found.capacity, found.usable, found.fits, found.largest) == (None, None, None, None)
    shown = text_of(found)
    assert "fit into" not in shown
    assert ("gh200 is sold with several sizes of memory" in shown) == (device is not None)


def test_sizes_follow_the_layout_and_the_objective() -> None:
    assert micro_batch_size(config_of(), ITEM).slots == 8 * 1024
    unpadded = memory_of(config_of(training={"layout": "unpadded"}))
    assert (unpadded.size.slots, unpadded.size.head_rows) == (8 * 1000, 8 * 1000)
    assert "average packs" in unpadded.notes[0]
    assert micro_batch_size(config_of(training={"layout": "padded"}), ITEM).slots == 8 * 2 * 1024


@pytest.mark.parametrize(
    ("masking", "lengths", "rows"),
    [
        ({"share": 0.25, "max_predictions": 256}, [256] * 4, 8 * 256),  # each below the maximum: the share decides
        ({"share": 0.25, "max_predictions": 50}, [256] * 4, 8 * 200),  # each at the maximum
        ({"share": 0.25, "max_predictions": 50}, [1024], 8 * 50),
        ({"share": 0.25, "max_predictions": 50}, [300, 300, 300, 124], 8 * 200),  # 181 and less in each pack
    ],
)
def test_the_most_predictions_of_a_sequence_are_not_those_of_a_pack(
    masking: dict[str, Any], lengths: list[int], rows: int
) -> None:
    """What is estimated is never less than what sequences of a pack predict, and never more than their maxima."""
    item = AverageItem(sequences=Fraction(len(lengths)), tokens=Fraction(sum(lengths)), row_slots=1024)
    sizes = {"max_sequence_length": 1024}
    training = {"packs_per_step": 512, "packs_per_micro_batch": 8}
    drawn_again = {"data": {"recipe": sizes, "pack_length": 1024}, "masking": masking}  # refused if it would be cut
    stored = {"data": {"recipe": {**sizes, "static_masks": masking}, "pack_length": 1024}}
    for sections in (drawn_again, stored) if masking["max_predictions"] == 256 else (stored,):
        values = pair_run_values("bert", Path("never_written"), training=training, **sections)
        values["data"]["recipe"] = {"kind": "sentence_pairs", **values["data"]["recipe"]}
        config = run_config(values)
        assert micro_batch_size(config, item).head_rows == rows
        predicted = masked_count(np.array(lengths), config.mask_limits)
        assert 8 * predicted.sum() <= rows


def test_pairs_that_came_with_masks_predict_as_many_as_their_recipe_allows() -> None:
    training = {"packs_per_step": 512, "packs_per_micro_batch": 8}
    values = pair_run_values("bert", Path("never_written"), training=training)
    values["data"] |= {
        "recipe": {"kind": "masked_pairs", "max_sequence_length": 512, "max_predictions": 20},
        "sources": {"shards": {"kind": "hdf5", "path": "never_written"}},
        "tokenizer": {"kind": "bert", "path": "never_written"},
        "pack_length": 512,
    }
    config = run_config(values)
    item = AverageItem(sequences=Fraction(1), tokens=Fraction(512), row_slots=512)
    assert micro_batch_size(config, item).head_rows == 8 * 20
    many = AverageItem(sequences=Fraction(100), tokens=Fraction(500), row_slots=512)
    assert micro_batch_size(config, many).head_rows == 8 * 100, "each sequence has at least one"


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_backend_that_keeps_scores_is_named(backend: str) -> None:
    assert f"{backend} keeps scores or masks" in memory_of(config_of(attention={"backend": backend})).notes[0]
