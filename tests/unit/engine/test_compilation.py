"""torch.compile of blocks and loss: few graphs, made in the first step, and the numbers of the uncompiled model."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_jobs import NEEDS_A_COMPILER, results_of
from run_files import run_config, run_values

from evenpack.engine.activity import START, doing
from evenpack.engine.compilation import Compilation, announced_compilations, compile_if_asked
from evenpack.engine.config import RunConfig
from evenpack.errors import RunError
from evenpack.models.build import Model, new_model

OPAQUE = "Attempted to call function marked as skipped"
"""Why a block is cut at an attention whose calls depend on lengths."""

GRAPHS_ALONE = {"code": "aot_eager"}
"""Graphs are made as always, but no code of them, half a minute a job: another job compares that of the family."""

BY_ENGINE = {
    "packed": {"steps": 200},
    "packed, pairs with dropout": {"kind": "bert", "dropout": 0.1, "checkpointing": True, **GRAPHS_ALONE},
    "padded": {"layout": "padded", "positions": "alibi", "zero_stage": 1, "steps": 200, **GRAPHS_ALONE},
    "padded, ZeRO 2": {"layout": "padded", "positions": "alibi", "zero_stage": 2, "steps": 20, **GRAPHS_ALONE},
    "padded sequences": {"layout": "padded", "batching": "sequences", "backend": "reference", **GRAPHS_ALONE},
    "padded, sorted": {"kind": "bert", "layout": "padded", "batching": "sequences", "assignment": "sorted"},
    "unpadded": {"kind": "llama", "positions": "rotary", "layout": "unpadded", "checkpointing": True, "steps": 200},
    "windows": {"kind": "modernbert", "positions": "rotary", "backend": "reference"},
    "windows, unpadded": {
        "kind": "modernbert",
        "positions": "rotary",
        "layout": "unpadded",
        "checkpointing": True,
        **GRAPHS_ALONE,
    },
}
"""Jobs of `compiled_process.py`: each layout in 200 steps, and what else may change a graph in 60."""


def assert_same_numbers(result: dict[str, Any], *, tolerance: float) -> None:
    eager, compiled = result["eager"], result["compiled"]
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=tolerance)
    assert compiled["names"] == eager["names"]
    assert not any("_orig_mod" in name for name in compiled["names"])


@pytest.mark.slow
def test_all_blocks_share_one_graph_of_the_first_step_and_compute_the_same(tmp_path: Path) -> None:
    """Training and evaluation have one each, at any room for segments; so has each kind of block of ModernBERT.

    Embedding, final norm, the loss of a chunk and the masked tokens' layers, at any number of these, are the other
    graphs. SDPA, whose calls depend on lengths, cuts a block into six.
    """
    by_hand = {"is_engine": False, "code": "aot_eager", "steps": 6}
    varying, opaque, windows = results_of(
        tmp_path,
        {**by_hand, "backend": "reference", "layout": "padded"},
        {**by_hand, "backend": "sdpa", "checkpointing": True},
        {**by_hand, "backend": "reference", "kind": "modernbert", "positions": "rotary"},
    )
    for result, graphs, breaks in ((varying, 2 * 4, []), (opaque, 2 * 9, [OPAQUE]), (windows, 2 * 7, [])):
        assert_same_numbers(result, tolerance=1e-5)
        assert set(result["eager"]["graphs"]) == {0}
        assert set(result["compiled"]["graphs"]) == {graphs}
        assert list(result["breaks"]) == breaks
        assert result["compiled"]["left_eager"] == 0


@pytest.fixture(scope="module")
def by_engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the result of each job of `BY_ENGINE`; one process takes them all, because each imports for seconds."""
    jobs = [{"steps": 60, **settings} for settings in BY_ENGINE.values()]
    return dict(zip(BY_ENGINE, results_of(tmp_path_factory.mktemp("by_engine"), *jobs), strict=True))


@pytest.mark.slow
@NEEDS_A_COMPILER
@pytest.mark.parametrize("name", BY_ENGINE)
def test_compiled_code_trains_alike_and_is_made_in_the_first_step(
    by_engine: dict[str, dict[str, Any]], name: str
) -> None:
    assert len(set(by_engine[name]["compiled"]["graphs"])) == 1
    if not BY_ENGINE[name].get("dropout"):
        assert_same_numbers(by_engine[name], tolerance=1e-5)


