"""The roofline of runs: parts add up to the model's operations, fusions bring it nearer to the floor, nothing is
guessed."""

import json
from pathlib import Path

import pytest
from drawn_figures import keep_figures, texts_of
from matplotlib.figure import Figure

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.launcher.cli import app as cli
from evenpack.models.cost import Work, step_flops
from evenpack.models.traffic import FUSIONS, PARTS
from evenpack.studies.roofline import presentation
from evenpack.studies.roofline.command import RooflineCommand
from evenpack.studies.roofline.presentation import verdict
from evenpack.studies.roofline.study import Roofline, study_roofline

WIKI = ("data.sources.wiki.path=wiki/", "data.tokenizer.path=bert/")
WEB = ("data.sources.web.path=web/", "data.tokenizer.path=gpt2/")


def run_of(name: str, *overrides: str) -> RunConfig:
    paths = [
        word for word in (WIKI if name.startswith("bert") else WEB) if "tokenizer" not in word or "llama" not in name
    ]
    return load_run_file(Path(name), RunConfig, [*paths, *overrides])


def roofline(
    name: str,
    *overrides: str,
    device: str = "h100",
    devices: int = 8,
    goal: float | None = None,
    vocabulary_size: int = 50_257,
) -> Roofline:
    given = RooflineCommand(device=device, devices=devices, vocabulary_size=vocabulary_size, goal=goal)
    return study_roofline(run_of(name, *overrides), given)


@pytest.mark.parametrize("name", ["gpt2_small", "gpt2_xl", "llama_160m"])
def test_parts_have_the_runs_operations_and_lie_between_floor_and_estimate(name: str) -> None:
    found = roofline(name)
    config = run_of(name)
    slots = found.slots_per_micro_batch
    work = Work(slots=slots, squared_lengths=slots * config.data.pack_length, head_slots=slots, sequences=0)
    flops = step_flops(config.model, vocabulary_size=50_257, work=work)
    assert sum(row.flops for row in found.parts) == found.micro_batches * flops
    assert [row.part for row in found.parts] == list(PARTS)
    for row in found.parts:
        assert row.floor_seconds <= row.fused_seconds <= row.expected_seconds
    assert found.tokens_per_step == found.micro_batches * slots  # full packs, where the data is not prepared
    rates = [found.expected_tokens_per_second, *(row.tokens_per_second for row in found.fusions)]
    assert rates == sorted(rates)
    assert rates[-1] < found.floor_tokens_per_second
    assert [row.fusion for row in found.fusions] == list(FUSIONS)
    assert min(row.saved_seconds for row in found.fusions) > 0
    assert 0.2 < found.expected_mfu < 0.6
    assert found.expected_mfu == pytest.approx(flops / slots * found.expected_tokens_per_second / 989.4e12, rel=1e-12)


def test_an_encoder_is_estimated_with_its_masked_tokens_and_its_dropout() -> None:
    found, without = roofline("bert_large_phase2_sprint"), roofline("bert_large_phase2_sprint", "model.dropout=0")
    head = next(row for row in found.parts if row.part == "head and loss")
    assert 0.01 < head.flops / sum(row.flops for row in found.parts) < 0.03
    assert found.expected_tokens_per_second < without.expected_tokens_per_second
    assert "dropout of attention costs nothing" in found.assumptions
    assert "dropout of attention costs nothing" not in without.assumptions


def test_a_faster_device_takes_less_time_and_a_small_model_waits_for_its_host() -> None:
    assert not roofline("gpt2_small").is_host_bound
    small = ("model.preset=tiny", "training.packs_per_micro_batch=1")
    waiting, faster = (roofline("gpt2_small", *small, device=name, vocabulary_size=1000) for name in ("h100", "b200"))
    assert waiting.is_host_bound
    assert faster.expected_tokens_per_second == pytest.approx(waiting.expected_tokens_per_second, rel=1e-9)
    assert (
        roofline("gpt2_xl", device="b200").expected_tokens_per_second
        > 1.5 * roofline("gpt2_xl").expected_tokens_per_second
    )


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        (1000.0, "the estimate is within it."),
        (480_000.0, "the estimate is within it with all fusions up to 'fused head'."),
        (700_000.0, "the estimate is above it with all fusions."),
        (9e6, "less than the floor, so it cannot be reached."),
    ],
)
def test_a_goal_is_compared_with_the_estimate_and_the_floor(goal: float, words: str) -> None:
    said = verdict(roofline("gpt2_small", goal=goal))
    assert words in said
    assert "Most above the floor: head and loss (" in said


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ((), {"device": "h999"}, "the peak of a device 'h999' is not known"),
        ((), {"device": "t4"}, "t4 does not compute bfloat16: name another device"),
        ((), {"device": "gh200"}, "the memory bandwidth of gh200 is not known"),
        ((), {"devices": 0}, "--devices must be 1 or more"),
        ((), {"goal": 0.0}, "--goal must be tokens per second"),
        ((), {"devices": 7}, "7 ranks"),
        (("training.precision=fp32",), {}, "training.precision=bf16_autocast, found fp32"),
        (("training.layout=padded",), {}, "training.layout=packed or unpadded, found padded"),
        (("model.activation_checkpointing=true",), {}, "model.activation_checkpointing=false, found true"),
    ],
)
def test_what_is_not_traced_is_refused(overrides: tuple[str, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roofline("gpt2_small", *overrides, **options)  # type: ignore[arg-type]


def test_the_command_prints_and_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures: list[Figure] = keep_figures(monkeypatch, presentation)
    plot = tmp_path / "roofline.png"
    words = ["study", "roofline", "gpt2_xl", *WEB, "--devices", "8", "--goal", "50000", "--vocabulary-size", "50257"]
    for options in (["--plot", str(plot)], ["--json"]):
        monkeypatch.setattr("sys.argv", ["evenpack", *words, *options])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert not exit_.value.code
        shown = capsys.readouterr().out
        if options != ["--json"]:
            for name in (*PARTS, "launches", "all fused, at the peaks", "ESTIMATE, not measured", f"Drew {plot}"):
                assert name in shown
    value = json.loads(shown)
    assert (value["goal"], value["device"], len(value["parts"])) == (50_000, "h100", len(PARTS))
    assert "The goal of 50,000 tokens/s allows" in texts_of(figures[0])
    assert plot.read_bytes().startswith(b"\x89PNG")
