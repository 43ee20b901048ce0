"""What a user sees and a metrics file holds while a run goes on."""

import io
import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.helpers import losses, records, train
from trainer.job import Progress
from trainer.reporting.reporter import Reporter, Stopwatch


@pytest.mark.parametrize("writes", [0, 20])
def test_a_terminal_that_goes_away_changes_nothing(data, tmp_path, writes):
    plain = train(data_path=data, out_dir=tmp_path / "plain")
    terminal, error = io.StringIO(), OSError(5, "Input/output error")
    terminal.write = mock.Mock(side_effect=itertools.chain([None] * writes, itertools.repeat(error)))
    with mock.patch("sys.stdout", terminal):
        run = train(data_path=data, out_dir=tmp_path / "closed")
    assert losses(run) == losses(plain)


def test_samples_of_any_language_end_no_run(data, tmp_path):
    """On a console of Windows for Western Europe, without `run_cli`. Reference: the metrics file, which has them as they are."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    with mock.patch("sys.stdout", terminal):
        train(data_path=data, out_dir=tmp_path / "猫", sample_prompts="猫", max_updates=1)
    terminal.flush()
    (sample,) = records(tmp_path / "猫" / "pretrain_16.metrics.jsonl", "text")
    assert sample["prompt"] == "猫" and "sample from '\\u732b'" in terminal.buffer.getvalue().decode("cp1252")


def test_the_time_that_is_left_leaves_out_the_first_update(monkeypatch):
    """Which compiles: 60 s, and then a second for each micro-batch. Until there are others it is all there is.

    An evaluation takes time of the run, and is no training: of the tokens a second it is left out, as are plans.
    """
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = Stopwatch(step=9, seconds_before=5.0)
    with watch.paused():
        now[0] = 100.0
    now[0] = 160.0
    watch.after_update(step=11)
    assert watch.seconds_per_step(11) == 30.0
    with watch.paused():
        now[0] = 164.0
    now[0] = 172.0
    watch.after_update(step=19)
    assert watch.seconds_per_step(19) == 1.5
    assert watch.lap() == 5.0 + 68.0
    assert watch.lap() == 0.0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_costs_lines_of_the_metrics_and_a_warning(capsys):
    reporter = Reporter(is_main=True)
    with open("/dev/full", "wb", buffering=0) as reporter.file:
        reporter.record(Progress(), {})
        reporter.record(Progress(), {})
    assert capsys.readouterr().out.count("warning: /dev/full: No space left on device") == 1
    written = []

    def write(line):
        """The disk takes three bytes of the first line, and then has room again."""
        written.append(line if written else line[:3])
        return len(written[-1])

    reporter = Reporter(is_main=True)
    reporter.file = SimpleNamespace(name="metrics", write=write)
    for step in (1, 2, 3):
        reporter.record(Progress(step=step), {})
    assert [line[:10] for line in b"".join(written).splitlines()] == [b'{"s', b'{"step": 2', b'{"step": 3']
    assert capsys.readouterr().out.count("warning: metrics: not all of a line fits") == 1
