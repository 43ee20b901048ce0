"""benchmarks/time_to_loss.py. References: minutes and rates counted by hand, and the trainer's own reading of the flags."""

import json

import pytest

from benchmarks import time_to_loss
from benchmarks.arguments import time_to_loss_parser
from benchmarks.time_to_loss import RIVALS, fastest, rival_flags, updates_in
from benchmarks.trained import Outcome, flag_words
from trainer.pretrain.settings import parse_args

PLAIN = RIVALS["plain"]
HF = RIVALS["hf"]


def test_updates_follow_from_minutes_and_speed():
    """250 updates of 8 x 511 positions at 991 a second take 1,031 s."""
    assert updates_in(1031.3 / 60, 991, PLAIN) == 250
    assert updates_in(1, 8 * 512, HF) == 60


def test_the_fastest_form_counts():
    sides = {"hf": {"positions_per_second": 10.0}, "hf-compiled": {"positions_per_second": 30.0}}
    assert fastest({"sides": sides}, HF) == 30
    assert fastest({"sides": {"hf": sides["hf"]}}, HF) == 10
    with pytest.raises(SystemExit, match="could not start hf or hf-compiled"):
        fastest({"sides": {"ours": sides["hf"]}}, HF)


@pytest.mark.parametrize("rival", RIVALS.values(), ids=list(RIVALS))
def test_the_flags_are_those_of_the_other_trainer(rival):
    settings = parse_args(flag_words(rival_flags(rival, 1e-3, 20)))
    assert settings.optimizer == "adamw" and settings.max_updates == 20 and settings.learning_rate == 1e-3
    assert settings.batch_size * settings.accumulation_steps == 8 and settings.max_seq_len == 512
    is_plain = rival is PLAIN
    assert settings.pack != is_plain and settings.dtype == ("float32" if is_plain else "bfloat16")
    assert settings.lr_schedule == ("minimind" if is_plain else "linear")


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """[(folder's name, flags)] of what was trained; the speed is known, and a name tells the figures."""
    seen = []
    bits = {"hf_60_updates_rate_0.0005": 2.2, "hf_60_updates_rate_0.001": 2.1, "budget_90s": 2.1}

    def instead(folder, flags):
        seen.append((folder.name, flags))
        return Outcome(1_000_000, bits[folder.name], 3.0, 60, 240_000)

    monkeypatch.setattr(time_to_loss, "trained", instead)
    record = {"sides": {"hf": {"positions_per_second": 8 * 512.0}}}
    (tmp_path / "hf_speed.json").write_text(json.dumps([record]))
    return seen


def started(monkeypatch, tmp_path, *words):
    flags = ["--rival", "hf", "--minutes", "1", "--budget", "90s", "--rates", "5e-4", "1e-3", *words]
    flags += ["--data_path", "a", "b", "--val_path", "v", "--work", str(tmp_path)]
    args = time_to_loss_parser().parse_args(flags)
    monkeypatch.setattr(time_to_loss, "time_to_loss_parser", lambda: Given(args))
    time_to_loss.main()


class Given:
    """A parser whose command line is known."""

    def __init__(self, args):
        self.args = args

    def parse_args(self):
        return self.args


def test_the_best_rate_counts_and_the_budget_starts_afresh(monkeypatch, tmp_path, runs, capsys):
    started(monkeypatch, tmp_path)
    said = capsys.readouterr().out
    assert "hf: 4,096 positions/s, 60 updates in 1 minutes" in said
    assert "| --budget 90s | 1.5 | 1.00 M | 60 | 0.24 M | 3.000 | 2.1000 |" in said
    assert said.endswith("--budget 90s reaches the loss that hf has after 1 minutes: 0.7 times as fast.\n")
    assert [name for name, _ in runs] == ["hf_60_updates_rate_0.0005", "hf_60_updates_rate_0.001", "budget_90s"]
    for _, flags in runs:
        assert flags[:3] == ["--data_path", "a", "b"] and flags[flags.index("--val_path") + 1] == "v"
    assert "--budget" in runs[-1][1] and "--max_updates" not in runs[-1][1]


def test_a_loss_that_is_not_reached_is_told(monkeypatch, tmp_path, runs, capsys):
    """At the second rate alone the other trainer is at 2.1; a better one is not reached."""
    monkeypatch.setattr(time_to_loss, "run", lambda args, name, flags: Outcome(1, len(name), 3.0, 1, 1))
    started(monkeypatch, tmp_path)
    # The name of the run of --budget is the shortest.
    assert "90s reaches" in capsys.readouterr().out
    monkeypatch.setattr(time_to_loss, "run", lambda args, name, flags: Outcome(1, -len(name), 3.0, 1, 1))
    started(monkeypatch, tmp_path)
    assert "does not reach" in capsys.readouterr().out
