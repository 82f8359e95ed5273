"""A checkpoint is converted whole or not at all: full disks, damage, and files that do not belong together."""

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from test_checkpoint_files import SOLO, train_state
from torch import nn

from evenpack.engine.activity import doing
from evenpack.engine.checkpoints import loading
from evenpack.engine.checkpoints.files import Checkpoint, commit_files, list_files, read_manifest, write_manifest
from evenpack.engine.checkpoints.pickles import ALLOWED, forbidding_code
from evenpack.engine.checkpoints.shards import WHOLE_WEIGHTS, saved_tensors
from evenpack.engine.checkpoints.universal import load_universal, make_universal, parameter_shapes
from evenpack.engine.optimizers.build import parameter_groups
from evenpack.errors import CheckpointError

STEP = 3


def trained_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model whose matrices and vectors alternate, and its optimizer after two updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1))
    for _ in range(2):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


MODEL, OPTIMIZER = trained_model()
SHAPES = parameter_shapes(MODEL)


def saved_at_zero_0(directory: Path, **changes: Any) -> Checkpoint:
    """Writes a checkpoint with what DeepSpeed saves at ZeRO 0."""
    path = directory / "step_000003"
    path.mkdir(parents=True, exist_ok=True)
    counters = dict.fromkeys(("dp_world_size", "mp_world_size", "global_steps", "global_samples", "skipped_steps"), 1)
    states = {"module": MODEL.state_dict(), "optimizer": OPTIMIZER.state_dict(), "ds_version": "0.19.8"}
    torch.save(counters | states | changes, path / WHOLE_WEIGHTS)
    return recorded(path)


def recorded(path: Path, **state: Any) -> Checkpoint:
    write_manifest(path, replace(train_state(STEP), **state), commit_files(path, list_files(path)))
    return read_manifest(path)


def convert(checkpoint: Checkpoint) -> Path:
    return make_universal(checkpoint, SHAPES, SOLO)


def of(converted: Path, name: str, state: str) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(converted / "zero" / name / f"{state}.pt", weights_only=True)["param"]
    return tensor


