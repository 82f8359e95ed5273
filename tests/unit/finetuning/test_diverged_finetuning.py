"""A fine-tuning that diverges ends where it does, names seed and step, and says the same when it is started again."""

import io
from pathlib import Path

import pytest
from finetuning_tasks import finetune_config, write_encoder, write_sentences
from rich.console import Console

from evenpack.errors import RunError
from evenpack.finetuning.run import finetune
from evenpack.launcher.processes.holding import held_output_dir
from evenpack.progress import Progress


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"epochs": 1}, r"^seed 0, step [2-5] of 5: the loss is (nan|inf)\."),
        ({"epochs": 2, "sequences_per_step": 40}, "^seed 0, step 1 of 2: predictions for dev are not finite after it"),
    ],
)
def test_it_ends_at_the_first_number_that_is_not_finite(step: dict[str, int], said: str, tmp_path: Path) -> None:
    task = write_sentences(tmp_path / "task", training=40, evaluation=10)
    encoder = write_encoder(tmp_path / "bert")
    settings = {"learning_rate": 1e30, "warmup_fraction": 0.0, **step}
    config = finetune_config("sst2", task, encoder, tmp_path / "out", **settings)
    messages = []
    for _ in range(2):
        with pytest.raises(RunError, match=said) as told, Progress(Console(file=io.StringIO())) as progress:
            finetune(config, progress, hold=held_output_dir)
        messages.append(str(told.value))
    assert "Lower training.learning_rate (1e+30)" in messages[0]
    assert messages[0] == messages[1]
    assert not list((tmp_path / "out").glob("seed_*"))
