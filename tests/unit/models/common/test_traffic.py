"""Bytes and kernels of a step: operations and parameters of an outline are those of its family."""

import pytest
import torch

from evenpack.models.build import new_model
from evenpack.models.common.cost import Work
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.traffic import FUSIONS, PARTS, Operation, gradient_operations
from evenpack.models.cost import step_flops
from evenpack.models.families import family_of, find_family, known_families

VOCABULARY = 1000
WORK = Work(slots=3000, squared_lengths=1_400_000, head_slots=400, sequences=11)


def models() -> list[TransformerConfig]:
    """The presets of all families, each as small as its widths allow."""
    return [
        find_family(name).config.model_validate({"kind": name, "preset": preset})
        for name in known_families()
        for preset in find_family(name).config.presets
    ]


@pytest.mark.parametrize("config", models(), ids=lambda config: f"{config.kind} {config.preset}")
def test_an_outline_has_the_operations_and_the_tensors_of_its_model(config: TransformerConfig) -> None:
    describe = family_of(config).cost.outline
    assert describe is not None
    outline = describe(config, vocabulary_size=VOCABULARY)
    operations = gradient_operations(outline, WORK)
    assert sum(one.flops for one in operations) == step_flops(config, vocabulary_size=VOCABULARY, work=WORK)
    with torch.device("meta"):
        model = new_model(config, vocabulary_size=VOCABULARY, max_positions=64)
    assert outline.tensors == len(list(model.parameters()))


@pytest.mark.parametrize("config", models()[:1] + models()[-1:], ids=lambda config: config.kind)
def test_a_fusion_removes_bytes_and_kernels_and_no_operation(config: TransformerConfig) -> None:
    describe = family_of(config).cost.outline
    assert describe is not None
    operations = gradient_operations(describe(config, vocabulary_size=VOCABULARY), WORK)
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
