"""The probe finds the known leaks of transformers and of functions made to leak, and says where it proves nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow_but
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from evenpack.errors import BackendError, ConfigError
from evenpack.studies.probe import Combination, Pack, ProbedCombination, _transformer, probe
from evenpack.studies.tiny_copies import MOST_PARAMETERS, text_configuration, tiny_model

DEFINITIONS = '''
import torch

EMBEDDING = torch.nn.Embedding(100, 8, _weight=torch.randn(100, 8, generator=torch.Generator().manual_seed(1)))

def means(states, borders):
    """The mean of all tokens so far, from each border on."""
    parts = [states[:, start:stop] for start, stop in zip(borders[:-1], borders[1:])]
    return torch.cat([part.cumsum(1) / torch.arange(1, part.shape[1] + 1)[:, None] for part in parts], 1)

def isolating(batch):
    return means(EMBEDDING(batch["input_ids"]), batch["cu_seqlens"].tolist())

def leaky(batch):
    return means(EMBEDDING(batch["input_ids"]), [0, batch["input_ids"].shape[1]])

def leaky_in_training(batch):
    return leaky(batch) if batch["train"] else isolating(batch)

def leaky_in_the_second_layer(batch):
    embeddings = EMBEDDING(batch["input_ids"])
    first = means(embeddings, batch["cu_seqlens"].tolist())
    second = means(first, [0, embeddings.shape[1]])
    return {"outputs": second, "hidden_states": [embeddings, first, second], "embeddings": embeddings}

class GradientsLeak(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1e-3 * gradient.roll(-1, dims=1)

def leaky_in_gradients(batch):
    embeddings = EMBEDDING(batch["input_ids"])
    return {"outputs": means(GradientsLeak.apply(embeddings), batch["cu_seqlens"].tolist()), "embeddings": embeddings}

def each_token_alone(batch):
    return EMBEDDING(batch["input_ids"])

def counting_calls(batch, calls=[]):
    calls.append(batch)
    return isolating(batch) * len(calls)

def writing_into_its_tokens(batch):
    outputs = isolating(batch)
    batch["input_ids"].fill_(11)
    return outputs

def running_positions(batch):
    return isolating(batch) + torch.arange(batch["input_ids"].shape[1])[:, None]

def losses(batch, borders):
    outputs = isolating(batch)
    labels = batch["labels"].roll(-1, 1)
    labels[:, [border - 1 for border in borders[1:]]] = -100
    return {"outputs": outputs, "loss": torch.where(labels == -100, 0, outputs.sum(-1)).sum()}

def targets_cross(batch):
    return losses(batch, [0, batch["input_ids"].shape[1]])

def targets_stay(batch):
    return losses(batch, batch["cu_seqlens"].tolist())

def fails(batch):
    return batch["tokens"]


def returns_predictions(batch):
    return leaky(batch).argmax(-1)

def returns_a_row_too_few(batch):
    return leaky(batch)[:, 1:]

not_a_function = 3
'''


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes functions to be probed into the current folder; returns their module."""
    module = f"probed_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(DEFINITIONS)
    monkeypatch.chdir(tmp_path)
    return module


def rows(model: str, **asked: Any) -> tuple[ProbedCombination, ...]:
    found: tuple[ProbedCombination, ...] = probe(model, **asked).value.combinations
    return found


def tiny_copy(model_type: str) -> Any:
    masked = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    return tiny_model(auto.from_config, text_configuration(CONFIG_MAPPING[model_type](), auto._model_mapping))


def only(model: str, **asked: Any) -> ProbedCombination:
    (row,) = rows(model, **asked)
    return row


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("backend", slow_but(["sdpa"], ["eager", "sdpa", "flex"]))
def test_llama_isolates_by_positions_without_a_cache(backend: str, mode: str) -> None:
    row = only("llama", backend=backend, cache=False, mask="none", mode=mode)
    assert (row.verdict, row.first_leak) == ("isolated", None)
    assert max(row.states) == 0
    assert len(row.states) == 4, "embeddings, two layers, outputs"
    assert row.gradients == (None if backend == "flex" else 0), "flex has no gradients on a CPU"
    if mode == "eval":
        assert row.alone is not None
        assert row.alone < 1e-5
        assert row.positions_restart is True


