"""benchmarks/time_to_loss.py. References: minutes and rates counted by hand, the other trainers' own settings."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import time_to_loss
from benchmarks.time_to_loss import RIVALS, ROWS, T, flag_args, rival_flags
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
    settings = PretrainSettings.parse(flag_args(rival_flags(RIVALS[rival], RIVALS[rival].cpu_dtype, LEARNING_RATE, 20)))
    expected = {
        **own, "dtype": dtype, "optimizer": "adamw", "weight_decay": 0.01, "grad_clip": 1.0, "warmup_iters": 0,
        "learning_rate": LEARNING_RATE, "batch_size": 8, "accumulation_steps": 1, "max_seq_len": 512, "max_updates": 20,
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in expected} == expected


def test_the_best_rate_counts_and_all_runs_have_the_same_text_and_seed(tmp_path, monkeypatch, capsys):
    """The other trainer makes an update a second in one form, and cannot start in the other."""

    def measure(words, check):
        assert words[-3:] == ["--sides", "hf", "hf-compiled"]
        asked = dict(zip(words[2:-3:2], words[3:-3:2], strict=True))
        assert (asked["--rows"], asked["--max_seq_len"]) == (str(ROWS), str(T))
        record = {"device": "cpu", "sides": {"hf": {"slices": [{"updates": 3, "seconds": 3.0}]}}}
        Path(asked["--out"]).write_text(json.dumps([record]), encoding="utf-8")
        return SimpleNamespace(returncode=0)

    def instead(work, name, flags):
        runs[name] = PretrainSettings.parse(list(flags))
        return bits[len(runs) - 1]

    monkeypatch.setattr(time_to_loss, "subprocess", SimpleNamespace(run=measure))
    monkeypatch.setattr(time_to_loss, "trained", instead)
    flags = ["--rival", "hf", "--minutes", "1", "--budget", "90s", "--rates", "5e-4", "1e-3", "--seed", "7"]
    flags += ["--data_path", "a", "b", "--val_path", "v", "--work", str(tmp_path)]
    runs, bits = {}, []
    for figures, said in (((2.2, 2.1, 2.15), "does not reach the loss"), ((2.2, 2.1, 2.1), "reaches the loss")):
        runs.clear()
        bits[:] = figures
        time_to_loss.main(flags)
        assert f"--budget 90s {said} that hf has after 1 minutes" in capsys.readouterr().out
    assert list(runs) == ["hf_60_updates_bfloat16_rate_0.0005", "hf_60_updates_bfloat16_rate_0.001", "budget_90s"]
    for settings in runs.values():
        assert (settings.data_path, settings.val_path, settings.seed) == (["a", "b"], ["v"], 7)
    *rivals, ours = runs.values()
    assert [settings.learning_rate for settings in rivals] == [5e-4, 1e-3]
    assert {(settings.max_updates, settings.dtype) for settings in rivals} == {(60, "bfloat16")}
    assert ours.budget == "90s" and not ours.max_updates and ours.from_weight == "none"
