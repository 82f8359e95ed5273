"""`study imbalance`: the command with its three sources."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_line import evenpack
from tiny_run import tiny_gpt2_run

from evenpack.data.prepared import PreparedData
from evenpack.engine.resolving.resolve import resolve
from evenpack.studies.cost_model_estimate import linear_seconds
from evenpack.studies.imbalance.cluster import SCHEMES

QUICK = ("--steps", "30", "--batch", "4")

study = partial(evenpack, "study", "imbalance")


def test_json_has_all_sources_and_every_row(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    random = np.random.default_rng(0)
    log.write_text("\n".join(f"'seq/s': {100 * rate:.3f}" for rate in random.gumbel(1.6, 0.12, 400)))
    baseline = tmp_path / "padded.txt"
    baseline.write_text("'seq/s': 100\n" * 80)
    options = ("--log", log, "--baseline-run", baseline, "--json")
    code, out, _ = study("wikipedia_512", "--devices", "1,8", *QUICK, *options)
    assert code == 0
    values: dict[str, Any] = json.loads(out)
    simulation = values["simulation"]
    assert values["origin"] == "wikipedia_512"
    assert values["devices"] == [1, 8]
    rows = {(row["layout"], row["policy"], row["dense"], row["devices"]) for row in simulation["rows"]}
    assert rows == {(one.layout, one.policy, one.dense, devices) for one in SCHEMES for devices in (1, 8)}
    assert simulation["cost"]["estimated"] is True
    assert simulation["packs_per_micro_batch"] == 2
    reference = values["reference"]
    assert reference["single"]["location"] == pytest.approx(1.94, abs=0.01)
    assert reference["single"]["scale"] == pytest.approx(0.318, abs=0.001)
    assert [row["expected"] for row in reference["rows"]] == pytest.approx([2.12, 1.65], abs=0.01)
    assert reference["fitted"] == {"location": 1.6038, "scale": 0.1288}
    assert values["measured"]["run"]["steps_used"] == 390
    assert values["regimes"]["rows"][0]["best"]["expected"] == pytest.approx(1.6 + 0.12 * np.euler_gamma, abs=0.04)


def test_a_run_is_simulated_with_its_own_model(tmp_path: Path) -> None:
    config = tiny_gpt2_run(tmp_path)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    code, out, _ = study(run_file, "--devices", "2", *QUICK, "--json")
    assert code == 0
    cost = json.loads(out)["simulation"]["cost"]
    assert cost["causal"] is True
    assert "ESTIMATE, not measured: operations of gpt2 tiny at rates measured on one h100" in cost["origin"]
    run = resolve(config, PreparedData.open(config.prepared_dir, config.data))
    expected = linear_seconds(
        config.model,
        vocabulary_size=run.prepared.vocabulary_size,
        max_positions=run.config.max_positions,
        head_share=1.0,
        optimizer=config.optimizer,
        device="h100",
    )
    for name in ("constant", "per_slot", "per_squared_length", "per_step"):
        assert cost[name] == pytest.approx(getattr(expected, name), rel=1e-12)


@pytest.mark.slow
def test_tables_name_the_estimate_and_every_scheme(tmp_path: Path) -> None:
    plot = tmp_path / "new" / "figure.png"
    arguments = ("wikipedia_512", "--devices", "1..4", *QUICK)
    code, out, err = study(*arguments, "--accumulation", "2", "--zero-stage", "2", "--plot", plot)
    assert code == 0, err
    assert "ESTIMATE, not measured: operations of bert large" in out
    for scheme in SCHEMES:
        assert len(re.findall(rf"^{scheme.label}  ", out, flags=re.MULTILINE)) >= 3, scheme.label
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pack-length", "256"], "do not fit into a pack of 256"),
        (["--cost-model", "h100"], "neither a file nor a shipped one"),
        (["--log", "LOG", "--regime-steps", "199"], "--regime-steps must be 200 or more, not 199"),
        (["--baseline-run", "LOG"], "at least 50"),
        (["--plot", "figure.svg"], "--plot writes a PNG file"),
    ],
)
def test_bad_input_is_refused_before_anything_is_simulated(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "LOG").write_text("'seq/s': 100\n" * 20)
    monkeypatch.chdir(tmp_path)
    code, out, err = study("squad_1_1_384", *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err.replace("\n", " ")), err
    assert "simulating" not in err
