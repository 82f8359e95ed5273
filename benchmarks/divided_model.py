"""Measures the memory of ranks that export a large model, and that build and fill it divided, as at ZeRO 3.

    python benchmarks/divided_model.py FOLDER [--preset 8b] [--layers 2] [--vocabulary 128256] [--ranks 2] [--json FILE]

Ranks (gloo, FP32) report the most memory that belonged to them alone (RssAnon of Linux, sampled) above what they had
when a stage began, against the bytes of the whole model. Weights of an earlier call that are in FOLDER/exported are
used again, and the first stage is left out.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measuring
import torch

from evenpack.engine.checkpoints.weight_sources import TransformersFolder
from evenpack.engine.sharding import SHARDINGS
from evenpack.engine.world.distributed import World
from evenpack.models import huggingface
from evenpack.models.build import Model, new_model
from evenpack.models.huggingface import to_huggingface
from evenpack.models.llama.config import LlamaConfig
from evenpack.testing import run_ranks

_SAMPLE_SECONDS = 0.02
_SHARD_BYTES = 2_200_000_000
"""Of a file: as much as the largest tensor of Llama 3.1, so that a small machine can hold the model and a copy."""
_SETTINGS = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    sizes = {"preset": arguments.preset, "layers": arguments.layers, "vocabulary": arguments.vocabulary}
    weights = arguments.folder / "exported"
    with torch.device("meta"):
        whole = sum(4 * one.numel() for one in model_of(sizes).parameters())
    stages: dict[str, list[int]] = {}
    if not weights.is_dir():
        stages["build whole on one rank, and export"] = run_ranks(export, 1, sizes, weights)
    built, filled = zip(*run_ranks(build_divided, arguments.ranks, sizes, weights), strict=True)
    stages |= {"build divided": list(built), "fill from the exported files": list(filled)}
    rows = [
        {"stage": stage, "ranks": len(peaks), "most_bytes": max(peaks), "of_the_model": round(max(peaks) / whole, 2)}
        for stage, peaks in stages.items()
    ]
    report = {**measuring.device_facts(torch.device("cpu")), **sizes, "model_bytes": whole, "stages": rows}
    print(json.dumps(report, indent=2))
    measuring.write_report(report, arguments.json)


def model_of(sizes: dict[str, Any]) -> Model:
    config = LlamaConfig(kind="llama", preset=sizes["preset"], layers=sizes["layers"])
    return new_model(config, vocabulary_size=sizes["vocabulary"], max_positions=8192)


def export(world: World, sizes: dict[str, Any], folder: Path) -> int:
    huggingface.SHARD_BYTES = _SHARD_BYTES
    with most_of_its_own() as found:
        to_huggingface(model_of(sizes), folder, tokenizer_dir=None, special_token_id=0)
    return found[0]


def build_divided(world: World, sizes: dict[str, Any], folder: Path) -> tuple[int, int]:
    sharding = SHARDINGS[3]
    with most_of_its_own() as built:
        with torch.device("meta"):
            model = model_of(sizes)
        sharding.place(model, 0, world, _SETTINGS)
        world.barrier()
    with most_of_its_own() as filled:
        weights = TransformersFolder(path=folder).read(model) if world.is_main else None
        sharding.fill(model, weights, world)
        world.barrier()
    return built[0], filled[0]


@contextmanager
def most_of_its_own() -> Iterator[list[int]]:
    """Yields a list with the most bytes above those at the beginning, once the block has ended."""
    begin, found, is_over = measuring.status_kib("RssAnon"), [0], threading.Event()

    def sample() -> None:
        while not is_over.wait(_SAMPLE_SECONDS):
            found[0] = max(found[0], 1024 * (measuring.status_kib("RssAnon") - begin))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    yield found
    is_over.set()
    sampler.join()


if __name__ == "__main__":
    import divided_model  # ranks find functions by the module's name

    divided_model.main()
