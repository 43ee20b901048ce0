"""What is said of updates that do not suit the run."""

from tests.helpers import train, write_corpus
from trainer.budget import laws


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
