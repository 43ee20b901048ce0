"""The runs of a folder as they train: what has been read in pieces is what a reader of the whole file finds."""

import json
import os
import time

import numpy as np
import pytest

from scripts.playground import runs as runs_module
from scripts.playground.runs import MOST_POINTS, LiveRun, RunFolder, find_runs
from tests.helpers import train
from tests.scripts.playground.pages import HOSTILE, ask, serving
from tests.trainer.reporting.test_html_report import START, metrics_file
from trainer.reporting.charts import Chart
from trainer.reporting.records import RunRecords


def refreshed(run, seconds=60.0):
    run.refresh(time.monotonic() + seconds)
    return run


def same_curves(run, whole):
    assert run.columns.keys() == whole.curves.keys()
    for field, (x, y) in whole.curves.items():
        assert (list(run.columns[field][0]), list(run.columns[field][1])) == (list(x), list(y)), field


def points_of(content, title, label):
    (chart,) = [chart for chart in content["charts"] if chart["title"] == title]
    (curve,) = [curve for curve in chart["curves"] if curve["label"] == label]
    return curve["points"]


def test_a_run_that_grows_is_read_on(tmp_path):
    """In blocks of any size, cut within lines. Reference: RunRecords of the whole file."""
    whole = metrics_file(tmp_path / "whole.metrics.jsonl")
    content = whole.read_bytes()
    grown = tmp_path / "grown.metrics.jsonl"
    grown.write_bytes(b"")
    run = LiveRun(grown, "grown")
    versions = []
    for start in range(0, len(content), 777):
        with open(grown, "ab") as file:
            file.write(content[start : start + 777])
        versions.append(refreshed(run).version)
    same_curves(run, RunRecords(whole))
    assert len(set(versions)) > len(versions) // 2
    assert refreshed(run).version == versions[-1], "nothing new"
    assert run.samples == RunRecords(whole).samples and run.starts == RunRecords(whole).starts


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path):
    path = metrics_file(tmp_path / "a.metrics.jsonl", n=3)
    run = refreshed(LiveRun(path, "a"))
    with open(path, "ab") as file:
        file.write(b'{"step": 9, "update": 9, "tokens": 900, "lo')
        file.flush()
        assert len(refreshed(run).columns["loss"][0]) == 3
        file.write(b'ss": 0.5}\n')
        file.flush()
        assert refreshed(run).last("loss") == 0.5