def test_without_a_compiler_the_error_names_it_and_the_way_back() -> None:
    from torch._inductor import config

    nowhere: Any = config.patch({"cpp.cxx": (None, "no-such-compiler")})
    told = pytest.raises(RunError, match=r"C\+\+.*\nSet training\.compile=false")
    with nowhere, told, Compilation(is_asked=True).explained():
        torch.compile(lambda x: 3 * x + 1)(torch.ones(3))


def test_only_what_is_requested_is_compiled() -> None:
    for is_asked in (False, True):
        run = run_of(compile=is_asked)
        model = tiny(run)
        compile_if_asked(model, run)
        assert model.is_compiled == is_asked


def test_a_compilation_that_fails_in_a_step_is_explained_with_the_way_back() -> None:
    def compiler(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    with (
        pytest.raises(
            RunError, match=r"cannot make code .*C compiler\. Please.*\nSet training\.compile=false"
        ) as caught,
        Compilation(is_asked=True).explained(),
    ):
        torch.compile(lambda x: 3 * x, backend=compiler)(torch.ones(3))
    assert "RuntimeError" in str(caught.value)


@pytest.mark.parametrize(("is_asked", "error"), [(True, ValueError), (False, torch._dynamo.exc.Unsupported)])
def test_other_errors_and_those_of_runs_that_do_not_compile_are_left_alone(
    is_asked: bool, error: type[Exception]
) -> None:
    with pytest.raises(error), Compilation(is_asked=is_asked).explained():
        raise error("no work of torch.compile for this run")


def test_a_function_that_is_given_up_ends_the_run_before_its_first_update_and_is_counted_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A constant of Python is in the code, so that each new one makes a variant."""

    def times(x: torch.Tensor, factor: str) -> torch.Tensor:
        return x * len(factor)

    def watched_calls(watched: Compilation, function: Callable[..., Any]) -> None:
        few: Any = torch._dynamo.config.patch(recompile_limit=2)
        for factor in ("a", "bb", "ccc", "dddd"):
            with few, watched.explained():
                function(torch.ones(3), factor)

    torch._dynamo.reset()
    watched = Compilation(is_asked=True)
    with pytest.raises(RunError, match=r"given up 1 functions, .*recompile_limit.*\nSet training\.compile=false"):
        watched_calls(watched, torch.compile(times, backend="eager"))
    torch._dynamo.reset()
    watched, unasked = (Compilation(is_asked=is_asked) for is_asked in (True, False))
    watched.note_update()
    assert watched.left_eager == 0
    with caplog.at_level(logging.WARNING):
        watched_calls(watched, torch.compile(times, backend="eager"))
    assert caplog.text.count("has given up 1 functions") == 1
    assert (watched.left_eager, unasked.left_eager) == (1, None)


def test_compiled_runs_raise_the_limit_of_variants() -> None:
    usual: Any = torch._dynamo.config.patch(recompile_limit=8)
    with usual:
        compile_if_asked(tiny(run_of(compile=True)), run_of(compile=True))
        assert torch._dynamo.config.recompile_limit == 64


@pytest.mark.parametrize(("assignment", "varies"), [("arrival", False), ("sorted", True), ("max_tokens", True)])
def test_rectangles_of_single_sequences_have_one_size_where_nothing_sorts_them(assignment: str, varies: bool) -> None:
    sizes = {"packs_per_step": None, "packs_per_micro_batch": None, "sequences_per_step": 8}
    training = run_of(
        layout="padded", batching="sequences", assignment=assignment, sequences_per_micro_batch=4, **sizes
    ).training
    assert training.has_varying_slots == varies


def run_of(**training: Any) -> RunConfig:
    return run_config(run_values("gpt2", Path("never_written"), training=training))


def tiny(run: RunConfig) -> Model:
    with torch.device("meta"):
        return new_model(run.model, vocabulary_size=16, max_positions=8)


def test_a_compilation_is_announced_as_a_black_box_and_what_it_compiles_is_not() -> None:
    doing.end_black_box(START)
    during: list[str | None] = []

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        during.append(doing.black_box)

        def run(*arguments: torch.Tensor) -> Any:
            during.append(doing.black_box)
            return graph(*arguments)

        return run

    double = torch.compile(lambda x: 2 * x, backend=compiler)
    with announced_compilations():
        double(torch.ones(3))
    assert during == ["compiling", None]
    torch._dynamo.reset()
    double(torch.ones(3))
    assert during[2:] == [None, None]
