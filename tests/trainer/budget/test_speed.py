"""How long an update takes, as a plan measures it. References: the clock that the test holds, and what a run does."""

import statistics

import pytest
import torch

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.budget import speed
from trainer.budget.speed import Machine, measured_seconds
from trainer.machine import compiling
from trainer.machine.ranks import Ranks

CONFIG = MiniMindConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
MACHINE = Machine(torch.device("cpu"), torch.float32, Ranks(), 1e11)


def measured(**changes):
    usual = {
        "rows": 2,
        "T": 8,
        "optimizer": "muon",
        "compiled": False,
        "gradient_checkpointing": False,
        "times": 5,
    }
    return measured_seconds(CONFIG, MACHINE, **{**usual, **changes})


@pytest.mark.parametrize(("least_seconds", "rounds"), [(0.0, 5), (2.0, 5), (10.0, 15)])
def test_a_measurement_lasts_until_the_machine_is_as_fast_as_in_the_run(monkeypatch, least_seconds, rounds):
    """The first five updates of two micro-batches take 1.2 s, later ones 0.4 s. A short one ends after five, as it always did."""
    durations = []

    def seconds(work, device):
        work()
        durations.append(0.6 if len(durations) < 10 else 0.2)
        return durations[-1]

    monkeypatch.setattr(speed, "seconds", seconds)
    of_micro_batch, of_rest = measured(least_seconds=least_seconds)
    assert len(durations) == 2 * rounds
    assert of_micro_batch == statistics.median(durations[::2]) and of_rest == 0
    assert of_micro_batch == (0.2 if rounds > 10 else 0.6)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_timed_is_prepared_as_the_run_is(monkeypatch, compiled):
    """Reference: the job's own preparation, by which plain code keeps freed memory too: a fifth of its time."""
    prepared = []
    monkeypatch.setattr(compiling, "keep_freed_memory", lambda: prepared.append("memory"))
    monkeypatch.setattr(
        MiniMindForCausalLM, "compile_training", lambda model, shape, dtype: prepared.append(("compiled", shape)) or ""
    )
    monkeypatch.setattr(compiling, "failure_to_compile", lambda device_type: None)
    measured(compiled=compiled)
    assert prepared == ["memory", *([("compiled", (2, 8))] if compiled else [])]
