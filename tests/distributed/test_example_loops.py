"""The training loops of examples/ over real processes learn what documents alone teach, also after a kill."""

import math
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_ranks import fork_context
from host_trainers import relative_error
from repository import ROOT
from torch.optim.optimizer import register_optimizer_step_post_hook

import evenpack
from evenpack.launch_environment import free_port, without_launcher

EXAMPLES = ROOT / "examples"
STEPS = 6


def run_script(name: str, folder: Path, ranks: int, steps: int, dies_at: int | None = None) -> list[dict[str, Any]]:
    """Runs an example on this many processes, as torchrun does; returns the gradients and the output of each.

    Args:
        dies_at: the update after which every process is killed, before it is saved; counted from 0 in this start.
    """
    port = free_port()
    context = fork_context()
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        other = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}  # as a configuration of `accelerate launch` may say
        environment = {**place, **other, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(context.Process(target=_run, args=(name, environment, folder, steps, dies_at)))
    for process in processes:
        process.start()
    while dies_at is not None and any(process.is_alive() for process in processes):
        if all((folder / f"waits_{rank}").exists() for rank in range(ranks)):
            for process in processes:
                process.kill()
            break
        time.sleep(0.05)
    for process in processes:
        process.join(900)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    outputs = [(folder / f"output_{rank}.txt").read_text("utf-8") for rank in range(ranks)]
    assert codes == [0 if dies_at is None else -signal.SIGKILL] * ranks, "\n".join(outputs)
    found = [pickle.loads((folder / f"gradients_{rank}").read_bytes()) for rank in range(ranks)]
    return [{"output": output, "gradients": one} for output, one in zip(outputs, found, strict=True)]


def _run(name: str, environment: dict[str, str], folder: Path, steps: int, dies_at: int | None) -> None:
    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False  # it would be compiled first
    os.environ.update(environment)
    gradients: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if float(optimizer.param_groups[0]["lr"]) == 0:
            return  # no update: get_state_dict fills the optimizer's state so
        if len(gradients) == dies_at:
            leave()
            (folder / f"waits_{rank}").touch()
            signal.pause()  # until this process is killed
        found = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found if one is not None]
        gradients.append(torch.cat([one.detach().clone().flatten() for one in whole]))

    def leave() -> None:
        (folder / f"gradients_{rank}").write_bytes(pickle.dumps(gradients))
        sys.stdout.flush()

    register_optimizer_step_post_hook(keep)  # Lightning runs a micro-batch within the step
    rank = environment["RANK"]
    output = (folder / f"output_{rank}.txt").open("w", encoding="utf-8")
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = output
    sys.argv = [name, str(folder), str(steps)]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    leave()
    if name in ("ddp_loop.py", "trainer.py"):  # elsewhere modules hold the group, and barriers come last
        _require_end_of_gloo()


def _require_end_of_gloo() -> None:
    """One of its threads that asks for Python's lock while Python ends aborts the process, once in some 75 runs."""
    deadline = time.monotonic() + 60  # a thread that was joined is still listed for a moment
    while "pt_gloo_runloop" in (names := _thread_names()):
        assert time.monotonic() < deadline, f"the group of ranks has not ended: {names}"
        time.sleep(0.05)


def _thread_names() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return names


@cache
def documents_alone() -> tuple[list[float], list[torch.Tensor]]:
    """Returns the loss and the gradients of each step, from each document by itself."""
    tiny = runpy.run_path(str(EXAMPLES / "tiny.py"))
    documents = tiny["documents"]()
    model = tiny["build_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = evenpack.Loader(documents, pack_length=tiny["PACK_LENGTH"], packs_per_step=tiny["PACKS_PER_STEP"])
    losses, gradients = [], []
    for step in range(STEPS):
        plan = loader.plan(step)
        total = 0.0
        for index in plan.packs.sequence_ids.tolist():
            tokens = torch.tensor([documents[index]])
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum") / plan.counts.targets
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients.append(torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", output.replace("train_loss", ""))]


LOOPS = ("ddp_loop", "fsdp2_loop", "accelerate_loop", "deepspeed_loop", "lightning_loop", "trainer")


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.slow
def test_a_loop_learns_the_same_through_kills_and_on_other_ranks(name: str, tmp_path: Path) -> None:
    """Two ranks are killed in their third update, one goes on for two steps, and four for the last two."""
    script = f"{name}.py"
    losses, gradients = documents_alone()
    _require_same(run_script(script, tmp_path, 2, STEPS, dies_at=2), losses[:2], gradients[:2])
    _require_same(run_script(script, tmp_path, 1, 4), losses[2:4], gradients[2:4])
    _require_same(run_script(script, tmp_path, 4, STEPS), losses[4:], gradients[4:])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_starts_as_its_page_says_and_learns_from_text(name: str, tmp_path: Path) -> None:
    """By the real launcher, whose arguments come in between, into a new folder; only its port is chosen here."""
    found = re.search(
        rf"^ *(\w.* examples/{name}.py) FOLDER STEPS$", (EXAMPLES / f"{name}.py").read_text("utf-8"), re.M
    )
    assert found is not None
    launcher, *words = found[1].split()
    port = "--main_process_port" if launcher == "accelerate" else "--master_port"
    words.insert(launcher == "accelerate", f"{port}={free_port()}")  # after `launch`
    environment = {
        **without_launcher(os.environ),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    done = subprocess.run(
        [Path(sys.executable).with_name(launcher), *words, tmp_path / "new/folder", "12"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = losses_in(done.stdout)
    assert losses[0] == pytest.approx(math.log(256), abs=0.05)
    assert losses[11] < losses[0] - 1
    assert not list(tmp_path.glob("extensions/*/deepspeed*")), "an operator of DeepSpeed's was compiled"


def _require_same(results: list[dict[str, Any]], losses: list[float], gradients: list[torch.Tensor]) -> None:
    rounding = 5e-4 if "'loss'" in results[0]["output"] else 5e-8  # Trainer prints four digits, the loops eight
    assert losses_in(results[0]["output"])[: len(losses)] == pytest.approx(losses, rel=1e-6, abs=rounding)
    for result in results:
        assert len(result["gradients"]) == len(gradients)
        for found, expected in zip(result["gradients"], gradients, strict=True):
            # An optimizer groups parameters as it likes: values are compared in their own order.
            assert relative_error(found.sort().values, expected.sort().values) < 1e-6
