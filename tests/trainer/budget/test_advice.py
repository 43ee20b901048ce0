"""What is said of updates that do not suit the run, and of its end. Reference: the law."""

import pytest

from tests.helpers import train, write_corpus
from trainer.budget import advice, costs, laws
from trainer.reporting.records import RunRecords


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


def test_the_end_is_told_at_each_evaluation(tmp_path, monkeypatch, capsys):
    """By the law for the whole run, and not along the way. What the clock says of a moved end: test_clock.py."""
    data = write_corpus(tmp_path / "text.jsonl")
    options = {"data_path": data, "learning_rate": 1e-3, "val_fraction": 0.2, "eval_interval": 8}
    train(out_dir=tmp_path / "short", **options, max_updates=12)
    # no forecast for a run of seconds
    assert "expected" not in capsys.readouterr().out
    monkeypatch.setattr(advice, "SHORT_RUN_FLOPS", 0)
    monkeypatch.setattr(laws, "MIN_TOKENS", 100)
    monkeypatch.setattr(costs, "difficulty_of", lambda *_: 0.6)
    for length in ({"max_updates": 12}, {"epochs": 1}):
        run = train(out_dir=tmp_path / next(iter(length)), **options, **length)
        printed = capsys.readouterr().out
        first = run.job.plan(0)
        tokens, updates = first.n_pairs, run.progress.update
        if "max_updates" in length:
            tokens *= updates / run.batching.schedule(first.n_rows).n_updates
        loss = laws.expected_loss(run.job.config, tokens, [laws.Part(1.0, first.n_pairs)], 0.6, "adamw")
        wanted = f"{loss:.3f} ({0.8 * loss:.2f} to {1.2 * loss:.2f})"
        *before, last = [line for line in printed.splitlines() if line.startswith("Validation")]
        assert before and all(line.endswith(f"; the end is expected at {wanted}") for line in before)
        assert "expected" not in last
        assert f"{run.progress.val_loss:.3f} in {updates} updates, for which {wanted}" in printed
        assert not any("expected" in line for line in printed.splitlines() if line.startswith("Epoch"))
        expected = RunRecords.read(run.reporter.file.name).expected_end
        assert expected == pytest.approx((tokens, loss, 0.2), rel=0.02)
