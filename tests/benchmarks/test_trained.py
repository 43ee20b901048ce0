"""benchmarks/trained.py: what is finished is kept, for the same flags alone. References: the commands that it starts, and the
metrics of a run."""

import json
from types import SimpleNamespace

from benchmarks import trained
from tests.helpers import train, write_corpus

FLAGS = ["--data_path", "a", "b", "--seed", "42", "--report", "0"]


def test_a_run_is_trained_once_for_the_same_flags_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command[2:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trained.subprocess, "run", run)
    monkeypatch.setattr(trained, "outcome", lambda folder: folder)
    first = trained.trained(tmp_path, "run", FLAGS)
    assert trained.trained(tmp_path, "run", FLAGS) == first
    expected = [[*FLAGS, "--out_dir", str(first), "--from_resume", "1"]]
    assert commands == expected
    # It was stopped.
    (first / "done").unlink()
    assert trained.trained(tmp_path, "run", FLAGS) == first and commands == 2 * expected
    assert trained.trained(tmp_path, "run", [*FLAGS, "--muon_lr", "0.02"]) != first and len(commands) == 3


def test_the_end_of_a_run_is_read_from_its_metrics(tmp_path):
    """The last evaluation, not the first one."""
    text = write_corpus(tmp_path / "text.jsonl", n_documents=60)
    finished = train(data_path=text, out_dir=tmp_path, val_fraction=0.1, max_updates=4, eval_interval=2, log_interval=2)
    read = trained.outcome(tmp_path)
    assert (read.updates, read.tokens) == (4, finished.progress.tokens)
    assert read.parameters == sum(weight.numel() for weight in finished.job.model.parameters())
    (metrics,) = tmp_path.glob("pretrain_*.metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert len(losses) > 1 and read.update_seconds > 0
    assert read.val_loss == losses[-1] != losses[0]
