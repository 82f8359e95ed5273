"""Starts the process that traces, once for all cases of a file that were asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

from fake_gpu.device import compile_hooks

from evenpack.config import validate
from evenpack.models.cost import PASSES, Work, attention_flops, model_products, step_flops
from evenpack.models.families import find_family
from evenpack.models.trace import Products

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build/fake_cuda"


def traced(jobs):
    """The result of each job, by its name."""
    command = [sys.executable, str(ROOT / "tests/fake_cuda/tracing_process.py"), str(compile_hooks(BUILT)), *jobs]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(jobs), done.stderr
    return {result.pop("job"): result for result in results}


def jobs_of(request):
    """The values of `job` of the tests of this file that will run."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(item.callspec.params["job"] for item in items if "job" in item.callspec.params))


def work_of(result):
    """The work of a micro-batch, whose windows were keys of JSON."""
    pairs = {int(window): count for window, count in result["work"]["pairs_within"].items()}
    return Work(**{**result["work"], "pairs_within": pairs})


def expected_flops(result):
    """Operations of a micro-batch as the model is counted: matrix products, and attention as an operator."""
    family = find_family(result["model"]["kind"])
    config, work = validate(result["model"], family.config, origin="a trace"), work_of(result)
    counted = model_products(config, vocabulary_size=result["vocabulary_size"])
    attention = PASSES * attention_flops(counted, work)
    products = step_flops(config, vocabulary_size=result["vocabulary_size"], work=work) - attention
    if result["attended_squares"] is None:
        return products, attention
    square = Work(slots=0, squared_lengths=result["attended_squares"], head_slots=0, sequences=0)
    whole = Products(linear=counted.linear, attention={(False, None): sum(counted.attention.values())})
    return products + PASSES * attention_flops(whole, square), 0


def forward_of_blocks(result):
    """Operations of one forward pass through the blocks: matrix products, and attention as an operator."""
    heads_left_out = {**result["work"], "head_slots": 0, "sequences": 0}
    products, attention = expected_flops({**result, "work": heads_left_out})
    return products // PASSES, attention // PASSES
