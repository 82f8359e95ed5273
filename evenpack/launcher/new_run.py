"""A shipped run file, changed for a user's data, model and devices, and written with the meaning of each key."""

import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from evenpack.config import validate
from evenpack.data.tokenizers.config import TokenizerConfig
from evenpack.data.tokenizers.loading import load_tokenizer, tokenizer_kind_of
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.files import write_text
from evenpack.launcher.key_reference import Key, find_keys, keys_of
from evenpack.launcher.processes.start import DEFAULT_CPU_RANKS
from evenpack.models.families import find_family
from evenpack.shipped import first_comment, shipped_run_files
from evenpack.units import counted
from evenpack.yaml_text import read_yaml

MODELS = {
    "gpt2_mini": "gpt2_mini_wiki",
    "llama_mini": "llama_mini_wiki",
    "bert_mini": "bert_mini_wiki",
    "modernbert_mini": "modernbert_mini_wiki",
    "gpt2_small": "gpt2_small",
    "gpt2_xl": "gpt2_xl",
    "llama_160m": "llama_160m",
    "llama_1.1b": "llama_1.1b",
    "llama_8b": "llama_8b",
    "bert_base": "bert_base_phase1",
    "bert_large": "bert_large_phase1",
    "modernbert_base": "modernbert_base",
}
"""Each with the shipped run file that it begins with; those called mini are for CPU cores, the others for GPUs."""

_GPUS_OF_A_NODE = 8
"""GPUs of one machine; a larger number is taken to be on several machines."""
_COLUMNS = 100
_MINI_VOCABULARY = 8192
"""Entries of a vocabulary that is trained for a model on CPU cores."""


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """The data, model and devices for which a run file is written."""

    name: str
    sources: Mapping[str, Mapping[str, Any]]
    """The sections of its sources by name."""
    model: str
    """Name of a model in `MODELS`."""
    tokenizer: Path | None
    """The folder with the vocabulary, or for the kind `hub` a name there; None: one is trained on the data."""
    devices: int
    """GPUs of all machines together; 0: CPU cores."""

    @property
    def place(self) -> str:
        """Says in words where the run takes place."""
        return counted(self.devices, "GPU") if self.devices else f"{DEFAULT_CPU_RANKS} CPU ranks"

    def plan_command(self, run_file: Path) -> str:
        """Returns the command that shows the plan on these devices."""
        ranks = f" --ranks {self.devices}" if self.devices else ""
        return f"evenpack plan {shlex.quote(str(run_file))}{ranks}"

    def next_commands(self, run_file: Path) -> list[str]:
        """Returns the commands that follow."""
        file = shlex.quote(str(run_file))
        where = ""
        if self.devices:
            where = f" --num-gpus {self.devices}" if self.devices <= _GPUS_OF_A_NODE else " --hostfile HOSTFILE"
        return [
            f"evenpack prepare {file}",
            self.plan_command(run_file),
            f"evenpack train {file}{where}",
            f"evenpack evaluate {file}",
        ]


def write_run_file(path: Path, new: NewRun) -> None:
    """Writes the run file. Raises: ConfigError if there is a file already, or if what was asked for does not fit."""
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another name, or remove it")
    values = run_values(new)
    validate(values, RunConfig, origin=str(path))
    shipped = MODELS[new.model]
    comment = (
        f"Made of {shipped} ({first_comment(shipped_run_files()[shipped]).rstrip('.')}) for "
        f"{' and '.join(new.sources)}, on {new.place}. `evenpack config explain KEY` explains a key, also one "
        "that is not in this file. Steps and learning rate are taken from the shipped file: "
        f"`{new.plan_command(path)}` shows what they mean for this data."
    )
    write_commented(path, values, comment)


def write_commented(path: Path, values: Mapping[str, Any], comment: str) -> None:
    """Writes the sections of a run file below a comment, with the meaning of each key above it."""
    write_text(path, "\n".join([*_comment(comment), *_lines(values, keys_of(RunConfig), ""), ""]))


def run_values(new: NewRun) -> dict[str, Any]:
    """The sections of the run file."""
    text = shipped_run_files()[MODELS[new.model]].read_text(encoding="utf-8")
    values: dict[str, Any] = read_yaml(text, "the shipped run file")
    values["run"] |= {"name": new.name, "output_dir": f"runs/{new.name}"}
    several = len(new.sources) > 1
    sources = {name: {**section, **({"weight": 1} if several else {})} for name, section in new.sources.items()}
    values["data"] |= {"sources": sources, "tokenizer": _tokenizer(values, new)}
    values["training"] |= _training(values["training"], new.devices)
    return values