def refusal(checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(checkpoint)
    assert not list((checkpoint.path.parent / ".universal").iterdir()), "nothing half-written is left"
    return str(caught.value)


def test_every_parameter_has_its_own_weights_moments_and_count(tmp_path: Path) -> None:
    checkpoint = saved_at_zero_0(tmp_path)
    moves = doing.moves
    converted = convert(checkpoint)
    for name, parameter in MODEL.named_parameters():
        assert torch.equal(of(converted, name, "fp32"), parameter.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(of(converted, name, key), OPTIMIZER.state[parameter][key])
        assert torch.load(converted / "zero" / name / "step.pt", weights_only=True).item() == 2.0
    assert doing.moves - moves == len(SHAPES) == 6, "a hang is not suspected while parameters are written"


def test_an_optimizer_that_has_made_no_update_has_moments_of_zero(tmp_path: Path) -> None:
    empty = torch.optim.AdamW(parameter_groups(MODEL, weight_decay=0.1)).state_dict()
    converted = convert(saved_at_zero_0(tmp_path, optimizer=empty))
    assert not any(of(converted, name, key).any() for name in SHAPES for key in ("exp_avg", "exp_avg_sq"))


def test_those_of_other_checkpoints_make_room_for_it(tmp_path: Path) -> None:
    """One of them may have been interrupted by a kill."""
    (tmp_path / ".universal" / "3f" / "zero").mkdir(parents=True)
    converted = convert(saved_at_zero_0(tmp_path))
    assert list((tmp_path / ".universal").iterdir()) == [converted]


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved_at_zero_0(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    message = refusal(checkpoint)
    assert "No space left on device" in message
    assert "continue with as many ranks, and at the ZeRO stage, with which it was saved" in message


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    weights, states = MODEL.state_dict(), OPTIMIZER.state_dict()["state"]
    other = weights | {"0.weight": torch.zeros(5, 3)}
    spoiled = weights | {"2.bias": torch.tensor([1.0, torch.nan])}
    late = {number: state | {"step": torch.tensor(4.0)} for number, state in states.items()}
    swapped = {number: states[5 - number] for number in range(6)}
    for number, (changes, message) in enumerate(
        [
            ({"module": other}, "0.weight: expected shape (4, 3), found (5, 3)"),
            ({"module": spoiled}, "fp32 of 2.bias has numbers that are not finite"),
            ({"optimizer": OPTIMIZER.state_dict() | {"state": late}}, "of step 3, and its optimizer has counted [4]"),
            ({"optimizer": OPTIMIZER.state_dict() | {"state": swapped}}, "not in the form of DeepSpeed 0.19 at ZeRO"),
        ]
    ):
        assert message in refusal(saved_at_zero_0(tmp_path / str(number), **changes))


class RankWithoutBiases:
    """An engine of a rank that holds a part of the first group of parameters, and nothing of the second."""

    class optimizer:  # noqa: N801 - an attribute of DeepSpeed's engine
        bit16_groups = ([SimpleNamespace(_hp_mapping="a part")], [SimpleNamespace(_hp_mapping=None)])

    def zero_optimization_stage(self) -> int:
        return 2


def test_ranks_that_cannot_divide_a_group_are_refused_before_deepspeed_fails(tmp_path: Path) -> None:
    converted = convert(saved_at_zero_0(tmp_path))
    with pytest.raises(CheckpointError, match="more than this model's biases and norms can be divided among"):
        load_universal(RankWithoutBiases(), converted, SOLO)


def test_a_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    shapes = [{"0.weight": torch.Size((4, 3))}]
    checkpoint = recorded(saved_at_zero_0(tmp_path, param_shapes=shapes).path, zero_stage=1, world_size=2)
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_0_mp_rank_00_optim_states.pt does not exist, and"):
        saved_tensors(checkpoint).read("0.weight", "exp_avg")


def saved_at_zero_1(directory: Path, places: dict[str, int]) -> Checkpoint:
    """Writes a checkpoint of one rank, whose table says that the masters of the parameters begin at `places`."""
    path = saved_at_zero_0(directory, param_shapes=[{name: MODEL.get_parameter(name).shape for name in places}]).path
    masters = torch.cat([MODEL.get_parameter(name).detach().flatten() for name in places])
    table = {name: fragment_address(MODEL.get_parameter(name).numel(), start) for name, start in places.items()}
    state = {"param_slice_mappings": [table], "single_partition_of_fp32_groups": [masters]}
    torch.save({"optimizer_state_dict": state}, path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return recorded(path, zero_stage=1)


def test_masters_that_are_not_the_weights_are_refused(tmp_path: Path) -> None:
    right = saved_tensors(saved_at_zero_1(tmp_path / "right", {"1.weight": 0, "1.bias": 4, "0.bias": 8}))
    assert all(torch.equal(right.read(name, "fp32"), MODEL.get_parameter(name)) for name in right.shapes)
    wrong = saved_tensors(saved_at_zero_1(tmp_path / "wrong", {"1.weight": 0, "1.bias": 8, "0.bias": 4}))
    assert torch.equal(wrong.read("1.weight", "fp32"), MODEL.get_parameter("1.weight"))
    with pytest.raises(CheckpointError, match=r"FP32 copy of 1\.bias is not equal to the model's weights"):
        wrong.read("1.bias", "fp32")


def with_buffer(model: nn.Module) -> None:
    model.register_buffer("counts", torch.zeros(3))


def with_second_name(model: nn.Module) -> None:
    model.alias = model.get_submodule("0")


@pytest.mark.parametrize(("change", "name"), [(with_buffer, "counts"), (with_second_name, "alias.bias, alias.weight")])
def test_a_model_that_saves_more_than_its_parameters_is_refused(
    tmp_path: Path, change: Callable[[nn.Module], None], name: str
) -> None:
    model, optimizer = trained_model()
    change(model)
    checkpoint = saved_at_zero_0(tmp_path, module=model.state_dict())
    engine: Any = SimpleNamespace(
        module=model, optimizer=optimizer, zero_optimization_stage=lambda: 1, load_checkpoint=pytest.fail
    )
    with pytest.raises(CheckpointError) as caught:
        loading.load_checkpoint(engine, checkpoint, SOLO)
    assert f"saves more than its parameters: {name} (persistent buffers," in str(caught.value)
    assert "Continue at deepspeed.zero_stage=0 with 1 rank, as it was saved" in str(caught.value)


def saved_at_zero_3(directory: Path, module: dict[str, torch.Tensor], buffers: list[str]) -> Checkpoint:
    """Writes a checkpoint of one rank with one parameter, `0.bias`."""
    path = directory / "step_000003"
    path.mkdir(parents=True)
    bias = MODEL.get_parameter("0.bias").detach()
    states = {"module": module, "buffer_names": buffers, "param_shapes": [{"0.bias": bias.shape}]}
    torch.save(states, path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    optimizer = {"optimizer_state_dict": {"fp32_flat_groups": [bias.clone()]}}
    torch.save(optimizer, path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return recorded(path, zero_stage=3)


def test_weights_of_zero_3_have_the_buffers_and_lack_nothing(tmp_path: Path) -> None:
    module = {"0.bias": torch.empty(0), "counts": torch.arange(3)}
    weights = saved_tensors(saved_at_zero_3(tmp_path / "whole", module, ["counts"])).weights()
    assert weights.keys() == module.keys()
    assert torch.equal(weights["0.bias"], MODEL.get_parameter("0.bias"))
    assert torch.equal(weights["counts"], module["counts"])
    lacking = saved_at_zero_3(tmp_path / "lacking", module | {"alias.bias": torch.empty(0)}, ["counts"])
    with pytest.raises(CheckpointError, match=r"does not hold the values of alias\.bias: second names"):
        saved_tensors(lacking).weights()


def test_deepspeed_is_quiet_where_a_file_that_is_read_needs_its_classes():
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.INFO)  # as its import leaves it
    with forbidding_code(ALLOWED):
        assert logger.level == logging.WARNING
