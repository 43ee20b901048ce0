"""The report page: nothing of a curve's range is lost, nothing of a text is markup, nothing is fetched."""

import itertools
import json
import os
import random
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from scripts import report
from tests.helpers import records, train
from trainer.electra.job import ElectraJob
from trainer.pretrain.outlook import CHARTS as PRETRAINING
from trainer.reporting.charts import (
    COMMON,
    MOST_CHARTS,
    MOST_CURVES,
    Chart,
    charts_of_record,
    charts_of_runs,
    fields_of,
)
from trainer.reporting.curves import BUCKETS, thin
from trainer.reporting.html_report import EARLIER, go_on, write_report
from trainer.reporting.next_commands import NextCommand
from trainer.reporting.older_records import CHARTS_BEFORE
from trainer.reporting.records import MOST_FIELDS, MOST_LINE_BYTES, RunRecords

START = {
    "step": -1, "update": 0, "tokens": 0, "started": "2026-01-01 00:00:00", "command": "python trainer/train_pretrain.py",
    "settings": {"hidden_size": 16, "data_path": ["<a>.jsonl"]}, "model": {"parameters": 1000},
    "data": {"documents": 10, "rows": 5, "fill": 0.9}, "machine": {"cores": 2}, "versions": {"python": "3.11"},
}  # fmt: skip


def metrics_file(path, n=50, **settings):
    generator = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps({**START, "settings": {**START["settings"], **settings}}) + "\n")
        for i in range(n):
            at = {"step": i, "update": i, "tokens": 100 * i}
            line = {
                **at,
                "loss": generator.random() + 1,
                "lr": 1e-3,
                "grad_norm": None if i == 7 else generator.random(),
            }
            file.write(json.dumps({**line, "tokens_per_second": 1000.0, "expert_load": [0.5, 0.5]}) + "\n")
        file.write(json.dumps({**at, "val_loss": 1.25, "bits_per_byte": 0.75}) + "\n")
        file.write(json.dumps({**at, "prompt": "<i>", "text": "<i> & <script>alert(1)</script> \u4f60\u597d"}) + "\n")
    return path


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 40))
def test_thinned_curves_keep_their_extremes(values, buckets):
    """Of the whole and of each part; the points that are left are points of the curve, in order."""
    y, x = np.array(values), np.arange(len(values))
    kept, of_y = thin(x, y, buckets)
    assert len(kept) <= max(2 * buckets + 2, 1) and (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.diff(kept) > 0).all() and (y[kept] == of_y).all()
    if len(values) > 2 * buckets + 2:
        edges = np.linspace(0, len(y), buckets + 1).astype(int)
        for lo, hi in itertools.pairwise(edges):
            part = y[kept[(kept >= lo) & (kept < hi)]]
            assert (part.min(), part.max()) == (y[lo:hi].min(), y[lo:hi].max())


def test_the_page_of_a_run(data, tmp_path):
    """Written at the end of a run, with its own figures, samples and settings; it fetches nothing."""
    run = train(data_path=data, out_dir=tmp_path, report=1, val_fraction=0.2, sample_prompts="the cat", use_moe=1)
    page = (tmp_path / "pretrain_16_moe.report.html").read_text(encoding="utf-8")
    assert f"{records(run)[-1]['loss']:.4f}" in page and f"{run.progress.best_val_loss:.4f}" in page
    (sample,) = records(run, "text")
    assert sample["text"].startswith("the cat") and "<b>the cat</b>" in page
    assert page.count("<svg") >= 7 and "Expert load" in page and "--from_resume 1" in page
    assert not re.search(r"(src|href|url)\s*=?\s*[\"'(]+\s*(https?:)?//", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert (tmp_path / "pretrain_16_moe.loss.png").read_bytes().startswith(b"\x89PNG")


def captions(page):
    """The captions of a page's charts, in order."""
    return re.findall(r"<figcaption>(.*?)</figcaption>", page)


def with_charts(path, charts):
    """The metrics file, whose start says what to draw."""
    first, rest = path.read_text(encoding="utf-8").split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), "charts": charts}) + "\n" + rest, encoding="utf-8")
    return path


def test_a_run_records_the_charts_of_its_job(data, tmp_path):
    run = train(data_path=data, out_dir=tmp_path, use_moe=1)
    (start,) = records(run, "settings")
    assert start["charts"] == [chart.as_record() for chart in PRETRAINING]
    path = f"{run.job.files.stem}.metrics.jsonl"
    assert RunRecords(path).charts == PRETRAINING


