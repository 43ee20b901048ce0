"""benchmarks/budget.py: its configurations are those that it names. References: the plan, the trainer's own flags and metrics."""

import json

import pytest

from benchmarks.budget import hand_made, outcome
from tests.helpers import train, write_corpus
from trainer.pretrain.settings import parse_args

PLAN = ["--hidden_size", "192", "--num_hidden_layers", "2", "--batch_size", "12", "--accumulation_steps", "2"]
PLAN += ["--optimizer", "muon", "--muon_lr", "0.01", "--learning_rate", "0.008"]


@pytest.fixture(scope="module")
def configurations():
    return hand_made(parse_args(PLAN))


def test_there_are_eight_and_the_trainer_takes_their_flags(configurations):
    assert len(configurations) == 8
    for changes in configurations.values():
        words = [word for flag, value in changes.items() for word in (f"--{flag}", str(value))]
        settings = parse_args(["--budget", "3m", *words])
        for flag, value in changes.items():
            assert getattr(settings, flag) == value


def test_each_is_what_its_name_says(configurations):
    plan = parse_args(PLAN)
    rows = plan.batch_size * plan.accumulation_steps
    of_batch = {
        name: changes["batch_size"] * changes["accumulation_steps"]
        for name, changes in configurations.items()
        if "batch_size" in changes
    }
    assert of_batch == {"half the batch": rows / 2, "twice the batch": rows * 2}
    widths = {name: changes["hidden_size"] for name, changes in configurations.items()}
    assert widths["narrower"] == widths["narrower and deeper"] < plan.hidden_size < widths["wider"]
    layers = {name: changes.get("num_hidden_layers") for name, changes in configurations.items()}
    assert layers["deeper"] == layers["narrower and deeper"] == 2 * plan.num_hidden_layers
    assert configurations["half the rates"]["muon_lr"] == pytest.approx(plan.muon_lr / 2)
    assert configurations["higher rates"]["learning_rate"] == pytest.approx(plan.learning_rate * 1.5)


def test_the_end_of_a_run_is_read_from_its_metrics(tmp_path):
    """The last evaluation, not the first one. Reference: the run, and its metrics without the last evaluation."""
    text = write_corpus(tmp_path / "text.jsonl", n_documents=60)
    finished = train(data_path=text, out_dir=tmp_path, val_fraction=0.1, max_updates=4, eval_interval=2)
    read = outcome(tmp_path, "some", {})
    assert (read.updates, read.tokens) == (4, finished.progress.tokens)
    (metrics,) = tmp_path.glob("pretrain_*.metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert len(losses) > 1
    assert read.val_loss == losses[-1] != losses[0]
