"""Traces steps in a process of its own: `tracing_process.py LIBRARY JOB ...` writes a line of JSON for each job.

A job is the name of a case, of a preset as `whole_preset` reads it, `SPOILER:CASE` for a case with a fault put into it,
`torch:CASE` for a case whose memory torch's own tracker measures beside ours, `compiled:BACKEND` for a block that
torch.compile makes graphs of, or `stream:BLOCK` for what goes between these.
"""

import gc
import json
import sys
import time
import traceback
import warnings
from dataclasses import asdict, replace
from pathlib import Path

from fake_gpu.device import pretend_cuda

pretend_cuda(Path(sys.argv[1]))

import torch  # noqa: E402 - after the device
from batches import build_batch, random_sequences  # noqa: E402
from compiled_blocks import graphs_of, stream_of  # noqa: E402
from fake_gpu.counting import StepOperators  # noqa: E402
from fake_gpu.trace import StepStopped, trace_steps  # noqa: E402
from masked_batches import build_masked_batch, random_pairs  # noqa: E402
from run_files import run_config, run_values  # noqa: E402
from spoilers import FAULTY, SPOILERS  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from traced_cases import (  # noqa: E402
    CASES,
    EXPECTED_WAITS,
    Case,
    has_estimated_blocks,
    is_estimated,
    whole_preset,
)

from evenpack.engine.memory.estimate import MicroBatchSize, training_memory  # noqa: E402
from evenpack.kernels.sdpa import GROUP_TOKENS, plan_groups  # noqa: E402
from evenpack.models.cost import performed_work  # noqa: E402
from evenpack.models.families import find_family  # noqa: E402

VOCABULARY = 32_000
LONGEST = 512
RANKS = 2
PACKS = ([512], [300, 150], [200, 40, 20])


def batch_of(case, windows):
    """Packs in the case's layout, with the pairs within the windows of its model."""
    make = random_sequences if find_family(case.family).objective == "next_tokens" else random_pairs
    packs = [make(lengths, vocabulary_size=VOCABULARY) for lengths in case.times * PACKS]
    build = build_batch if make is random_sequences else build_masked_batch
    return build(packs, case.layout, max_sequence_length=LONGEST, pack_length=LONGEST, windows=windows)[0]


def with_room(batch, segments):
    """The batch with so many empty segments more."""
    ends = batch.cu_seqlens.new_full((segments,), batch.slots)
    return replace(batch, cu_seqlens=torch.cat([batch.cu_seqlens, ends]))


_PRESETS = {"llama": "1.1b"}
"""Those that are traced where a family's last one is not: tensors of 8b fill buckets of the reduction alone."""


def config_of(case):
    """Two layers, or all, of a preset."""
    family = find_family(case.family)
    recipe = {"kind": family.recipes[0], "max_sequence_length": LONGEST}
    model = {
        "preset": case.preset or _PRESETS.get(case.family, list(family.config.presets)[-1]),
        "hidden_size": None,
        "heads": None,
        "layers": case.layers,
        "positions": case.positions,
        "dropout": case.dropout,
        "activation_checkpointing": case.checkpointing,
    }
    training = {
        "layout": case.layout,
        "packs_per_step": RANKS * case.micro_batches * case.times * len(PACKS),
        "packs_per_micro_batch": case.times * len(PACKS),
        "precision": case.precision,
        "residual_dtype": case.residual,
    }
    values = run_values(
        case.family,
        Path("never_written"),
        data={"recipe": recipe, "pack_length": LONGEST},
        model={"kind": case.family, **model},
        attention={"backend": case.backend},
        training=training,
        optimizer={"kind": case.update.partition("_")[0]},
        deepspeed={"zero_stage": int(case.update.endswith("zero1"))},
    )
    return run_config(values)