@pytest.mark.parametrize(("cache", "mask"), [(True, "none"), (False, "ones")])
def test_llama_leaks_with_a_cache_and_with_a_mask_of_ones(cache: bool, mask: str) -> None:
    row = only("llama", backend="sdpa", cache=cache, mask=mask, mode="eval")
    assert (row.verdict, row.first_leak) == ("leaks", "layer 1")
    assert row.states[0] == 0
    assert row.states[-1] > 0.06
    assert row.gradients is not None
    assert row.gradients > 0.06
    assert row.positions_restart is None, "positions that are rotary do not show in a pack that leaks"


def test_targets_of_transformers_cross_borders_where_labels_are_the_tokens() -> None:
    assert only("llama", backend="sdpa", cache=False, mask="none", mode="eval").targets_cross is True
    assert only("bert", backend="sdpa", mask="block", mode="eval").targets_cross is False


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_the_rounding_of_experts_is_no_leak(backend: str) -> None:
    row = only("mixtral", backend=backend, cache=False, mask="none", mode="eval")
    assert row.verdict == "isolated"
    assert row.gradients == 0


def test_modernbert_leaks_by_positions_and_not_with_masks_of_its_two_kinds_of_layers() -> None:
    leaking, isolated = (only("modernbert", backend="sdpa", mask=mask, mode="eval") for mask in ("none", "block"))
    assert (leaking.verdict, leaking.first_leak) == ("leaks", "layer 1")
    assert isolated.verdict == "isolated"
    assert isolated.alone is not None
    assert isolated.alone < 1e-5, "the windows of its layers are in the masks"


def test_dropout_drops_the_same_before_and_after() -> None:
    assert only("bert", backend="sdpa", mask="block", mode="train").verdict == "isolated"


def test_positions_that_are_learned_are_seen_where_the_pack_leaks_too() -> None:
    row = only("roberta", backend="sdpa", mask="none", mode="eval")
    assert (row.verdict, row.positions_restart) == ("leaks", True)


def test_a_model_without_position_ids_is_named_and_leaks() -> None:
    report = probe("mamba2", backend="eager", cache=False, mode="eval").value
    assert {row.verdict for row in report.combinations} == {"leaks"}
    (note,) = report.notes
    assert "mamba2 takes no position_ids" in note
    assert "expected a forward with them" in note


def test_what_a_model_refuses_is_shown_and_proves_nothing() -> None:
    report = probe("gpt2", backend="flex", cache=False, mask="none", mode="eval")
    (row,) = report.value.combinations
    assert row.verdict == "not served"
    assert "flex_attention" in (row.reason or "")
    assert report.exit_code == 1


def test_the_exit_code_is_that_of_the_combinations_asked_for() -> None:
    assert probe("gpt2", backend="sdpa", cache=False, mask="none").exit_code == 0
    assert probe("gpt2", backend="sdpa", cache=False, mode="eval").exit_code == 1, "a mask of ones is among them"


def test_a_directory_is_loaded_with_its_weights_and_a_config_without_them(tmp_path: Path) -> None:
    model = tiny_copy("gpt2")
    config = model.config
    for parameter in model.transformer.h.parameters():
        torch.nn.init.zeros_(parameter)  # what only the weights tell: no layer adds anything
    model.save_pretrained(tmp_path / "model")
    report = probe(str(tmp_path / "model"), backend="sdpa", cache=False, mask="none", mode="eval").value
    assert report.kind == "with its weights"
    assert report.combinations[0].verdict == "cannot tell"
    for path in (tmp_path / "model/config.json", tmp_path / "config_alone"):
        if path.name == "config_alone":
            config.save_pretrained(path)
        assert only(str(path), backend="sdpa", cache=False, mask="none", mode="eval").verdict == "isolated"


