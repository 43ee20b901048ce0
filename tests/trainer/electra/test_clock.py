"""--budget of train_electra.py. Reference: a machine that takes a simulated second for each update, and the formulas of the
schedules."""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.trainer.electra.test_closing import write_documents
from tests.trainer.test_train_electra import equal, flags, interrupted, train, weights
from trainer import train_electra
from trainer.budget import clock as budget_clock
from trainer.electra import clock, closing
from trainer.electra.settings import parse_args, warmup_of
from trainer.engine import Engine
from trainer.machine.ranks import Ranks

RATE = 1e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}


class Machine:
    """A clock that updates move."""

    def __init__(self):
        self.now = 1000.0
        self.seconds_of_update = 1.0

    def monotonic(self):
        return self.now


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    update = Engine.update

    def timed(self, *arguments, **named):
        machine.now += machine.seconds_of_update
        return update(self, *arguments, **named)

    monkeypatch.setattr(Engine, "update", timed)
    monkeypatch.setattr(budget_clock, "time", machine)
    monkeypatch.setattr(clock, "seconds_since_start", lambda: 0.0)
    # The run begins with three times as many updates as fit.
    monkeypatch.setattr(clock, "most_updates", lambda *_: 80)
    monkeypatch.setattr("trainer.electra.job.most_updates", lambda *_: 80)
    return machine


def lines_of(folder):
    lines = (folder / "electra_small" / "electra_small.metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.parametrize("schedule", ["original_linear", "separate_linear"])
def test_a_run_ends_on_time_with_its_rate_at_0(data, tmp_path, machine, schedule, capsys):
    """Thirty seconds, five of them for files and passages: some 25 updates. Once the end is set the rate falls in a line to 0."""
    run = train(
        **data, out_dir=tmp_path, max_steps=None, budget="30s", warmup_steps=3, lr_schedule=schedule, save_steps=20
    )
    end = run.progress.update
    assert 23 <= end <= 26 and run.finished
    rates = [line["lr"] for line in lines_of(tmp_path)]
    assert len(rates) == end and max(rates) <= RATE
    # The highest rate comes early, and is nearly what was asked for.
    assert max(rates) == pytest.approx(RATE, rel=0.15) and rates.index(max(rates)) < 12
    falls = [after - before for before, after in zip(rates[15:], rates[16:], strict=False)]
    assert all(fall == pytest.approx(falls[0], rel=0.02) for fall in falls)
    assert rates[-1] == pytest.approx(-falls[0], rel=0.02)
    out = capsys.readouterr().out
    assert "so far it is a guess" in out and f"there is time for {end} of them" in out
    assert f"work: {end * run.job.flops_of_update():.6g} FLOP; --budget_flops " in out
    folder = tmp_path / "electra_small"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "checkpoint-20", "discriminator", "electra_small_resume", "generator",
    ]  # fmt: skip


@pytest.mark.parametrize("seconds_of_text", [1.0, 100.0])
def test_the_search_for_passages_ends_on_time_too(tmp_path, machine, monkeypatch, capsys, seconds_of_text):
    """A text takes a simulated second, or more, to be looked at, and one in twenty is held out. Nobody waits for six of
    them, and where not even one was found a line tells what shows some."""
    write_documents(tmp_path / "data.jsonl", n=300)
    data = {"data_path": tmp_path / "data.jsonl", "vocab_path": write_vocab(tmp_path / "vocab.txt")}
    texts_of = closing.texts_of

    def slowly(*arguments):
        for text in texts_of(*arguments):
            machine.now += seconds_of_text
            yield text

    monkeypatch.setattr(closing, "time", machine)
    monkeypatch.setattr(closing, "texts_of", slowly)
    began = machine.now
    train(**data, out_dir=tmp_path, max_steps=None, budget="30s", warmup_steps=2, val_fraction=0.05, eval_interval=0)
    out = capsys.readouterr().out
    if seconds_of_text < 5:
        assert machine.now - began <= 30
    else:
        assert "nothing can be shown of it: the time of --budget is over; scripts/detect.py --model " in out
        assert machine.now - began < 30 + seconds_of_text


def test_passages_that_take_long_are_fewer(monkeypatch):
    """The first one is always read."""
    machine = Machine()

    def passage(text, share, seed):
        machine.now += 2.0
        return text

    monkeypatch.setattr(closing, "time", machine)
    for end, wanted in ((0.0, "a"), (3.0, "ab"), (4.0, "ab"), (99.0, "abcd")):
        found = closing.passages_of("abcd", SimpleNamespace(passage=passage), 0.15, machine.now + end)
        assert "".join(found) == wanted


