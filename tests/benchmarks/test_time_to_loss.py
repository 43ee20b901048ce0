"""benchmarks/time_to_loss.py. References: minutes and rates counted by hand, the other trainers' own settings, and the command
lines of bench.py and of the trainer."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import time_to_loss
from benchmarks.time_to_loss import RIVALS, ROWS, T, rival_flags
from benchmarks.trained import Outcome, flag_words
from benchmarks.training import LEARNING_RATE
from trainer.pretrain.settings import PretrainSettings


@pytest.mark.parametrize(
    ("rival", "dtype", "own"),
    [
        ("plain", "float32", {"pack": False, "lr_schedule": "minimind"}),
        ("hf", "bfloat16", {"pack": True, "lr_schedule": "linear"}),
    ],
)
def test_the_flags_are_those_of_the_other_trainer(rival, dtype, own):
    """As benchmarks/sides.py has them: AdamW with torch's weight decay, clipping at 1, no warm-up, one micro-batch an update."""
    settings = PretrainSettings.parse(
        flag_words(rival_flags(RIVALS[rival], RIVALS[rival].cpu_dtype, LEARNING_RATE, 20))
    )
    expected = {
        **own, "dtype": dtype, "optimizer": "adamw", "weight_decay": 0.01, "grad_clip": 1.0, "warmup_iters": 0,
        "learning_rate": LEARNING_RATE, "batch_size": 8, "accumulation_steps": 1, "max_seq_len": 512, "max_updates": 20,
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in expected} == expected


RUNS = ["hf_60_updates_bfloat16_rate_0.0005", "hf_60_updates_bfloat16_rate_0.001", "budget_90s"]


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function that calls the program and returns the settings of its three runs, whose bits per byte it is given.

    The other trainer makes an update a second in one form, and cannot start in the other.
    """

    def call(*bits, more=()):
        seen = {}

        def instead(work, name, flags):
            seen[name] = PretrainSettings.parse(list(flags))
            return Outcome(1_000_000, bits[len(seen) - 1], 3.0, 60, 240_000)

        monkeypatch.setattr(time_to_loss, "trained", instead)
        flags = ["--rival", "hf", "--minutes", "1", "--budget", "90s", "--rates", "5e-4", "1e-3", "--seed", "7"]
        flags += ["--data_path", "a", "b", "--val_path", "v", "--work", str(tmp_path), *more]
        time_to_loss.main(flags)
        return seen

    def measure(words, check):
        asked = dict(zip(words[2::2], words[3::2], strict=True))
        assert asked["--sides"] == "hf,hf-compiled"
        assert (asked["--rows"], asked["--max_seq_len"]) == (str(ROWS), str(T))
        record = {"device": "cpu", "sides": {"hf": {"slices": [{"updates": 3, "seconds": 3.0}]}}}
        with open(asked["--out"], "w", encoding="utf-8") as file:
            json.dump([record], file)
        # A second start finds it.
        monkeypatch.setattr(time_to_loss, "subprocess", None)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(time_to_loss, "subprocess", SimpleNamespace(run=measure))
    return call


def test_the_best_rate_counts(start, tmp_path, capsys):
    """A budget between the losses of both rates does not reach the better one."""
    start(2.2, 2.1, 2.15)
    said = capsys.readouterr().out
    assert said.endswith("--budget 90s does not reach the loss that hf has after 1 minutes.\n")
    start(2.2, 2.1, 2.1)
    said = capsys.readouterr().out
    assert f"hf-compiled could not start and is left out; to measure again remove {tmp_path}/hf_bench.json" in said
    assert "hf: 1.00 updates/s, 60 in 1 minutes" in said
    assert "| --budget 90s | 1.5 | 1.00 M | 60 | 0.24 M | 3.000 | 2.1000 |" in said
    assert said.endswith("reaches the loss that hf has after 1 minutes: 0.7 times as fast, or faster.\n")


def test_the_runs_have_the_same_text_and_seed_and_the_budget_starts_afresh(start):
    runs = start(2.2, 2.1, 2.1)
    assert list(runs) == RUNS
    for settings in runs.values():
        assert (settings.data_path, settings.val_path, settings.seed) == (["a", "b"], ["v"], 7)
    *rivals, ours = runs.values()
    assert [settings.learning_rate for settings in rivals] == [5e-4, 1e-3]
    assert {settings.max_updates for settings in rivals} == {60}
    assert {settings.dtype for settings in rivals} == {"bfloat16"}
    assert ours.budget == "90s" and not ours.max_updates and ours.from_weight == "none"
