"""The three calls of the GPU day: what each measures, row by row, in one process.

    Call.row(name, work)  ->  PREFIX.json, written again after each row

A row that fails, or that has no time left, is recorded, and the others go on. What the checkout does not have, or what
cannot serve here, is left out with a line that says why.
"""

import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.resolving.attention_choice import attention_request, check_attention
from evenpack.engine.world.distributed import World, joined_world
from evenpack.errors import BackendError, EvenpackError
from evenpack.files import read_json, write_json
from evenpack.kernels.capabilities import AttentionRequest, unavailable_reason
from evenpack.launcher.processes.devices import choose_accelerator
from evenpack.studies.throughput.contenders import contender, run_to_measure
from evenpack.studies.throughput.measure import Quartiles, micro_batches_of
from evenpack.studies.throughput.study import layout_row, ratios
from gpu_day import BERT, ROOT, SMALL, XL
from gpu_day.corpus import make, run_file
from gpu_day.gloo_ranks import losses_of
from gpu_day.kernels import AttentionLayer, attention_row, loss_as_before, loss_row
from gpu_day.runner import Step, run_step
from gpu_day.stepping import Contender, Variant, in_turn

EVENPACK = (sys.executable, "-c", "from evenpack.launcher.cli.app import main; main()")

LEAST_SECONDS = 5.0
"""A row that would have less than this is not begun."""

NO_DROPOUT = "model.attention_dropout=0"
"""Wherever kernels are compared, which for GPT-2 changes nothing: FlashAttention 4 has no dropout."""

SWITCHES = {"flash4": "attention.backend=flash4", "BF16 residual": "training.residual_dtype=bf16"}
TODAY = Variant(name="today")
WARMUP = 2
"""Steps that are not timed, in which code is compiled."""

_SHOWN = ("step_seconds", "tokens_per_second", "sequences_per_second", "mfu", "peak_memory_bytes", "speed_up")
"""What a line of output has of a layout's values."""

_LOSS_TOLERANCE = 1e-3
"""Largest relative difference of a step's loss between one rank and two, in BF16."""


