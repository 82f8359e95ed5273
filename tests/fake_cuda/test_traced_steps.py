"""Whole optimizer steps on a CUDA device that does not exist: host waits, devices, dtypes, operations and memory."""

from collections import Counter

import pytest
from fake_gpu.device import why_not_here
from slow_cases import slow_but
from traced_cases import CASES, cases, has_estimated_blocks, is_estimated
from tracing import expected_flops, forward_of_blocks, jobs_of, traced

from evenpack.config import validate
from evenpack.engine.optimizers.muon import ITERATIONS
from evenpack.models.cost import parameter_count
from evenpack.models.families import find_family

_reason = why_not_here()
if _reason is not None:  # one line for all of them
    pytest.skip(_reason, allow_module_level=True)

MEMORY_ERROR = 0.05
"""The largest difference of the estimate from the traced peak, as a share."""

PHASE_ERROR = 0.03
"""The same for each phase alone."""

BLOCK_EXCESS = {"modernbert": -0.088}
"""What a block keeps beyond the formula, as a share, where it is not 0. modernbert: the first of two blocks has no norm
before attention, which would keep the block's input in FP32."""


LARGE_BATCH = "gpt2:medium+2_layers+16_times+checkpointing+zero1"
"""A micro-batch so large that the peak is in the backward pass through a block."""

FAULTS = (
    ("wait", "aten._local_scalar_dense", "the host reads"),
    ("wait", "tolist", "the host reads"),
    ("wait", "aten._to_copy", " to the host"),
    ("wait", "aten._to_copy", "without non_blocking"),
    ("wait", "aten.index", "the shape of its result"),
    ("wait", "aten.index_put_", "the shape of its result"),
    ("wait", "torch.cuda.synchronize", "it waits"),
    ("device", "aten.add", "on cpu"),
    ("dtype", "aten.mm", "float32"),
    ("contract", "torch_attn._varlen_attn", "must be torch.bfloat16"),
    ("alignment", "aten.mm", "from 0: not all lines"),
    ("alignment", "aten.mm", "from 4: not all lines"),
    ("slow path", "aten._foreach_mul", "differ in shape"),
)
"""What the misuse of `spoilers.py` makes: kind, operator, and words of the problem."""

STREAM_BYTES = {"stream:pre+bfloat16": 14, "stream:post+bfloat16": 14, "stream:post+float32": 24}
"""For each slot and channel, of a block with its norms before or after attention and feed-forward layer."""

ATTENTION_IN_GRAPHS = {
    "compiled:varlen": ["torch_attn._varlen_attn"],
    "compiled:varlen+dropout": ["aten._flash_attention_forward"],
    "compiled:flash": ["autograd_function_apply"],
    "compiled:flash4": ["evenpack.flash_attention_4"],
    "compiled:reference": ["einsum"],
}
"""The function of each backend in the graph of a compiled block."""

WHOLE = ("bert:large", "llama:1.1b")

SPOILED = "bert-learned-varlen-packed-bf16_autocast-adamw"

CAUSAL, WIDTH = "gpt2:xl+2_layers", 1600
"""GPT-2 XL's width."""

of_each_case = pytest.mark.parametrize("job", cases())


@pytest.fixture(scope="module")
def results(request):
    return traced(jobs_of(request))


@of_each_case
def test_a_step_waits_only_where_it_is_meant_to_and_mixes_no_devices_or_dtypes(results, job):
    result = results[job]
    assert "error" not in result, result["error"]
    assert result["faults"] == []
    assert result["expected_waits"] == waits_of(CASES[job])


def waits_of(case):
    """SDPA reads boundaries in each layer, and ALiBi's slopes; at ZeRO 1 DeepSpeed reads the gradient norm."""
    waits = {}
    if case.backend == "sdpa":
        reads = 2 if case.positions == "alibi" else 1
        passes = 2 if case.checkpointing else 1
        waits["evenpack.kernels.sdpa.attend"] = reads * passes * case.layers * case.micro_batches
    if case.update == "adamw_zero1":
        waits["deepspeed.runtime.utils.mask_nan_or_inf_with_val_inplace"] = 2
        waits["deepspeed.runtime.utils.is_invalid_grad_norm"] = 3
    return waits


@of_each_case
def test_a_step_computes_the_operations_of_the_formula(results, job):
    case, result = CASES[job], results[job]
    products, attention = expected_flops(result)
    found = (result["product_flops"] / case.micro_batches, result["attention_flops"] / case.micro_batches)
    if case.update == "muon":  # in each block: four square matrices, and two that are four times as long as wide
        products += ITERATIONS * (4 * 6 + 2 * 18) * WIDTH**3 * case.layers
    if not case.checkpointing:
        assert found == (products, attention)
        return
    again = forward_of_blocks(result)
    assert found[1] == attention + again[1]
    # Recomputing ends with the last tensor that was saved: the last layer of a block may be spared.
    assert 0.5 * again[0] < found[0] - products <= again[0]


