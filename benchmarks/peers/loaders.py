"""Compares evenpack.Loader with the loaders of other packages on the same text, each in an environment of its own.

    python benchmarks/peers/environments.py trl transformers torchtitan litdata
    OMP_NUM_THREADS=1 python benchmarks/peers/loaders.py [--text FILE.jsonl.zst] [--json FILE]

Each loader prepares the text, reads one epoch on 1 and on 2 gloo ranks, and goes on from a checkpoint at 99 % of it, on
as many ranks and on the other number, in new processes. What was read is compared token for token. Times are CPU
seconds, also of threads and children, without imports; rates and times to the first batch are medians of `--rounds`, in
which the loaders take turns. Without `--text` it is the built-in corpus.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from environments import python_of
from peer_loaders import MODULES, PEERS, Task
from records import Record, balance, coverage, fill, shared_steps, steps_of_ranks

from evenpack.data.sources.config import BuiltinSource, JsonlSource
from evenpack.data.sources.kinds import open_corpus
from evenpack.data.tokenizers.byte_pairs import train_byte_pairs
from evenpack.data.tokenizers.config import TrainedTokenizer

Run = Callable[..., list[dict[str, Any]]]
"""`Environment.run` of one loader."""
Interrupted = tuple[list[Record], int, int]
"""The uninterrupted epoch of each rank, the steps until its checkpoint, and the ranks that go on."""

_RANKS = (1, 2)
_RESUMED = 3
"""Times that one rank goes on, for the median of its time to the first batch."""
_SPECIAL = {"begin": "<|begin|>", "end": "<|endoftext|>", "padding": "<|padding|>"}


class RankFailedError(Exception):
    """A rank of a loader ended with an error; the message is its last line."""


class Environment:
    """A process of an environment that runs its loaders (`reading.py`); a context manager."""

    def __init__(self, name: str, folder: Path) -> None:
        """Starts it; its messages go to a file in `folder`."""
        self.python = Path(sys.executable) if name == "evenpack" else python_of(name)
        if not self.python.exists():
            raise SystemExit(
                f"{self.python} is missing: run python benchmarks/peers/environments.py {name}, or leave its loaders "
                "out by --only"
            )
        own = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._log = folder / f"{name}.log"
        self._process = subprocess.Popen(
            [self.python, Path(__file__).with_name("reading.py"), *MODULES[name]],
            env=os.environ | own | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            text=True,
        )
        code = f"from importlib.metadata import version; print(version({name!r}))"
        self.version = subprocess.check_output([self.python, "-c", code], text=True).strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, peer: str, task: Task, action: str, *, ranks: int = 1, **options: Any) -> list[dict[str, Any]]:
        """Runs an action on new processes, one a rank, and returns their answers. Raises: RankFailedError."""
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryDirectory() as meeting:
            fields = asdict(task) | {"work": str(task.work)}
            request = {"peer": peer, "task": fields, "action": action, "ranks": ranks, "meeting": meeting, **options}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        answer = (
            json.loads(line)
            if line
            else {"error": f"{self.python} ended: {self._log.read_text('utf-8', 'replace')[-300:]}"}
        )
        if "error" in answer:
            raise RankFailedError(answer["error"])
        return list(answer["ranks"])


def write_text(work: Path, text: Path | None, arguments: argparse.Namespace) -> Task:
    """Writes documents and tokenizer, and returns the task of one rank."""
    source = BuiltinSource(kind="builtin") if text is None else JsonlSource(kind="jsonl", path=text)
    texts = [document.text for document in open_corpus("text", source).documents()][: arguments.documents]
    with (work / "documents.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document}) + "\n" for document in texts)
    import tokenizers

    backend = train_byte_pairs(TrainedTokenizer(kind="train", vocabulary_size=arguments.vocabulary), texts)
    backend.add_special_tokens([_SPECIAL["begin"], _SPECIAL["padding"]])
    ids = {name: int(backend.token_to_id(token)) for name, token in _SPECIAL.items()}
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{_SPECIAL['begin']} $A {_SPECIAL['end']}",
        special_tokens=[(_SPECIAL[name], ids[name]) for name in ("begin", "end")],
    )
    (work / "tokenizer").mkdir()
    backend.save(str(work / "tokenizer/tokenizer.json"))
    special = {"bos_token": _SPECIAL["begin"], "eos_token": _SPECIAL["end"], "pad_token": _SPECIAL["padding"]}
    (work / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    documents = [encoding.ids for encoding in backend.encode_batch(texts)]
    np.savez(work / "documents.npz", tokens=np.concatenate(documents), lengths=[len(one) for one in documents])
    lengths = np.array([len(one) for one in documents])
    mean = np.minimum(lengths, arguments.pack_length).mean()
    return Task(
        work=work,
        pack_length=arguments.pack_length,
        packs_per_step=arguments.packs_per_step,
        packs_per_micro_batch=arguments.packs_per_micro_batch,
        documents_per_micro_batch=round(arguments.packs_per_micro_batch * arguments.pack_length / mean),
        documents=len(texts),
        tokens=int(lengths.sum()),
        vocabulary=backend.get_vocab_size(),
        **ids,
    )


def read_epochs(run: Run, task: Task, folder: Path, checkpoint_at: float) -> dict[str, Any]:
    """Reads an epoch on each number of ranks, goes on near its end on each number, and returns what was found."""
    run = partial(run, folder=str(folder))
    saving = replace(task, steps_between_checkpoints=1)
    found: dict[str, Any] = {}
    whole: dict[int, list[Record]] = {}
    after: dict[int, int] = {}
    for ranks in _RANKS:
        name = f"whole_{ranks}"
        answers = run(saving, "record", ranks=ranks, name=name, states=[])
        after[ranks] = int(checkpoint_at * min(answer["steps"] for answer in answers))
        whole[ranks] = _records(task, folder, name, ranks)
        found["keys"] = answers[0]["keys"]
        found[f"epoch_{ranks}"] = {
            "steps": [answer["steps"] for answer in answers],
            "checkpoint_after_steps": after[ranks],
            **coverage(whole[ranks], _documents(task), task.end),
        }
    found["fill"] = fill(whole[1])
    found["balance"] = balance(whole[2])
    found["borders_shown"] = whole[1][0].borders_shown()
    found["steps_shared_by_ranks"] = shared_steps(*(steps_of_ranks(whole[ranks]) for ranks in _RANKS))
    states = [f"{folder}/whole_1_0.states"]
    again = [run(task, "record", name="rest", states=states, step=after[1])[0]["first"] for _ in range(_RESUMED)]
    found["first_after_resume"] = statistics.median(again)
    for before, ranks in itertools.product(_RANKS, _RANKS):
        found[f"resume_{before}_{ranks}"] = _resume(run, task, folder, (whole[before], after[before], ranks))
    return found


def _resume(run: Run, task: Task, folder: Path, interrupted: Interrupted) -> dict[str, Any]:
    """Goes on from a checkpoint on some ranks, and compares with the uninterrupted epoch."""
    whole, step, ranks = interrupted
    states = [f"{folder}/whole_{len(whole)}_{rank}.states" for rank in range(len(whole))]
    try:
        run(task, "record", ranks=ranks, name="rest", states=states, step=step)
    except RankFailedError as error:
        return {"refused": str(error)}
    rest, expected = _records(task, folder, "rest", ranks), [record.part(step, None) for record in whole]
    found: dict[str, Any] = {
        "steps_of_uninterrupted": shared_steps(steps_of_ranks(rest), steps_of_ranks(expected)),
        # Over the steps before the checkpoint and those after it.
        **coverage([*(record.part(0, step) for record in whole), *rest], _documents(task), task.end),
    }
    if len(whole) == ranks:
        found["same_token_for_token"] = all(one.equals(other) for one, other in zip(rest, expected, strict=True))
    return found


def _records(task: Task, folder: Path, name: str, ranks: int) -> list[Record]:
    micro_batches = replace(task, ranks=ranks).micro_batches
    return [
        Record.read(folder / f"{name}_{rank}.npz", micro_batches=micro_batches, begin=task.begin, padding=task.padding)
        for rank in range(ranks)
    ]


@cache
def _documents(task: Task) -> Record:
    with np.load(task.work / "documents.npz") as found:
        tokens = found["tokens"].astype(np.int64)
    row = np.array([len(tokens)])
    return Record(
        tokens=tokens,
        positions=None,
        row_slots=row,
        rows=np.ones(1, dtype=np.int64),
        micro_batches=1,
        begin=task.begin,
        padding=task.padding,
    )


def measure(peer: str, environment: Environment, task: Task, checkpoint_at: float) -> dict[str, Any]:
    """Prepares the text, and reads it as often as is needed for everything but the rates."""
    report: dict[str, Any] = {"loader": PEERS[peer].name, "version": environment.version}
    run = partial(environment.run, peer)
    try:
        report["prepare"] = run(task, "prepare")[0]["prepare"]
        with tempfile.TemporaryDirectory() as folder:
            report |= read_epochs(run, task, Path(folder), checkpoint_at)
            report["leak"] = leak(_records(task, Path(folder), "whole_1", 1)[0], report["keys"], task)
    except RankFailedError as error:
        return report | {"failed": str(error)}
    return report | {"rounds": []}


def leak(found: Record, keys: dict[str, str], task: Task) -> float | None:
    """Returns how much the tokens of one document change the outputs of the next one, over the largest output.

    A small Llama of transformers (SDPA, no cache) gets the first two documents of a row as the loader gives them:
    tokens, positions if the batch has some, a mask of ones if it has a mask. None if each row has one document.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = np.cumsum(found.row_slots)
    documents = np.array([row.sum() for row in np.split(found.segment_starts & found.is_real, ends[:-1])])
    if (documents < 2).all():
        return None
    row = int((documents >= 2).argmax())
    start = int(found.row_starts[row])
    begins = np.flatnonzero(found.segment_starts[start : int(ends[row])])
    length = int(begins[2]) if len(begins) > 2 else int(found.row_slots[row])
    slots = slice(start, start + length)
    tokens = torch.from_numpy(found.tokens[slots])[None]
    inputs = {} if found.positions is None else {"position_ids": torch.from_numpy(found.positions[slots])[None].long()}
    if "attention_mask" in keys:
        inputs["attention_mask"] = torch.ones_like(tokens)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=task.vocabulary, max_position_embeddings=length, **sizes)).eval()
    changed = tokens.clone()
    changed[0, : begins[1]] = (changed[0, : begins[1]] + 1) % task.vocabulary
    with torch.no_grad():
        one, other = (
            model(input_ids=ids, use_cache=False, **inputs).logits[0, begins[1] :] for ids in (tokens, changed)
        )
    return float((one - other).abs().max() / one.abs().max())