OTHER_TYPES = [
    *((name, None, None) for name in ("mllama", "got_ocr2", "fuyu", "blt", "emu3", "phi4_multimodal", "gemma3n")),
    *((name, None, None) for name in ("bamba", "falcon", "xlstm", "mamba2", "jamba", "zamba", "gpt_neo", "funnel")),
    *((name, None, None) for name in ("perceiver", "luke", "esm", "xmod", "ultravbert", "deepseek_v2", "laguna")),
]


@pytest.mark.parametrize(
    ("model_type", "made", "kinds"),
    [
        ("gemma3_text", "Gemma3ForCausalLM", [*["sliding_attention"] * 5, "full_attention"]),
        ("gemma3", "Gemma3ForCausalLM", [*["sliding_attention"] * 5, "full_attention"]),
        ("gemma4", "Gemma4ForCausalLM", [*["sliding_attention"] * 5, "full_attention"]),
        ("modernbert", "ModernBertForMaskedLM", ["full_attention", "sliding_attention"]),
        ("qwen3_5", "Qwen3_5ForCausalLM", [*["linear_attention"] * 3, "full_attention"]),
        ("qwen3_5_moe", "Qwen3_5MoeForCausalLM", [*["linear_attention"] * 3, "full_attention"]),
        ("llama4", "Llama4ForCausalLM", [*["chunked_attention"] * 3, "full_attention"]),
        ("axk2", "AXK2ForCausalLM", ["indexed_attention"] * 2),
        ("dots1", "Dots1ForCausalLM", ["full_attention"] * 2),
        *slow_but(["mllama", "blt", "bamba", "mamba2", "gpt_neo", "luke", "deepseek_v2"], OTHER_TYPES),
    ],
)
def test_a_tiny_copy_is_small_runs_and_has_each_kind_of_layer(
    model_type: str, made: str | None, kinds: list[str] | None
) -> None:
    model = tiny_copy(model_type)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e7
    cache = {} if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else {"use_cache": False}
    assert model(input_ids=torch.arange(10, 42)[None], **cache).logits.isfinite().all()
    if made is not None:
        assert type(model).__name__ == made, "the model of text alone"
        assert model.config.layer_types == kinds
    for window in ("sliding_window", "attention_chunk_size", "local_attention"):
        assert (getattr(model.config, window, None) or 0) <= 8, "shorter than a sequence of the pack"


def test_what_is_small_already_keeps_its_size() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=16, n_head=2, n_layer=1)
    small = tiny_model(AutoModelForCausalLM.from_config, config).config
    assert (small.n_embd, small.n_head, small.n_layer) == (16, 2, 1)


def test_what_cannot_be_made_tiny_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 10**8}))
    with pytest.raises(ConfigError, match=rf"no tiny copy of GPT2Config.*above {MOST_PARAMETERS:,}"):
        probe(str(tmp_path))
    with pytest.raises(ConfigError, match="no tiny copy of Qwen4ExpTextConfig can be built: TypeError"):
        probe("qwen4_exp")


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_function_that_isolates_passes(functions: str, mode: str) -> None:
    row = only(f"{functions}:isolating", mode=mode)
    assert row.verdict == "isolated"
    assert row.positions_restart is (True if mode == "eval" else None)


def test_a_function_that_leaks_is_found(functions: str) -> None:
    assert [row.verdict for row in rows(f"{functions}:leaky")] == ["leaks", "leaks"]
    assert [row.verdict for row in rows(f"{functions}:leaky_in_training")] == ["isolated", "leaks"]


def test_the_layer_that_leaks_is_named(functions: str) -> None:
    row = only(f"{functions}:leaky_in_the_second_layer", mode="eval")
    assert (row.verdict, row.first_leak) == ("leaks", "layer 2")


def test_gradients_alone_can_leak(functions: str) -> None:
    row = only(f"{functions}:leaky_in_gradients", mode="eval")
    assert (row.verdict, row.first_leak, max(row.states)) == ("leaks", "gradients", 0)