def test_the_page_draws_what_the_start_declares(tmp_path):
    """A chart that no code of the report knows, in the order of the declaration."""
    charts = [Chart("Speed", ("tokens_per_second",)), Chart("Two <b> halves", ("expert_load/*",)), COMMON[0]]
    path = with_charts(metrics_file(tmp_path / "a.metrics.jsonl"), [chart.as_record() for chart in charts])
    write_report([path], tmp_path / "a.html", tmp_path / "a.png")
    assert captions((tmp_path / "a.html").read_text(encoding="utf-8")) == ["Speed", "Two &lt;b&gt; halves", "Loss"]


def test_a_start_without_charts_is_drawn_as_before(tmp_path):
    """Reference: the captions of the page that the version without declared charts made of this file."""
    write_report([metrics_file(tmp_path / "a.metrics.jsonl")], tmp_path / "a.html")
    assert captions((tmp_path / "a.html").read_text(encoding="utf-8")) == [
        "Loss",
        "Validation: bits per byte",
        "Learning rate",
        "Gradient norm, before clipping",
        "Tokens per second",
        "Expert load: mean over the layers",
    ]


# What later versions draw beside it in the same charts.
SINCE = {"val_mlm_loss", "val_disc_loss", "val_gen_acc", "val_disc_acc", "val_disc_auc"}


def as_before(chart):
    return replace(chart, fields=tuple(field for field in chart.fields if field not in SINCE))


def test_every_job_declares_what_was_drawn_of_it_before():
    """Side by side they give the order of before; a job alone has a part of it, and no chart twice."""
    jobs = [[as_before(chart) for chart in charts] for charts in (PRETRAINING, ElectraJob.CHARTS, COMMON)]
    assert charts_of_runs(jobs) == list(CHARTS_BEFORE)
    for charts in jobs:
        assert list(charts) == [chart for chart in CHARTS_BEFORE if chart in charts]


@pytest.mark.parametrize(
    "charts",
    [7, None, "Loss", [], [7], [{"title": "Loss"}], [{**COMMON[0].as_record(), "fields": ["loss", 1]}],
     [{**COMMON[0].as_record(), "logarithmic": "yes"}]],
    ids=range(8),
)  # fmt: skip
def test_charts_that_no_run_wrote_are_those_of_before(tmp_path, charts):
    path = with_charts(metrics_file(tmp_path / "a.metrics.jsonl"), charts)
    assert RunRecords(path).charts == CHARTS_BEFORE
    write_report([path], tmp_path / "a.html", tmp_path / "a.png")