def _tokenizer(shipped: Mapping[str, Any], new: NewRun) -> dict[str, Any]:
    """The vocabulary of the kind that the shipped file takes, or one trained for its model."""
    if new.tokenizer is not None:
        kind = tokenizer_kind_of(new.tokenizer, like=shipped["data"]["tokenizer"]["kind"])
        return {"kind": kind, "name" if kind == "hub" else "path": str(new.tokenizer)}
    is_mini = new.model.endswith("_mini")
    if find_family(shipped["model"]["kind"]).objective == "masked_tokens":
        return {"kind": "train_word_pieces", "vocabulary_size": _MINI_VOCABULARY if is_mini else 30_522}
    return {"kind": "train", "vocabulary_size": _MINI_VOCABULARY if is_mini else 32_768}


def require_tokenizer(new: NewRun) -> list[str]:
    """Loads the given vocabulary, if there is one in files, and returns a sentence on its cost where it is large.

    Raises: ConfigError or DataError if it cannot be used.
    """
    if new.tokenizer is None:
        return []
    section = run_values(new)["data"]["tokenizer"]
    is_name = section["kind"] == "hub" and not new.tokenizer.is_absolute() and len(new.tokenizer.parts) <= 2
    if new.tokenizer.is_dir():
        files: Any = TypeAdapter(TokenizerConfig).validate_python(section)  # of a kind that is read from files
        entries = load_tokenizer(files).vocabulary_size
        if not new.devices and entries > 2 * _MINI_VOCABULARY:
            return [
                f"The vocabulary has {entries:,} entries: on CPU cores they are most of a small model's work, whose "
                f"steps take several times as long as with {_MINI_VOCABULARY:,} that are trained on the data (leave "
                "--tokenizer out)"
            ]
    elif not is_name:
        raise ConfigError(
            f"--tokenizer {new.tokenizer} is not a folder: give the folder of a vocabulary for {new.model}, or leave "
            "the option out to train one on the data"
        )
    return []


def _training(shipped: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The micro-batch and the step nearest to the shipped one that divide by the ranks, precision and compilation."""
    ranks = devices or DEFAULT_CPU_RANKS
    of_a_rank = max(1, shipped["packs_per_step"] // ranks)
    micro_batch = min(shipped["packs_per_micro_batch"], of_a_rank)
    micro_batches = max(1, round(shipped["packs_per_step"] / (ranks * micro_batch)))
    return {
        "packs_per_step": ranks * micro_batch * micro_batches,
        "packs_per_micro_batch": micro_batch,
        "precision": "bf16_autocast" if devices else "fp32",
        **({"compile": bool(devices)} if "compile" in shipped else {}),
    }


def _lines(values: Mapping[str, Any], keys: Sequence[Key], place: str) -> Iterator[str]:
    """The values as YAML, with the meaning of each key above it."""
    indent = "  " * place.count(".") + ("  " if place else "")
    for name, value in values.items():
        here = f"{place}.{name}" if place else name
        if not place:
            yield ""
        yield from (f"{indent}{line}" for line in _comment(_meaning(keys, here, values), width=_COLUMNS - len(indent)))
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, keys, here)
        elif isinstance(value, list):
            yield f"{indent}{name}:"
            yield from (f"{indent}  - {_scalar(item)}" for item in value)
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()


def _meaning(keys: Sequence[Key], place: str, siblings: Mapping[str, Any]) -> str:
    """The first sentence of what a key means, with its unit; none of `kind`, nor of a name that others chose."""
    if place.endswith(".kind") or place.rpartition(".")[0] == "data.sources":
        return ""
    try:
        found = find_keys(keys, place)
    except ConfigError:  # where any key is allowed, such as below deepspeed.extra
        return ""
    kind = siblings.get("kind")
    key = next((key for key in found if kind in key.kinds), found[0])
    sentence = re.split(r"(?<=[.;:])(?<!\bal\.)\s(?!\()", key.meaning)[0].rstrip(".;:")
    return f"{sentence} ({key.unit})" if key.unit else sentence


def _comment(text: str, *, width: int = _COLUMNS) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, width - 2)]
