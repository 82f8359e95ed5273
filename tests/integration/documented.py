"""Types the commands of a page of the documentation, one after another as a reader would, at a small size."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetuning_tasks import SPECIAL, WORDS, write_sentences
from repository import ROOT
from small_run import evenpack, evenpack_process


def write_inputs(folder: Path, corpus: str, documents: Sequence[str]) -> None:
    """Writes a corpus, a vocabulary of BERT's kind, and SST-2, where the pages have them."""
    for name in (corpus, "bert", "glue"):
        (folder / name).mkdir()
    (folder / corpus / "part.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (folder / "bert" / "vocab.txt").write_text("\n".join(SPECIAL + WORDS) + "\n")
    write_sentences(folder / "glue" / "SST-2", training=64, evaluation=16)


def type_commands(page: str, tiny: Mapping[str, Any], *, tuning: Mapping[str, Any]) -> list[str]:
    """Types the commands in the current folder with smaller sizes, of models or of fine-tuning; returns their names."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    ((data, block),) = re.findall(r'```\nDATA="(.*?)"\n(.*?)```', text, re.DOTALL)
    lines = block.replace("\\\n", " ").replace("$DATA", data).splitlines()
    done = []
    for command, run_file, *words in (shlex.split(line)[1:] for line in lines if line):
        smaller = tuning if command == "finetune" else tiny
        options = [word for word in words if word.startswith(("--", "wikipedia_"))]
        written = [word for word in words if word not in options and word.partition("=")[0] not in smaller]
        overrides = [*written, *(f"{key}={value}" for key, value in smaller.items())]
        if command == "train":
            evenpack_process(command, ROOT / run_file, *overrides, options=[*options, "--cpu-ranks", "1"])
        else:
            evenpack(command, ROOT / run_file, *overrides, options=options)
        done.append(command)
    return done