@pytest.mark.parametrize("job", cases(is_estimated))
def test_the_estimate_of_memory_is_near_the_traced_peak(results, job):
    assert results[job]["estimated_peak"] == pytest.approx(results[job]["peak_bytes"], rel=MEMORY_ERROR)


@pytest.mark.parametrize("job", [*cases(is_estimated), pytest.param(LARGE_BATCH, marks=pytest.mark.slow)])
def test_the_estimate_of_each_phase_is_near_the_traced_one(results, job):
    traced, estimated = results[job]["phase_bytes"], results[job]["estimated_phases"]
    found = {
        "forward": estimated["loss"],
        "backward": max(estimated[phase] for phase in ("head", "last block", "first block", "embedding")),
        "all_reduce": estimated["reduction"],
        "update": estimated["update"],
    }
    assert found == {phase: pytest.approx(traced[phase], rel=PHASE_ERROR) for phase in found}


@pytest.mark.slow
@pytest.mark.parametrize("job", [LARGE_BATCH])
def test_the_estimate_of_memory_is_near_the_traced_peak_of_a_large_micro_batch(results, job):
    assert results[job]["phase_bytes"]["backward"] > results[job]["phase_bytes"]["forward"]
    assert results[job]["estimated_phase"] == "last block"
    assert results[job]["estimated_peak"] == pytest.approx(results[job]["peak_bytes"], rel=MEMORY_ERROR)


@pytest.mark.parametrize("job", ["gpt2:medium+2_layers+16_times+rooms"])
def test_micro_batches_of_other_numbers_of_segments_need_the_memory_of_the_estimate(results, job):
    """What is alive between steps, and the peak, are those of micro-batches of one size."""
    result = results[job]
    assert "error" not in result, result["error"]
    assert (result["faults"], result["expected_waits"]) == ([], {})
    config = validate(result["model"], find_family(result["model"]["kind"]).config, origin="a trace")
    sizes = {name: result[name] for name in ("vocabulary_size", "max_positions")}
    assert result["resident_bytes"] == pytest.approx(12 * parameter_count(config, **sizes), rel=0.001)
    assert result["estimated_peak"] == pytest.approx(result["peak_bytes"], rel=PHASE_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["bert:base+2_layers+16_times+bf16"])
def test_a_residual_stream_of_16_bits_has_no_faults_and_at_most_the_memory_of_the_estimate(results, job):
    result = results[job]
    assert "error" not in result, result["error"]
    assert (result["faults"], result["expected_waits"]) == ([], {})
    assert (result["product_flops"], result["attention_flops"]) == expected_flops(result)
    assert 0.95 < result["peak_bytes"] / result["estimated_peak"] < 1.001


@pytest.mark.parametrize("job", cases(has_estimated_blocks))
def test_a_block_keeps_what_the_formula_says(results, job):
    excess = results[job]["block_bytes"] / results[job]["estimated_block_bytes"] - 1.0
    assert excess == pytest.approx(BLOCK_EXCESS.get(CASES[job].family, 0.0), abs=0.005)


@pytest.mark.parametrize("job", [f"float32_kept:{SPOILED}"])
def test_a_block_that_computes_gelu_in_float32_keeps_more_than_the_formula_says(results, job):
    assert results[job]["block_bytes"] > 1.2 * results[job]["estimated_block_bytes"]


@pytest.mark.parametrize("job", [f"empty_segments:{CAUSAL}"])
def test_room_for_segments_is_paid_for_by_the_buffers_of_attention(results, job):
    """A thousand empty segments: 128 rows of FP32 for each, of the width of the model, beside what else is alive."""
    rows = 1000 * 128
    assert results[job]["faults"] == []
    assert results[job]["peak_bytes"] > 4 * rows * WIDTH + results[job]["resident_bytes"]
    assert results[job]["peak_bytes"] > (1.0 + MEMORY_ERROR) * results[job]["estimated_peak"]


@pytest.mark.slow
@pytest.mark.parametrize("job", [f"torch:{SPOILED}"])
def test_torch_tracks_the_same_peak(results, job):
    assert results[job]["peak_bytes"] == results[job]["peak_by_torch"]


@pytest.mark.parametrize("job", [f"misuse:{SPOILED}"])
def test_faults_that_are_put_into_a_model_are_found(results, job):
    found = results[job]["error"].splitlines()  # the trace ends with the first step, at the latest
    for kind, operator, problem in FAULTS:
        assert any(f"{kind}: {operator} in " in line and problem in line for line in found), (kind, operator, found)


def operators_of(result, **wanted):
    """The operators of a step that start work on the device, by name, of a caller or a phase."""
    names = ("phase", "caller", "name")
    found = [(dict(zip(names, kind, strict=True)), count) for *kind, count in result["operators"]]
    counts = Counter()
    for kind, count in found:
        if wanted.items() <= kind.items():
            counts[kind["name"]] += count
    return counts


