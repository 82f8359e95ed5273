import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import LAYOUTS, build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs
from pydantic import TypeAdapter
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig as TheirBertConfig
from transformers import BertForMaskedLM, BertForPreTraining
from windowed_models import layers_with_windows, windowed_bert, windowed_gpt2

from evenpack.errors import ConfigError
from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.common import layers
from evenpack.models.common.device_peaks import DEVICE_PEAKS, device_peak_flops, find_device_peak, known_device
from evenpack.models.config import ModelConfig
from evenpack.models.cost import Work, parameter_count, performed_work, step_flops, useful_work
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2
from evenpack.models.huggingface import mapping_of
from evenpack.models.llama.config import LlamaConfig
from evenpack.models.trace import at_two_depths
from evenpack.visible_pairs import total_pairs_within

SHAPE = Gpt2Config(kind="gpt2", preset="tiny", layers=3, hidden_size=32, heads=4)
VOCABULARY = 101


BY_HAND = json.loads(Path(__file__).with_name("counted_by_hand.json").read_text())
"""Each preset of each family with a vocabulary of 50,257 and 1,024 positions, by formulas written for its layers."""


@pytest.mark.parametrize(
    "values", BY_HAND, ids=lambda values: " ".join(str(value) for value in [*values.values()][:-4])
)
def test_counts_of_a_model_are_those_of_formulas_for_its_layers(values):
    counts = ("parameters", "flops", "of_tokens", "of_squares")
    section = {key: value for key, value in values.items() if key not in counts}
    config = TypeAdapter(ModelConfig).validate_python(section)

    def flops(**work):
        nothing = {"slots": 0, "squared_lengths": 0, "head_slots": 0, "sequences": 0}
        return step_flops(config, vocabulary_size=50_257, work=Work(**nothing | work))

    found = {
        "parameters": parameter_count(config, vocabulary_size=50_257, max_positions=1_024),
        "flops": flops(slots=3_001, squared_lengths=1_400_003, head_slots=411, sequences=11),
        "of_tokens": flops(slots=2_000, head_slots=300),
        "of_squares": flops(squared_lengths=2_000),
    }
    assert found == {name: values[name] for name in counts}


def test_pairs_within_a_window_that_were_not_counted_are_refused():
    work = Work(slots=4, squared_lengths=16, head_slots=0, sequences=0, pairs_within={3: 16})
    with pytest.raises(ValueError, match=r"no pairs within a window of 2, only within \[3\]"):
        work.attended_pairs(causal=True, window=2)
    with pytest.raises(ValueError, match=r"windows \[3\] and within \[\] does not add up"):
        work + replace(work, pairs_within={})
    assert (work + work).pairs_within == {3: 32}


def attend_token_by_token(q, k, v, segments, *, window, **_):
    """Computes a product for each token with the keys that it sees, and nothing else."""
    found = []
    for start, stop in pairwise(segments.cu_seqlens.tolist()):
        reach = stop if window is None else window
        for token in range(start, stop):
            seen = slice(max(start, token - reach), token + 1 if segments.causal else min(stop, token + reach + 1))
            scores = torch.bmm(q[token].unsqueeze(1), k[seen].permute(1, 2, 0)) / q.shape[2] ** 0.5
            found.append(torch.bmm(scores.softmax(-1), v[seen].transpose(0, 1)).squeeze(1))
    return torch.stack(found)


@pytest.mark.parametrize("windows", [(None, 2), (1, 4, 4), (3,)])
@pytest.mark.parametrize("causal", [True, False])
def test_operations_within_windows_are_those_that_torch_counts_of_what_is_seen(windows, causal):
    shape = {"layers": 4, "hidden_size": 32, "heads": 4}
    with layers_with_windows(), pytest.MonkeyPatch.context() as patch:
        config = (windowed_gpt2 if causal else windowed_bert)(windows, preset="tiny", dropout=0.0, **shape)
        if causal:
            sequences = random_sequences([9, 3, 1, 7], vocabulary_size=VOCABULARY)
            batch, _ = build_batch([sequences], "packed", max_sequence_length=9, windows=config.windows)
        else:
            pairs = random_pairs([9, 4, 7], vocabulary_size=VOCABULARY)
            batch, _ = build_masked_batch([pairs], "packed", max_sequence_length=9, windows=config.windows)
        work = performed_work(batch)
        blocks = replace(work, head_slots=0, sequences=0)
        expected = step_flops(config, vocabulary_size=VOCABULARY, work=blocks)
        patch.setattr(layers, "packed_attention", attend_token_by_token)
        model = (Gpt2 if causal else Bert)(config, vocabulary_size=VOCABULARY, max_positions=16)
        with FlopCounterMode(display=False) as counter:
            model.hidden_states(batch).sum().backward()
    assert counter.get_total_flops() == expected
    assert useful_work(batch).pairs_within == work.pairs_within  # no slot pads


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_as_long_as_the_longest_sequence_costs_what_whole_sequences_cost(causal):
    shape = {"layers": 3, "hidden_size": 32, "heads": 4}
    windowed = windowed_gpt2 if causal else windowed_bert
    work = Work(slots=60, squared_lengths=9**2 + 12**2, head_slots=7, sequences=3)
    flops = []
    with layers_with_windows():
        for window in (None, 11, 10):
            config = windowed((None, window), preset="tiny", **shape)
            pairs = total_pairs_within(np.array([9, 12]), config.windows)
            flops.append(step_flops(config, vocabulary_size=VOCABULARY, work=replace(work, pairs_within=pairs)))
    assert flops[0] == flops[1] > flops[2]  # 10 leaves out one pair at each end of the longer sequence
    assert flops[1] - flops[2] == 3 * 4 * 32 * (1 if causal else 2)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None,) * 6, (1, 2)),
        ((None, 4, 4) * 3, (3, 6)),
        ((None, 4, 4, None, 4, 4, None), (4, 7)),
        ((None, 4), (2, 4)),
    ],
)
def test_two_depths_are_periods_of_the_pattern_of_layers(windows, expected):
    class Patterned(Gpt2Config):
        @property
        def attention_windows(self):
            return windows

    config = Patterned(kind="gpt2", layers=len(windows))
    few, more, further = at_two_depths(config, lambda shallow: shallow.shape["layers"], periods=1)
    assert (few, more) == expected
    assert few + further * (more - few) == len(windows)


