"""What is said of a batch or a rate that does not suit the run. References: the laws, and the run with the advice followed."""

import pytest

from tests.helpers import train, write_corpus
from trainer.budget import advice
from trainer.budget.advice import notes_on_rates
from trainer.pretrain.settings import PretrainSettings


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--batch_size", "1"], []),
        ([], ["runs"]),
        (["--learning_rate", "1e-5"], ["--learning_rate"]),
        (["--optimizer", "muon", "--learning_rate", "8e-3", "--muon_lr", "0.5"], ["--muon_lr"]),
        (["--optimizer", "muon", "--learning_rate", "1e-4", "--muon_lr", "1e-4"], ["--learning_rate", "--muon_lr"]),
    ],
)
def test_updates_and_rates_that_are_far_off_are_named(words, named):
    """The default update of 131,072 tokens is too large for a run of ten million."""
    settings = PretrainSettings.parse([*words, "--batch_size", "1"] if words else [])
    update_tokens = settings.batch_size * settings.accumulation_steps * settings.max_seq_len
    lines = notes_on_rates(settings, parameters=26_000_000, tokens=1e7, update_tokens=update_tokens)
    assert [line.split()[1] for line in lines] == named


def test_a_run_tells_of_its_batch_and_rate_when_it_starts(tmp_path, monkeypatch, capsys):
    """A run of fewer tokens than MIN_TOKENS_FOR_NOTES says nothing of them."""
    data = write_corpus(tmp_path / "text.jsonl", n_documents=60)
    options = {"data_path": data, "batch_size": 16, "accumulation_steps": 8, "learning_rate": 1e-7}
    train(out_dir=tmp_path / "a", **options)
    assert "note: " not in capsys.readouterr().out
    monkeypatch.setattr(advice, "MIN_TOKENS_FOR_NOTES", 100)
    train(out_dir=tmp_path / "b", **options)
    printed = capsys.readouterr().out
    assert "learn best with updates of about" in printed and "note: --learning_rate 1e-07" in printed