CLIPPING = Counter(("_foreach_norm", "stack", "linalg_vector_norm", "add", "div", "clamp"))
"""The operators of the norm, and of what the update clips by, at ZeRO 0."""


@of_each_case
def test_an_update_is_fused_whatever_the_number_of_parameters(results, job):
    """AdamW is one kernel for each group of parameters; so is LAMB, beside twelve operators for its trust ratios.

    Muon has as many products for one matrix as for all that have its shape and group. GPT-2 has four such shapes: parts
    of query, key and value, the output of attention, and the two of the feed-forward layer.
    """
    if CASES[job].update == "lamb":
        update, groups = operators_of(results[job], phase="update"), results[job]["groups"]
        assert update["_fused_adam_"] == groups
        assert update["_foreach_addcmul_"] == groups - 1
        assert update >= CLIPPING
        assert (update - CLIPPING).total() <= 12 * groups
        return
    if CASES[job].update == "muon":
        update, shapes = operators_of(results[job], phase="update"), 4
        assert (update["bmm"], update["baddbmm"]) == (ITERATIONS * shapes, 2 * ITERATIONS * shapes)
        assert (update - CLIPPING).total() <= 34 * shapes
    assert operators_of(results[job], caller="optimizer") == {"_fused_adamw_": 2, "_foreach_add_": 2}


@pytest.mark.parametrize("job", [*cases(lambda case: case.backend == "flash4"), SPOILED])
def test_flash4_is_one_operator_a_layer_and_direction_and_concatenates_nothing(results, job):
    """BERT and GPT-2 have queries, keys and values as one tensor; rotations make two of them anew.

    What is concatenated else are the gradients of gated layers, which the families with rotations have.
    """
    case = CASES[job]
    forward, backward = (operators_of(results[job], phase=phase) for phase in ("forward", "backward"))
    if case.backend == "flash4":
        name, again = "evenpack.flash_attention_4", case.checkpointing * case.layers
        assert (forward[name], forward[f"{name}_backward"]) == (case.layers, 0)
        assert (backward[name], backward[f"{name}_backward"]) == (again, case.layers)
    copies = operators_of(results[job], phase="backward", caller="backward pass")
    is_rotated = case.positions == "rotary"
    assert copies["cat"] == case.layers * ((case.backend != "flash4" or is_rotated) + is_rotated)
    assert (copies["clone"], copies["copy_"]) == (0, 0)


@of_each_case
def test_deepspeed_adds_one_copy_for_each_parameter_and_little_else(results, job):
    case = CASES[job]
    if case.update == "adamw_zero1":
        return  # it splits, checks and gathers there: docs/studies/steps_of_deepspeed.md has the counts
    found = operators_of(results[job], caller="DeepSpeed")
    each_micro_batch = {"div": case.micro_batches, "ones_like": case.micro_batches}
    buckets = results[job]["buckets"]
    joined = sum(size > 1 for size in buckets)
    assert found.pop("copy_") == results[job]["parameters"]
    assert found == {**each_micro_batch, "cat": joined, "c10d.allreduce_": len(buckets), "mul_": len(buckets)}


@pytest.mark.parametrize("job", cases(lambda case: case.update != "adamw_zero1"))
def test_gradients_are_reduced_beside_the_last_backward_pass(results, job):
    """All buckets begin before its end, the last with the gradients of the token embedding."""
    assert operators_of(results[job], phase="backward")["c10d.allreduce_"] == len(results[job]["buckets"])


@pytest.mark.parametrize("job", slow_but(["compiled:varlen"], ATTENTION_IN_GRAPHS))
def test_a_compiled_block_is_one_graph_with_its_attention(results, job):
    result = results[job]
    assert "error" not in result, result["error"]
    assert (len(result["graphs"]), result["breaks"], result["device"]) == (1, 0, "cuda:0")
    assert any(word in operator for operator in result["graphs"][0] for word in ATTENTION_IN_GRAPHS[job])


@pytest.mark.parametrize("job", slow_but(["stream:pre+bfloat16"], STREAM_BYTES))
def test_compiled_blocks_pass_on_and_keep_a_residual_stream_of_its_own_type(results, job):
    """Forward: it enters, is kept and leaves; backward: what is kept, and a gradient in and out. Products read BF16."""
    for direction in ("forward", "backward"):
        found = results[job][direction]
        assert set(found) == {"bfloat16", job.rpartition("+")[2]}
        assert sum(found.values()) == STREAM_BYTES[job] * 96 * 64


@pytest.mark.slow
@pytest.mark.parametrize("job", WHOLE)
def test_a_whole_model_has_no_faults_and_computes_what_the_formulas_say(results, job):
    result = results[job]
    assert "error" not in result, result["error"]
    assert (result["faults"], result["expected_waits"]) == ([], {})
    assert (result["product_flops"], result["attention_flops"]) == expected_flops(result)
    assert result["estimated_peak"] == pytest.approx(result["peak_bytes"], rel=MEMORY_ERROR)
