"""The slots and rows of logits of a micro-batch, on which its memory depends."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import pair_run_values, run_config, run_values

from evenpack.data.sequences.masking import masked_count
from evenpack.engine.memory.estimate import micro_batch_size
from evenpack.engine.resolving.data_facts import AverageItem

ITEM = AverageItem(sequences=Fraction(2), tokens=Fraction(1000), row_slots=1024)


def test_sizes_follow_the_layout_and_the_objective() -> None:
    slots = {}
    for layout in ("packed", "unpadded", "padded"):
        training = {"layout": layout, "packs_per_step": 512, "packs_per_micro_batch": 8}
        data = {"recipe": {"kind": "documents", "max_sequence_length": 1024}, "pack_length": 1024}
        config = run_config(run_values("gpt2", Path("never_written"), data=data, training=training))
        slots[layout] = micro_batch_size(config, ITEM).slots
    assert slots == {"packed": 8 * 1024, "unpadded": 8 * 1000, "padded": 8 * 2 * 1024}


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
