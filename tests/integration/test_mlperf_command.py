"""MLPerf's command in docs/bert.md, from HDF5 shards and a TensorFlow checkpoint to a log that the checker passes."""

import json
import re
from pathlib import Path

import pytest
from mlperf_checker import verdict
from repository import CONFIGS, ROOT
from shard_files import CLS, MASK, MASK_SLOTS, SEP, SLOTS, fixed_arrays, random_rows, write_arrays
from small_run import evenpack_process, metrics
from tensorflow_checkpoints import BERT, SHAPE, VOCABULARY

TINY = [
    *(f"model.{name}={value}" for name, value in SHAPE.items() if name != "kind"),
    f"model.max_positions={SLOTS}",
    f"data.recipe.max_sequence_length={SLOTS}",
    f"data.recipe.max_predictions={MASK_SLOTS}",
    f"data.pack_length={2 * SLOTS}",
    "training.packs_per_step=8",
    "training.packs_per_micro_batch=2",
    "training.steps=4",
    "training.precision=fp32",
    "training.compile=false",
    "training.evaluate_every_samples=30",
    "mlperf.submission_division=open",
]
TRAINED, EVALUATED = 90, 20


def documented_command() -> list[str]:
    """Returns the arguments after `evenpack train`."""
    text = (ROOT / "docs" / "bert.md").read_text(encoding="utf-8").partition("## MLPerf's BERT")[2]
    found = re.search(r"^evenpack train (.*?)^python -m mlperf_logging", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1).replace("\\\n", " ").split()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Creates the files that the command's paths name."""
    write_arrays(tmp_path / "hdf5/training/part_0.hdf5", fixed_arrays(random_rows(TRAINED, seed=1)))
    write_arrays(tmp_path / "hdf5/eval_10k.hdf5", fixed_arrays(random_rows(EVALUATED, seed=2)))
    words = [f"word{number}" for number in range(VOCABULARY)]
    words[:2], words[CLS], words[SEP], words[MASK] = ["[PAD]", "[UNK]"], "[CLS]", "[SEP]", "[MASK]"
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(words) + "\n")
    return {
        "hdf5/training": str(tmp_path / "hdf5/training"),
        "hdf5/eval_10k.hdf5": str(tmp_path / "hdf5/eval_10k.hdf5"),
        "bert/": str(tmp_path / "bert"),
        "model.ckpt-28252": str(BERT),
        "NAME": "nobody",
    }


@pytest.mark.slow
def test_one_command_goes_from_shards_to_a_log_that_passes(files: dict[str, str], tmp_path: Path) -> None:
    run_file, prepare, *overrides = documented_command()
    assert prepare == "--prepare"
    placed = [f"{key}={files[value]}" for key, value in (override.split("=") for override in overrides)]
    output = tmp_path / "out"
    done = evenpack_process(
        "train",
        CONFIGS.parent / run_file,
        *placed,
        *TINY,
        f"run.output_dir={output}",
        f"data.prepared_dir={tmp_path / 'data'}",
        options=["--prepare", "--cpu-ranks", "1"],
    )
    assert "model.ckpt-28252 (TensorFlow); 46 tensors used" in " ".join(done.stderr.split())
    records = metrics(output)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    samples = sum(record["sequences"] for record in records)
    lines = [line.removeprefix(":::MLLOG ") for line in (output / "mlperf.log").read_text().splitlines()]
    values = {event["key"]: event["value"] for event in map(json.loads, lines)}
    assert (values["train_samples"], values["eval_samples"]) == (samples, EVALUATED)
    assert values["opt_base_learning_rate"] == 9.6e-4, "the run file's own"
    assert values["submission_division"] == "open"
    passed, said = verdict(output / "mlperf.log")
    assert passed, said
