"""What only a GPU runs of the GPU day, on the fake one: `gpu_day_process.py LIBRARY FOLDER RUN.yaml`.

Each program of the day runs from its first line to its last one, over the run that it is given, whose batches are real
and whose model, engine and kernels are fake. Their values are left in FOLDER, and a line of JSON has what was asked of
the device. Events are 2 ms apart; memory counters have the numbers below.
"""

import json
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from fake_gpu.device import listening_to_waits, pretend_cuda

pretend_cuda(Path(sys.argv[1]))

import torch  # noqa: E402 - after the device
from fake_gpu.trace import (  # noqa: E402
    DEVICE,
    FakeCudaMode,
    faked_batch,
    join_fake_ranks,
    modules_move_to_new_tensors,
    provide_gpu_kernels,
)
from fake_gpu.watch import Watch  # noqa: E402
from gpu_day import checks, design, law, profile_step  # noqa: E402
from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.autograd.profiler_util import FunctionEventAvg  # noqa: E402

from evenpack.data.batches.pipeline import MicroBatchDataset  # noqa: E402
from evenpack.engine.world.distributed import World  # noqa: E402
from evenpack.kernels import cross_entropy  # noqa: E402
from evenpack.studies.throughput.contenders import contender, run_to_measure  # noqa: E402
from evenpack.studies.throughput.measure import StepTimer  # noqa: E402

EVENT_MILLISECONDS = 2.0
ALLOCATED, PEAK = 3_000_000, 10_000_000

asked = []
"""What the programs asked of the device, in their order."""

watch = Watch(product_dtype=torch.bfloat16, wide_products=("bmm",))  # SDPA, by its parts as on a CPU
fake = FakeCudaMode()


def main():
    folder, run_file = Path(sys.argv[2]), sys.argv[3]
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    answer_as_a_gpu()
    join_fake_ranks(1)
    provide_gpu_kernels()
    for program in (checks, law, profile_step):
        program.stepping = stepping_on_the_fake_device
    found = {}
    with fake, modules_move_to_new_tensors(), watch.watching():
        few = {"widths": (768,), "vocabularies": (50_257, 50_304), "head_rows": (1335, 8192), "loss_tokens": 4096}
        sizes = replace(design.FULL, **few, heads=(12,), unseen_lengths=range(301, 305, 4), repeats=1, chain=2)
        assert design.answer(design.Bench(device=DEVICE, sizes=sizes), folder / "design.json")
        found["design"] = list(asked)
        for program, steps in ((checks, 2), (law, 2), (profile_step, 1)):
            asked.clear()
            program._WARMUP = 1
            name = program.__name__.rpartition(".")[2]
            out = str(folder / f"{name}.json")
            sys.argv = [name, run_file, "training.precision=bf16_autocast", "--out", out, "--steps", str(steps)]
            program.main()
            found[name] = list(asked)
        found["a wait"] = checks.count_waits(World(rank=0, size=1, local_rank=0, device=DEVICE), torch.cuda.synchronize)
    meant = ("wait", "alignment")  # vocabularies that are not aligned are timed beside others that are
    faults = [str(fault) for fault in watch.faults if fault.kind not in meant]
    print(json.dumps({"asked": found, "faults": faults}))


def answer_as_a_gpu():
    """Gives numbers to events and counters, and notes what is asked."""

    def noted(name, value=None):
        def answer(*arguments, **_):
            asked.append(name)
            return value

        return answer

    torch.cuda.Event.elapsed_time = noted("elapsed_time", EVENT_MILLISECONDS)
    torch.cuda.reset_peak_memory_stats = noted("reset_peak_memory_stats")
    torch.cuda.memory_allocated = noted("memory_allocated", ALLOCATED)
    torch.cuda.max_memory_allocated = noted("max_memory_allocated", PEAK)
    torch.cuda.set_sync_debug_mode = sync_debug_mode
    torch.Tensor.pin_memory = lambda tensor, *_: (asked.append("pin_memory"), tensor)[1]
    profile_step.profile = profile_of_a_gpu
    cross_entropy._compiler = lambda: cross_entropy._chunk_sums  # code for a GPU needs Triton and the device


@contextmanager
def profile_of_a_gpu(activities):
    """A profile as torch makes it on a GPU: an operator, its kernel, and the region around it, of 3 ms each."""
    asked.extend(str(one) for one in activities)
    events = []
    for key, kind, is_region in (("aten::mm", "CPU", False), ("nvjet_gemm", "CUDA", False), ("Adam", "CUDA", True)):
        event = FunctionEventAvg()
        event.key, event.device_type, event.is_user_annotation = key, getattr(DeviceType, kind), is_region
        event.self_device_time_total = event.self_cpu_time_total = 3000
        events.append(event)
    yield SimpleNamespace(key_averages=lambda: events)


_listening = []


def sync_debug_mode(mode):
    """Warns of waits as torch does on a GPU."""
    asked.append(f"sync_debug_mode {mode}")
    if mode == "warn":
        warned = listening_to_waits(lambda _: warnings.warn("called a synchronizing CUDA operation", stacklevel=2))
        warned.__enter__()
        _listening.append(warned)
    else:
        _listening.pop().__exit__(None, None, None)


@contextmanager
def stepping_on_the_fake_device(config, *forms):
    """As `gpu_day.stepping.stepping`, with batches that are read outside the fake mode and faked."""
    world = World(rank=0, size=1, local_rank=0, device=DEVICE)
    with unset_fake_temporarily():
        run = run_to_measure(config)
        datasets = [contender(form, run, world) for form in forms]
        for dataset in datasets:
            dataset.__class__ = _Faked
    yield StepTimer(run, world, clock="wall"), datasets


class _Faked(MicroBatchDataset):
    def __getitem__(self, index):
        with unset_fake_temporarily():
            batch = super().__getitem__(index)
        return faked_batch(batch, fake, watch)


main()
