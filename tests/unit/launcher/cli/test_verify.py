"""`evenpack verify`: its output and exit codes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import Done, evenpack
from prepared_files import two_sources

Verify = Callable[..., Done]


@pytest.fixture
def own_finished(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "finished"))


@pytest.fixture
def verify(corpus: Path, own_finished: Path, tmp_path: Path) -> Verify:
    """Runs the command over `own_finished`."""
    values = {
        "run": {"name": "small", "output_dir": str(tmp_path / "out")},
        "data": {**two_sources(corpus).model_dump(mode="json"), "prepared_dir": str(own_finished)},
        "model": {"kind": "gpt2", "preset": "tiny"},
        "training": {"packs_per_step": 8, "packs_per_micro_batch": 2, "steps": 6},
        "optimizer": {"learning_rate": 1e-3},
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(values))

    return lambda *arguments, command="verify": evenpack(command, run_file, *arguments)


def test_a_sound_set_ends_with_0_and_the_rate(verify: Verify, own_finished: Path) -> None:
    code, shown, progress = verify()
    assert code == 0
    assert f"{own_finished}: all " in shown
    assert "GB/s" in shown
    assert "verifying  100 %" in progress
    _, document, _ = verify("--json")
    assert json.loads(document)["damaged"] == []


def test_damaged_and_missing_files_exit_with_1_and_are_named_with_a_remedy(verify: Verify, own_finished: Path) -> None:
    tokens, plan = (own_finished / "sources" / "wiki" / name for name in ("tokens.bin", "train/packing.json"))
    content = bytearray(tokens.read_bytes())
    content[1001] ^= 0x80
    tokens.write_bytes(content)
    plan.unlink()
    code, shown, _ = verify()
    assert code == 1
    assert f"{plan} cannot be found" in shown
    assert f"{tokens} is not as it was written" in shown
    assert f"remove {own_finished} and prepare again" in shown
    code, document, _ = verify("--json")
    assert code == 1
    found = {damage["file"]: damage["first_bad_byte"] for damage in json.loads(document)["damaged"]}
    assert found == {str(plan): None, str(tokens): [0, len(content) - 1]}


def test_what_is_not_prepared_or_of_other_data_ends_with_2(verify: Verify, own_finished: Path) -> None:
    assert verify("data.pack_length=96")[:2] == (2, "")
    (own_finished / "manifest.json").unlink()
    assert verify()[:2] == (2, "")


def test_a_plan_that_trips_over_a_damaged_file_names_it(verify: Verify, own_finished: Path) -> None:
    path = own_finished / "sources" / "wiki" / "train" / "documents.npy"
    documents = np.load(path)
    documents[:] = 1 << 40  # none of the token file's
    np.save(path, documents)
    code, _, said = verify("--ranks", "1", command="plan")
    assert code == 2
    assert f"{path} is not as it was written" in said
    assert "Traceback" not in said
