"""ModernBERT: its section, its windows and what it learns from."""

from dataclasses import replace
from typing import Any

import pytest
from masked_batches import build_masked_batch, random_pairs

from evenpack.config import validate
from evenpack.models.build import Model, new_model
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import find_family
from evenpack.models.modernbert.config import ModernBertConfig

VOCABULARY = 61
LONGEST = 40
SMALL = {"preset": "tiny", "layers": 5, "hidden_size": 48, "heads": 3, "feed_forward_size": 64, "window": 5}


def section(**changes: Any) -> ModernBertConfig:
    return validate({"kind": "modernbert", **SMALL, **changes}, ModernBertConfig, origin="model")


def small_model(**changes: Any) -> Model:
    return new_model(section(**changes), vocabulary_size=VOCABULARY, max_positions=LONGEST, seed=3)


@pytest.mark.parametrize(
    ("layers", "every", "windows"),
    [
        (7, 3, [None, 9, 9, None, 9, 9, None]),
        (5, 3, [None, 9, 9, None, 9]),  # as in base, whose 22 layers are no multiple of 3
        (3, 1, [None, None, None]),
        (3, 8, [None, 9, 9]),
    ],
)
def test_the_first_layer_and_then_every_nth_sees_everything(layers: int, every: int, windows: list[int | None]) -> None:
    config = section(layers=layers, global_every_layers=every, window=9)
    assert list(config.attention_windows) == windows
    model = small_model(layers=layers, global_every_layers=every, window=9)
    assert [block.attention.window for block in model.blocks] == windows


@pytest.mark.parametrize(("layers", "every"), [(1, 3), (1, 1), (2, 3), (4, 7), (5, 3), (7, 2)])
def test_operations_of_attention_are_those_of_its_global_and_its_local_layers(layers: int, every: int) -> None:
    config = section(layers=layers, global_every_layers=every, window=5)
    work = Work(
        slots=0, squared_lengths=700, head_slots=0, sequences=0, pairs_within=dict.fromkeys(config.windows, 300)
    )
    of_a_pair = 3 * 4 * config.shape["hidden_size"]  # scores and weighted sums, forward and twice that backward
    pairs = sum(700 if window is None else 300 for window in config.attention_windows)
    assert step_flops(config, vocabulary_size=VOCABULARY, work=work) == of_a_pair * pairs


def test_its_keys_that_weights_do_not_show_are_compared_when_weights_are_loaded() -> None:
    unseen = section().unseen_in_weights
    for change in ({"window": 6}, {"global_every_layers": 2}, {"rotary_base": 1e4}, {"local_rotary_base": 5e3}):
        assert section(**change).unseen_in_weights != unseen
    assert section(norm_epsilon=1e-6).unseen_in_weights != unseen


def test_it_learns_from_masked_tokens_of_documents() -> None:
    family = find_family("modernbert")
    assert (family.causal, family.objective, family.recipes) == (False, "masked_tokens", ("documents", "concat"))
    assert [loss.name for loss in section().losses] == ["masked_token"]
    pairs = random_pairs([LONGEST], vocabulary_size=VOCABULARY)
    batch, _ = build_masked_batch([pairs], "packed", max_sequence_length=LONGEST)
    with pytest.raises(ValueError, match="ModernBert learns from targets masked_token, the batch has next_sentence"):
        small_model()(replace(batch, targets={"next_sentence": batch.targets["next_sentence"]}))
