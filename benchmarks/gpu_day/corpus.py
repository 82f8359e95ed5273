"""Writes and prepares corpora of random tokens whose lengths are the published ones, with the run files over them.

    python benchmarks/gpu_day/corpus.py DIRECTORY RUN ... [--tiny]

Nothing is downloaded, and it takes seconds. Speed depends on lengths and sizes and not on what the tokens are. The run
files are the shipped ones with another source, without a checkpoint to start from, uncompiled unless a step says
otherwise, and with the step of one of the eight GPUs that they are for; `--tiny` makes them small enough for a CPU.
Corpora that are there are kept.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from evenpack.config import validate
from evenpack.data.keys import derive_key
from evenpack.data.sequences.pairs import PairMasks
from evenpack.data.shards.reading import MaskedSequences
from evenpack.data.shards.writing import ShardForm, new_shard
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.engine.config import RunConfig
from evenpack.files import atomic_directory, write_text
from evenpack.launcher.preparing import prepare_run
from evenpack.shipped import shipped_run_files
from evenpack.studies.lengths.reading import published_histogram

BERT_VOCABULARY, GPT2_VOCABULARY, TINY_VOCABULARY = 30_522, 50_257, 600
MASK_SHARE = 0.15
MOST_MASKS = 76
SHORTEST_PAIR = 7

_MOST_PACKS = {"gpt2_xl": 8}
RUNS = {"bert_large_phase2_sprint": "pairs", "gpt2_small": "documents", "gpt2_xl": "documents"}
"""The shipped run files of the day, and the corpus of each."""

GPUS = 8
"""Those that share a step of the shipped run files."""


def published_lengths(name: str, count: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Returns so many lengths, spread evenly over the published histogram, in a fixed random order."""
    counts = published_histogram(name).counts
    shares = np.cumsum(counts) / counts.sum()
    lengths = 1 + np.searchsorted(shares, (np.arange(count) + 0.5) / count)
    return np.random.default_rng(0).permutation(lengths)


def write_documents(directory: Path, *, count: int, vocabulary_size: int) -> None:
    """Writes documents in Megatron's layout, each ended by the last id of the vocabulary."""
    lengths = np.maximum(2, published_lengths("wikipedia_1024", count))
    tokens = np.random.default_rng(1).integers(0, vocabulary_size - 1, int(lengths.sum()))
    tokens[np.cumsum(lengths) - 1] = vocabulary_size - 1
    hashes = derive_key(0, np.arange(count, dtype=np.uint64))
    with TokenFileWriter(directory / "tokens", vocabulary_size=vocabulary_size) as writer:
        writer.append(tokens, lengths, {"document_hashes": hashes})
        writer.finish()


def write_pairs(directory: Path, *, count: int, vocabulary_size: int) -> None:
    """Writes masked pairs as an HDF5 shard, and a vocabulary of as many words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(vocabulary_size - 5))]
    write_text(directory / "vocab.txt", "\n".join(words) + "\n")
    lengths = np.maximum(SHORTEST_PAIR, published_lengths("wikipedia_512", count))
    random = np.random.default_rng(2)
    tokens = random.integers(5, vocabulary_size, int(lengths.sum()))
    ends = np.cumsum(lengths)
    starts, firsts = ends - lengths, lengths // 2 + 1
    tokens[starts], tokens[starts + firsts - 1], tokens[ends - 1] = 2, 3, 3
    masks = np.clip(np.round(MASK_SHARE * lengths), 1, np.minimum(MOST_MASKS, firsts - 2)).astype(np.int64)
    places = np.concatenate([1 + np.arange(number) for number in masks])  # of the first half, before its [SEP]
    at = np.repeat(starts, masks) + places
    labels = tokens[at].copy()
    tokens[at] = 4
    sequences = MaskedSequences(
        tokens=tokens,
        lengths=lengths,
        first_segment_lengths=firsts,
        next_sentence_labels=np.arange(count) % 2,
        masks=PairMasks(counts=masks, places=places, labels=labels),
    )
    form = ShardForm(layout="variable", row_slots=512, mask_slots=MOST_MASKS, vocabulary_size=vocabulary_size)
    with new_shard(directory / "part_00000_of_00001.hdf5", form, count) as shard:
        shard.append(sequences)


def run_values(name: str, directory: Path, *, tiny: bool) -> dict[str, Any]:
    """Returns the shipped run file over the corpus of the day."""
    values: dict[str, Any] = yaml.safe_load(shipped_run_files()[name].read_text(encoding="utf-8"))
    corpus, data, training = RUNS[name], values["data"], values["training"]
    vocabulary = TINY_VOCABULARY if tiny else GPT2_VOCABULARY
    if corpus == "pairs":
        source = {"kind": "hdf5", "path": str(directory / corpus), "weight": 1}
        data["recipe"] = {"kind": "masked_pairs", "max_sequence_length": 512, "max_predictions": MOST_MASKS}
        data["tokenizer"] = {"kind": "bert", "path": str(directory / corpus)}
    else:
        source = {"kind": "megatron", "path": str(directory / corpus / "tokens"), "weight": 1}
        data["tokenizer"] = {"kind": "external", "vocabulary_size": vocabulary, "end_of_text_id": vocabulary - 1}
    data["sources"] = {"published": source}
    data["prepared_dir"] = str(directory / "prepared" / corpus)
    values["run"]["output_dir"] = str(directory / "runs" / name)
    values["attention"] = {}
    values["deepspeed"] = {"zero_stage": 0}
    training.pop("initialize_from", None)
    training["packs_per_step"] //= GPUS
    # One GPU holds the whole optimizer at ZeRO 0: of GPT-2 XL 80 GB then have no room for the run file's 16 packs.
    training["packs_per_micro_batch"] = min(training["packs_per_micro_batch"], _MOST_PACKS.get(name, 1 << 30))
    training["compile"] = False
    if tiny:
        values["model"] |= {"preset": "tiny"}
        training |= {"packs_per_step": 4, "packs_per_micro_batch": 2, "precision": "fp32"}
    return values


def make(directory: Path, runs: Sequence[str], *, tiny: bool) -> None:
    """Writes and prepares what these runs need."""
    (directory / "run_files").mkdir(parents=True, exist_ok=True)
    configs = {}
    for name in runs:
        values = run_values(name, directory, tiny=tiny)
        configs[RUNS[name]] = validate(values, RunConfig, origin=name)
        write_text(run_file(directory, name), yaml.safe_dump(values, sort_keys=False))
    for corpus, config in configs.items():
        if not (directory / corpus).is_dir():
            with atomic_directory(directory / corpus) as folder:
                if corpus == "pairs":
                    vocabulary = TINY_VOCABULARY if tiny else BERT_VOCABULARY
                    write_pairs(folder, count=300 if tiny else 60_000, vocabulary_size=vocabulary)
                else:
                    vocabulary = TINY_VOCABULARY if tiny else GPT2_VOCABULARY
                    write_documents(folder, count=150 if tiny else 30_000, vocabulary_size=vocabulary)
        prepare_run(config)


def run_file(directory: Path, name: str) -> Path:
    """Returns the path of a run file of the day."""
    return directory / "run_files" / f"{name}.yaml"


def main() -> None:
    """Makes what these runs need."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("runs", nargs="+", choices=list(RUNS), metavar="RUN")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    make(given.directory.absolute(), given.runs, tiny=given.tiny)


if __name__ == "__main__":
    main()
