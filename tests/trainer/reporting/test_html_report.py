"""The report page: nothing of a curve's range is lost, nothing of a text is markup, nothing is fetched."""

import gzip
import itertools
import json
import os
import random
import re
import shlex

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.start import ROOT, next_command
from scripts import report
from tests.helpers import records, train, write_records
from trainer.reporting.html_report import draw, write_report
from trainer.reporting.records import LOSS, MOST_LINE_BYTES, RunRecords, downsample, quality

START = {
    "step": -1, "update": 0, "tokens": 0, "started": "2026-01-01 00:00:00", "command": "python trainer/train_pretrain.py",
    "settings": {"hidden_size": 16, "data_path": ["<a>.jsonl"]}, "model": {"parameters": 1000},
    "data": {"documents": 10, "rows": 5, "fill": 0.9}, "machine": {"cores": 2}, "versions": {"python": "3.11"},
}  # fmt: skip

ODD_NUMBERS = [b'{"tokens": 1, "text": "t", "prompt": ""}\n', b'{"tokens": 1%s, "loss": 1}\n' % (b"0" * 400)]
ODD_NUMBERS += [b'{"tokens": "abc", "loss": 1}\n', b'{"tokens": [1, 2, 3], "id": 4}\n']


def metrics_file(path, n=50, start=(), **settings):
    """The metrics of a run of n updates. start: entries of its first line; settings: those of the run."""
    generator = random.Random(0)
    lines = [{**START, "settings": {**START["settings"], **settings}, **dict(start)}]
    for i in range(n):
        at = {"step": i, "update": i, "tokens": 100 * i}
        line = {"loss": generator.random() + 1, "grad_norm": None if i == 7 else generator.random(), "lr": 1e-3}
        lines.append({**at, **line, "tokens_per_second": 1000.0, "expert_load": [0.5, 0.5]})
    lines.append({**at, "val_loss": 1.25, "bits_per_byte": 0.75})
    write_records(path, [*lines, {**at, "prompt": "<i>", "text": "<i> & <script>alert(1)</script> \u4f60\u597d"}])
    return path


def add(path, *lines):
    """Append lines (dicts, or bytes as they are) to a metrics file; returns its path."""
    with open(path, "ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
    return path


def page_of(*paths):
    """The text of the page about runs, which is written beside the first."""
    page = paths[0].with_suffix(".html")
    write_report(paths, page)
    return page.read_text(encoding="utf-8")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 40))
def test_thinned_curves_keep_their_extremes(values, buckets):
    """The whole and each part; the points that are left are points of the curve, in order."""
    y, x = np.array(values), np.arange(len(values))
    kept, of_y = downsample(x, y, buckets)
    assert len(kept) <= max(2 * buckets + 2, 1) and (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.diff(kept) > 0).all() and (y[kept] == of_y).all()
    if len(values) > 2 * buckets + 2:
        edges = np.linspace(0, len(y), buckets + 1).astype(int)
        for lo, hi in itertools.pairwise(edges):
            part = y[kept[(kept >= lo) & (kept < hi)]]
            assert (part.min(), part.max()) == (y[lo:hi].min(), y[lo:hi].max())


