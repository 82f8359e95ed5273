"""Measures BERT's data: the distance of pair lengths to the published ones, and the cost of making and masking pairs.

    python benchmarks/sentence_pairs.py --path FILE.jsonl.zst --tokenizer DIR

It tokenises the file once and draws the pairs of ten passes at 128, 384 and 512 tokens. `by_pass` is the mean over the
passes of each pass's own distance, `all_passes` that of all lengths together. Rates are per CPU second of this process,
all its threads together: sentences and tokens of the bare batch encoder over whole documents, of splitting and
encoding sentence by sentence, of drawing pairs and copying their tokens, and tokens of masking pairs, in one call and
with 16 sequences per call. Each is the median of a few rounds.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring
import numpy as np

from evenpack.data.config import DataConfig
from evenpack.data.packing import LengthHistogram
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.recipes import MaskingConfig, SentencePairsRecipe
from evenpack.data.sequences.masking import mask_sequences, masking_keys
from evenpack.data.sequences.pair_drawing import PairDrawing, SentenceIndex, split_sentences
from evenpack.data.sources.kinds import open_corpus
from evenpack.data.tokenizers.config import BertTokenizer
from evenpack.data.tokenizers.loading import load_tokenizer
from evenpack.data.tokens.file import TokenFile
from evenpack.studies.lengths.reading import published_histogram
from evenpack.studies.lengths.statistics import largest_cdf_gap, total_variation

PASSES = 10
SAMPLED_DOCUMENTS = 10
"""The rates are measured on every document whose number is a multiple of this."""
TURNS = 3


def main() -> None:
    arguments = _parse_arguments()
    scratch = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        config = _config(arguments)
        started = time.process_time()
        prepare(config, scratch / "data")
        report: dict[str, Any] = {"prepare_cpu_seconds": time.process_time() - started, "passes": PASSES}
        token_file = TokenFile(scratch / "data" / "sources" / "text" / "tokens")
        index = SentenceIndex.open(token_file)
        report |= {"sentences": len(index.places) - 1, "text_tokens": int(index.places[-1])}
        report |= {f"lengths_{longest}": _lengths(index, longest) for longest in (128, 384, 512)}
        report |= _encoding_rates(config) | _pair_rates(config, scratch / "data", index)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(report, indent=2))


def _config(arguments: argparse.Namespace) -> DataConfig:
    return DataConfig.model_validate(
        {
            "sources": {"text": {"kind": "jsonl", "path": arguments.path}},
            "validation_fraction": 0.0,
            "tokenizer": {"kind": "bert", "path": arguments.tokenizer},
            "recipe": {"kind": "sentence_pairs", "max_sequence_length": 512, "duplication_factor": PASSES},
            "pack_length": 512,
        }
    )


def _lengths(index: SentenceIndex, longest: int) -> dict[str, float]:
    """Returns the distances of the pairs' lengths to the published histogram."""
    recipe = SentencePairsRecipe(kind="sentence_pairs", max_sequence_length=longest)
    published = published_histogram(f"wikipedia_{longest}")
    documents = np.flatnonzero(np.diff(index.first_sentences))
    drawing = PairDrawing(index, documents, recipe)
    passes, random_nexts = [], 0
    for number in range(PASSES):
        spans = drawing.draw(0, len(documents), number)
        passes.append(LengthHistogram.from_lengths(spans.lengths, longest=longest))
        random_nexts += int(spans.is_random_next.sum())
    together = LengthHistogram(counts=np.sum([histogram.counts for histogram in passes], axis=0))
    return {
        "pairs": together.sequences,
        "mean_length": together.tokens / together.sequences,
        "published_mean_length": published.tokens / published.sequences,
        "random_next_share": random_nexts / together.sequences,
        "total_variation_all_passes": total_variation(together, published),
        "total_variation_by_pass": statistics.mean(total_variation(histogram, published) for histogram in passes),
        "largest_cdf_gap_all_passes": largest_cdf_gap(together, published),
        "largest_cdf_gap_by_pass": statistics.mean(largest_cdf_gap(histogram, published) for histogram in passes),
    }


def _encoding_rates(config: DataConfig) -> dict[str, float]:
    assert isinstance(config.tokenizer, BertTokenizer)
    tokenizer = load_tokenizer(config.tokenizer)
    documents = open_corpus("text", config.sources["text"]).documents()
    texts = [document.text for number, document in enumerate(documents) if number % SAMPLED_DOCUMENTS == 0]
    encoded = tokenizer.encode_sentences([split_sentences(text, "en") for text in texts])
    sentences = len(encoded.columns["sentence_lengths"])
    whole = measuring.median_cpu_seconds(lambda: tokenizer.encode_batch(texts), TURNS)
    apart = measuring.median_cpu_seconds(
        lambda: tokenizer.encode_sentences([split_sentences(text, "en") for text in texts]), TURNS
    )
    return {
        "encoder_sentences_per_second": sentences / whole,
        "encoder_tokens_per_second": len(encoded.tokens) / whole,
        "sentence_encoder_sentences_per_second": sentences / apart,
        "sentence_encoder_tokens_per_second": len(encoded.tokens) / apart,
    }


def _pair_rates(config: DataConfig, directory: Path, index: SentenceIndex) -> dict[str, float]:
    """Returns rates of a second call with existing tokens, writing and packing included, and of masking."""
    prepared = PreparedData.open(directory, config)
    shutil.rmtree(directory / "sources" / "text" / "train")
    (directory / "manifest.json").unlink()
    pairs = measuring.median_cpu_seconds(lambda: prepare(config, directory), 1)
    view = prepared.view("text", "train")
    ids = np.arange(8192)
    tokens, lengths = view.read(ids).tokens.astype(np.int64), view.lengths()[ids]
    offsets = np.append(0, np.cumsum(lengths))
    keys = masking_keys(0, np.zeros_like(ids), np.zeros_like(ids, dtype=np.uint64), ids)
    rates = {"pair_making_sentences_per_second": PASSES * (len(index.places) - 1) / pairs}
    vocabulary = prepared.tokenizer.masking_vocabulary()
    for whole_words in (False, True):
        settings = MaskingConfig(whole_words=whole_words)
        for batch in (len(ids), 16):

            def mask(settings: MaskingConfig = settings, batch: int = batch) -> None:
                for first in range(0, len(ids), batch):
                    bounds = offsets[first : first + batch + 1]
                    chunk = tokens[bounds[0] : bounds[-1]]
                    mask_sequences(chunk, bounds - bounds[0], keys[first : first + batch], settings, vocabulary)

            name = f"masking_{'words' if whole_words else 'tokens'}_{batch}_sequences_tokens_per_second"
            rates[name] = len(tokens) / measuring.median_cpu_seconds(mask, TURNS)
    return rates


def _parse_arguments() -> argparse.Namespace:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--path", type=Path, required=True, help="documents, one JSON object with `text` a line")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with BERT's vocab.txt")
    parser.add_argument("--directory", type=Path, help="where to write, about 30 bytes for each token of text")
    return parser.parse_args()


if __name__ == "__main__":
    main()
