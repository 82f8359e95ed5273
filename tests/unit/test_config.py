"""Run files are read or refused, with messages that name the mistake."""

import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evenpack.config import load_run_file, nearest
from evenpack.data.shuffle.config import GridShuffle
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.optimizers.build import BUILDERS
from evenpack.errors import ConfigError
from evenpack.launch_environment import refuse_other_options
from evenpack.models.config import study_switches
from evenpack.models.families import known_families
from evenpack.yaml_text import read_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
FAMILIES = ", ".join(known_families())


def run_values() -> dict[str, Any]:
    return {
        "run": {"name": "a", "output_dir": "runs/a"},
        "data": {
            "sources": {"wiki": {"kind": "jsonl", "path": None}},
            "tokenizer": {"kind": "gpt2"},
            "recipe": {"kind": "documents", "max_sequence_length": 128},
            "pack_length": 128,
        },
        "model": {"kind": "gpt2", "preset": "tiny"},
        "training": {"packs_per_step": 8, "packs_per_micro_batch": 2, "steps": 10},
        "optimizer": {"learning_rate": 1e-3},
    }


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_values()))
    return path


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_run_file_is_valid(path: Path) -> None:
    config = load_run_file(path, RunConfig)
    assert config.run.name == path.stem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("10", 10), ("0", 0), ("-7", -7), ("+7", 7), ("1_000", 1000), ("0x1F", 31), ("0b11", 3), ("0o17", 15)),
        *(("6e-4", 6e-4), ("1.", 1.0), (".5", 0.5), ("012.5", 12.5), ("-.inf", -math.inf), ("1e3", 1000.0)),
        *(("1:30", "1:30"), ("190:20:30.5", "190:20:30.5"), ("2026-11-22", "2026-11-22"), ("'010'", "010")),
        *(("true", True), ("False", False), ("yes", True), ("off", False), ("~", None)),
    ],
)
def test_scalars_are_read_as_yaml_1_2_has_them_and_yes_and_no_as_1_1(text: str, value: object) -> None:
    found = read_yaml(text, "it")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "remedy"), [("010", "10"), ("08", "8"), ("-017", "-17"), ("00", "0"), ("0_1", "1"), ("!!int '012'", "12")]
)
def test_a_number_that_begins_with_0_is_refused_because_versions_of_yaml_differ(text: str, remedy: str) -> None:
    for written in (text, f"{{steps: {text}}}", f"[1, {text}]"):
        with pytest.raises(ConfigError, match=f"begins with 0, which YAML 1.1 reads as octal.*: write {remedy}, or '"):
            read_yaml(written, "it")


def test_overrides_replace_values_and_are_read_as_yaml(run_file: Path) -> None:
    config = load_run_file(
        run_file,
        RunConfig,
        ["optimizer.learning_rate=6e-4", "data.sources.wiki.path=/data/a=b.jsonl", "deepspeed.extra.steps_per_print=7"],
    )
    assert config.optimizer.learning_rate == 6e-4
    assert config.data.sources["wiki"].path == Path("/data/a=b.jsonl")
    assert config.deepspeed.extra == {"steps_per_print": 7}
    several = load_run_file(run_file, RunConfig, ['data.sources.wiki.path=[b.jsonl, "a/*.jsonl"]'])
    assert several.data.sources["wiki"].path == (Path("b.jsonl"), Path("a/*.jsonl"))