def test_a_field_that_cannot_be_drawn_as_text_is_spelled_out(tmp_path):
    name = "\udcff$\\frac{$"
    charts = [Chart(name, ("lr", name)).as_record()]
    path = with_charts(metrics_file(tmp_path / "a.metrics.jsonl"), charts)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 1, "tokens": 5, name: 1.0}) + "\n")
    write_report([path], tmp_path / "a.html")
    assert "\\udcff$" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_text_is_never_markup(tmp_path):
    write_report([metrics_file(tmp_path / "a.metrics.jsonl")], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page and "&lt;a&gt;.jsonl" in page and "你好" in page


def test_runs_side_by_side(tmp_path, capsys):
    """Each with a column of its own; what differs between them is marked; the same names are told apart by their folders."""
    for name, rate in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        metrics_file(tmp_path / name / "run.metrics.jsonl", learning_rate=rate)
    assert (
        report.main([str(tmp_path / "a"), str(tmp_path / "b" / "run.pth"), "--out", str(tmp_path / "both.html")]) == 0
    )
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "a/run" in page and "b/run" in page
    assert re.search(r'<tr class="differs"><th>learning_rate</th><td>1</td><td>2</td></tr>', page)
    assert "<tr><th>hidden_size</th><td>16</td><td>16</td></tr>" in page
    assert str(tmp_path / "both.loss.png") in capsys.readouterr().out and (tmp_path / "both.loss.png").exists()


def test_samples_are_limited_and_shown_as_text(tmp_path):
    """The last evaluation's and 20 earlier ones'; control characters as pictures."""
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    with open(path, "a", encoding="utf-8") as file:
        for update in range(100, 1100):
            line = {
                "step": update,
                "update": update,
                "tokens": update,
                "prompt": "p",
                "text": f"p text {update}\x00\x1b[2J",
            }
            file.write(json.dumps(line) + "\n")
    write_report([path], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.count("<pre><b>p</b>") == 1 and page.count("after update") == EARLIER
    assert page.index("text 1099␀␛[2J") < page.index("Earlier ones") and "\x00" not in page and "\x1b" not in page


@pytest.mark.parametrize("given", ["", " --from_resume 0", " --from_resume", " --from_resume 1"])
def test_the_command_that_goes_on(tmp_path, given):
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    text = path.read_text().replace("train_pretrain.py", f"train_pretrain.py --epochs 2{given} --seed 1")
    path.write_text(text)
    write_report([path], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "python trainer/train_pretrain.py --epochs 2 --seed 1 --from_resume 1<" in page


def test_the_commands_of_a_run_that_was_started_elsewhere_name_the_repository(tmp_path):
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    start, *rest = path.read_text().splitlines()
    start = json.loads(start)
    start["command"] = "python /there/minimind/trainer/train_pretrain.py"
    # The second and the third were written by nobody's run.
    start["next_commands"] = [
        ["continue texts", "python {top}scripts/generate.py --weight {stem}.pth"],
        "no command",
        [1, 2],
    ]
    path.write_text("\n".join([json.dumps(start), *rest]))
    write_report([path], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "python /there/minimind/trainer/train_pretrain.py" in page
    assert f"python /there/minimind/scripts/generate.py --weight {tmp_path / 'a.pth'}" in page


def started_by(path, command, next_commands=()):
    """A metrics file of a run that was started by a command."""
    start, *rest = metrics_file(path, n=3).read_text().splitlines()
    start = {**json.loads(start), "command": command, "next_commands": list(next_commands)}
    path.write_text("\n".join([json.dumps(start), *rest]))
    return path


def test_the_path_of_a_repository_may_have_a_blank(tmp_path):
    """Reference: what a shell makes of it."""
    command = shlex.join(
        ["torchrun", "--nproc_per_node", "2", "/my work/mini mind/trainer/train_sft.py", "--seed", "1"]
    )
    next_commands = [["continue texts", "python {top}scripts/generate.py --weight {stem}.pth"]]
    run = RunRecords(started_by(tmp_path / "a.metrics.jsonl", command, next_commands))
    (why, again), (_, generate) = go_on(run)
    # train_electra.py has no epochs.
    assert why == "train on, after a stop or for longer"
    assert again == f"{command} --from_resume 1"
    assert shlex.split(generate)[:2] == ["python", "/my work/mini mind/scripts/generate.py"]


@pytest.mark.parametrize(
    "command",
    [
        "python 'a b/trainer/train_sft.py",
        "python train.py",
        "trainer/" * 10_000,
        "a" * 200_000 + "/trainer/train_sft.py",
    ],
    ids=range(4),
)
def test_a_command_that_names_no_repository_does_not_end_the_report(tmp_path, command):
    """A quotation without its end, another program, and what nobody types."""
    next_commands = [["continue texts", "python {top}scripts/generate.py"], ["long", "{top}" * 1000]]
    run = RunRecords(started_by(tmp_path / "a.metrics.jsonl", command, next_commands))
    commands = dict(go_on(run))
    assert commands["continue texts"] == "python scripts/generate.py" and "long" not in commands
    assert len(commands) == 1 + (len(command) < 100_000)


def test_a_command_for_a_run_in_a_folder_with_blanks_can_be_pasted():
    """Reference: what a shell makes of it."""
    command = NextCommand("export", "python {top}scripts/export_hf.py --weight {stem}.pth --out_dir {stem}_hf 'a b'")
    filled = command.filled({"top": "", "stem": "out/a b/pretrain_64"})
    wanted = ["--weight", "out/a b/pretrain_64.pth", "--out_dir", "out/a b/pretrain_64_hf", "a b"]
    assert shlex.split(filled) == ["python", "scripts/export_hf.py", *wanted]


def test_damaged_lines_are_passed_over(tmp_path):
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    whole = RunRecords(path)
    path.write_text(path.read_text() + '{"step": 3, "upd\nnull\n[1]\n')
    damaged = RunRecords(path)
    assert damaged.curves.keys() == whole.curves.keys() and damaged.last("loss") == whole.last("loss")
    assert len(whole.curves["grad_norm"][0]) == 49, "an unknown norm is no point of the curve"


def test_half_a_character_costs_its_line_alone(tmp_path):
    """A disk that was full may have cut it off."""
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    whole = RunRecords(path)
    cut = json.dumps({"tokens": 1, "text": "caf\u00e9"}, ensure_ascii=False).encode().removesuffix(b'\xa9"}')
    path.write_bytes(path.read_bytes() + cut + b"\n" + b'{"step": 60, "tokens": 9000, "loss": 0.5}\n' + cut)
    damaged = RunRecords(path)
    assert damaged.curves.keys() == whole.curves.keys() and damaged.last("loss") == 0.5


def test_a_file_without_bounds_is_read_within_some(tmp_path):
    """A line that no run writes, fields and charts without end."""
    path = metrics_file(tmp_path / "a.metrics.jsonl", n=3)
    rows = [
        json.dumps({"tokens": 1, "loss": 7.0, "pad": "x" * MOST_LINE_BYTES}),
        json.dumps({"tokens": 500, "loss": 0.5}),
        json.dumps({"tokens": 600, **{f"field {i}": i for i in range(3000)}}),
    ]
    path.write_text(path.read_text(encoding="utf-8") + "\n".join(rows), encoding="utf-8")
    run = RunRecords(path)
    assert len(run.curves["loss"][0]) == 4 and run.last("loss") == 0.5
    assert len(run.curves) == MOST_FIELDS
    one = {"title": "t", "fields": ["loss"] * 1000, "logarithmic": False, "unless_zero": False}
    found = charts_of_record([one] * 1000)
    assert len(found) == MOST_CHARTS and len(found[0].fields) == MOST_CURVES
    assert (
        len(fields_of(Chart("t", ("a/*", "b/*")), [f"{name}/{i}" for name in "ab" for i in range(200)])) == MOST_CURVES
    )


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b'{"tokens": 1, "text": "t", "prompt": ""}\n'])
def test_what_is_no_metrics_file_is_named(tmp_path, content):
    path = tmp_path / "x.metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="x.metrics.jsonl"):
        report.main([str(path)])
    with pytest.raises(UserError, match="no .*metrics.jsonl in this folder"):
        (tmp_path / "empty").mkdir()
        report.main([str(tmp_path / "empty")])


@pytest.mark.slow
def test_a_million_updates_stay_under_3_mb(tmp_path):
    path = metrics_file(tmp_path / "long.metrics.jsonl", n=1_000_000)
    write_report([path], tmp_path / "long.html", tmp_path / "long.png")
    assert (tmp_path / "long.html").stat().st_size < 3e6
    x, y = RunRecords(path).curves["loss"]
    assert len(x) == 1_000_000 and len(thin(x, y)[0]) <= 2 * BUCKETS + 2


def test_names_settings_and_commands_are_shown_and_not_obeyed(tmp_path):
    """What a browser would reorder or a copied command would hide; a name with two $ is no formula."""
    paths = []
    for name in ("a$\\frac{$\u202e", os.fsdecode(b"caf\xe9")):
        path = metrics_file(tmp_path / f"{name}.metrics.jsonl", data_path="b\u2066\x9b.jsonl")
        command = "python trainer/train_pretrain.py --out_dir 'o\u001b[31m\u202e'"
        path.write_text(path.read_text().replace(START["command"], command.replace("\u001b", "\\u001b")))
        paths.append(path)
    write_report(paths, tmp_path / "a.html", tmp_path / "a.png")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    for character in "\x1b\x9b\u202e\u2066":
        assert character not in page
    assert "&#39;o␛[31m&lt;U+202E&gt;&#39;" in page
    assert "b&lt;U+2066&gt;&lt;U+009B&gt;.jsonl" in page
    assert "caf\\udce9" in page


@pytest.mark.parametrize(
    "line",
    [
        {"tokens": 1, "settings": {}},
        {**START, "model": {"parameters": "many"}},
        {**START, "machine": ["cores"]},
        {"tokens": 1, "text": "t", "prompt": None, "update": 1},
        {"tokens": 1, "text": "t", "prompt": "t", "update": "one"},
        {"tokens": 10**400, "loss": 1.0},
        {"tokens": 1, "loss": 10**400},
        {"tokens": float("inf"), "loss": 1.0},
        {"tokens": 1, "lr": float("inf")},
    ],
    ids=range(9),
)
def test_a_line_that_no_run_wrote_does_not_end_the_report(tmp_path, line):
    path = metrics_file(tmp_path / "a.metrics.jsonl", n=3)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n" + "[" * 100_000 + "\n")
    write_report([path], tmp_path / "a.html", tmp_path / "a.png")
    assert "hidden_size" in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("others", [-1e308, 1.0])
def test_figures_that_no_axis_can_show_are_no_points(tmp_path, others, recwarn):
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    with open(path, "a", encoding="utf-8") as file:
        for tokens, loss in ((5000, 1e308), (6000, others), (1e300, 2.0)):
            file.write(json.dumps({"step": 60, "update": 60, "tokens": tokens, "loss": loss}) + "\n")
    write_report([path], tmp_path / "a.html", tmp_path / "a.png")
    assert not [warning for warning in recwarn if "overflow" in str(warning.message)]
    assert len(RunRecords(path).curves["loss"][0]) == 50 + (others == 1.0)
