"""Muon moves each matrix of the blocks as torch's does, and AdamW moves everything else."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_files import run_config, run_values
from torch import nn

from evenpack.engine.optimizers import muon
from evenpack.engine.optimizers.build import build_optimizer
from evenpack.engine.optimizers.config import MuonSection
from evenpack.engine.optimizers.muon import hidden_matrices, orthogonalised
from evenpack.errors import ConfigError
from evenpack.models.build import Model, new_model
from evenpack.models.cost import model_sizes
from evenpack.models.families import find_family, known_families

SECTION = MuonSection(kind="muon", learning_rate=0.02, weight_decay=0.1, epsilon=1e-6, momentum=0.9)
Optimizers = dict[str, tuple[list[nn.Parameter], torch.optim.Optimizer]]
"""By the name of a parameter: its parts, which are moved apart, and what moves them."""
EXPANDED = {"gpt2": (128,), "bert": (128,), "llama": (352, 352), "modernbert": (192, 192)}
"""Rows of the matrices that widen, by family, at a hidden size of 32; gate and up are one parameter."""


def tiny(kind: str) -> Model:
    section = find_family(kind).config.model_validate(
        {"kind": kind, "preset": "tiny", "hidden_size": 32, "heads": 2, "layers": 2}
    )
    return new_model(section, vocabulary_size=11, max_positions=16)


@pytest.mark.parametrize("kind", known_families())
def test_the_matrices_of_blocks_are_muons_and_all_else_is_adamws(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny(kind)
    layer = {
        "attention.query_key_value": (32, 32, 32),
        "attention.output": (32,),
        "feed_forward.expand": EXPANDED[kind],
        "feed_forward.contract": (32,),
    }
    expected = {f"blocks.{number}.{name}.weight": rows for number in range(2) for name, rows in layer.items()}
    assert hidden_matrices(model) == expected
    sizes = model_sizes(model.config, vocabulary_size=11, max_positions=16)
    assert sum(sizes.matrices) == sum(model.get_parameter(name).numel() for name in expected)
    with caplog.at_level("INFO", logger="evenpack"):
        optimizer = build_optimizer(model, SECTION, torch.device("cpu"))
    said = ", ".join(f"blocks.*.{name}.weight" for name in layer)
    assert caplog.messages == [f"Muon updates {said}; AdamW updates all other parameters"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [({names[id(one)] for one in group["params"]}, group) for group in optimizer.param_groups]
    assert sum(len(members) for members, _ in groups) == len(names) == len(set().union(*(one for one, _ in groups)))
    assert {name: group["parts"] for members, group in groups if group.get("parts") for name in members} == expected
    for members, group in groups:
        shapes = {model.get_parameter(name).dim() for name in members}
        assert shapes == ({2} if group["weight_decay"] else {1}), "matrices decay, by the rule of all optimizers"


def drawn_gradient(shape: Sequence[int], step: int, number: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + number))


def moved(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
    """Returns what parameters are after some updates with gradients that are drawn by their name."""
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = drawn_gradient(parameter.shape, step, number)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def of_torch(model: Model) -> Optimizers:
    """Returns torch's Muon for the parts of each hidden matrix, and its AdamW for the rest."""
    matrices, found = hidden_matrices(model), {}
    for name, parameter in model.named_parameters():
        settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1 if parameter.dim() > 1 else 0.0}
        if name in matrices:
            parts = [nn.Parameter(part.detach()) for part in parameter.split_with_sizes(matrices[name])]
            optimizer = torch.optim.Muon(parts, momentum=0.9, adjust_lr_fn="match_rms_adamw", **settings)
        else:
            parts = [parameter]
            optimizer = torch.optim.AdamW(parts, betas=(0.9, 0.95), eps=1e-6, foreach=False, **settings)
        found[name] = (parts, optimizer)
    return found


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_each_matrix_moves_as_torchs_muon_moves_it_and_the_rest_as_torchs_adamw_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's iteration is in BF16, so its other arithmetic is compared with the iteration of ours in its place."""
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz", lambda matrix, *_: orthogonalised(matrix[None])[0]
    )
    model, theirs = tiny(kind), tiny(kind)
    ours = moved(model, build_optimizer(model, SECTION, torch.device("cpu")))
    optimizers = of_torch(theirs)
    for step in range(3):
        for number, (parts, optimizer) in enumerate(optimizers.values()):
            sizes = [len(part) for part in parts]
            gradient = drawn_gradient((sum(sizes), *parts[0].shape[1:]), step, number)
            for part, own in zip(parts, gradient.split_with_sizes(sizes), strict=True):
                part.grad = own
            optimizer.step()
    for name, (parts, _) in optimizers.items():
        torch.testing.assert_close(ours[name], torch.cat([part.detach() for part in parts]), rtol=1e-5, atol=1e-7)