def test_flops_of_a_small_pack_by_hand():
    """Lengths 5, 3 and 2: ten tokens, 15 + 6 + 3 = 24 causal pairs, 4 + 2 + 1 = 7 targets."""
    sequences = random_sequences([5, 3, 2], vocabulary_size=VOCABULARY)
    batch, _ = build_batch([sequences], "packed", max_sequence_length=8, pack_length=14)
    work = useful_work(batch)
    assert work == Work(slots=10, squared_lengths=25 + 9 + 4, head_slots=7, sequences=3)
    assert work.attended_pairs(causal=True) == 24
    assert work.attended_pairs(causal=False) == 38
    query_key_value = 2 * 10 * 32 * 96
    output = 2 * 10 * 32 * 32
    feed_forward = 2 * (2 * 10 * 32 * 128)
    attention = 4 * (2 * 24 * 8) * 2  # heads x (2 x pairs x head_dim), for scores and for values
    head = 2 * 7 * 32 * 101
    forward = 3 * (query_key_value + output + feed_forward + attention) + head
    assert step_flops(SHAPE, vocabulary_size=VOCABULARY, work=work) == 3 * forward == 2_375_232


def test_padding_changes_the_slots_and_nothing_that_is_useful():
    packs = [random_sequences(lengths, vocabulary_size=VOCABULARY) for lengths in ([5, 3, 2], [7, 1])]
    shapes = [(layout, 12) for layout in LAYOUTS] + [("packed", 20)]
    batches = [build_batch(packs, layout, max_sequence_length=8, pack_length=slots)[0] for layout, slots in shapes]
    assert {useful_work(batch) for batch in batches} == {Work(slots=18, squared_lengths=88, head_slots=13, sequences=5)}
    assert [batch.slots for batch in batches] == [24, 18, 40, 40]
    assert [performed_work(batch) for batch in batches] == [
        Work(slots=24, squared_lengths=88 + 2 * 2 + 4 * 4, head_slots=24, sequences=0),
        Work(slots=18, squared_lengths=88, head_slots=18, sequences=0),
        Work(slots=40, squared_lengths=5 * 8 * 8, head_slots=40, sequences=0),
        Work(slots=40, squared_lengths=88 + 8 * 8 + 2 * 2 + 8 * 8 + 4 * 4, head_slots=40, sequences=0),
    ]


@pytest.mark.parametrize(("preset", "published"), [("base", 110_106_428), ("large", 336_226_108)])
@pytest.mark.parametrize("next_sentence", [True, False])
def test_berts_presets_have_the_parameter_counts_of_transformers(preset, published, next_sentence):
    config = BertConfig(kind="bert", preset=preset, next_sentence=next_sentence)
    with torch.device("meta"):
        model = Bert(config, vocabulary_size=30_522, max_positions=512)
        theirs = (BertForPreTraining if next_sentence else BertForMaskedLM)(
            TheirBertConfig(**mapping_of(config).config_values(model, 0))
        )
    count = parameter_count(config, vocabulary_size=30_522, max_positions=512)
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    assert count == published if next_sentence else count < published


@pytest.mark.parametrize(
    ("preset", "vocabulary_size", "parameters"),
    [
        ("8b", 128_256, 8_030_261_248),  # as the index of its safetensors has it
        ("1.1b", 32_000, 1_100_048_384),  # as TinyLlama's model card and its safetensors header have it
    ],
)
def test_llamas_presets_have_the_published_number_of_parameters(preset, vocabulary_size, parameters):
    config = LlamaConfig(kind="llama", preset=preset)
    assert parameter_count(config, vocabulary_size=vocabulary_size, max_positions=2048) == parameters