def test_the_page_of_a_run(data, tmp_path):
    run = train(data_path=data, out_dir=tmp_path, report=1, val_fraction=0.2, sample_prompts="the cat", use_moe=1)
    page = (tmp_path / "pretrain_16_moe.report.html").read_text(encoding="utf-8")
    assert f"{records(run)[-1]['loss']:.4f}" in page and f"{run.progress.best_val_loss:.4f}" in page
    (sample,) = records(run, "text")
    assert sample["text"].startswith("the cat") and "<b>the cat</b>" in page
    assert "<h2>Go on" in page and "continue after a stop" not in page, "the run is finished"
    assert page.count("<svg") >= 7 and "Expert load" in page and "<th>passes over the text</th><td>1.00</td>" in page
    assert not re.search(r"(src|href|url)\s*=?\s*[\"'(]+\s*(https?:)?//", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert (tmp_path / "pretrain_16_moe.loss.png").read_bytes().startswith(b"\x89PNG")


def test_names_settings_and_commands_are_shown_and_not_obeyed(tmp_path):
    """What a browser would reorder or a copied command would hide; a name with two $ is no formula."""
    paths = []
    for name in ("a$\\frac{$\u202e", os.fsdecode(b"caf\xe9")):
        start = {"next_commands": [["go on", "python a.py --out_dir 'o\u001b[31m\u202e'"]]}
        path = metrics_file(tmp_path / f"{name}.metrics.jsonl", start=start, data_path="b\u2066\x9b.jsonl")
        paths.append(path)
    page = page_of(*paths)
    for character in "\x1b\x9b\u202e\u2066":
        assert character not in page
    assert "&#39;o&lt;U+001B&gt;[31m&lt;U+202E&gt;&#39;" in page
    assert "b&lt;U+2066&gt;&lt;U+009B&gt;.jsonl" in page
    assert "caf\\udce9" in page


def test_runs_side_by_side(tmp_path, capsys):
    for name, rate in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        metrics_file(tmp_path / name / "run.metrics.jsonl", learning_rate=rate)
    words = [tmp_path / "a", tmp_path / "b" / "run.pth", "--out", tmp_path / "both.html"]
    assert report.main(list(map(str, words))) == 0
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "a/run" in page and "b/run" in page
    assert re.search(r'<tr class="differs"><th>learning_rate</th><td>1</td><td>2</td></tr>', page)
    assert "<tr><th>hidden_size</th><td>16</td><td>16</td></tr>" in page
    assert str(tmp_path / "both.loss.png") in capsys.readouterr().out and (tmp_path / "both.loss.png").exists()


def test_the_next_commands_can_be_pasted(tmp_path, monkeypatch):
    """In the repository and elsewhere, with blanks in the folder. Reference: what a shell makes of them."""
    wanted = ["--weight", "out/a b/pretrain_64.pth", "--out_dir", "out/a b"]
    for folder, script in ((ROOT, "scripts/export_hf.py"), (tmp_path, f"{ROOT}/scripts/export_hf.py")):
        monkeypatch.chdir(folder)
        _, export = next_command("export", "scripts/export_hf.py", *wanted)
        assert shlex.split(export) == ["python", script, *wanted]


def test_what_a_crash_or_a_stranger_left_costs_its_line_alone(tmp_path):
    """Lines that are cut off, within a character too, or longer than any of ours."""
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    whole = RunRecords.read(path)
    cut = json.dumps({"tokens": 1, "text": "caf\u00e9"}, ensure_ascii=False).encode().removesuffix(b'\xa9"}')
    too_long = {"tokens": 1, "loss": 7.0, "pad": "x" * MOST_LINE_BYTES}
    add(path, b'{"step": 3, "upd\n', b"null\n[1]\n3\n", cut + b"\n", b"[" * 100_000 + b"\n", too_long)
    add(path, {"tokens": 1, "update": 1, "prompt": "a", "text": None})
    add(path, {"tokens": 9000, "loss": 0.5}, cut)
    damaged = RunRecords.read(path)
    assert damaged.columns.keys() == whole.columns.keys()
    assert list(damaged.columns["loss"][1]) == [*whole.columns["loss"][1], 0.5]
    assert len(whole.columns["grad_norm"][0]) == 49, "an unknown norm is no point of the curve"
    assert "hidden_size" in page_of(path)


def test_an_odd_start_costs_its_line_alone(tmp_path):
    parts = itertools.product(("settings", "model", "data", "machine", "next_commands"), (None, 5, {}, ["x"]))
    odd = ({"fill": "x"}, {"gzip": "x"}, {"fingerprint": []}, {"documents": []})
    starts = [{part: value} for part, value in parts] + [{"data": {**START["data"], **fields}} for fields in odd]
    for start in starts:
        path = metrics_file(tmp_path / "a.metrics.jsonl", n=3, start=start)
        assert "val_loss" in RunRecords.read(path).columns
        assert "a.metrics.jsonl" in page_of(path) or "10 documents" in page_of(path), start


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", *ODD_NUMBERS])
def test_what_is_no_metrics_file_is_named(tmp_path, content):
    path = tmp_path / "x.metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="x.metrics.jsonl"):
        report.main([str(path)])
    with pytest.raises(UserError, match=r"\*.metrics.jsonl"):
        (tmp_path / "empty").mkdir()
        report.main([str(tmp_path / "empty")])


def test_the_model_stands_beside_what_was_expected_and_gzip(tmp_path):
    start = {"data": {**START["data"], "gzip": 3.0}, "next_commands": [["continue after a stop", "python a.py"]]}
    path = metrics_file(tmp_path / "a.metrics.jsonl", start=start)
    assert "continue after a stop" in page_of(path) and "dotted" not in page_of(path)
    trained = {"source": "<b>web</b>/", "tokens": 12345, "share": 0.25, "passes": 2.5}
    told = {"expected": {"tokens": 5100, "loss": 1.5, "error": 0.1}}
    add(path, {"step": 49, "update": 49, "tokens": 4900, "val_loss": 1.25, **told})
    assert "expected end" in page_of(path)
    range_of = draw([RunRecords.read(path)], ["a"], LOSS).axes[0].containers[0]
    assert range_of[2][0].get_segments()[0] == pytest.approx(np.array([[5100, 1.35], [5100, 1.65]]))
    add(path, {"step": 50, "update": 50, "tokens": 5000, "trained": [trained]})
    # A loss of 1.25 nats a token was 0.75 bits a byte, so 1.5 nats are 0.9.
    expected = [("this model", 0.75), ("expected", pytest.approx(0.9)), ("gzip", 3.0)]
    assert quality(RunRecords.read(path)) == expected
    page = page_of(path)
    order = ["<svg", "How good is this?", "width: 25.0%", ">3.000<", "<h2>Samples", "<h2>Go on", "<h2>Figures"]
    order += ["<h2>More curves", "<h2>Settings", "<details"]
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    # 4,900 tokens are two and a half passes.
    assert RunRecords.read(path).ends_of_passes() == pytest.approx([1960, 3920])
    assert page.count("dotted: a pass over the text ends") == 1 and "continue after a stop" not in page
    # A finished run that was extended, and stopped
    assert "continue after a stop" in page_of(add(path, {**START, **start}))
    # What was trained of each source
    assert "<td>12,345</td>" in page and "&lt;b&gt;web&lt;/b&gt;/" in page and "<b>web" not in page


def test_a_run_notes_what_gzip_needs(data, tmp_path):
    """Reference: the texts that were held out."""
    run = train(data_path=data, out_dir=tmp_path / "with", val_fraction=0.2, max_updates=1)
    texts = [record["text"] for record in records(data, None)]
    raw = "\n".join(texts[document] for document in run.job.corpus.val_documents).encode()
    start = RunRecords.read(run.reporter.file.name).start_record("data")
    assert start["gzip"] == 8 * len(gzip.compress(raw, 9)) / len(raw)