def test_what_one_reading_overrides_is_in_the_next_as_the_file_has_it(run_file: Path) -> None:
    before = load_run_file(run_file, RunConfig)
    assert load_run_file(run_file, RunConfig, ["training.steps=77"]).training.steps == 77
    assert load_run_file(run_file, RunConfig) == before
    sources = "data.sources={own: {kind: text, path: here.txt}}"
    assert load_run_file(run_file, RunConfig, [sources, "data.sources.own.weight=3"]).data.sources["own"].weight == 3
    assert load_run_file(run_file, RunConfig, [sources]).data.sources["own"].weight == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.sources.wiki.pth=x", "did you mean 'path'"),
        ("data.sources.wiki.path=[a, 5]", "data.sources.wiki.path: expected a path or a list of paths, found 5"),
        ("data.recipe.kind=documnts", "'sentence_pairs'"),
        ("data.recipe={kind: sentence_pairs, max_sequence_length: 64, language: English}", "[a-z]{2,3}"),
        ("data.recipe={kind: concat, max_sequence_length: 64, atom: 128}", "set pack_length=64, found 128"),
        ("optimizer.learning_rate=fast", "found 'fast'"),
        ("data.validation_fraction=false", "data: validation_fraction takes numbers, found false"),
        ("schedule={kind: wsd, warmup_steps: 4, decay_steps: 7}", "decay_steps (7) are more than training.steps (10)"),
        ("training.stop_after_steps=11", "stop_after_steps names step 11, above"),
        ("model.max_positions=64", "max_positions (64) is below"),
        ("model={preset: tiny}", f"model: kind is required; known: {FAMILIES}"),
        ("model.mlm_reduction=token", "model.mlm_reduction: no such key"),
        ("min_lr=1e-5", "did you mean schedule.final_fraction?"),  # another unit, so without the value
        ("model.n_layer=8", "model.n_layer: no such key; did you mean model.layers?"),
        ("data.recipe.seq_len=8", "did you mean data.recipe.max_sequence_length, or data.pack_length?"),
        ("document_separator=line", "did you mean data.sources.NAME.document_separator=line?"),
        ("kind=gpt2", "known: attention, data,"),  # there is a key of this name in most sections
        ("training.stps=3", "known: steps,"),
        ("training.steps.x=3", "single value, not a section"),
        ("run={}", "run.name: this key is required"),
    ],
)
def test_a_wrong_override_is_refused_and_explained(run_file: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_run_file(run_file, RunConfig, [override])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run.seed=1", "training.steps", "60", "run.name=x"], r"section\.key=value.*did you mean.*training\.steps=60"),
        (["training.steps", "run.name=x"], "not of the form section.key=value"),
        (["training.steps"], "not of the form section.key=value"),
    ],
)
def test_a_value_that_is_written_apart_is_told_how_to_be_joined(
    run_file: Path, words: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        load_run_file(run_file, RunConfig, words)


@pytest.mark.parametrize("key", ["data.sources.wiki.subset", "model.token_types"])
def test_a_key_of_another_kind_is_not_told_its_own_place(run_file: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: no such key; known:"):
        load_run_file(run_file, RunConfig, [f"{key}=2"])


def test_an_empty_value_followed_by_another_key_is_null(run_file: Path) -> None:
    assert load_run_file(run_file, RunConfig, ["data.prepared_dir=", "training.steps=12"]).data.prepared_dir is None


@pytest.mark.parametrize("known", [[f"key_{number}" for number in range(1000)], ["steps", *map(str, range(500))], []])
def test_a_hint_takes_two_lines_at_most_and_begins_with_the_nearest(known: list[str]) -> None:
    for word in ("stps", "key_77", "", "qqq"):
        lines = nearest(word, known).splitlines()
        assert len(lines) <= 3
        assert sum(map(len, lines)) < 300
    if "steps" in known:
        assert "did you mean 'steps'? known: steps" in nearest("stps", known)


@pytest.mark.parametrize(
    ("asked", "found"),
    [("wt.yml", "wt.yaml"), ("wt", "wt.yaml"), ("sub/a.yaml", "sub/a.yml"), ("gpt2_mini", "gpt2_mini_wiki")],
)
def test_a_run_file_of_nearly_this_name_is_named(
    asked: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("wt.yaml", "sub/a.yml"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=rf"did you mean {found}\b"):
        load_run_file(Path(asked), RunConfig)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--training.steps=60", "training.steps=60"),
        ("--data.sources.wiki.path", "data.sources.wiki.path=VALUE"),
        ("--deepspeed-config=ds.json", "deepspeed.extra"),
    ],
)
def test_an_option_of_other_programs_is_told_its_key(option: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        refuse_other_options(["run.yaml", "a.b=c", option, "x"])
    refuse_other_options(["run.yaml", "--save", "a.json", "--data=texts/a.txt", "training.steps=3", "--local_rank=0"])


@pytest.mark.parametrize(
    "override",
    [
        "training.packs_per_step=100000000",
        "training.steps=1000000000000000000",
        "model.layers=1000000000000",
        "masking.max_predictions=1000000000000",
        "data.tokenizer={kind: external, vocabulary_size: 1000000000000, end_of_text_id: 0}",
    ],
)
def test_a_number_that_no_machine_could_serve_is_refused_before_anything_is_built(
    run_file: Path, override: str
) -> None:
    with pytest.raises(ConfigError, match=r"Input should be less than or equal to [0-9]+, found 10+$"):
        load_run_file(run_file, RunConfig, [override])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: !!int abc", "'abc' cannot be read as int"),
        ("run: 1" + "0" * 9999, "cannot be read as int"),
        ("? [a, b]\n: 1", "a key must be text, found \\['a', 'b'\\]"),
        ("run: {1: 2}", "a key must be text, found 1"),
        ("run: " + "[" * 1200 + "]" * 1200, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_run_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_run_file(path, RunConfig)


def alias_bomb(levels: int) -> str:
    """Returns YAML whose number of values grows ninefold with each line."""
    lines = ["run: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_few_lines_that_stand_for_a_billion_values_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(alias_bomb(9))
    with pytest.raises(ConfigError, match=r"represents [0-9,]{9,} values") as caught:
        load_run_file(path, RunConfig)
    assert len(str(caught.value)) < 500


def test_a_value_is_shown_in_a_line_however_large_it_is(run_file: Path) -> None:
    for override in ("training.steps=" + "9" * 9999, "training." + "s" * 9999 + "=1", "x" * 9999):
        with pytest.raises(ConfigError) as caught:
            load_run_file(run_file, RunConfig, [override])
        assert max(map(len, str(caught.value).splitlines())) < 1000
    run_file.write_text(yaml.safe_dump(run_values() | {"x" * 9999: 1} | {f"y{n}": n for n in range(99)}))
    with pytest.raises(ConfigError, match="and 80 more") as caught:
        load_run_file(run_file, RunConfig)
    assert max(map(len, str(caught.value).splitlines())) < 500


@pytest.mark.parametrize("text", ["2026-11-22", "2026-13-45"])
def test_a_run_may_be_named_by_a_date(run_file: Path, text: str) -> None:
    assert load_run_file(run_file, RunConfig, [f"run.name={text}"]).run.name == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("''", "expected a path, found ''; the current directory is '.'"),
        ('"a\\0b"', "expected a path, found 'a"),
        ("~nobody-of-this-name/x", "no such user"),
    ],
)
def test_what_is_no_path_is_refused(run_file: Path, text: str, expected: str) -> None:
    for key in ("run.output_dir", "data.sources.wiki.path"):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            load_run_file(run_file, RunConfig, [f"{key}={text}"])


def test_what_is_no_file_is_not_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        load_run_file(tmp_path, RunConfig)


def test_pairs_of_sentences_need_text(run_file: Path) -> None:
    overrides = [
        "data.recipe={kind: sentence_pairs, max_sequence_length: 64}",
        "data.tokenizer={kind: external, vocabulary_size: 9, end_of_text_id: 0}",
        "data.sources={wiki: {kind: megatron}}",
    ]
    with pytest.raises(ConfigError, match=r"megatron sources hold no text: give text sources"):
        load_run_file(run_file, RunConfig, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimizer.kind=sgd"], f"optimizer: expected a section whose kind is {' or '.join(BUILDERS)}, found"),
        (["optimizer.bias_correction=true"], "optimizer.bias_correction: no such key"),
        (
            ["optimizer.kind=lamb", "deepspeed.zero_stage=1"],
            "optimizer.kind lamb needs deepspeed.zero_stage=0, found 1",
        ),
        (["training.compile=true", "deepspeed.zero_stage=3"], "training.compile is true at deepspeed.zero_stage=3"),
        (["training.packing_adjustment=lamb_betas"], "lamb_betas needs optimizer.kind=lamb, found adamw"),
        (["schedule.degree=2"], "degree (2.0) is for kind polynomial, found kind cosine"),
        (["training.residual_dtype=bf16", "training.precision=fp32"], "set precision=bf16_autocast, or"),
    ],
)
def test_settings_of_the_step_that_would_be_wrong_are_refused(
    run_file: Path, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_run_file(run_file, RunConfig, overrides)


def test_lamb_is_refused_with_deepspeeds_bf16(run_file: Path) -> None:
    config = load_run_file(run_file, RunConfig, ["optimizer.kind=lamb", "deepspeed.extra.bf16={enabled: true}"])
    with pytest.raises(ConfigError, match=r"'bf16', which evenpack derives: set training\.precision"):
        deepspeed_config(config, 1)


# BERT


def bert_file(tmp_path: Path) -> Path:
    path = tmp_path / "bert.yaml"
    values = run_values() | {"model": {"kind": "bert", "preset": "tiny"}}
    values["data"]["recipe"]["kind"] = "sentence_pairs"
    values["data"]["tokenizer"] = {"kind": "train_word_pieces", "vocabulary_size": 500}
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["data.tokenizer.kind=gpt2", "data.tokenizer.path=x"], "data.tokenizer.kind is gpt2 by an override; left out"),
        (["data.tokenizer.path=x", "data.tokenizer.kind=bert"], "not have: vocabulary_size: 500"),
        (["data.tokenizer.kind=train_word_pieces"], None),
        (["data.sources.wiki.kind=text"], "not have: text_key: 'body'"),
        (["data.recipe.kind=concat", "model.kind=gpt2", "data.tokenizer.kind=train"], "duplication_factor: 3"),
        (["data.recipe.kind=concat", "model.kind=gpt2", "data.tokenizer.kind=train"], "not have: token_types: 2"),
        (["optimizer.kind=adamw"], None),
        (["data.shuffle.kind=permutation"], "not have: block_tokens: 9000"),
    ],
)
def test_an_override_of_a_kind_drops_what_the_file_had_for_another(
    tmp_path: Path, overrides: list[str], note: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    run_file = other_kinds_file(tmp_path)
    with caplog.at_level(logging.INFO, logger="evenpack"):
        for _ in range(2):
            load_run_file(run_file, RunConfig, overrides)
    assert [note in line for line in caplog.messages].count(True) == 1 if note else not caplog.messages


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["data.tokenizer.kind=gpt2", "data.tokenizer.vocabulary_size=9"],
            "data.tokenizer.vocabulary_size: no such key",
        ),
        (["data.tokenizer={kind: gpt2, lower_case: true}", "data.tokenizer.kind=hub"], "data.tokenizer.lower_case: no"),
        (["data.tokenizer.kind=gtp2"], "'gpt2'"),
        (["data.sources.wiki.kind=text", "data.sources.wiki.split=a"], "wiki.split: no such"),
        (["model.kind=gtp2"], "no model family 'gtp2'"),
        (["run.name.kind=a"], "'run.name' is a single value, not a section"),
    ],
)
def test_what_an_override_gives_or_a_file_misspells_is_never_dropped(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    run_file = other_kinds_file(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_run_file(run_file, RunConfig, overrides)
    assert expected in str(caught.value)
    run_file.write_text(run_file.read_text().replace("text_key", "txt_key"))
    with pytest.raises(ConfigError, match=r"data\.sources\.wiki\.txt_key: no such key"):
        load_run_file(run_file, RunConfig, ["data.sources.wiki.kind=text"])


def other_kinds_file(tmp_path: Path) -> Path:
    """Returns a run file whose sections have keys of their kinds."""
    path = bert_file(tmp_path)
    values = yaml.safe_load(path.read_text())
    values["data"]["sources"]["wiki"] |= {"path": "wiki.jsonl", "text_key": "body"}
    values["data"]["recipe"]["duplication_factor"] = 3
    values["data"]["shuffle"] = {"kind": "blocks", "block_tokens": 9000}
    values["model"]["token_types"] = 2
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_section_that_is_written_as_its_kind_alone_takes_overrides(run_file: Path) -> None:
    run_file.write_text(yaml.safe_dump(run_values() | {"data": run_values()["data"] | {"shuffle": "grid"}}))
    config = load_run_file(run_file, RunConfig, ["data.shuffle.rows=4"])
    assert config.data.shuffle == GridShuffle(kind="grid", rows=4)


def test_masks_are_refused_for_a_model_that_has_none(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"models of masked tokens, and model\.kind gpt2 learns from next tokens"):
        load_run_file(run_file, RunConfig, ["masking.share=0.2"])


def test_each_switch_for_study_is_named_and_none_is_on_by_default(tmp_path: Path) -> None:
    for name, value in {
        "attention.isolate": "false",
        "model.reset_positions": "false",
        "model.loss_balancing": "micro_batch",
        "model.next_sentence_reduction": "pack",
        "data.order": "by_length",
    }.items():
        config = load_run_file(bert_file(tmp_path), RunConfig, [f"{name}={value}"])
        found = study_switches(config.model, config.attention) | config.data.study_switches
        assert list(found) == [f"{name} is {value}"]


def test_positions_that_run_through_a_pack_need_as_many_rows(tmp_path: Path) -> None:
    path, longer = bert_file(tmp_path), ["data.pack_length=512", "model.reset_positions=false"]
    assert load_run_file(path, RunConfig, longer[:1]).positions_needed == 128
    assert load_run_file(path, RunConfig, longer).positions_needed == 512
    with pytest.raises(ConfigError, match=r"max_positions \(128\) is below what the data needs \(512\)"):
        load_run_file(path, RunConfig, [*longer, "model.max_positions=128"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["attention.isolate=false", "training.layout=padded"], "attention.isolate: false applies to packs alone"),
        (["model.reset_positions=false", "training.layout=unpadded"], "must be packed, found unpadded"),
        (["data.recipe={kind: padding, max_sequence_length: 128, atom: 64}"], "data.recipe.kind padding do not go"),
        (["data.recipe={kind: documents, max_sequence_length: 128}"], "set model.next_sentence=false to learn from"),
        (
            [
                "data.recipe={kind: documents, max_sequence_length: 128, end_of_text_in_loss: none}",
                "model.next_sentence=false",
            ],
            "end_of_text_in_loss none is for models of next tokens",
        ),
        (["model={kind: gpt2}"], "model.kind gpt2 and data.recipe.kind sentence_pairs do not go together"),
        (["masking.mask_share=0.95"], "exceed 1 together"),
        (["model.heads=3"], "must be a multiple of heads (3)"),
    ],
)
def test_a_wrong_bert_is_refused_and_explained(tmp_path: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_run_file(bert_file(tmp_path), RunConfig, overrides)


def test_a_run_file_is_read_without_loading_what_trains() -> None:
    heavy = "{'torch', 'numpy', 'scipy', 'transformers', 'deepspeed'}"
    code = f"import sys, evenpack.engine.config; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


ROWS = "data.recipe={kind: padding, max_sequence_length: 128, atom: 64}"


def test_rows_that_keep_their_order_are_not_sorted(run_file: Path) -> None:
    assert load_run_file(run_file, RunConfig, [ROWS]).data.keeps_order
    with pytest.raises(ConfigError, match="leave order out, found by_length"):
        load_run_file(run_file, RunConfig, [ROWS, "data.order=by_length"])


@pytest.mark.parametrize(
    "recipe", [ROWS, "data.recipe={kind: concat, max_sequence_length: 64, end_of_text_in_loss: none}"]
)
def test_a_recipe_that_knows_the_end_of_text_needs_documents_that_end(run_file: Path, recipe: str) -> None:
    megatron = "data.sources.wiki={kind: megatron, path: p, require_end_of_text: false}"
    tokenizer = "data.tokenizer={kind: external, vocabulary_size: 9, end_of_text_id: 0}"
    with pytest.raises(ConfigError, match=r"set sources\.wiki\.require_end_of_text=true"):
        load_run_file(run_file, RunConfig, [recipe, megatron, tokenizer])