def masked_batch(layout):
    pairs = random_pairs([10, 4, 2], vocabulary_size=VOCABULARY)
    sizes = {"max_sequence_length": 10, "pack_length": 18, "max_targets": 7, "max_sequences": 5}
    return build_masked_batch([pairs], layout, **sizes)[0]


def test_work_performed_on_pairs_is_all_slots_and_all_rows_of_the_heads():
    """Lengths 10, 4 and 2: 100 + 16 + 4 = 120 pairs of tokens that attend, 2 + 1 + 1 = 4 masked tokens."""
    batches = {layout: masked_batch(layout) for layout in LAYOUTS}
    assert {useful_work(batch) for batch in batches.values()} == {
        Work(slots=16, squared_lengths=120, head_slots=4, sequences=3)
    }
    assert {layout: performed_work(batch) for layout, batch in batches.items()} == {
        "packed": Work(slots=18, squared_lengths=120 + 2 * 2, head_slots=7, sequences=5),
        "unpadded": Work(slots=16, squared_lengths=120, head_slots=7, sequences=5),
        "padded": Work(slots=30, squared_lengths=120 + 6 * 6 + 8 * 8, head_slots=7, sequences=5),
    }


@pytest.mark.parametrize(
    ("name", "short", "half", "single"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 989.4, 66.9),
        ("NVIDIA H100 PCIe", "h100-pcie", 756.0, 51.2),
        ("NVIDIA H100 NVL", "h100-nvl", 835.5, 60.0),
        ("NVIDIA H200", "h200", 989.4, 66.9),
        ("NVIDIA H200 NVL", "h200-nvl", 835.5, 60.0),
        ("NVIDIA GH200 480GB", "gh200", 989.4, 66.9),
        ("NVIDIA H20", "h20", 148.0, 44.0),
        ("NVIDIA B200", "b200", 2250.0, 75.0),
        ("NVIDIA B300 SXM6 AC", "b300", 2250.0, 75.0),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 312.0, 19.5),
        ("NVIDIA A100 80GB PCIe", "a100-80gb", 312.0, 19.5),
        ("NVIDIA A30", "a30", 165.0, 10.3),
        ("NVIDIA A10", "a10", 125.0, 31.2),
        ("NVIDIA A40", "a40", 149.7, 37.4),
        ("NVIDIA RTX A6000", "rtx-a6000", 154.8, 38.7),
        ("NVIDIA L4", "l4", 121.0, 30.3),
        ("NVIDIA L40", "l40", 181.05, 90.5),
        ("NVIDIA L40S", "l40s", 362.05, 91.6),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada", 364.2, 91.1),
        ("NVIDIA GeForce RTX 3090", "rtx-3090", 71.0, 35.6),
        ("NVIDIA GeForce RTX 4080", "rtx-4080", 97.5, 48.7),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 5080", "rtx-5080", 112.6, 56.3),
        ("NVIDIA GeForce RTX 5090", "rtx-5090", 209.5, 104.8),
        ("AMD Instinct MI300X OAM", "mi300x", 1307.4, 163.4),
    ],
)
def test_known_devices_have_their_dense_peaks(name, short, half, single):
    assert device_peak_flops(name, torch.bfloat16) == half * 1e12
    assert device_peak_flops(name, torch.float16) == half * 1e12
    assert device_peak_flops(name, torch.float32) == single * 1e12
    for written in (short, short.upper(), short.replace("-", ""), short.replace("-", " "), name):
        assert find_device_peak(written).name == short


@pytest.mark.parametrize(("name", "teraflops"), [("Tesla T4", 65), ("Tesla V100-SXM2-16GB", 125), ("v100-pcie", 112)])
def test_cards_without_bfloat16_have_no_peak_of_it(name, teraflops):
    device = find_device_peak(name)
    assert (device.flops(torch.float16), device.flops(torch.bfloat16)) == (teraflops * 1e12, None)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("AMD EPYC 9R14", torch.bfloat16),
        ("NVIDIA H100", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3", torch.float64),
        ("NVIDIA A1000", torch.bfloat16),
        ("NVIDIA A10G", torch.bfloat16),
        ("NVIDIA H20-3e", torch.bfloat16),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16),
        ("NVIDIA GeForce RTX 4080 SUPER", torch.bfloat16),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16),
        ("Quadro RTX 6000", torch.bfloat16),
    ],
)
def test_a_peak_that_is_not_known_is_none(name, dtype):
    assert device_peak_flops(name, dtype) is None


def test_a_device_may_be_named_shortly():
    assert find_device_peak("a100").flops(torch.float32) == 19.5e12
    assert find_device_peak("a100").flops(torch.float64) is None
    assert (find_device_peak("a100").memory_bytes, find_device_peak("h200").memory_bytes) == (None, 141 * 10**9)
    assert known_device("NVIDIA A100-SXM4-40GB").memory_bytes == 40 * 10**9
    assert len({peak.name for peak in DEVICE_PEAKS}) == len(DEVICE_PEAKS)
    with pytest.raises(ConfigError, match=r"'h10' is not known; did you mean 'h100'\?"):
        find_device_peak("h10")
