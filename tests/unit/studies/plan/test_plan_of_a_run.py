"""Plans from counts alone, as in the paper, and exact ones over prepared data."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import ROOT
from run_files import changed, prepared, run_config, run_values, text_sources
from slow_cases import slow_but
from tiny_run import tiny_gpt2_run
from windowed_models import layers_with_windows, with_windows

from evenpack.config import load_run_file
from evenpack.data.order.assignment import StepAssignment
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.engine.resolving.resolve import open_run
from evenpack.errors import ConfigError
from evenpack.launcher.planning import plan_training
from evenpack.models.cost import Work, step_flops
from evenpack.studies.imbalance.step_cost import SHIPPED
from evenpack.studies.plan.options import PlanOptions
from evenpack.studies.plan.plan import RunPlan, plan_run, step_balance
from evenpack.studies.plan.rates import MEASURED_MFU
from evenpack.visible_pairs import total_pairs_within

CONFIGS = ROOT / "configs"
PAPER = {"corpus_tokens": 114_400_095, "corpus_documents": 799_439}
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


def plan_of(config: RunConfig, *, ranks: int = 1, **options: Any) -> RunPlan:
    return plan_run(config, PlanOptions(**options), ranks=ranks)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("run"))


@contextmanager
def refused(*messages: str) -> Iterator[None]:
    with pytest.raises(ConfigError) as caught:
        yield
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(("length", "steps"), [(32, 28_125), (64, 14_063), (128, 14_063)])
def test_the_papers_counts_give_the_steps_of_concat(length: int, steps: int) -> None:
    plan = plan_of(of_paper(length), **PAPER)
    assert plan.cost.steps == steps
    assert plan.data.epochs == pytest.approx(2.0, abs=1e-3)
    assert plan.cost.parameters == 124_439_808 - 1024 * 768, "124M without a table of positions"
    (source,) = plan.data.sources
    assert source.tokens_per_epoch == 114_400_095 + 799_439
    assert source.items_per_epoch == -(-source.tokens_per_epoch // length)
    assert plan.data.padding[0].padding == plan.cost.steps * plan.step.slots - round(plan.cost.tokens)


def test_the_plan_shows_the_rounding_and_is_the_same_for_a_run_that_is_checked(config: RunConfig) -> None:
    for length in ({"steps": 7}, {"epochs": 2.5}, {"max_samples": 900}, {"tokens": 40_000}, {"chinchilla_ratio": 2}):
        step = {"packs_per_step": None, "tokens_per_step": 900}
        run = changed(config, training={"steps": None, **length, **step})
        plan, of_checked = plan_of(run, ranks=2), plan_training(run, ranks=2)
        assert plan.cost.steps == open_run(run).config.training.planned_steps
        assert (plan.data, plan.cost, plan.start) == (of_checked.data, of_checked.cost, of_checked.start)
        assert "training.tokens_per_step 900: training.packs_per_step" in plan.start.packing_adjustment[0]
        assert plan.data.assumptions == ()


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
        plan = plan_of(epoch.model_copy(update={"model": model}))
        useful = step_flops(model, vocabulary_size=data.vocabulary_size, work=work)
    assert (plan.cost.tokens, plan.cost.sequences, plan.cost.flops) == (work.slots, work.sequences, useful)
    of_packs, of_rows = plan.data.padding
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
    plan = plan_of(epoch)
    of_stream, of_documents = plan.data.padding
    assert (plan.cost.tokens, of_stream.padding) == (sum(lengths), 16 * rows - sum(lengths))
    assert of_documents.slots == sum(16 * -(-length // 16) for length in lengths)
    assert of_documents.rows == "one document in each, of 16"
    counted = plan_of(epoch, corpus_tokens=sum(lengths) - 90, corpus_documents=90)
    assert (counted.cost.steps, counted.data.epochs, counted.cost.tokens) == (
        plan.cost.steps,
        plan.data.epochs,
        plan.cost.tokens,
    )
    assert [one.rows for one in counted.data.padding] == ["packs of 16"], "what each document takes is not known"


@pytest.mark.parametrize("windows", [(), (2, 5)])
@pytest.mark.parametrize("predicted", ["all", "closing"])
def test_what_padding_of_rows_costs_is_waste_and_the_rest_useful(
    tmp_path: Path, predicted: str, windows: tuple[int, ...]
) -> None:
    run = of_rows(tmp_path, kind="padding", atom=8, end_of_text_in_loss=predicted)
    view = PreparedData.open(run.prepared_dir, run.data).view("one", "train")
    rows, lengths = np.arange(view.count), view.lengths().astype(np.int64)
    real = view.counts(rows, lengths).real_lengths
    epoch = changed(run, training={"packs_per_step": len(rows), "packs_per_micro_batch": len(rows), "steps": 1})
    model = with_windows(run.model, windows or (None,))  # two layers
    with layers_with_windows():
        plan = plan_of(epoch.model_copy(update={"model": model}))
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
    assert (plan.cost.tokens, plan.cost.flops) == (useful.slots, flops[0]), "what only fills rows up is no token"
    (padding,) = plan.data.padding
    assert padding.wasted_flops == flops[1] - flops[0]
    assert padding.share == pytest.approx(1 - useful.slots / performed.slots)


def test_each_source_has_its_epochs_by_its_weight(tmp_path: Path) -> None:
    sources = text_sources(tmp_path, {"one": ["x" * (1 + n % 9) for n in range(70)], "two": ["yz" * 9] * 40})
    sources["one"]["weight"] = 2
    run = prepared(run_config(run_values("gpt2", tmp_path, data={"sources": sources})))
    plan = plan_of(run, ranks=2)
    one, two = plan.data.sources
    assert (one.share, two.share) == pytest.approx((2 / 3, 1 / 3))
    for source in (one, two):
        drawn = plan.cost.steps * plan.step.items * source.share
        assert source.epochs == pytest.approx(drawn / source.items_per_epoch)
        assert source.epochs == pytest.approx(plan.cost.steps / source.steps_per_epoch)
    expected = sum(source.epochs * source.tokens_per_epoch for source in plan.data.sources)
    assert plan.cost.tokens == pytest.approx(expected)


def test_hours_are_operations_over_what_the_devices_reach(config: RunConfig) -> None:
    many = changed(config, training={"packs_per_step": 64, "precision": "bf16_autocast"})
    alone = plan_of(many, device="h100", mfu=0.4)
    assert alone.cost.hours.device_hours == pytest.approx(alone.cost.flops / (0.4 * 989.4e12) / 3600)
    assert alone.cost.hours.hours == alone.cost.hours.device_hours
    eight = plan_of(many, device="h100", mfu=0.4, ranks=8)
    assert eight.cost.hours.device_hours == alone.cost.hours.device_hours == pytest.approx(8 * eight.cost.hours.hours)
    assert eight.cost.hours.tokens_per_second == pytest.approx(eight.cost.tokens / eight.cost.hours.hours / 3600)
    fp32 = plan_of(changed(many, training={"precision": "fp32"}), device="h100", mfu=0.4)
    assert fp32.cost.hours.hours == pytest.approx(alone.cost.hours.hours * 989.4 / 66.9)


def test_a_batch_is_micro_batches_times_accumulation_times_devices(config: RunConfig) -> None:
    many = changed(config, training={"packs_per_step": 64})
    for devices in (1, 2, 8):
        step = plan_of(many, ranks=devices).step
        assert step.items == step.items_per_micro_batch * step.micro_batches * devices == 64
        assert step.slots == 64 * 64
        assert step.tokens <= step.slots
    with refused("3 ranks x training.packs_per_micro_batch (4) must divide", "the number of ranks can be 1, 2, 4"):
        plan_of(many, ranks=3)


DECODER_AND_ENCODER = [CONFIGS / f"{name}.yaml" for name in ("gpt2_small", "bert_large_phase1")]


@pytest.mark.parametrize(
    "path", slow_but(DECODER_AND_ENCODER, sorted(CONFIGS.glob("*.yaml"))), ids=lambda path: path.stem
)
def test_every_run_file_has_a_plan_before_its_data_is_prepared(path: Path, tmp_path: Path) -> None:
    words = [f"data.prepared_dir={tmp_path}", "training.packing_adjustment=none"]
    run = load_run_file(path, RunConfig, words)
    training = {"steps": 5000, "epochs": None, "max_samples": None}
    plan = plan_of(changed(run, training=training), vocabulary_size=32_000)
    assert plan.data.epochs is None
    assert (plan.data.sources, plan.data.padding) == ((), ())
    assert plan.step.slots is None or plan.step.tokens <= plan.step.slots
    assert 0.2 < plan.cost.flops / plan.cost.flops_by_rule < 2.5
    assert len(plan.data.assumptions) == 2


def test_documents_are_split_no_more_than_their_tokens_need() -> None:
    words = ["training.steps=null", "training.epochs=1", "schedule.warmup_steps=0"]
    run = load_run_file(CONFIGS / "gpt2_small.yaml", RunConfig, words)
    plan = plan_of(run, corpus_tokens=9_990_000, corpus_documents=10_000)
    (source,) = plan.data.sources
    assert (source.tokens_per_epoch, source.items_per_epoch) == (10_000_000, -(-10_000_000 // 1024))
    assert plan.cost.steps == -(-source.items_per_epoch // 512)
    assert plan.step.sequences == pytest.approx(512 * 10_000 / source.items_per_epoch)


def test_documents_without_a_text_are_counted_too() -> None:
    words = ["data.recipe={kind: concat, max_sequence_length: 2}", "data.pack_length=2", "model.positions=alibi"]
    run = load_run_file(CONFIGS / "gpt2_small.yaml", RunConfig, words)
    plan = plan_of(run, corpus_tokens=1, corpus_documents=10)
    assert 0 < plan.cost.flops < plan.cost.flops_by_rule, "no target is below none"


@pytest.mark.parametrize("kind", ["documents", "concat"])
def test_ends_of_documents_that_are_left_out_of_the_loss_are_no_targets_of_the_head(kind: str) -> None:
    words = ["training.steps=null", "training.epochs=1", "schedule.warmup_steps=0", "training.packs_per_step=32"]
    flops = {}
    for ends in ("all", "none"):
        recipe = f"data.recipe={{kind: {kind}, max_sequence_length: 1024, end_of_text_in_loss: {ends}}}"
        run = load_run_file(CONFIGS / "gpt2_small.yaml", RunConfig, [*words, "data.pack_length=1024", recipe])
        plan = plan_of(run, corpus_tokens=32 * 1024 - 100, corpus_documents=100)
        assert plan.cost.steps == 1
        flops[ends] = plan.cost.flops
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
        ("gpt2_small", {}, {"mfu": 0.4}, "--mfu is a fraction of a device's peak: give --device"),
        ("llama_1.1b", {}, {}, "give --vocabulary-size"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path, name: str, training: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    run = load_run_file(CONFIGS / f"{name}.yaml", RunConfig, [f"data.prepared_dir={tmp_path}"])
    with refused(message):
        given = PlanOptions(**options)
        given.require_valid()
        plan_run(changed(run, training=training), given, ranks=1)


def test_a_prepared_vocabulary_is_not_to_be_given_again(config: RunConfig) -> None:
    with refused("--vocabulary-size is for data that is not prepared"):
        plan_of(config, vocabulary_size=50_257)


def test_counts_that_are_given_stand_in_place_of_prepared_data(config: RunConfig) -> None:
    plan = plan_of(config, **PAPER)
    assert plan.data.sources[0].tokens_per_epoch == 115_199_534
    assert "as given" in plan.data.assumptions[0]


def test_hours_without_a_given_share_have_the_spread_of_what_was_measured(config: RunConfig) -> None:
    run = changed(config, training={"precision": "bf16_autocast"})
    found = plan_of(run, device="h100").cost.hours
    given = [plan_of(run, device="h100", mfu=share).cost.hours.hours for share in MEASURED_MFU.values()]
    assert (found.least, found.most) == pytest.approx((min(given), max(given)))
    assert found.least < found.hours < found.most
    assert "not measured on b200" in plan_of(run, device="b200").cost.hours.basis
    padded = plan_of(changed(run, training={"layout": "padded"}), device="h100")
    wasted = padded.data.padding[-1].wasted_flops / padded.cost.flops
    assert padded.cost.hours.hours == pytest.approx(found.hours * (1 + wasted)), "padding takes time too"
    assert plan_of(config, device="h100").cost.hours is None, "FP32 was not measured"


def test_hours_by_a_measured_cost_model_are_the_seconds_that_it_predicts(config: RunConfig, tmp_path: Path) -> None:
    shipped = CostModel.read(SHIPPED / "bert_large_width_cpu.json")
    of_run = {
        "family": "gpt2",
        "causal": True,
        "layers": config.model.shape["layers"],
        "device": "NVIDIA H100 80GB HBM3",
    }
    measured_on = shipped.measured_on.model_copy(update=of_run)
    file = tmp_path / "cost.json"
    shipped.model_copy(update={"measured_on": measured_on, "per_segment": 0.25}).write(file)
    data = PreparedData.open(config.prepared_dir, config.data)
    lengths = data.view("one", "train").lengths().astype(np.int64)
    packs = data.manifest.sources["one"].train.packing.packs
    training = {"packs_per_step": packs, "packs_per_micro_batch": 1, "steps": 2, "cost_model": str(file)}
    run = open_run(changed(config, training=training))
    plan = plan_run(run.config, PlanOptions(device="h100"), ranks=1, resolved=run)
    read = CostModel.read(file)
    of_step = read.seconds(np.array([64 * packs]), np.array([(lengths**2).sum()]), np.array([len(lengths)]))
    seconds = 2 * (float(of_step[0]) + (packs - 1) * read.constant + read.per_step)
    assert plan.cost.hours.device_hours * 3600 == pytest.approx(seconds)
    assert plan.cost.hours.most == pytest.approx(plan.cost.hours.hours * (1 + read.held_out_95_percent_error))
    elsewhere = plan_run(run.config, PlanOptions(device="h200", mfu=0.4), ranks=1, resolved=run)
    assert "as --mfu says" in elsewhere.cost.hours.basis


def test_hours_on_a_cpu_are_timed(config: RunConfig) -> None:
    run = open_run(config)
    found = plan_run(run.config, PlanOptions(), ranks=2, resolved=run, is_timed=True).cost.hours
    assert 0 < found.least <= found.hours <= found.most
    assert found.device_hours == 2 * found.hours
    assert "timed here" in found.basis


@pytest.mark.parametrize("each", [False, True])
def test_no_assignment_is_below_the_bound_of_a_step(each: bool) -> None:
    """The bound holds for every assignment of a small step, and one reaches it or comes near."""
    costs = np.array([9.0, 1.0, 2.0, 3.0, 1.0, 2.0, 2.0, 4.0])
    found = []
    for order in permutations(range(len(costs))):
        if any(order[place] > order[place + 1] for place in (0, 2, 4, 6)):
            continue  # the same shares in another order
        shares = StepAssignment(items=np.array(order), offsets=np.arange(0, 9, 2))
        found.append(step_balance(costs, shares, ranks=2, each=each))
    bounds = {bound for _, bound in found}
    assert bounds == {max(1.0, (9 + 1 + 1 + 2) / 12)}
    assert min(waited for waited, _ in found) >= max(bounds)
    if not each:
        assert min(waited for waited, _ in found) == pytest.approx(max(bounds))


def test_the_balance_is_that_of_the_steps_which_are_trained(config: RunConfig) -> None:
    run = changed(config, training={"packs_per_step": 64})
    balanced = plan_training(run, ranks=4).step.balance
    by_arrival = plan_training(changed(run, training={"assignment": "arrival"}), ranks=4).step.balance
    assert 1.0 <= balanced.bound <= balanced.largest < by_arrival.largest
    assert plan_training(run, ranks=1).step.balance is None
