"""Budgets from counts alone, as in the paper, and exact ones over prepared data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import ROOT
from tiny_run import tiny_gpt2_run
from windowed_models import layers_with_windows, with_windows

from evenpack.config import load_run_file
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.kernels.visible_pairs import total_pairs_within
from evenpack.launcher.training import plan_training
from evenpack.models.cost import Work, step_flops
from evenpack.studies.budget.command import compute_budget
from evenpack.studies.budget.options import BudgetOptions
from evenpack.studies.budget.study import Budget, budget_of
from evenpack.testing import changed, prepared, run_config, run_values, text_sources

CONFIGS = ROOT / "configs"
PAPER = {"corpus_tokens": 114_400_095, "corpus_documents": 803_000}
"""Of WikiText-103 without its short rows, and rows left: AtomSize, A.1 and A.5."""
BATCHES = {32: 256, 64: 256, 128: 128}
"""By maximum sequence length: A.2."""


def of_paper(length: int) -> RunConfig:
    return load_run_file(
        CONFIGS / "gpt2_small.yaml",
        RunConfig,
        [
            f"data.recipe={{kind: concat, max_sequence_length: {length}, isolate_documents: false}}",
            f"data.pack_length={length}",
            "model.positions=alibi",
            f"training.packs_per_step={BATCHES[length]}",
            "training.steps=null",
            "training.epochs=2",
        ],
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("run"))


@contextmanager
def refused(*messages: str) -> Iterator[None]:
    with pytest.raises(ConfigError) as caught:
        yield
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(("length", "steps"), [(32, 28_126), (64, 14_063), (128, 14_063)])
def test_the_papers_counts_give_the_steps_of_concat(length: int, steps: int) -> None:
    budget = budget_of(of_paper(length), BudgetOptions(**PAPER))
    assert budget.steps == steps
    assert budget.epochs == pytest.approx(2.0, abs=1e-3)
    assert budget.parameters == 124_439_808 - 1024 * 768, "124M without a table of positions"
    (source,) = budget.sources
    assert source.tokens_per_epoch == 114_400_095 + 803_000
    assert source.items_per_epoch == -(-source.tokens_per_epoch // length)
    assert budget.padding[0].padding == budget.steps * budget.batch.slots - round(budget.tokens)


@pytest.mark.parametrize(("length", "steps"), [(32, 28_120), (64, 14_058), (128, 14_056)])
def test_tails_dropped_from_batches_and_epochs_explain_the_papers_steps(length: int, steps: int) -> None:
    """WikiText-103 has 1,801,350 rows, of which 44.38 % stay. If 1,000 documents at a time are joined and their tails
    dropped, half a row on average (`datasets.map` and its example), and each epoch drops its last, unfinished step,
    the steps are the paper's."""
    documents = round(1_801_350 * (1 - 0.5562))
    tails = -(-documents // 1000) * length / 2
    per_epoch = (114_400_095 + documents - tails) // (length * BATCHES[length])
    assert 2 * per_epoch == steps


def test_a_budget_does_the_steps_of_the_plan_and_shows_its_rounding(config: RunConfig) -> None:
    for length in ({"steps": 7}, {"epochs": 2.5}, {"max_samples": 900}, {"tokens": 40_000}, {"chinchilla_ratio": 2}):
        step = {"packs_per_step": None, "tokens_per_step": 900}
        run = changed(config, training={"steps": None, **length, **step})
        plan, budget = plan_training(run, ranks=2), budget_of(run, BudgetOptions(devices=2))
        assert (budget.steps, budget.tokens, budget.parameters) == (plan.steps, plan.tokens, plan.parameters)
        assert budget.batch.micro_batches == plan.micro_batches_per_rank
        assert budget.epochs == plan.epochs_of_all
        assert "training.tokens_per_step 900: training.packs_per_step" in budget.adjustment[0]
        assert budget.assumptions == ()


@pytest.mark.parametrize("windows", [(), (3,)])
def test_the_operations_of_an_epoch_are_those_of_its_lengths(config: RunConfig, windows: tuple[int, ...]) -> None:
    data = PreparedData.open(config.prepared_dir, config.data)
    lengths = data.view("one", "train").lengths().astype(np.int64)
    packs = data.manifest.sources["one"].train.packing.packs
    epoch = changed(config, training={"packs_per_step": packs, "packs_per_micro_batch": packs, "steps": 1})
    model = with_windows(config.model, (None, *windows))
    work = Work(
        slots=int(lengths.sum()),
        squared_lengths=int((lengths**2).sum()),
        head_slots=int((lengths - 1).sum()),
        sequences=len(lengths),
        pairs_within=total_pairs_within(lengths, windows),
    )
    with layers_with_windows():
        budget = budget_of(epoch.model_copy(update={"model": model}), BudgetOptions())
        useful = step_flops(model, vocabulary_size=data.vocabulary_size, work=work)
    assert (budget.tokens, budget.samples, budget.flops) == (work.slots, work.sequences, useful)
    of_packs, of_rows = budget.padding
    assert of_packs.padding == packs * 64 - work.slots
    assert of_rows.slots == 64 * len(lengths)
    assert of_rows.share == pytest.approx(1 - work.slots / of_rows.slots)
    rows = Work(
        slots=64 * len(lengths),
        squared_lengths=64 * 64 * len(lengths),
        head_slots=work.head_slots,
        sequences=len(lengths),
        pairs_within=total_pairs_within(np.full(len(lengths), 64), windows),
    )
    performed = step_flops(model, vocabulary_size=data.vocabulary_size, work=rows)
    assert of_rows.wasted_flops == performed - useful > of_packs.wasted_flops > 0


def of_rows(folder: Path, **recipe: Any) -> RunConfig:
    """Returns a run over rows of 16 slots, and documents of up to three of them."""
    data = {
        "sources": text_sources(
            folder, {"one": ["abcdefgh"[: number % 8 + 1] * (number % 7 + 1) for number in range(90)]}
        ),
        "recipe": {"max_sequence_length": 16, "isolate_documents": False, **recipe},
        "pack_length": 16,
    }
    return prepared(run_config(run_values("gpt2", folder, data=data)))


def test_documents_of_a_stream_would_be_padded_one_by_one(tmp_path: Path) -> None:
    run = of_rows(tmp_path, kind="concat", atom=8)
    view = PreparedData.open(run.prepared_dir, run.data).view("one", "train")
    lengths = view.token_file.spans(np.arange(90))[1].tolist()
    rows = -(-sum(lengths) // 16)
    epoch = changed(run, training={"packs_per_step": rows, "packs_per_micro_batch": rows, "steps": 1})
    budget = budget_of(epoch, BudgetOptions())
    of_stream, of_documents = budget.padding
    assert (budget.tokens, of_stream.padding) == (sum(lengths), 16 * rows - sum(lengths))
    assert of_documents.slots == sum(16 * -(-length // 16) for length in lengths)
    assert of_documents.rows == "one document in each, of 16"
    counted = budget_of(epoch, BudgetOptions(corpus_tokens=sum(lengths) - 90, corpus_documents=90))
    assert (counted.steps, counted.epochs, counted.tokens) == (budget.steps, budget.epochs, budget.tokens)
    assert [one.rows for one in counted.padding] == ["packs of 16"], "what each document takes is not known"


def test_what_only_fills_rows_up_is_no_token(tmp_path: Path) -> None:
    run = of_rows(tmp_path, kind="padding", atom=16)
    packing = PreparedData.open(run.prepared_dir, run.data).manifest.sources["one"].train.packing
    budget = budget_of(run, BudgetOptions())
    (of_rows_alone,) = budget.padding
    assert packing.padding > 0
    assert of_rows_alone.share == pytest.approx(1 - packing.efficiency, abs=1 / of_rows_alone.slots)
    assert budget.tokens == pytest.approx(budget.steps * 8 * packing.tokens / packing.packs)


@pytest.mark.parametrize("windows", [(), (2, 5)])
@pytest.mark.parametrize("predicted", ["all", "closing"])
def test_what_padding_of_rows_costs_is_waste_and_the_rest_useful(
    tmp_path: Path, predicted: str, windows: tuple[int, ...]
) -> None:
    run = of_rows(tmp_path, kind="padding", atom=8, end_of_text_in_loss=predicted)
    view = PreparedData.open(run.prepared_dir, run.data).view("one", "train")
    rows, lengths = np.arange(view.count), view.lengths().astype(np.int64)
    real = lengths - np.add.reduceat(view.ends_of_text(rows, closing=False), 16 * rows, dtype=np.int64)
    epoch = changed(run, training={"packs_per_step": len(rows), "packs_per_micro_batch": len(rows), "steps": 1})
    model = with_windows(run.model, windows or (None,))  # two layers
    with layers_with_windows():
        budget = budget_of(epoch.model_copy(update={"model": model}), BudgetOptions())
    useful = Work(
        slots=int(real.sum()),
        squared_lengths=int((real**2).sum()),
        head_slots=int((real - 1).sum()),
        sequences=len(rows),
        pairs_within=total_pairs_within(real, windows),
    )
    performed = Work(
        slots=16 * len(rows),
        squared_lengths=int((lengths**2).sum()),
        head_slots=int((lengths - 1).sum()) if predicted == "all" else useful.head_slots,
        sequences=len(rows),
        pairs_within=total_pairs_within(lengths, windows),
    )
    assert performed.slots > useful.slots
    flops = [step_flops(model, vocabulary_size=260, work=work) for work in (useful, performed)]
    assert budget.flops == flops[0]
    assert budget.padding[0].wasted_flops == flops[1] - flops[0]


def test_each_source_has_its_epochs_by_its_weight(tmp_path: Path) -> None:
    sources = text_sources(tmp_path, {"one": ["x" * (1 + n % 9) for n in range(70)], "two": ["yz" * 9] * 40})
    sources["one"]["weight"] = 2
    run = prepared(run_config(run_values("gpt2", tmp_path, data={"sources": sources})))
    budget = budget_of(run, BudgetOptions(devices=2))
    one, two = budget.sources
    assert (one.share, two.share) == pytest.approx((2 / 3, 1 / 3))
    for source in (one, two):
        drawn = budget.steps * budget.batch.per_step * source.share
        assert source.epochs == pytest.approx(drawn / source.items_per_epoch)
        assert source.epochs == pytest.approx(budget.steps / source.steps_per_epoch)
    expected = sum(source.epochs * source.tokens_per_epoch for source in budget.sources)
    assert budget.tokens == pytest.approx(expected)


def test_hours_are_operations_over_what_the_devices_reach(config: RunConfig) -> None:
    many = changed(config, training={"packs_per_step": 64, "precision": "bf16_autocast"})
    alone = budget_of(many, BudgetOptions(device="h100", mfu=0.4))
    assert alone.time.device_hours == pytest.approx(alone.flops / (0.4 * 989.4e12) / 3600)
    assert alone.time.hours == alone.time.device_hours
    eight = budget_of(many, BudgetOptions(device="h100", mfu=0.4, devices=8))
    assert eight.time.device_hours == alone.time.device_hours == pytest.approx(8 * eight.time.hours)
    assert eight.time.tokens_per_second == pytest.approx(eight.tokens / eight.time.hours / 3600)
    waste = eight.padding[1]
    assert waste.wasted_device_hours == pytest.approx(waste.wasted_flops / (0.4 * 989.4e12) / 3600)
    fp32 = budget_of(changed(many, training={"precision": "fp32"}), BudgetOptions(device="h100", mfu=0.4))
    assert fp32.time.hours == pytest.approx(alone.time.hours * 989.4 / 66.9)


def test_a_batch_is_micro_batches_times_accumulation_times_devices(config: RunConfig) -> None:
    many = changed(config, training={"packs_per_step": 64})
    for devices in (1, 2, 8):
        batch = budget_of(many, BudgetOptions(devices=devices)).batch
        assert batch.per_step == batch.per_micro_batch * batch.micro_batches * devices == 64
        assert batch.slots == 64 * 64
        assert batch.tokens <= batch.slots
    with refused("3 ranks x training.packs_per_micro_batch (4) must divide", "the number of ranks can be 1, 2, 4"):
        budget_of(many, BudgetOptions(devices=3))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_file_has_a_budget_before_its_data_is_prepared(path: Path, tmp_path: Path) -> None:
    words = [f"data.prepared_dir={tmp_path}", "training.packing_adjustment=none"]
    run = load_run_file(path, RunConfig, words)
    training = {"steps": 5000, "epochs": None, "max_samples": None}
    budget = budget_of(changed(run, training=training), BudgetOptions(vocabulary_size=32_000))
    assert budget.epochs is None
    assert (budget.sources, budget.padding) == ((), ())
    assert budget.tokens <= budget.steps * budget.batch.slots
    assert 0.2 < budget.flops / budget.flops_by_rule < 2.5
    assert len(budget.assumptions) == 2


def test_documents_are_split_no_more_than_their_tokens_need() -> None:
    words = ["training.steps=null", "training.epochs=1", "schedule.warmup_steps=0"]
    run = load_run_file(CONFIGS / "gpt2_small.yaml", RunConfig, words)
    budget = budget_of(run, BudgetOptions(corpus_tokens=9_990_000, corpus_documents=10_000))
    (source,) = budget.sources
    assert (source.tokens_per_epoch, source.items_per_epoch) == (10_000_000, -(-10_000_000 // 1024))
    assert budget.steps == -(-source.items_per_epoch // 512)
    assert budget.batch.sequences == pytest.approx(512 * 10_000 / source.items_per_epoch)


def test_documents_without_a_text_are_counted_too() -> None:
    words = ["data.recipe={kind: concat, max_sequence_length: 2}", "data.pack_length=2", "model.positions=alibi"]
    run = load_run_file(CONFIGS / "gpt2_small.yaml", RunConfig, words)
    budget = budget_of(run, BudgetOptions(corpus_tokens=1, corpus_documents=10))
    assert 0 < budget.flops < budget.flops_by_rule, "no target is below none"


@pytest.mark.parametrize("kind", ["documents", "concat"])
def test_ends_of_documents_that_are_left_out_of_the_loss_are_no_targets_of_the_head(kind: str) -> None:
    words = ["training.steps=null", "training.epochs=1", "schedule.warmup_steps=0", "training.packs_per_step=32"]
    flops = {}
    for ends in ("all", "none"):
        recipe = f"data.recipe={{kind: {kind}, max_sequence_length: 1024, end_of_text_in_loss: {ends}}}"
        run = load_run_file(CONFIGS / "gpt2_small.yaml", RunConfig, [*words, "data.pack_length=1024", recipe])
        budget = budget_of(run, BudgetOptions(corpus_tokens=32 * 1024 - 100, corpus_documents=100))
        assert budget.steps == 1
        flops[ends] = budget.flops
    head = 6 * 768 * 50_257  # of a target, forward and backward
    assert flops["all"] - flops["none"] == pytest.approx(100 * head, rel=1e-6)


COUNTS = {"corpus_tokens": 1000, "corpus_documents": 10}


@pytest.mark.parametrize(
    ("name", "training", "options", "message"),
    [
        ("gpt2_small", {"steps": None, "epochs": 1.0}, {}, "training.epochs (1.0) needs the data"),
        ("bert_large_phase2", {"packing_adjustment": "lamb_betas"}, {}, "packing_adjustment (lamb_betas) needs"),
        ("bert_large_phase2", {}, COUNTS, "how many sequences sentence_pairs makes does not follow from counts"),
        ("gpt2_small", {}, {"device": "Tesla T4"}, "t4 does not compute bfloat16: name another device"),
        ("gpt2_small", {}, {"device": "tpu"}, "the peak of a device 'tpu' is not known"),
        ("gpt2_small", {}, {"mfu": 0.0}, "--mfu is a fraction of the peak, above 0 and at most 1, not 0"),
        ("gpt2_small", {}, {"mfu": 40.0}, "--mfu is a fraction of the peak"),
        ("gpt2_small", {}, {"corpus_tokens": 9}, "--corpus-tokens and --corpus-documents go together"),
        ("gpt2_small", {}, {"compute": -1.0}, "--compute must be a number above 0"),
        ("gpt2_small", {}, {"served_tokens": float("inf")}, "--served-tokens must be a number above 0"),
        ("bert_large_phase2_sprint", {}, {"served_tokens": 1e9}, "uses losses of causal models, and bert large is"),
        ("llama_1.1b", {}, {}, "give --vocabulary-size"),
        (None, {}, {"served_tokens": 1e9}, "give a RUN.yaml, or --compute FLOPS"),
        (None, {}, {"compute": 1e21, "device": "h100"}, "--device is of a run: give a RUN.yaml, or leave"),
        (None, {}, {"compute": 1e21, "vocabulary_size": 9}, "--vocabulary-size is of a run"),
    ],
)
def test_what_no_budget_can_be_drawn_up_for_is_refused(
    tmp_path: Path, name: str | None, training: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    run = None
    if name is not None:
        run = load_run_file(CONFIGS / f"{name}.yaml", RunConfig, [f"data.prepared_dir={tmp_path}"])
        run = changed(run, training=training)
    with refused(message):
        compute_budget(run, BudgetOptions(**options))


def test_a_prepared_vocabulary_is_not_to_be_given_again(config: RunConfig) -> None:
    with refused("--vocabulary-size is for data that is not prepared"):
        budget_of(config, BudgetOptions(vocabulary_size=50_257))


def test_counts_that_are_given_stand_in_place_of_prepared_data(config: RunConfig) -> None:
    budget = budget_of(config, BudgetOptions(**PAPER))
    assert budget.sources[0].tokens_per_epoch == 115_203_095
    assert "as given" in budget.assumptions[0]


def test_the_report_holds_the_budget_and_what_was_requested_beside_it(config: RunConfig) -> None:
    options = BudgetOptions(device="h200", compute=1.2e20, served_tokens=1e11)
    report = compute_budget(config, options)
    assert set(asdict(budget_of(config, options))) < set(report.value)
    assert report.value["compute_optimal"] == {"flops": 1.2e20, "parameters": 1e9, "tokens": 2e10}
    assert report.value["serving"].models[0].parameters == 1e9
    assert isinstance(budget_of(config, options), Budget)
