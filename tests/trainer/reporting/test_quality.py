"""What stands at the top of the report. References: gzip and lzma called on the texts themselves, and the formula of bits."""

import gzip
import json
import lzma
import math

import numpy as np
import pytest

from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import records, train, write_corpus
from tests.trainer.reporting.test_html_report import START, metrics_file
from trainer.pretrain import compressors
from trainer.reporting.html_report import write_report
from trainer.reporting.quality import quality, remarks
from trainer.reporting.records import RunRecords


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """(a store, its texts, its tokenizer)"""
    path = write_corpus(tmp_path_factory.mktemp("texts") / "a.jsonl", 200)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    tokenizer = small_tokenizer()
    return open_or_build(str(path), DocumentEncoder(tokenizer), progress=False), texts, tokenizer


def bits(raw):
    return {
        "gzip": 8 * len(gzip.compress(raw, 9, mtime=0)) / len(raw),
        "xz": 8 * len(lzma.compress(raw, preset=6)) / len(raw),
        "bytes": len(raw),
    }


def test_a_small_text_is_compressed_whole(store):
    documents, texts, tokenizer = store
    chosen = np.arange(0, 200, 2, dtype=np.uint32)
    assert compressors.compressed(documents, chosen, tokenizer) == bits("\n".join(texts[::2]).encode())
    assert compressors.compressed(documents, chosen[:0], tokenizer) == {}


