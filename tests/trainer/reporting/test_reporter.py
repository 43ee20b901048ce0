"""What a user sees while a run goes on: a bar on a terminal, log lines elsewhere."""

import io
import json
import os
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from tests.helpers import ROOT, losses, records, train
from trainer.engine import Engine
from trainer.reporting.log_lines import log_line
from trainer.reporting.reporter import Reporter, Stopwatch, finite, flat_numbers


class Terminal(io.StringIO):
    def __init__(self, breaks_after=None):
        super().__init__()
        self.breaks_after, self.writes = breaks_after, 0

    def isatty(self):
        return True

    def write(self, text):
        self.writes += 1
        if self.breaks_after is not None and self.writes > self.breaks_after:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_a_bar_on_a_terminal(data, tmp_path):
    """It counts the updates of all epochs, shows the last figures, and lines of other kinds stay whole beside it."""
    terminal = Terminal()
    with mock.patch("sys.stdout", terminal):
        run = train(data_path=data, out_dir=tmp_path, epochs=2, val_fraction=0.2)
    shown = terminal.getvalue()
    updates = run.progress.update
    assert "100%|" in shown and f"{updates}/{updates} updates [" in shown and "Epoch:[" not in shown
    last = records(run)[-1]
    assert f"loss {last['loss']:.3f}" in shown and "tokens, " in shown and " GB" in shown
    assert f"\nValidation after update {updates}: val_loss:" in shown.replace("\r", "\n")


def test_a_resumed_bar_goes_on_where_the_run_does(data, tmp_path):
    train(data_path=data, out_dir=tmp_path)
    terminal = Terminal()
    with mock.patch("sys.stdout", terminal):
        run = train(data_path=data, out_dir=tmp_path, epochs=3, from_resume=1)
    updates = run.progress.update
    assert f"{updates}/{updates} updates" in terminal.getvalue() and f" 1/{updates} updates" not in terminal.getvalue()


@pytest.mark.parametrize("writes", [0, 5, 20])
def test_a_terminal_that_goes_away_changes_nothing(data, tmp_path, writes):
    plain = train(data_path=data, out_dir=tmp_path / "plain")
    with mock.patch("sys.stdout", Terminal(breaks_after=writes)):
        run = train(data_path=data, out_dir=tmp_path / "closed")
    assert losses(run) == losses(plain)


class NarrowTerminal(io.TextIOWrapper):
    """A console of Windows for Western Europe, in a program that calls the trainer without `run_cli`."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="cp1252")

    def isatty(self):
        return True

    def shown(self):
        self.flush()
        return self.buffer.getvalue().decode("cp1252")


@pytest.mark.parametrize("with_bar", [False, True])
def test_what_a_terminal_cannot_encode_is_spelt_out(with_bar):
    """A sample, and the name of a file that is not UTF-8."""
    terminal = NarrowTerminal()
    with mock.patch("sys.stdout", terminal):
        reporter = Reporter(True)
        if with_bar:
            reporter.advance(1, 2)
        reporter.say("Mädchen 猫 \udcff")
        reporter.close()
    assert "Mädchen \\u732b \\udcff" in terminal.shown()


def test_samples_of_any_language_end_no_run(data, tmp_path):
    """Reference: the metrics file, which has them as they are."""
    terminal = NarrowTerminal()
    with mock.patch("sys.stdout", terminal):
        train(data_path=data, out_dir=tmp_path / "猫", sample_prompts="猫", max_updates=1)
    lines = (tmp_path / "猫" / "pretrain_16.metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (sample,) = (record for record in map(json.loads, lines) if "text" in record)
    assert sample["prompt"] == "猫" and "sample from '\\u732b'" in terminal.shown()


def test_a_terminal_that_is_gone_takes_text_of_any_language():
    """What takes its place would encode as the system does, in ASCII here."""
    program = """
import io, sys
from trainer.reporting.reporter import Reporter
class Gone(io.StringIO):
    def write(self, text):
        raise OSError(5, "Input/output error")