def test_a_control_that_does_not_leak_proves_nothing(functions: str) -> None:
    report = probe(f"{functions}:each_token_alone", mode="eval")
    (row,) = report.value.combinations
    assert row.verdict == "cannot tell"
    assert "the control does not leak" in (row.reason or "")
    assert row.positions_restart is None
    assert report.exit_code == 1


def test_a_function_may_write_into_its_tokens(functions: str) -> None:
    found = only(f"{functions}:writing_into_its_tokens", mode="eval")
    assert found == only(f"{functions}:isolating", mode="eval")
    assert found.verdict == "isolated"


def test_a_function_that_answers_differently_each_time_proves_nothing(functions: str) -> None:
    row = only(f"{functions}:counting_calls", mode="eval")
    assert row.verdict == "cannot tell"
    assert "two calls" in (row.reason or "")


def test_positions_that_run_on_are_found(functions: str) -> None:
    row = only(f"{functions}:running_positions", mode="eval")
    assert (row.verdict, row.positions_restart) == ("isolated", False)


def test_targets_that_cross_borders_are_found(functions: str) -> None:
    found = [only(f"{functions}:{name}", mode="eval") for name in ("targets_cross", "targets_stay", "isolating")]
    assert [row.targets_cross for row in found] == [True, False, None]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", "failed with KeyError: 'tokens'"),
        ("returns_predictions", r"returned torch\.int64, in which a small change is lost: return states in floating"),
        ("returns_a_row_too_few", r"returned \[1, 31, 8\] for 32 tokens"),
        ("not_a_function", "has no function 'not_a_function'"),
    ],
)
def test_a_function_of_another_convention_is_told_ours(functions: str, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        probe(f"{functions}:{function}")
    assert "cu_seqlens" in str(caught.value)


def write_config(values: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
        return folder

    return write


def with_broken_weights(folder: Path) -> Path:
    tiny_copy("gpt2").config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    return folder


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_config("{"), "config.json cannot be read.*expected a Hugging Face directory"),
        (write_config({"model_type": "lama"}), "type lama is unknown.*did you mean llama"),
        (write_config({"model_type": "gpt2", "auto_map": {}}), "names code of its own.*never run.*module:function"),
        (write_config({"model_type": "t5"}), "no decoder or encoder of text alone"),
        (with_broken_weights, "cannot be loaded.*expected a Hugging Face directory"),
    ],
)
def test_a_directory_that_cannot_be_probed_says_what_was_expected(
    write: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        probe(str(write(tmp_path)))


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module cannot be imported: ModuleNotFoundError"):
        probe("no_such_module:forward")


def test_combinations_that_do_not_exist_are_refused(functions: str) -> None:
    with pytest.raises(BackendError, match="flash needs a CUDA device"):
        probe("gpt2", backend="flash")
    with pytest.raises(ConfigError, match="bert has no choice of cache"):
        probe("bert", cache=True)
    with pytest.raises(ConfigError, match="has no choice of backend"):
        probe(f"{functions}:isolating", backend="sdpa")


def test_flash_gets_the_borders_that_it_reads() -> None:
    """All four, the lengths as Python numbers; with a mask it gets none of them."""
    pack = Pack(tokens=torch.arange(10, 15), borders=(0, 2, 5))
    subject = _transformer("llama")
    subject.model.config._attn_implementation = "flash_attention_2"
    given = subject._boundaries(pack, Combination(backend="flash", mask="none", mode="train"))
    assert given["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert (given[name].tolist(), given[name].dtype) == ([0, 2, 5], torch.int32)
    assert (given["max_length_q"], given["max_length_k"]) == (3, 3)
    masked = subject._boundaries(pack, Combination(backend="flash", mask="ones", mode="train"))
    assert set(masked) == {"position_ids", "attention_mask"}


def test_settings_of_the_process_are_as_before() -> None:
    before = (torch.get_num_threads(), torch.random.get_rng_state().tolist())
    probe("gpt2", backend="sdpa", cache=False, mask="none", mode="train")
    assert (torch.get_num_threads(), torch.random.get_rng_state().tolist()) == before
