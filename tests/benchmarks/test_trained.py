"""benchmarks/trained.py: the figures of a finished run. Reference: its metrics file."""

import json

from benchmarks import trained
from tests.helpers import train, write_corpus


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
