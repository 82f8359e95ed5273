"""Every key of the GPU day's results, for tests on a CPU and on the fake device."""

SPREAD = {"median", "quartile_1", "quartile_3"}
STEP = {"status", "seconds", "exit_code", "last_line"}
PART = {
    "part",
    "command",
    "commit",
    "date",
    "device",
    "python",
    "torch",
    "cuda",
    "gpus",
    "gpu_memory_bytes",
    "nccl",
    "driver",
    "topology",
    "steps",
    "results",
}
THROUGHPUT = {
    "run",
    "data",
    "ranks",
    "measured_on",
    "rows_per_step",
    "rows_per_micro_batch",
    "pack_length",
    "max_sequence_length",
    "options",
    "layouts",
    "ratio_of_promised_speed_up",
    "depths",
    "cost_model",
    "cost_model_refusal",
}
LAYOUT_SPREADS = {
    "step_seconds",
    "slots_per_second",
    "tokens_per_second",
    "sequences_per_second",
    "useful_tflops",
    "performed_tflops",
}
LAYOUT = LAYOUT_SPREADS | {
    "layout",
    "forward_seconds",
    "backward_seconds",
    "all_reduce_seconds",
    "update_seconds",
    "loader_seconds",
    "wait_share",
    "sequences_per_pack",
    "padding_share",
    "mfu",
    "peak_memory_bytes",
}
COST_MODEL = {
    "constant",
    "per_slot",
    "per_squared_length",
    "per_segment",
    "per_step",
    "noise",
    "repeat_noise",
    "held_out_median_error",
    "held_out_95_percent_error",
    "samples",
    "measured_on",
}
CATEGORIES = ["communication", "attention", "memory copies", "optimizer", "matmul", "elementwise"]
DESIGN = {
    "ceilings": (("ceiling",), ("value",)),
    "head_products": (("width", "vocabulary", "rows"), ("logits", "hidden_gradient", "weight_gradient")),
    "loss": (("width", "vocabulary", "compiled", "chunk_bytes"), ("milliseconds", "megabytes")),
    "segments": (("heads", "sequences", "segments"), ("milliseconds", "megabytes")),
    "dropout": (("dropout",), ("forward_milliseconds", "both_milliseconds")),
    "dropout_gradient": (("backward_pass",), ("relative_difference",)),
    "unseen_lengths": (("kernels",), ("first_milliseconds", "again_milliseconds")),
}
"""What is asked in each question, and what is answered."""


def check_throughput(value, layouts, *, has_cost_model):
    assert set(value) == THROUGHPUT
    assert [row["layout"] for row in value["layouts"]] == layouts
    for row in value["layouts"]:
        assert set(row) == LAYOUT
        assert all(set(row[name]) == SPREAD and row[name]["median"] > 0 for name in LAYOUT_SPREADS)
        assert row["peak_memory_bytes"] > 0
    assert (value["ratio_of_promised_speed_up"] is not None) == ("padded" in layouts)
    assert (value["cost_model"] is not None) == has_cost_model
    if has_cost_model:
        assert set(value["cost_model"]) == COST_MODEL


def check_design(value, *, on_gpu):
    assert list(value) == list(DESIGN)
    for question, rows in value.items():
        asked, answered = DESIGN[question]
        assert rows, question
        for row in rows:
            assert list(row) == [*asked, *answered], row
            unknown = [name for name in answered if row[name] is None]
            assert unknown == ([] if on_gpu or "megabytes" not in row else ["megabytes"])
    assert [row["ceiling"].partition(",")[0] for row in value["ceilings"]] == [
        "BF16 product",
        "copy",
        "one small operator",
    ]
    assert len({row["chunk_bytes"] for row in value["loss"]}) > 1
    assert [row["dropout"] for row in value["dropout"]] == [0.0, 0.1]
    assert len({row["segments"] for row in value["segments"]}) > 1
    assert [row["kernels"] for row in value["unseen_lengths"]] == ["without cuDNN", *(["cuDNN"] if on_gpu else [])]


def check_checks(value, *, steps, on_gpu):
    assert list(value) == [
        "device",
        "steps",
        "waits",
        "wait_places",
        "graphs_before",
        "recompilations",
        "copy_milliseconds",
    ]
    assert (value["steps"], value["recompilations"], value["wait_places"]) == (steps, 0, [])
    assert value["waits"] == (0 if on_gpu else None)
    pinned = ["pinned"] if on_gpu else []
    added = ["added_by_side_stream"] if on_gpu else []
    assert list(value["copy_milliseconds"]) == ["pageable", *pinned, "product", *added]
    assert all(one > 0 for name, one in value["copy_milliseconds"].items() if name != "added_by_side_stream")


def check_law(value, *, steps):
    names = ["device", "sequences_per_micro_batch", "padded_sequences_per_second", "speed_ups", "mean", "deviation"]
    assert list(value) == [*names, "fitted", "fitted_distance", "published", "published_distance"]
    assert len(value["speed_ups"]) == steps
    assert min(value["speed_ups"]) > 0
    assert set(value["fitted"]) == set(value["published"]) == {"location", "scale"}


def check_profile(value, *, steps):
    assert list(value) == ["device", "steps", "seconds_per_step", "longest"]
    assert value["steps"] == steps
    assert list(value["seconds_per_step"]) == CATEGORIES
    assert sum(value["seconds_per_step"].values()) > 0
    assert all(list(one) == ["kernel", "seconds", "category"] for one in value["longest"])
    assert value["longest"]


def check_overhead(value):
    where = ["run", "model", "device", "threads", "torch", "precision"]
    sizes = ["pack_length", "packs_per_step", "packs_per_micro_batch", "longest_packed", "rounds"]
    assert list(value) == [*where, *sizes, "rows", "costs"]
    assert list(value["rows"]) == ["packed", "one_segment", "full"]
    amounts = {"flops", "slots", "tokens", "sequences", "masked_tokens", "head_rows", "squared_lengths"}
    assert all(set(one) == {"collate_seconds", "passes_seconds"} | amounts for one in value["rows"].values())
    assert list(value["costs"]) == ["packed", "one_segment"]
    assert all(list(one) == ["raw", "by_flops", "passes", "collation"] for one in value["costs"].values())


STUDY = {
    "origin",
    "long_sequences",
    "devices",
    "needs",
    "run",
    "reference",
    "fitted_noise",
    "measured",
    "log",
    "replay",
    "simulation",
    "notes",
    "warnings",
}
"""Of `study imbalance --save`."""
REPLAY = {
    "measured_on",
    "batch",
    "packs",
    "accumulation",
    "zero_stage",
    "update_seconds",
    "timed_parts",
    "rows",
    "forecasts",
}
REPLAYED = {
    "layout",
    "policy",
    "dense",
    "devices",
    "steps",
    "speed_up",
    "speed_up_low",
    "speed_up_high",
    "step_low",
    "step_high",
    "sequences_per_second",
    "slowest_over_mean",
    "worst_slowest_over_mean",
    "wait_share",
    "efficiency",
}


def check_replay(value, *, ranks):
    assert set(value) == REPLAY
    assert value["update_seconds"] > 0
    assert value["timed_parts"] > 0
    assert {row["layout"] for row in value["rows"]} == {"packed", "unpadded", "padded"}
    for row in value["rows"]:
        assert set(row) == REPLAYED
        assert row["sequences_per_second"] > 0
        assert row["slowest_over_mean"] >= 1.0
    assert sorted({row["devices"] for row in value["rows"]}) == ranks
