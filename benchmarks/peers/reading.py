"""Runs the loaders of one environment: `loaders.py` starts it there, and asks it by lines of JSON.

The packages are imported once. Each request is carried out by processes that are forked for it, one for each rank, so
that they are new, and imports are not in their CPU seconds: those of the process, its threads and its children, from
the opening of the loader. What is only timed is not looked into.
"""

import itertools
import json
import multiprocessing
import os
import pickle
import resource
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed
from peer_loaders import PEERS, PeerLoader, Task
from records import Recorder

_LIMIT_SECONDS = 1800.0
"""By the clock, for one request."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # packages print
    for name in sys.argv[1:]:
        import_module(name)
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), file=answers, flush=True)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Forks the ranks, and returns what each answered, or the error of the first that failed."""
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[dict[str, Any]] = context.Queue()  # type: ignore[name-defined]
    processes = [context.Process(target=_rank, args=(request, rank, answers)) for rank in range(request["ranks"])]
    for process in processes:
        process.start()
    try:
        found = []
        for _ in processes:
            found.append(answers.get(timeout=_LIMIT_SECONDS))
            if "error" in found[-1]:
                return {"error": found[-1]["error"]}
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
            process.join()
    return {"ranks": sorted(found, key=lambda one: one["rank"])}


def _rank(request: dict[str, Any], rank: int, answers: Any) -> None:
    try:
        result = _carried_out(request, rank)
    except BaseException as error:  # told to the parent, which names the loader
        traceback.print_exc()
        result = {"error": " ".join(traceback.format_exception_only(error)[-1].split())[:300]}
    answers.put(result | {"rank": rank})


def _carried_out(request: dict[str, Any], rank: int) -> dict[str, Any]:
    ranks = request["ranks"]
    if ranks > 1:
        of_launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in of_launcher.items()}
        meeting = torch.distributed.FileStore(f"{request['meeting']}/store", ranks)
        torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    fields = request["task"] | {"work": Path(request["task"]["work"]), "rank": rank, "ranks": ranks}
    loader = PEERS[request["peer"]].loader(Task(**fields))
    if request["action"] == "prepare":
        started = _cpu_seconds()
        loader.prepare()
        return {"prepare": _cpu_seconds() - started}
    if request["action"] == "time":
        return _time(loader)
    return _record(loader, request)


def _time(loader: PeerLoader) -> dict[str, float]:
    started = _cpu_seconds()
    batches = loader.batches(None)
    next(batches)
    first = _cpu_seconds() - started
    for _ in batches:
        pass
    found = {"first": first, "epoch": _cpu_seconds() - started}
    if hasattr(loader, "tokenising_seconds"):
        found["tokenising"] = loader.tokenising_seconds
    return found


def _record(loader: PeerLoader, request: dict[str, Any]) -> dict[str, Any]:
    """Reads to the end of the epoch and writes what was read, and from the start the state after each step."""
    recorder, task = Recorder(), loader.task
    path = f"{request['folder']}/{request['name']}_{task.rank}"
    state = None
    if request["states"]:
        saved = [pickle.loads(Path(name).read_bytes())[request["step"] - 1] for name in request["states"]]
        state = loader.chosen([pickle.loads(one) for one in saved])
    started = _cpu_seconds()
    batches = loader.batches(state)
    first = next(batches)
    until_first = _cpu_seconds() - started
    states = []
    for count, batch in enumerate(itertools.chain([first], batches), 1):
        recorder.add(loader.rows(batch))
        if state is None and count % task.micro_batches == 0:
            states.append(pickle.dumps(loader.state(count)))
    recorder.save(Path(f"{path}.npz"))
    Path(f"{path}.states").write_bytes(pickle.dumps(states))
    return {"first": until_first, "steps": len(states), "keys": recorder.keys}


def _cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
