"""Every ZeRO stage trains every family as stage 0 does, evaluates the same, and its weights can be read without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from prepared_files import sentence_documents
from run_files import pair_run_values, prepared, run_config, run_values
from tiny_training import changed, records, train_all

import evenpack.engine.build as engine_build
from evenpack.engine.build import build_model, build_placed_model
from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.shards import saved_tensors
from evenpack.engine.checkpoints.weight_sources import OwnCheckpoint, find_weights
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.sharding import SHARDINGS
from evenpack.engine.world.distributed import World, quiet_deepspeed
from evenpack.files import read_json_object
from evenpack.launcher.trained import load_trained_model
from evenpack.models.common.tensors import NamedWeights, TensorName
from evenpack.models.families import find_family

STEPS = 3
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"activation_checkpointing": True},
    "bert": {},
    "llama": {"activation_checkpointing": True},
    "modernbert": {"activation_checkpointing": True, "window": 4, "feed_forward_size": 48},
}
"""Families, and keys of their models."""

RELEASING = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
}
"""Lets ZeRO 3 release the parameters of each layer after it, as it does with those of large models."""


def prepare_family(folder: Path, kind: str) -> RunConfig:
    """Prepares a run whose validation packs are too few for all ranks to have equally many."""
    family = find_family(kind)
    values_of = run_values if family.objective == "next_tokens" else pair_run_values
    recipe = "documents" if "sentence_pairs" not in family.recipes else "sentence_pairs"
    values = values_of(
        kind,
        folder / kind / "prepared",
        data={
            "sources": {"text": {"kind": "text", "path": folder / "text.txt", "document_separator": "line"}},
            "recipe": {"kind": recipe, "max_sequence_length": 48},
            "pack_length": 48,
            "validation_fraction": 0.1,
        },
        model=FAMILIES[kind],
        training={
            "packs_per_step": 8,
            "packs_per_micro_batch": 1,
            "steps": STEPS,
            "evaluate_every_steps": 2,
            "evaluation_packs": 5,
            "gradient_clipping": 0.5,
        },
        optimizer={"kind": "adamw", "learning_rate": 1e-3, "epsilon": 1e-3},
    )
    return prepared(run_config(values))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, RunConfig]]:
    folder = tmp_path_factory.mktemp("stages")
    lines = (" ".join(text.split()) for text in sentence_documents(60, seed=1))
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder, {kind: prepare_family(folder, kind) for kind in FAMILIES}


@pytest.mark.slow
def test_every_stage_trains_and_evaluates_every_family_as_zero_0(
    families: tuple[Path, dict[str, RunConfig]],
) -> None:
    folder, prepared_runs = families
    runs = {
        (kind, stage): changed(
            config,
            run={"output_dir": folder / f"{kind}_{stage}"},
            data={"prepared_dir": config.prepared_dir},
            deepspeed={"zero_stage": stage, "extra": RELEASING if stage == 3 else {}},
        )
        for kind, config in prepared_runs.items()
        for stage in SHARDINGS
    }
    run_ranks(train_all, 2, list(runs.values()))
    for (kind, _), run in runs.items():
        require_same_run(runs[kind, 0], run)


def require_same_run(plain: RunConfig, sharded: RunConfig) -> None:
    expected, found = (records(run) for run in (plain, sharded))
    assert [record["order_hash"] for record in found] == [record["order_hash"] for record in expected]
    assert len(found) == STEPS
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)
        assert one["gradient_norm"] > 0.5, "clipping must clip"
        assert ("validation" in one) == ("validation" in other)
    (mine,), (its,) = (
        [dict(record["validation"]["text"]) for record in each if "validation" in record][:1]
        for each in (found, expected)
    )
    assert (mine["packs"], mine["sequences"], mine["targets"]) == (its["packs"], its["sequences"], its["targets"])
    assert mine["packs"] % 2, "one rank has a batch more than the other"
    assert mine["loss"] == pytest.approx(its["loss"], rel=1e-5)
    summaries = [read_json_object(run.run.output_dir / "summary.json") for run in (plain, sharded)]
    assert summaries[0]["parameters"] == summaries[1]["parameters"] > 1000
    for config, path in ((plain, newest(plain)), (sharded, newest(sharded))):
        model = load_trained_model(config, torch.device("cpu")).model
        saved = saved_tensors(read_manifest(path)).weights()
        assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())
    origin = find_weights(newest(sharded))  # as training.initialize_from takes them
    assert isinstance(origin, OwnCheckpoint)
    assert origin.read_described()[1].keys() == saved.keys()
    trained = [saved_tensors(read_manifest(newest(run))).weights() for run in (plain, sharded)]
    assert trained[0].keys() == trained[1].keys()
    for name, weight in trained[0].items():
        torch.testing.assert_close(trained[1][name], weight, rtol=1e-4, atol=1e-6)


def newest(config: RunConfig) -> Path:
    return config.run.output_dir / "checkpoints" / f"step_{STEPS:06d}"


def build_divided(world: World, config: RunConfig) -> int:
    """Builds a model at ZeRO 3 and fills it; checks both against whole models. Returns the numbers that it has."""
    zero: Any = quiet_deepspeed().zero
    run = open_run(config)
    whole = build_model(run, world.device)
    held: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        make_room = torch.nn.Module.to_empty

        def seen(layer: torch.nn.Module, **places: Any) -> torch.nn.Module:
            held.append(sum(one.numel() for one in models[-1].parameters() if one.device.type != "meta"))
            return make_room(layer, **places)

        models: list[Any] = []
        new_model = engine_build.build_model
        patch.setattr(engine_build, "build_model", lambda *given: models.append(new_model(*given)) or models[-1])
        patch.setattr(torch.nn.Module, "to_empty", seen)
        model = build_placed_model(run, world)
    assert len(held) > 10
    assert set(held) == {0}, "a layer was whole when the next one was made"
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.ds_tensor.numel() == -(-expected[name].numel() // world.size)
        with zero.GatheredParameters([parameter]):
            assert torch.equal(parameter, expected[name]), name
    tensors = {name: 2.0 * one.detach() + world.rank for name, one in expected.items()}
    names = [TensorName(ours=name, theirs=(name,)) for name in tensors]
    weights = NamedWeights(config=config.model, tensors=tensors, names=names, notes=())
    SHARDINGS[3].fill(model, weights if world.is_main else None, world)
    for name, parameter in model.named_parameters():
        with zero.GatheredParameters([parameter]):
            assert torch.equal(parameter, 2.0 * expected[name]), name
    return sum(one.ds_numel for one in model.parameters())


def test_a_model_of_zero_3_is_never_whole_and_has_the_same_weights(families: tuple[Path, dict[str, RunConfig]]) -> None:
    _, runs = families
    config = changed(runs["llama"], deepspeed={"zero_stage": 3})
    counts = run_ranks(build_divided, 2, config)
    assert counts[0] == counts[1] > 1000
