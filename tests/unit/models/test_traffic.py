"""Bytes and kernels of a step: their operations are those of the model, and fusions leave less."""

import pytest

from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import find_family, known_families
from evenpack.models.traffic import FUSIONS, PARTS, Operation, gradient_operations

VOCABULARY = 1000


def work_of(config: TransformerConfig) -> Work:
    pairs = {window: 900_000 + window for window in config.windows}
    return Work(slots=3000, squared_lengths=1_400_000, head_slots=400, sequences=11, pairs_within=pairs)


def models() -> list[TransformerConfig]:
    """The presets of all families, each as small as its widths allow."""
    return [
        find_family(name).config.model_validate({"kind": name, "preset": preset})
        for name in known_families()
        for preset in find_family(name).config.presets
    ]


@pytest.mark.parametrize("config", models(), ids=lambda config: f"{config.kind} {config.preset}")
def test_traced_operations_are_those_of_the_model(config: TransformerConfig) -> None:
    work = work_of(config)
    operations = gradient_operations(config, vocabulary_size=VOCABULARY, work=work)
    assert sum(one.flops for one in operations) == step_flops(config, vocabulary_size=VOCABULARY, work=work)


def test_a_block_moves_what_its_operators_read_and_write() -> None:
    """By hand, for each slot of GPT-2: C = hidden size, F = 4 C, bfloat16 products and an FP32 residual stream."""
    config = find_family("gpt2").config.model_validate({"kind": "gpt2", "preset": "small"})
    sizes = {"slots": 1 << 20, "squared_lengths": 0, "head_slots": 0, "sequences": 0}
    found = gradient_operations(config, vocabulary_size=VOCABULARY, work=Work(**sizes))
    width, layers = 768, 12
    products = 3 * 2 * ((width + 3 * width) + (width + width))  # inputs and results, and the same for both gradients
    biases = 2 * (3 * width + width)
    norms = 2 * (2 * 4 + 3 * 4) + 2 * (4 + 2 + 4) + 2 * (3 * 4) + 6 * (4 + 2)  # norms, sums, their gradients, casts
    joined = 2 * 2 * 3 * width
    attention = 2 * (4 * width + 5 * width + 3 * width) + joined
    expected = {"projections": products + biases, "norms and sums": norms * width, "attention": attention}
    for part, of_a_slot in expected.items():
        moved = sum(one.bytes for one in found if one.part == part)
        assert moved / (layers * sizes["slots"]) == pytest.approx(of_a_slot, rel=0.01), part


@pytest.mark.parametrize("config", models()[:1] + models()[-1:], ids=lambda config: config.kind)
def test_a_fusion_removes_bytes_and_kernels_and_no_operation(config: TransformerConfig) -> None:
    operations = gradient_operations(config, vocabulary_size=VOCABULARY, work=work_of(config))
    assert {one.part for one in operations} == set(PARTS) - {"optimizer"}
    assert {one.fusion for one in operations} == {None, *FUSIONS} - {"fused update"}
    for one in operations:
        fused = one.under(frozenset(FUSIONS))
        assert fused.flops == one.flops
        assert (fused.bytes, fused.kernels) <= (one.bytes, one.kernels)
        assert one.under(frozenset()) == one
        assert (fused == one) == (one.fusion is None)


def test_kernels_are_multiplied_with_what_remains_of_them() -> None:
    one = Operation(part="weights", kernels=3, bytes=5, flops=7, fusion="fused head", fused_kernels=1, fused_bytes=2)
    assert one.times(2).under(frozenset({"fused head"})) == Operation(part="weights", kernels=2, bytes=4, flops=14)
