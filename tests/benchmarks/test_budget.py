"""benchmarks/budget.py: its configurations are those that it names. References: the plan, the trainer's own flags and metrics."""

import json

import pytest

from benchmarks.budget import hand_made
from benchmarks.trained import flag_words, outcome
from tests.helpers import train, write_corpus
from trainer.pretrain.settings import PretrainSettings

PLAN = ["--hidden_size", "192", "--num_hidden_layers", "2", "--batch_size", "12", "--accumulation_steps", "2"]
PLAN += ["--num_attention_heads", "3", "--num_key_value_heads", "1"]
PLAN += ["--optimizer", "muon", "--muon_lr", "0.01", "--learning_rate", "0.008"]


@pytest.fixture(scope="module")
def configurations():
    """{name: the settings}"""
    plan = PretrainSettings.parse(PLAN)
    return {name: PretrainSettings.parse([*PLAN, *flag_words(changes)]) for name, changes in hand_made(plan).items()}


def rows(settings):
    return settings.batch_size * settings.accumulation_steps


def test_there_are_ten_and_each_is_what_its_name_says(configurations):
    """Reference: the trainer's own reading of their flags."""
    assert len(configurations) == 10
    changed = {name: rows(settings) for name, settings in configurations.items() if rows(settings) != 24}
    assert changed == {"half the batch": 12, "twice the batch": 48}
    widths = {name: settings.hidden_size for name, settings in configurations.items()}
    assert widths.pop("narrower") == widths.pop("narrower and deeper") < 192 < widths.pop("wider")
    assert set(widths.values()) == {192}
    layers = {name: settings.num_hidden_layers for name, settings in configurations.items()}
    assert (layers.pop("deeper"), layers.pop("shallower"), layers.pop("narrower and deeper")) == (4, 1, 3)
    assert set(layers.values()) == {2}
    assert configurations["more heads"].num_attention_heads == 6
    assert configurations["half the rates"].muon_lr == pytest.approx(0.005)
    assert configurations["higher rates"].learning_rate == pytest.approx(0.012)


def test_the_end_of_a_run_is_read_from_its_metrics(tmp_path):
    """The last evaluation, not the first one. Reference: the run, and its metrics without the last evaluation."""
    text = write_corpus(tmp_path / "text.jsonl", n_documents=60)
    finished = train(data_path=text, out_dir=tmp_path, val_fraction=0.1, max_updates=4, eval_interval=2, log_interval=2)
    read = outcome(tmp_path)
    assert (read.updates, read.tokens) == (4, finished.progress.tokens)
    assert read.parameters == sum(weight.numel() for weight in finished.job.model.parameters())
    (metrics,) = tmp_path.glob("pretrain_*.metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert len(losses) > 1 and read.update_seconds > 0
    assert read.val_loss == losses[-1] != losses[0]
