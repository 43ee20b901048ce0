"""What stands at the top of the report. Reference: the formula of bits."""

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers import records, train, write_corpus
from tests.trainer.reporting.test_html_report import START, add, metrics_file, page_of
from trainer.reporting.records import RunRecords, quality


def test_the_model_stands_beside_what_was_expected_and_gzip(tmp_path):
    path = metrics_file(tmp_path / "a.metrics.jsonl", start={"data": {**START["data"], "gzip": 3.0}})
    add(path, {"step": 49, "update": 49, "tokens": 4900, "expected_loss": 1.5})
    # A loss of 1.25 nats a token was 0.75 bits a byte, so 1.5 nats are 0.9.
    expected = [("this model", 0.75), ("expected", pytest.approx(0.9)), ("gzip", 3.0)]
    assert quality(RunRecords.read(path)) == expected
    page = page_of(path)
    order = ["<svg", "How good is this?", "width: 25.0%", ">3.000<", "<h2>Samples", "<h2>Go on", "<h2>Figures"]
    order += ["<h2>More curves", "<h2>Settings", "<details"]
    places = [page.index(part) for part in order]
    assert places == sorted(places)


def test_a_run_notes_what_gzip_needs(data, tmp_path):
    """Reference: the texts that were held out."""
    run = train(data_path=data, out_dir=tmp_path / "with", val_fraction=0.2, max_updates=1)
    texts = [json.loads(line)["text"] for line in Path(data).read_text().splitlines()]
    raw = "\n".join(texts[document] for document in run.job.corpus.val_documents).encode()
    start = RunRecords.read(run.reporter.file.name).noted("data")
    assert start["gzip"] == 8 * len(gzip.compress(raw, 9)) / len(raw)


def test_what_was_trained_of_each_source_is_shown_as_text(tmp_path):
    trained = {"source": "<b>web</b>/", "tokens": 12345, "share": 0.25, "passes": 1.5}
    path = add(
        metrics_file(tmp_path / "a.metrics.jsonl"), {"step": 50, "update": 50, "tokens": 5000, "trained": [trained]}
    )
    page = page_of(path)
    assert "What was trained" in page and "&lt;b&gt;web&lt;/b&gt;/" in page and "<b>web" not in page
    for shown in ("12,345", "25.0%", "1.50"):
        assert f"<td>{shown}</td>" in page


@pytest.mark.slow
def test_overfitting_is_said_at_the_end_and_on_the_page(tmp_path, capsys):
    """One document, read until it is known by heart. Reference: the lowest of the evaluations in the metrics file."""
    path = write_corpus(tmp_path / "a.jsonl", 6)
    options = {"val_fraction": 0.4, "eval_interval": 10, "learning_rate": 0.05, "report": 1}
    run = train(data_path=path, out_dir=tmp_path, epochs=40, lr_schedule="constant", **options)
    evaluations = records(run, "val_loss")
    lowest = min(evaluations, key=lambda record: record["val_loss"])
    last = evaluations[-1]["val_loss"]
    assert last > 1.01 * lowest["val_loss"], "this run does not overfit"
    best, stem = f"{lowest['update']}: {lowest['val_loss']:.3f}", tmp_path / "pretrain_16"
    said = f"lowest after update {best} ({stem}.best.pth); that of the last update is {last:.3f} ({stem}.pth), so"
    assert said in capsys.readouterr().out
    assert said in Path(f"{stem}.report.html").read_text()


def test_a_run_that_is_best_at_its_end_has_not_overfitted(data, tmp_path, capsys):
    run = train(data_path=data, out_dir=tmp_path, val_fraction=0.2, eval_interval=10)
    values = [record["val_loss"] for record in records(run, "val_loss")]
    assert len(values) > 1 and min(values) == values[-1]
    assert "lowest" not in capsys.readouterr().out
