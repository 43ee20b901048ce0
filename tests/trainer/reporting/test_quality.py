"""What stands at the top of the report. Reference: the formula of bits."""

import gzip
import json
from pathlib import Path

import pytest

from tests.helpers import train
from tests.trainer.reporting.test_html_report import START, add, metrics_file, page_of
from trainer.reporting.records import RunRecords, quality


def test_the_model_stands_beside_what_was_expected_and_gzip(tmp_path):
    path = metrics_file(tmp_path / "a.metrics.jsonl", start={"data": {**START["data"], "gzip": 3.0}})
    trained = {"source": "<b>web</b>/", "tokens": 12345, "share": 0.25, "passes": 1.5}
    add(path, {"step": 49, "update": 49, "tokens": 4900, "expected_loss": 1.5})
    add(path, {"step": 50, "update": 50, "tokens": 5000, "trained": [trained]})
    # A loss of 1.25 nats a token was 0.75 bits a byte, so 1.5 nats are 0.9.
    expected = [("this model", 0.75), ("expected", pytest.approx(0.9)), ("gzip", 3.0)]
    assert quality(RunRecords.read(path)) == expected
    page = page_of(path)
    order = ["<svg", "How good is this?", "width: 25.0%", ">3.000<", "<h2>Samples", "<h2>Go on", "<h2>Figures"]
    order += ["<h2>More curves", "<h2>Settings", "<details"]
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    # What was trained of each source
    assert "<td>12,345</td>" in page and "&lt;b&gt;web&lt;/b&gt;/" in page and "<b>web" not in page


def test_a_run_notes_what_gzip_needs(data, tmp_path):
    """Reference: the texts that were held out."""
    run = train(data_path=data, out_dir=tmp_path / "with", val_fraction=0.2, max_updates=1)
    texts = [json.loads(line)["text"] for line in Path(data).read_text().splitlines()]
    raw = "\n".join(texts[document] for document in run.job.corpus.val_documents).encode()
    start = RunRecords.read(run.reporter.file.name).start_record("data")
    assert start["gzip"] == 8 * len(gzip.compress(raw, 9)) / len(raw)
