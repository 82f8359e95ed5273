"""BERT through the commands, with two ranks and LAMB: pairs, evaluation, and export to transformers.

How a command starts ranks depends on no family: test_commands.py has that.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from masked_batches import MaskedPair, build_masked_batch
from pair_sources import pair_run_values
from prepared_files import sentence_documents, write_jsonl
from run_files import changed, write_run_file
from scored_tokens import masked_token_logits, next_sentence_logits
from small_run import evenpack, metrics, train_on
from transformers import AutoTokenizer, BertForPreTraining

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.launcher.training import check_training, report_training
from evenpack.models.bert.model import Bert
from evenpack.models.huggingface import from_huggingface

pytestmark = pytest.mark.slow
"""`test_golden` has the same commands over a smaller run; the families' tests compare logits with transformers."""

STEPS = 4
TEXTS = ("late pillow dunk", "tad coven kad")
VOCABULARY = 120


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares a run and trains it on two ranks."""
    folder = tmp_path_factory.mktemp("bert")
    write_jsonl(folder / "sentences.jsonl", sentence_documents(200, seed=1))
    values = pair_run_values(
        folder,
        data={
            "sources": {"sentences": {"kind": "jsonl", "path": str(folder / "sentences.jsonl")}},
            "validation_fraction": 0.2,
            "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": VOCABULARY},
            "recipe": {"kind": "sentence_pairs", "max_sequence_length": 64, "duplication_factor": 1},
            "pack_length": 64,
        },
        training={"steps": STEPS, "evaluate_every_steps": STEPS, "evaluation_packs": 20},
        optimizer={"learning_rate": 0.05},
    )
    path = write_run_file(folder / "run.yaml", values)
    evenpack("prepare", path)
    run_ranks(train_on, 2, load_run_file(path, RunConfig))
    return path


@pytest.fixture(scope="module")
def exported(run_file: Path) -> Path:
    directory = run_file.parent / "exported"
    done = evenpack("export", run_file, str(directory), options=["--json"])
    assert json.loads(done.stdout) == {"directory": str(directory), "step": STEPS, "tokenizer": True}
    return directory


def test_a_run_reports_both_losses_from_the_first_step(run_file: Path) -> None:
    records = metrics(run_file.parent / "out")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["loss"] == record["token_loss"] + record["next_sentence_loss"]
        assert 0 <= record["next_sentence_accuracy"] <= 1
        for name in ("token_loss", "next_sentence_loss"):  # divided by what the step holds, as the reported ones are
            assert record[f"optimised_{name}"] == pytest.approx(record[name], rel=1e-6)
    assert records[0]["token_loss"] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert records[-1]["token_loss"] < records[0]["token_loss"]


def test_the_end_of_a_run_has_both_losses_by_themselves(run_file: Path) -> None:
    config = load_run_file(run_file, RunConfig)
    report = report_training(check_training(config, ranks=2))
    assert report is not None
    first, last = metrics(config.run.output_dir)[0], metrics(config.run.output_dir)[-1]
    for loss in ("token_loss", "next_sentence_loss"):
        assert (report[f"first_{loss}"], report[f"last_{loss}"]) == (first[loss], last[loss])
    assert report["packing_factor"] == pytest.approx(1.5, abs=0.5)
    other = report_training(check_training(changed(config, training={"layout": "unpadded"}), ranks=2))
    assert other is not None
    assert "packing_factor" not in other


def test_evaluate_finds_what_training_has_seen_and_shows_next_sentences(run_file: Path) -> None:
    seen = metrics(run_file.parent / "out")[-1]["validation"]["sentences"]
    found = json.loads(evenpack("evaluate", run_file, options=["--json"]).stdout)["sources"]["sentences"]
    assert found == pytest.approx(seen, rel=1e-5)
    assert found["packs"] == 20
    shown = evenpack("evaluate", run_file).stdout
    assert "next-sentence" in shown
    assert f"{found['next_sentence_loss']:.4f}" in shown


def encoded_pair(directory: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return dict(tokenizer(*TEXTS))


def test_the_exported_tokenizer_makes_pairs_as_training_did(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS)
    assert tokenizer.unk_token_id not in a + b
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    pair = encoded_pair(exported)
    assert pair["input_ids"] == [start, *a, end, *b, end]
    assert pair["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    roles = [tokenizer.pad_token_id, tokenizer.unk_token_id, start, end, tokenizer.mask_token_id]
    assert roles == tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]


def test_transformers_gives_our_logits_and_recognises_the_padding(exported: Path) -> None:
    theirs, loading = BertForPreTraining.from_pretrained(exported, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert theirs.config.pad_token_id == theirs.bert.embeddings.word_embeddings.padding_idx == tokenizer.pad_token_id
    assert theirs.config.vocab_size == len(tokenizer) == VOCABULARY
    ours = from_huggingface(exported).eval()
    assert isinstance(ours, Bert)
    pair = encoded_pair(exported)
    masked = {position: pair["input_ids"][position] for position in (2, 5)}
    tokens = [tokenizer.mask_token_id if place in masked else token for place, token in enumerate(pair["input_ids"])]
    batch, _ = build_masked_batch(
        [[MaskedPair(tokens=tokens, token_types=pair["token_type_ids"], masked=masked, next_sentence_label=0)]],
        "packed",
        max_sequence_length=64,
    )
    with torch.no_grad():
        outputs = theirs.eval()(torch.tensor([tokens]), token_type_ids=torch.tensor([pair["token_type_ids"]]))
        masked_logits, pair_logits = masked_token_logits(ours, batch), next_sentence_logits(ours, batch)
    assert outputs.prediction_logits.std() > 0
    torch.testing.assert_close(masked_logits[:2], outputs.prediction_logits[0, [2, 5]], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(pair_logits[0], outputs.seq_relationship_logits[0], rtol=0.0, atol=1e-5)


def test_what_is_exported_is_the_model_that_was_trained(run_file: Path, exported: Path) -> None:
    """The exported model's loss on the held-out pairs is that of the run."""
    from evenpack.engine.evaluate import evaluate_model
    from evenpack.engine.resolving.resolve import open_run
    from evenpack.engine.world.distributed import World

    config = load_run_file(run_file, RunConfig, [])
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    found = evaluate_model(from_huggingface(exported), open_run(config), world)["sentences"]
    seen = metrics(run_file.parent / "out")[-1]["validation"]["sentences"]
    assert found.to_json() == pytest.approx(seen, rel=1e-5)