def attended_squares(case, batch):
    """Scores that the backend computes for each head as plain matrix products; None where it is an operator."""
    if case.backend == "reference":
        return batch.slots**2
    if case.backend == "sdpa":
        lengths = tuple(batch.cu_seqlens.diff().tolist())
        windows = plan_groups(
            lengths,
            group_tokens=GROUP_TOKENS,
            causal=False,
            slopes=None,
            mask_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        return sum(window.tokens**2 for window in windows)
    return None


def measured_by_torch(engine, peaks):
    """Torch's own tracker of memory, whose peak is added to `peaks` at the end of each backward pass."""
    tracker = MemTracker()
    optimizer = engine.deepspeed.optimizer
    tracker.track_external(engine.model, optimizer)

    def note(phase):
        if phase == "update":
            peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cuda:0")]["Total"])

    engine.observer = note
    return tracker


def estimates(case, config, work):
    """The memory of the step and of a block as the formulas have them; {} where they are for other steps."""
    if not is_estimated(case):
        return {}
    size = MicroBatchSize(slots=work.slots, head_rows=work.head_slots)
    memory = training_memory(config, size, vocabulary_size=VOCABULARY, ranks=RANKS)
    has_block = case.preset is None and has_estimated_blocks(case)
    return {
        "estimated_peak": memory.peak.total,
        "estimated_phase": memory.peak.phase,
        "estimated_phases": {phase.phase: phase.total for phase in memory.phases},
        **({"estimated_block_bytes": estimated_block(config, size, memory)} if has_block else {}),
    }


def estimated_block(config, size, memory):
    """What a block keeps: what one layer more adds to the activations at the loss."""
    deeper = config.model.model_copy(update={"layers": config.model.shape["layers"] + 1})
    more = training_memory(config.model_copy(update={"model": deeper}), size, vocabulary_size=VOCABULARY, ranks=RANKS)
    return more.phases[0].activations - memory.phases[0].activations


def traced(job):
    prefix, _, name = job.partition(":")
    if prefix == "compiled":
        return graphs_of(name)
    if prefix == "stream":
        return stream_of(name)
    if prefix != "torch" and prefix not in SPOILERS:
        prefix, name = "", job
    case: Case = CASES.get(name) or whole_preset(name)
    peaks, counting, sizes_of_update = [], [], {}

    def beside(engine):
        if prefix in FAULTY:
            raise StepStopped("the first step has shown the faults")
        if prefix == "torch":
            return measured_by_torch(engine, peaks)
        counting.append(StepOperators(engine))
        sizes_of_update.update(
            parameters=len(list(engine.model.parameters())),
            groups=len(engine.deepspeed.optimizer.param_groups),
            buckets=[len(bucket) for bucket in getattr(engine.reduction, "buckets", ())],
        )
        return counting[0]

    config = config_of(case)
    batch = batch_of(case, config.model.windows)
    sizes = {"vocabulary_size": VOCABULARY, "max_positions": LONGEST}
    trace = trace_steps(
        config,
        [with_room(batch, segments) for segments in case.rooms] or [batch] * case.micro_batches,
        **sizes,
        world_size=RANKS,
        expected_waits=EXPECTED_WAITS,
        spoil=SPOILERS.get(prefix),
        beside=beside,
    )
    work = performed_work(batch)
    return {
        **asdict(trace),
        **({} if prefix == "torch" else estimates(case, config, work)),
        "peak_by_torch": max(peaks, default=None),
        "faults": [str(fault) for fault in trace.faults],
        "model": config.model.model_dump(mode="json"),
        **sizes,
        "work": asdict(work),
        "attended_squares": attended_squares(case, batch),
        "operators": [[*asdict(kind).values(), n] for mode in counting for kind, n in mode.counts.items()],
        **sizes_of_update,
    }


def main():
    gc.freeze()  # else each collection would scan all that was imported, half a second a step
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # DeepSpeed's alignment check
    for job in sys.argv[2:]:
        started = time.process_time()
        try:
            result = traced(job)
        except Exception as error:
            result = {"error": "".join(traceback.format_exception(error))}
        seconds = time.process_time() - started
        print(json.dumps({"job": job, "cpu_seconds": round(seconds, 2), **result}), flush=True)


main()
