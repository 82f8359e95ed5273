"""What is said before a run of what fits: each change was computed, and nothing is guessed."""

from dataclasses import replace
from fractions import Fraction
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_files import changed, run_config, run_values

from evenpack.engine.config import RunConfig
from evenpack.engine.memory.estimate import micro_batch_size, training_memory
from evenpack.engine.resolving.data_facts import AverageItem
from evenpack.models.common.device_peaks import DevicePeak, find_device_peak
from evenpack.studies.plan.memory import RunMemory, run_memory, with_micro_batch
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


def text_of(found: RunMemory, width: int = 160) -> str:
    console = Console(file=StringIO(), width=width)
    for shown in memory_shown(found, batching="packs"):
        console.print(shown)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [50, 80, 160])
def test_the_phases_are_a_table_of_whole_words_and_numbers_that_marks_the_peak(width: int) -> None:
    found = memory_of(config_of())
    shown = text_of(found, width)
    assert "GPU, in GB" in " ".join(shown.split())
    assert "8 packs: 8,192 slots" in shown
    lines = shown.splitlines()
    parts = [name for line in lines if line.startswith("phase ") for name in line.split()[1:]]
    assert parts == ["parameters", "gradients", "optimizer", "activations", "head", "buffers", "total"]
    for row in found.memory.phases:
        name = f"{row.phase} (peak)" if row is found.memory.peak else row.phase
        numbers = " ".join(line.removeprefix(name) for line in lines if line.startswith(f"{name} ")).split()
        assert numbers == [f"{getattr(row, part) / 1e9:,.2f}" for part in parts]


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


def test_average_items_are_said_to_be_average() -> None:
    unpadded = memory_of(config_of(training={"layout": "unpadded"}))
    assert (unpadded.size.slots, unpadded.size.head_rows) == (8 * 1000, 8 * 1000)
    assert "average packs" in unpadded.notes[0]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_backend_that_keeps_scores_is_named(backend: str) -> None:
    assert f"{backend} keeps scores or masks" in memory_of(config_of(attention={"backend": backend})).notes[0]