def test_the_iteration_is_torchs_to_the_rounding_of_its_bf16() -> None:
    for shape in [(24, 24), (16, 48), (48, 16)]:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
        theirs = torch.optim._muon._zeropower_via_newtonschulz(  # type: ignore[attr-defined]
            matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7
        )
        ours = orthogonalised(matrix[None])[0]
        assert ((ours - theirs.float()).norm() / ours.norm()).item() < 0.03


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 1000))
def test_singular_values_are_made_nearly_one_and_directions_stay(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(3, rows, columns, generator=generator, dtype=torch.float64)
    results = orthogonalised(matrices)
    for matrix, result in zip(matrices, results, strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        found = left.mT @ result @ right.mT
        torch.testing.assert_close(found, torch.diag(found.diagonal()), rtol=0.0, atol=1e-9)
        whole = values > 0.02 * values.norm()  # smaller ones need more steps of the iteration
        assert bool(((found.diagonal() > 0.6) & (found.diagonal() < 1.3))[whole].all())


def test_an_update_has_the_size_of_adamws_whatever_the_shape() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(48, 256, bias=False), nn.Linear(256, 48, bias=False)])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    section = MuonSection(kind="muon", learning_rate=0.02, weight_decay=0.0)
    after = moved(model, build_optimizer(model, section, torch.device("cpu")), steps=1)
    for name, weights in before.items():
        assert (after[name] - weights).square().mean().sqrt().item() == pytest.approx(0.2 * 0.02, rel=0.2)


def test_matrices_of_one_shape_may_be_moved_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = moved(model := tiny("llama"), build_optimizer(model, SECTION, torch.device("cpu")))
    monkeypatch.setattr(muon, "TOGETHER", 1)
    parts = moved(model := tiny("llama"), build_optimizer(model, SECTION, torch.device("cpu")))
    for name, weights in whole.items():
        torch.testing.assert_close(parts[name], weights, rtol=1e-5, atol=1e-7)


def test_gradients_are_clipped_by_the_scale_that_fused_kernels_take() -> None:
    scaled, plain = tiny("gpt2"), tiny("gpt2")
    ours, theirs = (
        build_optimizer(model, SECTION, torch.device("cpu"), fused_on_cpu=True) for model in (scaled, plain)
    )
    for step, scale in enumerate((4.0, 1.0)):  # one scale for all steps would cancel out
        ours.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        for number, (one, other) in enumerate(zip(scaled.parameters(), plain.parameters(), strict=True)):
            other.grad = drawn_gradient(other.shape, step, number)
            one.grad = scale * other.grad
        ours.step()
        theirs.step()
    for one, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_parameter_without_a_gradient_stays_and_a_state_is_loaded_again() -> None:
    model, again = tiny("gpt2"), tiny("gpt2")
    optimizer = build_optimizer(model, SECTION, torch.device("cpu"))
    moved(model, optimizer)
    resumed = build_optimizer(again, SECTION, torch.device("cpu"))
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for one, other in zip(moved(model, optimizer).values(), moved(again, resumed).values(), strict=True):
        assert torch.equal(one, other)
    before = model.get_parameter("blocks.1.attention.output.weight").detach().clone()
    for parameter in model.parameters():
        parameter.grad = None
    optimizer.step()
    assert torch.equal(model.get_parameter("blocks.1.attention.output.weight"), before)


def test_a_model_without_matrices_in_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear has none: set optimizer\.kind=adamw"):
        build_optimizer(nn.Linear(3, 5), SECTION, torch.device("cpu"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_zero_stages_are_refused_by_name(stage: int) -> None:
    optimizer = {"kind": "muon", "learning_rate": 1e-3}
    with pytest.raises(ConfigError, match=rf"muon needs deepspeed\.zero_stage=0, found {stage}"):
        run_config(run_values("gpt2", Path("nowhere"), optimizer=optimizer, deepspeed={"zero_stage": stage}))