sys.stdout = Gone()
reporter = Reporter(True)
reporter.say("a")
reporter.say("\\u732b")
print("\\u732b")
sys.stderr.write("done")
"""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **plain}, capture_output=True, text=True
    )
    assert done.stderr.endswith("done"), done.stderr


def test_a_resumed_interval_is_measured_whole(data, tmp_path):
    """Its tokens and seconds are those of before and after the stop; reference: the same interval undisturbed."""
    clock = {"now": 0.0}

    def ticking(self, *args, **options):
        clock["now"] += 1.0
        return update(self, *args, **options)

    options = {"data_path": data, "log_interval": 1000, "accumulation_steps": 1, "save_interval": 4}
    update, rates = Engine.update, []
    with mock.patch.object(Engine, "update", ticking), mock.patch("time.perf_counter", lambda: clock["now"]):
        rates.append(records(train(out_dir=tmp_path / "whole", **options))[-1]["tokens_per_second"])
        with (
            mock.patch("trainer.loop.Trainer.log", side_effect=[None, KeyboardInterrupt]),
            pytest.raises(KeyboardInterrupt),
        ):
            train(out_dir=tmp_path / "run", **options)
        clock["now"] += 1000.0
        rates.append(records(train(out_dir=tmp_path / "run", from_resume=1, **options))[-1]["tokens_per_second"])
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


def test_metrics_are_json_that_every_reader_takes():
    values = {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": -float("inf")}, "e": "text", "f": 3}
    kept = finite(values)
    assert json.loads(json.dumps(kept, allow_nan=False)) == {
        "a": None,
        "b": [1.0, None],
        "c": {"d": None},
        "e": "text",
        "f": 3,
    }
    assert flat_numbers(kept) == {"b/0": 1.0, "f": 3}


def test_lines_that_no_run_wrote_are_not_kept_by_a_resume(tmp_path):
    """Their step can be compared with no other one."""
    path = tmp_path / "a.metrics.jsonl"
    past = '{"step": 1, "loss": 2.0}\n'
    path.write_text(past + '{"step": "x"}\n{"step": null}\n' + "[" * 100_000 + '\n[1]\n{"loss": 1.0}\n')
    reporter = Reporter(is_main=True)
    reporter.open(path, lambda record: record["step"] < 2)
    reporter.close()
    assert path.read_text() == past


def test_metrics_survive_the_deletion_of_their_folder(data, tmp_path, capsys):
    """Reference: the metrics of the same run undisturbed."""
    undisturbed = train(data_path=data, out_dir=tmp_path / "whole")
    update, out_dir = Engine.update, tmp_path / "deleted"

    def deleting(self, *args, **options):
        if engine_updates.pop(0) == 3:
            shutil.rmtree(out_dir)
        return update(self, *args, **options)

    engine_updates = list(range(100))
    with mock.patch.object(Engine, "update", deleting):
        run = train(data_path=data, out_dir=out_dir)
    assert losses(run) == losses(undisturbed) and len(records(run, "settings")) == 1
    assert capsys.readouterr().out.count("was deleted") == 1


def test_expert_load_is_of_all_tokens_since_the_last_line(data, tmp_path):
    """However the micro-batches are cut; a mean over the layers that sums to 1, and the largest share of all."""
    shares = []
    for batch_size, accumulation_steps in ((4, 1), (1, 4)):
        run = train(
            data_path=data, out_dir=tmp_path / str(batch_size), use_moe=1, num_hidden_layers=2, learning_rate=1e-9,
            batch_size=batch_size, accumulation_steps=accumulation_steps, log_interval=1000,
        )  # fmt: skip
        (_, last) = records(run)
        shares.append((last["expert_load"], last["expert_load_max"]))
        assert (
            sum(last["expert_load"]) == pytest.approx(1) and 0.25 <= max(last["expert_load"]) <= last["expert_load_max"]
        )
    (load, largest), (same_load, same_largest) = shares
    assert load == pytest.approx(same_load, abs=0.02) and largest == pytest.approx(same_largest, abs=0.02)


def test_a_figure_of_zero_stands_in_the_log_line():
    """An accuracy of 0 is a finding; a gradient norm that is not known yet (None) is left out."""
    record = {
        "loss": 0.5, "lr": 1e-3, "epoch_Time": 1.0, "tokens_per_second": 7.0, "updates_per_second": 2.0,
        "skipped_updates": 0, "train_acc": 0.0, "grad_norm": None,
    }  # fmt: skip
    line = log_line(record, "Epoch:[1/1](0/9)", ("train_acc", "grad_norm"))
    assert " train_acc:0 " in line
    assert "grad_norm" not in line and "skipped_updates" not in line


@pytest.mark.parametrize("use_moe", [0, 1])
def test_the_auxiliary_loss_is_shown_of_a_mixture_of_experts_alone(use_moe, data, tmp_path, capsys):
    train(data_path=data, out_dir=tmp_path, use_moe=use_moe)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch:[")]
    assert lines and all(("aux_loss:" in line) == bool(use_moe) for line in lines)


def test_the_time_that_is_left_leaves_out_the_first_update(monkeypatch):
    """Which compiles: 60 s, and then a second for each micro-batch. Until there are others it is all there is."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = Stopwatch()
    now[0] = 60.0
    watch.after_update(last_step=1)
    assert watch.seconds_per_step(1) == 30.0
    now[0] = 68.0
    watch.after_update(last_step=9)
    assert watch.seconds_per_step(9) == 1.0