@dataclass(kw_only=True)
class Call:
    """The rows of a call, on one device."""

    path: Path
    facts: Mapping[str, Any]
    world: World
    folder: Path
    """Corpora, run files and outputs of runs."""
    is_tiny: bool
    overrides: tuple[str, ...]
    """What the caller has chosen: the winners of call 2, in call 3."""
    environment: Mapping[str, str]
    """Of the processes that a row starts: this one's, before it had joined."""
    limit_seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @property
    def end(self) -> float:
        """When the call's time is over, by `time.monotonic`."""
        return self.begun + self.limit_seconds

    def row(self, name: str, work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Adds what `work` returns to the rows; returns it, or None if there is nothing to go on with."""
        begun, found = time.monotonic(), None
        left = self.end - begun
        outcome: Mapping[str, Any]
        if left < LEAST_SECONDS:
            outcome = {"error": "not begun: the call's time is used up"}
        else:
            try:
                with limited_to(left):
                    outcome = found = work()
            except Exception as error:  # without its frames, which hold tensors
                outcome = {"error": f"{type(error).__name__}: {error}"[:500]}
        self._add({"row": name, "at": begun - self.begun, "seconds": time.monotonic() - begun, **outcome})
        return found

    def leave_out(self, name: str, reason: str) -> None:
        """Adds a row that says why there is no value."""
        self._add({"row": name, "left_out": " ".join(reason.split())[:300]})

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        write_json(self.path, {**self.facts, "rows": self.rows})
        print(", ".join(f"{name}: {_short(value)}" for name, value in row.items() if name != "longest"), flush=True)

    @property
    def is_done(self) -> bool:
        """Whether no row has failed."""
        return not any("error" in row or row.get("is_right") is False for row in self.rows)

    def settings(self, *own: str) -> tuple[str, ...]:
        """Returns the overrides of a row with these of its own: tiny models are not worth compiling."""
        return (("training.precision=bf16_autocast",) if self.is_tiny else ("training.compile=true",)) + own

    def why_not(self, run: str, overrides: Sequence[str]) -> str | None:
        """Returns the reason why a run cannot have these settings here; None if it can."""
        try:
            config = load_run_file(run_file(self.folder, run), RunConfig, list(overrides))
            check_attention(config, self.world.device.type)
        except EvenpackError as error:
            return str(error)
        return None

    def free(self) -> None:
        """Gives back the memory of the engines that nobody holds any more, and forgets their compiled code.

        For the next model, whose micro-batches have other sizes, torch.compile would else make code for any size.
        """
        torch._dynamo.reset()
        gc.collect()  # DeepSpeed's engine is a cycle
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def process(self, name: str, *command: str) -> None:
        """Runs a command to its end. Raises: RuntimeError with its last line if it fails."""
        log = self.path.with_suffix(".txt")
        left = self.end - time.monotonic()
        result = run_step(Step(name=name, command=command, limit_seconds=left), left, log, self.environment)
        if result.status != "done":
            raise RuntimeError(f"{result.status}: {result.last_line}; {log} has all of it")


def run_call(number: int, *, path: Path, facts: Mapping[str, Any], **given: Any) -> bool:
    """Runs a call. Returns whether no row has failed."""
    environment = dict(os.environ)
    choose_accelerator()
    with joined_world() as world:
        call = Call(path=path, facts=facts, world=world, environment=environment, **given)
        if call.row("corpora", lambda: _made(call)) is not None:
            CALLS[number](call)
        return call.is_done


@contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds."""

    def end(*_: object) -> None:
        raise TimeoutError(f"over its {seconds:.0f} s, which were all that the call had left")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _made(call: Call) -> dict[str, Any]:
    make(call.folder, (SMALL, BERT, XL), tiny=call.is_tiny)
    return {}


def headlines(call: Call) -> None:
    """Call 1: the three models as they are today, and where the milliseconds of a step go."""
    for run, rounds in ((SMALL, 8), (BERT, 8), (XL, 4)):
        steps_of(call, run, (TODAY,), call.settings(*call.overrides), rounds=rounds, is_profiled=True)


def switches(call: Call) -> None:
    """Call 2: each switch beside what is today, kernel by kernel, then in steps of alternating rounds."""
    for run in (SMALL, BERT, XL):
        kernels_of_run(call, run)
    variants = [TODAY, Variant(name="loss as before", patched=loss_as_before)]
    variants += [Variant(name=name, overrides=(setting,)) for name, setting in SWITCHES.items()]
    variants.append(Variant(name="both switches", overrides=tuple(SWITCHES.values())))
    rows = [
        steps_of(call, run, variants, call.settings(NO_DROPOUT, *call.overrides), rounds=8) for run in (SMALL, BERT)
    ]
    winners = [
        setting
        for name, setting in SWITCHES.items()
        if all(name in found and found[name]["speed_up"]["quartile_1"] > 1.0 for found in rows)
    ]
    call.row("faster on both models", lambda: {"next": " ".join(["scripts/gpu_day 3", *winners])})


def winners(call: Call) -> None:
    """Call 3: GPT-2 XL by its micro-batch, real training beside the study of its steps, and two ranks on one device."""
    per_step, sizes = (4, (1, 2, 4)) if call.is_tiny else (64, (8, 16, 32))
    for packs in sizes:
        of_step = (f"training.packs_per_step={per_step}", f"training.packs_per_micro_batch={packs}")
        variant = Variant(name=f"{packs} packs", overrides=of_step)
        steps_of(call, XL, (variant,), call.settings(*call.overrides), rounds=3, name=f"{XL}, {packs} packs")
    settings = call.settings(NO_DROPOUT, *call.overrides)
    study = steps_of(call, BERT, (Variant(name="chosen"),), settings, rounds=8).get("chosen")
    call.row(f"{BERT}: evenpack train", lambda: _trained(call, settings, study))
    call.row("two ranks on one device, by gloo", lambda: _two_ranks(call))


CALLS: dict[int, Callable[[Call], None]] = {1: headlines, 2: switches, 3: winners}


def kernels_of_run(call: Call, run: str) -> None:
    """Adds rows of attention and the loss by themselves, over the run's first micro-batch."""
    device, settings = call.world.device, call.settings(NO_DROPOUT, *call.overrides)
    config = load_run_file(run_file(call.folder, run), RunConfig, list(settings))
    dataset = contender("packed", run_to_measure(config), call.world)
    batch = dataset[0]
    layer = AttentionLayer(config, batch, device)
    request = attention_request(config.model, "bf16_autocast", device.type)
    for backend in ("varlen", "flash", "flash4") if device.type == "cuda" else ("sdpa", "flash4"):
        name = f"{run}: attention by {backend}"
        if (reason := _why_not_served(backend, request)) is None:
            call.row(name, partial(attention_row, layer, backend))
        else:
            call.leave_out(name, reason)
    if run != BERT:  # its masked tokens are few
        sizes = (batch.tokens.shape[0], config.model.shape["hidden_size"], dataset.data.vocabulary_size)
        call.row(f"{run}: loss", lambda: loss_row(*sizes, compiled=config.training.compile, device=device))
    call.free()


def _why_not_served(backend: str, request: AttentionRequest) -> str | None:
    try:
        return unavailable_reason(backend, request)
    except BackendError as error:  # this checkout does not have it
        return str(error)


def steps_of(
    call: Call,
    run: str,
    variants: Sequence[Variant],
    settings: Sequence[str],
    *,
    rounds: int,
    is_profiled: bool = False,
    name: str | None = None,
) -> dict[str, Any]:
    """Adds rows of a run's steps: the first ones of each variant, some of all in turn, and a profile of the first.

    Returns: the values of each variant; `speed_up` is over the first one, round by round.
    """
    contenders: dict[str, Contender] = {}

    def begin(variant: Variant) -> dict[str, Any]:
        alike = (each for each in contenders.values() if each.variant.overrides == variant.overrides)
        if (one := next(alike, None)) is not None:  # one engine for both
            contenders[variant.name] = replace(one, variant=variant)
        else:
            contenders[variant.name] = Contender.of(run_file(call.folder, run), settings, variant, call.world)
        try:
            losses = contenders[variant.name].losses(WARMUP)
        except BaseException:
            del contenders[variant.name]
            raise
        left_eager = contenders[variant.name].timer.engine.compilation.left_eager
        return {"settings": [*settings, *variant.overrides], "losses": losses, "left_eager": left_eager}

    def timed() -> dict[str, Any]:
        measured = in_turn(
            contenders, first=WARMUP, rounds=2 if call.is_tiny else rounds, until=call.end - LEAST_SECONDS
        )
        base = next(iter(measured.values()))
        return {
            name: asdict(layout_row(contenders[name].timer, name, steps))
            | {"speed_up": asdict(Quartiles.of(ratios(base, steps)))}
            for name, steps in measured.items()
        }

    def profiled() -> dict[str, Any]:
        first = next(iter(contenders.values()))
        return first.profiled(WARMUP, micro_batches_of(first.dataset, WARMUP))

    for variant in variants:
        first_steps = f"{run}, {variant.name}: first steps"
        if (reason := call.why_not(run, [*settings, *variant.overrides])) is None:
            call.row(first_steps, partial(begin, variant))
        else:
            call.leave_out(first_steps, reason)
    found = call.row(f"{name or run}: steps", timed) if contenders else None
    if found and is_profiled:
        call.row(f"{run}: profile of a step", profiled)
    contenders.clear()
    call.free()
    return dict(found or {})


def _trained(call: Call, settings: Sequence[str], study: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what a run of `evenpack train` says of its own steps, without the first third, beside the study's."""
    steps, folder = (6 if call.is_tiny else 30), call.folder / "trained"
    shutil.rmtree(folder, ignore_errors=True)
    ends = [f"training.{name}={steps}" for name in ("steps", "evaluate_every_steps", "checkpoint_every_steps")]
    on = ("--cpu-ranks", "1") if call.world.device.type == "cpu" else ()
    words = [*settings, *ends, "schedule.warmup_steps=1", f"run.output_dir={folder}", *on]
    call.process("train", *EVENPACK, "train", str(run_file(call.folder, BERT)), *words)
    records = read_metrics(folder / METRICS)[steps // 3 :]
    rates = Quartiles.of([record["tokens_per_second"] for record in records])
    return {
        "steps": len(records),
        "tokens_per_second": asdict(rates),
        "step_seconds": asdict(Quartiles.of([record["step_seconds"] for record in records])),
        "of_the_study": None if study is None else rates.median / study["tokens_per_second"]["median"],
    }


def _two_ranks(call: Call) -> dict[str, Any]:
    """Returns the losses of two ranks at ZeRO 0 and 1 beside those of one, in a small step without dropout."""
    path, out = str(run_file(call.folder, SMALL)), call.folder / "gloo_ranks.json"
    sizes = ("training.packs_per_step=8", "training.packs_per_micro_batch=2", "model.dropout=0")
    alone = losses_of(Path(path), sizes, call.world)
    call.free()
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    call.process(
        "two ranks", *launcher, str(ROOT / "benchmarks/gpu_day/gloo_ranks.py"), path, *sizes, "--out", str(out)
    )
    found: dict[str, Any] = {"alone": alone, **read_json(out)}
    others = [one["losses"] for one in found.values() if "losses" in one]
    found["largest_difference"] = max(
        abs(loss / of_one - 1.0) for losses in others for loss, of_one in zip(losses, alone["losses"], strict=True)
    )
    return found | {"is_right": found["largest_difference"] <= _LOSS_TOLERANCE}


def _short(value: Any) -> Any:
    """Returns a value as a line of output shows it: the median of quartiles, the rates of steps, and few digits."""
    if isinstance(value, dict):
        names = _SHOWN if "layout" in value else value
        return value["median"] if "median" in value else {name: _short(value[name]) for name in names if value[name]}
    return float(f"{value:.4g}") if isinstance(value, float) else value