def test_without_a_discriminator_no_time_is_kept_for_passages(machine):
    settings = parse_args(["--budget", "1h", "--max_seq_len", "32", "--batch_size", "4"])
    settings.max_steps = 100
    clocks = [clock.clock_of(settings, None, Ranks(), 10, shows) for shows in (False, True)]
    assert clocks[1].seconds_at_end - clocks[0].seconds_at_end == clock.SHOWING_S > closing.NETWORKS_S
    assert clock.seconds_to_show(None, True) == float("inf")
    machine.now += 5
    assert clock.seconds_to_show(clocks[1], True) == 3600 - 5 - clock.REPORT_S
    assert clock.seconds_to_show(clocks[1], False) == 3600 - 5


def test_time_is_kept_for_what_a_run_does_at_its_end():
    """An evaluation is never compiled, so it takes a smaller part of a training step that is not compiled either."""
    validation = SimpleNamespace(plan=SimpleNamespace(n_rows=400))
    clocks = {}
    for name, more in {"usual": [], "no report": ["--report", "0"], "plain": ["--use_compile", "0"]}.items():
        settings = parse_args(["--budget", "1h", "--max_seq_len", "32", "--batch_size", "4", *more])
        settings.max_steps = 100
        clocks[name] = clock.clock_of(settings, validation, Ranks(), 10, False)
    assert clocks["usual"].seconds_at_end == clocks["no report"].seconds_at_end + clock.REPORT_S == 4
    assert clocks["usual"].evaluation == 0.75 * 400 / 4 == pytest.approx(2.4 / 1.4 * clocks["plain"].evaluation)


def test_a_machine_that_gets_slower_ends_on_time_too(data, tmp_path, machine):
    def slower(self, *arguments, **named):
        machine.seconds_of_update = 1.0 if machine.now - began < 15 else 2.0
        return update(self, *arguments, **named)

    update = Engine.update
    began = machine.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "update", slower)
        run = train(**data, out_dir=tmp_path, max_steps=None, budget="51s", warmup_steps=2)
    assert 37 <= machine.now - began <= 51
    assert 24 <= run.progress.update <= 30
    assert lines_of(tmp_path)[-1]["lr"] < 0.1 * RATE


def test_a_resume_trains_the_same_updates(data, tmp_path, machine, capsys):
    """Reference: the run without a stop, bit for bit."""
    same = {**data, "max_steps": None, "budget": "30s", "save_interval": 10}
    whole = train(**same, out_dir=tmp_path / "whole")
    interrupted(18, **same, out_dir=tmp_path / "cut")
    resumed = train(**same, out_dir=tmp_path / "cut", from_resume=1)
    assert resumed.progress.update == whole.progress.update
    assert equal(weights(whole), weights(resumed))
    capsys.readouterr()
    assert train_electra.main(flags(**same, out_dir=tmp_path / "cut", from_resume=1)) == 0
    told = f"this run has already done its {whole.progress.update} updates: nothing to do"
    assert told in capsys.readouterr().out
    # What is written beside the weights is the same command.
    kept = (tmp_path / "cut" / "electra_small" / "electra_small.settings.yaml").read_text()
    assert "budget: 30s" in kept and "max_steps" not in kept.replace("max_steps: null", "")


def test_the_updates_that_a_budget_begins_with():
    """Reference: the rate of two threads by hand; a longer budget has more in proportion."""
    counts = []
    for budget in ("1m", "1h"):
        settings = SimpleNamespace(budget=budget)
        counts.append(clock.most_updates(settings, 1e10, torch.device("cpu"), Ranks()))
    assert counts[0] == round(60 * 0.3 * 5e11 * torch.get_num_threads() / 1e10)
    assert counts[1] == 60 * counts[0]


def test_the_warm_up_of_a_budget():
    settings = parse_args(["--budget", "1h"])
    # The guess of a clock.
    settings.max_steps = 10_000
    assert warmup_of(settings) == 100
    assert warmup_of(parse_args(["--budget", "1h", "--warmup_steps", "7"])) == 7
    # A short run begins with a guess of some updates, and makes about half of them.
    settings.max_steps = 160
    assert warmup_of(settings) == 8


def test_schedules_that_no_clock_can_end(data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(**data, out_dir=tmp_path, max_steps=None, budget="1h", lr_schedule="one_cycle")
    assert "--budget and --lr_schedule one_cycle: a clock moves the end of a run" in capsys.readouterr().err
