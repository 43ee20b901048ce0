"""What is said of updates that do not suit the run, and the expected curve. Reference: the law."""

import pytest

from tests.helpers import records, train, write_corpus
from tests.trainer.budget.test_best_plan import text
from trainer.budget import advice, laws
from trainer.budget.advice import EXCESS_BEFORE_DECAY
from trainer.budget.laws import expected_loss


def test_a_run_tells_of_its_batch_when_it_starts(tmp_path, monkeypatch, capsys):
    """A run of fewer tokens than MIN_TOKENS says nothing of it."""
    options = {"data_path": write_corpus(tmp_path / "text.jsonl", n_documents=60), "learning_rate": 1e-3}
    large = {"batch_size": 16, "accumulation_steps": 8}
    train(out_dir=tmp_path / "a", **options, **large)
    assert "note: " not in capsys.readouterr().out
    monkeypatch.setattr(laws, "MIN_TOKENS", 100)
    train(out_dir=tmp_path / "b", **options, **large)
    assert "learn best with updates of about" in capsys.readouterr().out
    train(out_dir=tmp_path / "c", **options, batch_size=1, accumulation_steps=1)
    assert "learn best" not in capsys.readouterr().out


def test_a_run_shows_the_expected_loss_beside_its_own(tmp_path, monkeypatch, capsys):
    """In log lines and metrics. Reference: the law by itself."""
    data = write_corpus(tmp_path / "text.jsonl")
    options = {"data_path": data, "max_updates": 12, "learning_rate": 1e-3, "lr_schedule": "linear"}
    train(out_dir=tmp_path / "short", **options)
    # no forecast for a run of seconds
    assert "expected:" not in capsys.readouterr().out
    monkeypatch.setattr(advice, "SHORT_RUN_FLOPS", 0)
    monkeypatch.setattr(advice, "MIN_TOKENS_FOR_FORECAST", 200)
    monkeypatch.setattr(advice, "difficulty_of", lambda *_: 0.6)
    run = train(out_dir=tmp_path / "long", **options)
    printed = capsys.readouterr().out
    assert "`expected` in the lines below: the training loss that runs of this size reach" in printed
    metrics = records(run)
    config = run.job.config
    first = run.job.plan(0)
    targets = first.row_targets(0, first.n_rows)
    for record in metrics:
        tokens = record["tokens"]
        if tokens < 200:
            assert "expected_loss" not in record
            continue
        at_the_end = expected_loss(config, tokens, text(targets), 0.6, "adamw")
        wanted = at_the_end * (1 + EXCESS_BEFORE_DECAY * record["lr"] / 1e-3)
        assert record["expected_loss"] == pytest.approx(wanted)
        assert f"expected:{wanted:.4g} " in printed
    assert "expected_loss" in metrics[-1]