def test_the_end_of_a_line_that_is_too_long_is_no_line(tmp_path, monkeypatch):
    """Whatever is written in between. Reference: the records before and behind it."""
    monkeypatch.setattr(runs_module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(runs_module, "MOST_LINE_BYTES", 1000)
    path = metrics_file(tmp_path / "a.metrics.jsonl", n=3)
    run = refreshed(LiveRun(path, "a"))
    for text in ("x" * 1002, "x" * 1002, '{"step": 8, "update": 8, "tokens": 800, "loss": 7.5}\n'):
        with open(path, "a") as file:
            file.write(text)
        refreshed(run)
    assert len(run.columns["loss"][0]) == 3
    with open(path, "a") as file:
        file.write('{"step": 9, "update": 9, "tokens": 900, "loss": 0.5}\n')
    assert refreshed(run).last("loss") == 0.5 and len(run.columns["loss"][0]) == 4


def test_a_resume_that_writes_the_file_anew_is_read_anew(tmp_path):
    """By a rename, as the trainer does; and a file that has become shorter."""
    path = metrics_file(tmp_path / "a.metrics.jsonl", n=50)
    run = refreshed(LiveRun(path, "a"))
    first = run.version
    shorter = metrics_file(tmp_path / "new", n=20)
    os.replace(shorter, path)
    same_curves(refreshed(run), RunRecords(path))
    assert run.version != first
    path.write_text(path.read_text()[:-200])
    assert len(refreshed(run).columns["loss"][0]) == 20


def test_another_file_with_the_number_of_the_one_before_is_read_anew(tmp_path):
    """As ext4 gives it to a file that is made right after one was removed. Here the file is written over, which keeps it."""
    path = metrics_file(tmp_path / "a.metrics.jsonl", n=20)
    run = refreshed(LiveRun(path, "a"))
    inode, first = path.stat().st_ino, run.version
    other = metrics_file(tmp_path / "b.metrics.jsonl", n=50, learning_rate=0.123)
    path.write_bytes(other.read_bytes())
    assert path.stat().st_ino == inode and path.stat().st_size > run._position
    same_curves(refreshed(run), RunRecords(other))
    assert run.version != first and run.starts == RunRecords(other).starts


def test_the_runs_of_a_folder_while_they_train(data, tmp_path):
    """A real run, one of a folder within, and the latest first."""
    train(data_path=data, out_dir=tmp_path, val_fraction=0.2, sample_prompts="the cat")
    folder = RunFolder(tmp_path)
    (summary,) = folder.summaries()
    assert summary["name"] == "pretrain_16" and summary["seconds_left"] == 0.0 and summary["is_read_whole"]
    assert {"updates", "training loss", "validation loss"} <= dict(summary["figures"]).keys()
    content = folder.content(summary["id"])
    whole = RunRecords(tmp_path / "pretrain_16.metrics.jsonl")
    found = np.array(points_of(content, "Loss", "training")).T
    np.testing.assert_allclose(found, whole.curves["loss"], rtol=1e-4)
    assert content["samples"][0][1] == "the cat" and len(content["samples"]) == len(whole.samples)
    (tmp_path / "again").mkdir()
    metrics_file(tmp_path / "again" / "b.metrics.jsonl")
    os.utime(tmp_path / "pretrain_16.metrics.jsonl", (1, 1))
    assert [run["name"] for run in folder.summaries()] == [os.path.join("again", "b"), "pretrain_16"]
    (tmp_path / "pretrain_16.metrics.jsonl").unlink()
    assert [run["name"] for run in folder.summaries()] == [os.path.join("again", "b")]
    assert folder.content(summary["id"]) is None


def test_no_folder_and_an_empty_one_have_no_runs(tmp_path):
    assert RunFolder(tmp_path / "none").summaries() == RunFolder(tmp_path).summaries() == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders, and links need rights")
def test_links_pipes_and_folders_are_passed_over(tmp_path):
    outside, out = tmp_path / "outside", tmp_path / "out"
    (outside / "deep").mkdir(parents=True)
    out.mkdir()
    secret = metrics_file(outside / "secret.metrics.jsonl")
    metrics_file(outside / "deep" / "secret.metrics.jsonl")
    (out / "link.metrics.jsonl").symlink_to(secret)
    (out / "folder").symlink_to(outside)
    (out / "loop").symlink_to(out)
    os.mkfifo(out / "pipe.metrics.jsonl")
    (out / "a.metrics.jsonl").mkdir()
    metrics_file(out / "own.metrics.jsonl")
    folder = RunFolder(out)
    assert [run["name"] for run in folder.summaries()] == ["own"]
    # One that becomes a link after it was found
    run = LiveRun(out / "own.metrics.jsonl", "own")
    (out / "own.metrics.jsonl").unlink()
    (out / "own.metrics.jsonl").symlink_to(secret)
    with pytest.raises(OSError):
        refreshed(run)
    with pytest.raises(OSError):
        refreshed(LiveRun(out / "pipe.metrics.jsonl", "pipe"))


def test_a_look_at_many_folders_ends(tmp_path, monkeypatch):
    """So many entries in all are looked at, those of the folder itself first."""
    monkeypatch.setattr(runs_module, "MOST_ENTRIES", 10)
    for name in "abc":
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.metrics.jsonl").touch()
    (tmp_path / "own.metrics.jsonl").touch()
    found = [path for _, path in find_runs(tmp_path)]
    assert found[0] == tmp_path / "own.metrics.jsonl" and len(found) == 10 - 3


LINES = [
    b"",
    b"\x00" * 1000,
    b"\xff\xfe{}",
    b"null",
    b"[" * 100_000,
    b"9" * 100_000,
    json.dumps({"tokens": 10**400, "loss": 1}).encode(),
    json.dumps({"tokens": 1, "loss": 10**400}).encode(),
    b'{"tokens": NaN, "loss": 1}',
    b'{"tokens": 1, "loss": NaN, "lr": Infinity, "grad_norm": -Infinity}',
    json.dumps({"tokens": 1, "loss": {"a": 1}, "lr": "x", "grad_norm": [[1]], "eta": True}).encode(),
    json.dumps({"tokens": 1, "loss": 1e30, "val_loss": -1e30, "eta": 1e30}).encode(),
    json.dumps({"tokens": -5, **{f"f{i}": i for i in range(5000)}}).encode(),
    json.dumps({"tokens": 1, "expert_load": list(range(50_000))}).encode(),
    json.dumps({"tokens": 1, "x" * 100_000: 1.0}).encode(),
    json.dumps({**START, "charts": [{**Chart("<b>" * 9999, ("loss",)).as_record()}] * 500}).encode(),
    json.dumps({**START, "charts": [Chart("\ud800", ("loss", "lr") * 900).as_record()] * 50}).encode(),
    json.dumps({"tokens": 1, "update": 10**300, "prompt": "\u202e<i>", "text": "\x1b" * 100_000}).encode(),
    b'{"tokens": 1, "text": "' + b"a" * (3 << 20) + b'", "prompt": "", "update": 1}',
    *(json.dumps({"tokens": 1, "update": 1, "prompt": text, "text": text + text}).encode() for text in HOSTILE),
]


def test_hostile_files_do_no_harm(tmp_path):
    """Each line alone and all together, between lines of a run: the page gets JSON of a bounded size, and the run."""
    before, after = (json.dumps({"tokens": n, "update": n, "loss": 2.5}).encode() for n in (1, 2))
    for number, line in enumerate([*LINES, b"\n".join(LINES)]):
        (tmp_path / f"run{number}.metrics.jsonl").write_bytes(b"\n".join((before, line, after, b"")))
    for name in ("<img src=x onerror=alert(1)>", "a\u202eb\x1b[31m", os.fsdecode(b"caf\xe9"), "x" * 200):
        (tmp_path / f"{name}.metrics.jsonl").write_bytes(before + b"\n")
    with serving([], tmp_path) as server:
        listed = []
        while not listed or not all(run["is_read_whole"] for run in listed):
            status, _, content = ask(server, "GET", "/api/runs")
            assert status == 200 and content.isascii()
            listed = json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert len(listed) == len(LINES) + 5
        assert "<img src=x onerror=alert(1)>" in [run["name"] for run in listed]
        for run in listed:
            assert not set("\x1b\u202e\u2066") & set(run["name"])
            status, _, content = ask(server, "GET", "/api/runs/" + run["id"])
            assert status == 200 and len(content) < 2_000_000
            found = json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
            assert found["charts"], run["name"]
            for _, prompt, text in found["samples"]:
                assert not set("\x1b\u202e\u2066\x00") & set(prompt + text) and len(text) <= 40_000


@pytest.mark.parametrize("run_id", ["", "..", "../runs", "0" * 16, "%2e%2e", "a" * 5000])
def test_only_runs_that_were_listed_are_given(tmp_path, run_id):
    metrics_file(tmp_path / "a.metrics.jsonl")
    with serving([], tmp_path) as server:
        ask(server, "GET", "/api/runs")
        assert ask(server, "GET", "/api/runs/" + run_id)[0] == 404


def test_a_long_curve_is_thinned_and_keeps_its_extremes(tmp_path):
    run = LiveRun(tmp_path / "a", "a")
    for number in range(3 * MOST_POINTS):
        run.take(json.dumps({"tokens": number, "loss": 9.0 if number == 31_415 else 1.0 + number % 7 / 10}))
    x, y = map(np.array, run.columns["loss"])
    assert len(x) <= MOST_POINTS and (x[0], x[-1]) == (0, 3 * MOST_POINTS - 1)
    assert (y.max(), y.min(), x[y.argmax()]) == (9.0, 1.0, 31_415) and (np.diff(x) > 0).all()


def test_a_file_that_takes_long_is_read_in_several_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(runs_module, "MOST_LINE_BYTES", 1000)
    path = metrics_file(tmp_path / "a.metrics.jsonl")
    run = LiveRun(path, "a")
    looks = 0
    moments = iter(range(10**6))
    # Time for one block in each look
    monkeypatch.setattr(runs_module.time, "monotonic", lambda: next(moments))
    while not run.is_read_whole:
        run.refresh(next(moments) + 2)
        looks += 1
    same_curves(run, RunRecords(path))
    assert looks > 5