def test_of_a_long_text_a_part_from_all_of_it_is_compressed(store, monkeypatch):
    documents, texts, tokenizer = store
    whole = sum(len(text) for text in texts)
    monkeypatch.setattr(compressors, "SAMPLE_BYTES", -(-whole // 4))
    found = compressors.compressed(documents, np.arange(200, dtype=np.uint32), tokenizer)
    assert found == bits("\n".join(texts[::4]).encode())
    # One document that is longer than the sample gives its beginning.
    monkeypatch.setattr(compressors, "SAMPLE_BYTES", 10)
    longest = max(range(200), key=lambda i: len(texts[i]))
    found = compressors.compressed(documents, np.array([longest], dtype=np.uint32), tokenizer)
    assert 0 < found["bytes"] < len(texts[longest])


def with_start(path, **data):
    """The metrics file of test_html_report, with this in the data of its start."""
    _, rest = metrics_file(path).read_text(encoding="utf-8").split("\n", 1)
    path.write_text(json.dumps({**START, "data": {**START["data"], **data}}) + "\n" + rest, encoding="utf-8")
    return path


def test_the_model_stands_beside_what_was_expected_and_the_compressors(tmp_path):
    path = with_start(tmp_path / "a.metrics.jsonl", compressors={"gzip": 3.0, "xz": 2.5, "bytes": 1000})
    with path.open("a") as file:
        file.write(json.dumps({"step": 49, "update": 49, "tokens": 4900, "expected_loss": 1.5}) + "\n")
    bars = quality(RunRecords(path))
    # A loss of 1.25 nats a token was 0.75 bits a byte, so 1.5 nats are 0.9.
    assert [(bar.label, bar.value) for bar in bars] == [
        ("this model", 0.75),
        ("expected", pytest.approx(0.9)),
        ("xz", 2.5),
        ("gzip", 3.0),
    ]
    assert [bar.percent for bar in bars] == [pytest.approx(100 * bar.value / 3) for bar in bars]
    write_report([path], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    order = ["<svg", "How good is this?", ">2.500<", "<h2>Samples", "<h2>Go on", "<h2>Figures", "<h2>More curves"]
    order += ["<h2>Settings", "<details"]
    places = [page.index(part) for part in order]
    assert places == sorted(places)


def test_an_expectation_that_ended_before_the_run_is_none(tmp_path):
    """Of text that is read many times nothing is expected in the end."""
    path = with_start(tmp_path / "a.metrics.jsonl", compressors={})
    with path.open("a") as file:
        file.write(json.dumps({"step": 20, "update": 20, "tokens": 2000, "expected_loss": 1.5}) + "\n")
    assert [bar.label for bar in quality(RunRecords(path))] == ["this model"]


@pytest.mark.parametrize(
    "noted", [None, 3, [], "gzip", {"gzip": "3"}, {"gzip": math.nan}, {"gzip": -1, "xz": 1e9}, {"zstd": 2}]
)
def test_what_no_run_has_noted_is_left_out(tmp_path, noted):
    bars = quality(RunRecords(with_start(tmp_path / "a.metrics.jsonl", compressors=noted)))
    assert [(bar.label, bar.percent) for bar in bars] == [("this model", 100)]


def test_a_run_notes_it_and_one_without_validation_says_how_to_get_it(data, tmp_path):
    run = train(data_path=data, out_dir=tmp_path / "with", val_fraction=0.2)
    noted = RunRecords(f"{run.job.files.stem}.metrics.jsonl").starts[0]["data"]["compressors"]
    assert set(noted) == {"gzip", "xz", "bytes"} and noted["bytes"] > 0
    assert {bar.label for bar in quality(RunRecords(f"{run.job.files.stem}.metrics.jsonl"))} == {
        "this model",
        "xz",
        "gzip",
    }
    without = train(data_path=data, out_dir=tmp_path / "without", report=1)
    page = (tmp_path / "without" / "pretrain_16.report.html").read_text()
    loss = records(without)[-1]["loss"]
    assert f"on the text that it was trained on was {loss:.3f} nats per token at the end." in page
    assert "How good is this?" in page and "--val_fraction 0.02" in page and "Bits per byte:" not in page
    assert "compressors" not in RunRecords(f"{without.job.files.stem}.metrics.jsonl").starts[0]["data"]


def without_bits(path, *figures, data=(), settings=()):
    """A metrics file of a language model that has these figures at its end, and no bits per byte."""
    start = {**START, "data": {**START["data"], **dict(data)}, "settings": {"val_fraction": 0.0, **dict(settings)}}
    at = {"step": 1, "update": 1, "tokens": 100, "loss": 2.5}
    path.write_text("\n".join([json.dumps(start), json.dumps({**at, **dict(figures)})]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("figure", ["mlm_loss", "mlm_acc"])
def test_of_an_encoder_nothing_is_said(tmp_path, figure):
    """Its loss is that of no language model; --objective mlm logs no mlm_loss."""
    assert remarks(RunRecords(without_bits(tmp_path / "a.metrics.jsonl", (figure, 0.3)))) == []


def test_without_bits_the_page_says_what_is_known(tmp_path):
    path = tmp_path / "a.metrics.jsonl"
    alone, advice = remarks(RunRecords(without_bits(path)))
    assert "2.500 nats per token at the end." in alone and "--val_fraction 0.02" in advice and "gzip" in advice
    expected, _ = remarks(RunRecords(without_bits(path, ("expected_loss", 2.25))))
    assert expected.endswith("2.500 nats per token at the end; 2.250 was to be expected.")
    answers = {"data": {"trained": "answers"}}
    _, advice = remarks(RunRecords(without_bits(path, **answers)))
    assert "conversations" in advice and "gzip" not in advice
    _, held_out = remarks(RunRecords(without_bits(path, ("val_loss", 2.75), **answers)))
    assert "answers that it was not trained on it was 2.750" in held_out


def test_of_runs_with_bits_and_of_other_trainers_nothing_more_is_said(tmp_path):
    path = tmp_path / "a.metrics.jsonl"
    assert remarks(RunRecords(without_bits(path, ("bits_per_byte", 1.0), ("val_loss", 2.0)))) == []
    assert remarks(RunRecords(metrics_file(path))) == []


def test_what_was_trained_of_each_source_is_shown_as_text(tmp_path):
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    good = {"source": "<b>web</b>/", "tokens": 12345, "share": 0.25, "passes": 1.5}
    at = {"step": 50, "update": 50, "tokens": 5000}
    with path.open("a") as file:
        file.write(json.dumps({**at, "trained": [good]}) + "\n")
        # None of these is what a run writes.
        for wrong in (3, [3], [{**good, "tokens": "many"}], [{"source": "x"}], [{**good, "share": math.inf}]):
            file.write(json.dumps({**at, "trained": wrong}) + "\n")
    assert RunRecords(path).trained == [good]
    write_report([path], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "What was trained" in page and "&lt;b&gt;web&lt;/b&gt;/" in page and "<b>web" not in page
    for shown in ("12,345", "25.0%", "1.50"):
        assert f"<td>{shown}</td>" in page


def test_overfitting_is_said_at_the_end_and_on_the_page(tmp_path, capsys):
    """One document, read until it is known by heart. Reference: the lowest of the evaluations in the metrics file."""
    path = write_corpus(tmp_path / "a.jsonl", 6)
    options = {"val_fraction": 0.4, "eval_interval": 10, "learning_rate": 0.05, "report": 1}
    run = train(data_path=path, out_dir=tmp_path, epochs=40, lr_schedule="constant", **options)
    evaluations = records(run, "val_loss")
    lowest = min(evaluations, key=lambda record: record["val_loss"])
    last = evaluations[-1]["val_loss"]
    assert last > 1.01 * lowest["val_loss"], "this run does not overfit"
    said = (
        f"lowest after update {lowest['update']}: {lowest['val_loss']:.3f}; that of the saved weights is {last:.3f}, so"
    )
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "pretrain_16.report.html").read_text()


def test_a_run_that_is_best_at_its_end_has_not_overfitted(data, tmp_path, capsys):
    run = train(data_path=data, out_dir=tmp_path, val_fraction=0.2, eval_interval=10)
    values = [record["val_loss"] for record in records(run, "val_loss")]
    assert len(values) > 1 and min(values) == values[-1]
    assert "lowest" not in capsys.readouterr().out


def test_runs_of_different_texts_say_so(tmp_path):
    pages = []
    for number, fingerprint in enumerate(("one", "another")):
        first = with_start(tmp_path / "a.metrics.jsonl", fingerprint="one")
        second = with_start(tmp_path / "b.metrics.jsonl", fingerprint=fingerprint)
        write_report([first, second], tmp_path / f"{number}.html")
        pages.append((tmp_path / f"{number}.html").read_text())
    assert ["different texts" in page for page in pages] == [False, True]
