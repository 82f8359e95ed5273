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
    for words in (
        "ESTIMATE, not measured: operations of bert large",
        "devices wait in every micro-batch",
        "published (BERT, 512): unpadded arrival",
        "predicts 1.6541 at 8 devices: -0.0240",
        f"Drew {plot}",
    ):
        assert words in out, words
    for scheme in SCHEMES:
        assert len(re.findall(rf"^{scheme.label}  ", out, flags=re.MULTILINE)) >= 3, scheme.label
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_number_of_devices_and_a_log_can_be_drawn(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("\n".join(f"'seq/s': {100 + 10 * (number % 7)}" for number in range(100)))
    plot = tmp_path / "figure.png"
    options = ("--log", log, "--log-devices", "2", "--plot", plot)
    code, out, err = study("wikipedia_512", "--devices", "2", *QUICK, *options)
    assert code == 0, err
    assert "published (BERT, 512): unpadded arrival" in out
    assert "log.txt has no regime of 200 steps" in " ".join(out.split())
    assert "log.txt: lines with 'seq/s'; 90 of 100 steps used" in out
    assert "cut 10 steps: warm-up" in out
    assert plot.exists()


@pytest.mark.slow
def test_the_log_is_shown_by_every_method_with_its_range(tmp_path: Path) -> None:
    log, baseline, saved = (tmp_path / name for name in ("log.txt", "padded.txt", "study.json"))
    rates = np.random.default_rng(3).gumbel(125, 10, 600)
    log.write_text("\n".join(f"'seq/s': {rate:.3f}" for rate in rates))
    baseline.write_text("'seq/s': 100\n" * 80)
    arguments = ("squad_1_1_384", "--devices", "1,64,128,2048", *QUICK, "--log", log, "--baseline-run", baseline)
    _, out, _ = study(*arguments, "--log-devices", "64", "--save", saved)
    rows = json.loads(saved.read_text())["regimes"]["rows"]
    assert [row["devices"] for row in rows] == [64, 128, 2048]
    assert "blocks of its steps resampled" in " ".join(out.split())
    assert "variance between  " not in out
    shown = out.split("Estimated from measured steps: speed-up by each")[1].split("\n\n")[0]
    lines = {label.strip(): values.split() for label, values in re.findall(r"^(\S.*?)  +(.*)$", shown, re.MULTILINE)}
    for method, label in (("gumbel", "gumbel (lowest AIC)"), ("normal", "normal"), ("empirical", "empirical")):
        of_method = [next(one for one in row["estimates"] if one["method"] == method) for row in rows]
        assert lines[label] == [f"{one['expected']:.3f}" for one in of_method], method
    assert lines["lowest, with 95 % intervals"] == [f"{row['lowest']:.3f}" for row in rows]
    assert lines["highest, with 95 % intervals"] == [f"{row['highest']:.3f}" for row in rows]
    assert lines["extrapolated"] == ["no", "no", "yes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "'0' is not a positive integer"),
        (["--pack-length", "256"], "do not fit into a pack of 256"),
        (["--cost-model", "h100"], "neither a file nor a shipped one"),
        (["--log", "LOG", "--regime-steps", "199"], "--regime-steps must be 200 or more, not 199"),
        (["--log", "LOG"], "fewer|at least 50"),
        (["--log", "none.txt"], "none.txt cannot be read"),
        (["--baseline-run", "LOG"], "at least 50"),
        (["--log", "EMPTY"], "no line with a rate"),
        (["--plot", "figure.svg"], "--plot writes a PNG file"),
    ],
)
def test_bad_input_is_refused_before_anything_is_simulated(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "LOG").write_text("'seq/s': 100\n" * 20)
    (tmp_path / "EMPTY").touch()
    monkeypatch.chdir(tmp_path)
    code, out, err = study("squad_1_1_384", *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err.replace("\n", " ")), err
    assert "simulating" not in err