def add_rounds(
    reports: dict[str, dict[str, Any]], environments: dict[str, Environment], task: Task, rounds: int
) -> None:
    """Reads whole epochs on one rank, without looking into batches; the loaders take turns."""
    for _ in range(rounds):
        for peer, report in reports.items():
            if "failed" not in report:
                answers = environments[PEERS[peer].environment].run(peer, task, "time")
                report["rounds"].append({name: value for name, value in answers[0].items() if name != "rank"})


def finish(report: dict[str, Any], task: Task) -> None:
    """Adds the medians of the rounds."""
    if "failed" in report:
        return
    read = report["epoch_1"]["read"] + report["epoch_1"]["repeated"]
    report["first"] = statistics.median(one["first"] for one in report["rounds"])
    report["tokens_per_cpu_second"] = statistics.median(read * task.tokens / one["epoch"] for one in report["rounds"])
    if "tokenising" in report["rounds"][0]:
        rates = [read * task.tokens / (one["epoch"] - one["tokenising"]) for one in report["rounds"]]
        report["tokens_per_cpu_second_without_tokenising"] = statistics.median(rates)


def show(reports: Sequence[dict[str, Any]]) -> None:
    """Prints a line for each loader."""
    for report in reports:
        print(f"{report['loader']} {report['version']}")
        for name, value in report.items():
            if name not in ("loader", "version", "rounds"):
                print(f"    {name:40} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="lines of JSON with `text`, also .zst and .gz (default: built-in)")
    parser.add_argument("--documents", type=int, help="the first so many documents (default: all)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of the tokenizer, which is trained on the text")
    parser.add_argument("--pack-length", type=int, default=2048)
    parser.add_argument("--packs-per-step", type=int, default=16)
    parser.add_argument("--packs-per-micro-batch", type=int, default=4)
    parser.add_argument("--checkpoint-at", type=float, default=0.99, help="share of an epoch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="LOADER")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        task = write_text(Path(name), arguments.text, arguments)
        names = dict.fromkeys(PEERS[peer].environment for peer in arguments.only)
        with ExitStack() as stack:
            environments = {name: stack.enter_context(Environment(name, task.work)) for name in names}
            reports = {}
            for peer in arguments.only:
                print(f"{PEERS[peer].name} ...", file=sys.stderr, flush=True)
                reports[peer] = measure(peer, environments[PEERS[peer].environment], task, arguments.checkpoint_at)
            add_rounds(reports, environments, task, arguments.rounds)
    for report in reports.values():
        finish(report, task)
    show(list(reports.values()))
    if arguments.json:
        shape = {name: value for name, value in asdict(task).items() if isinstance(value, int) and "rank" not in name}
        about = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
        about["text"] = arguments.text.name if arguments.text else "built-in"
        report = about | {"task": shape, "checkpoint_at": arguments.checkpoint_at, "loaders": reports}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
