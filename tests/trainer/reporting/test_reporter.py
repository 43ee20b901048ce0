"""What a user sees, a metrics file holds and trackers get while a run goes on. Trackers are stand-ins that note their calls."""

import io
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from common.errors import UserError
from tests.helpers import losses, records, train, write_texts
from trainer.job import Progress
from trainer.pretrain.settings import PretrainSettings
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
    """Which compiles: 60 s, and then a second for each micro-batch. Evaluations and plans are left out of the tokens a second."""
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
        reporter.sync()
    said = capsys.readouterr().out
    assert said.count("warning: /dev/full: No space left on device") == 1
    assert "warning: /dev/full: Invalid argument" in said, "a save does not bring the lines to the disk"
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


@pytest.mark.parametrize("kind", ["wandb", "swanlab", "trackio"])
def test_one_interface(data, tmp_path, kind, monkeypatch):
    """One run with the flags as its config, every record on the same axis, lists as one curve an item."""
    module = mock.MagicMock(**{"init.return_value.id": "abc"})
    # mock.patch.dict would also take away the modules that the run imports.
    monkeypatch.setitem(sys.modules, kind, module)
    run = train(data_path=data, out_dir=tmp_path, tracker=kind, use_moe=1, val_fraction=0.2)
    (call,) = module.init.call_args_list
    assert call.kwargs["config"]["hidden_size"] == 16 and call.kwargs["project"] == "MiniMind-Pretrain"
    logged = [(call.args[0], call.kwargs["step"]) for call in module.log.call_args_list]
    lines = [line for line in records(run, "step") if "loss" in line or "val_loss" in line]
    assert [step for _, step in logged] == [line["step"] for line in lines]
    assert all("step" not in numbers for numbers, _ in logged), "a name that some trackers keep for themselves"
    assert sum(logged[0][0][f"expert_load/{i}"] for i in range(4)) == pytest.approx(1)
    assert module.finish.call_count == 1


def test_passwords_are_in_nothing_that_others_see(data, tmp_path, monkeypatch):
    """The settings file, which repeats the run, keeps them."""
    module = mock.MagicMock(**{"init.return_value.id": "abc"})
    monkeypatch.setitem(sys.modules, "wandb", module)
    prompt = "s3://me:secret@host/a?token=secret"
    train(data_path=data, out_dir=tmp_path, tracker="wandb", report=1, max_updates=1, sample_prompts=prompt)
    (call,) = module.init.call_args_list
    assert call.kwargs["config"]["sample_prompts"] == ["s3://***@host/a?token=***"]
    holders = {path.name for path in tmp_path.iterdir() if path.is_file() and b"secret" in path.read_bytes()}
    assert holders == {"pretrain_16.settings.yaml"}
    assert "?token=***" in (tmp_path / "pretrain_16.metrics.jsonl").read_text(encoding="utf-8")


def test_trackio_finds_the_run_of_a_resume_by_its_name(monkeypatch):
    """Which is all that its init takes; another run of the same weights has another one."""
    init = mock.create_autospec(lambda project, name, resume, config: None)
    monkeypatch.setitem(sys.modules, "trackio", mock.MagicMock(init=init))
    settings = PretrainSettings.parse(["--tracker", "trackio"])
    run_ids = {}
    for ids in (run_ids, run_ids, {}):
        Reporter(is_main=True).open_tracker(settings, Path("run"), ids)
    first, resumed, other = (call.kwargs["name"] for call in init.call_args_list)
    assert first == resumed == run_ids["trackio"] != other and first.startswith("run-")


@pytest.mark.parametrize("kind, project, name", [("wandb", "PROJECT", "NAME"), ("swanlab", "PROJ_NAME", "EXP_NAME")])
def test_what_the_environment_says_is_left_to_the_package(kind, project, name, tmp_path, monkeypatch):
    """Except a project that a flag names. Its folder is beside the run's files, not in the current one."""
    monkeypatch.setitem(sys.modules, kind, module := mock.MagicMock())
    theirs = {f"{kind.upper()}_{end}": "theirs" for end in (project, name, "RUN_ID", "RESUME", "DIR", "LOG_DIR")}
    folder = {"dir": str(tmp_path)} if kind == "wandb" else {"logdir": str(tmp_path / "swanlog")}
    all_of_it = {"project": "MiniMind-Pretrain", "name": "run", "id": "abc", "resume": "allow", **folder}
    for said, flags, told in (({}, [], all_of_it), (theirs, [], {}), (theirs, ["mine"], {"project": "mine"})):
        settings = PretrainSettings.parse(["--tracker", kind, *(f"--wandb_project={flag}" for flag in flags)])
        with mock.patch("os.environ", said):
            Reporter(is_main=True).open_tracker(settings, tmp_path / "run", {kind: "abc"})
        assert module.init.call_args.kwargs == {**told, "config": mock.ANY}


@pytest.mark.parametrize("kind", ["wandb", "swanlab", "trackio"])
def test_a_package_that_is_missing_or_refuses_ends_the_run_before_it_tokenises(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    data = write_texts(tmp_path / "a.jsonl", ["some text"])
    refused = RuntimeError("no account\n  log in first")
    refusing = mock.MagicMock(**{"login.side_effect": refused, "init.side_effect": refused})
    for module, said in ((None, f"pip install {kind}"), (refusing, f"--tracker {kind}.*: no account log in first")):
        monkeypatch.setitem(sys.modules, kind, module)
        with pytest.raises(UserError, match=said):
            train(data_path=data, out_dir=tmp_path, tracker=kind)
        # Trackio needs no login.
        assert (tmp_path / ".token_store").exists() == (kind == "trackio" and module is refusing)


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_fails_does_not_end_the_run(data, tmp_path, capsys, method, monkeypatch):
    module = mock.MagicMock(**{"init.return_value.id": "abc", f"{method}.side_effect": ConnectionError("gone")})
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = train(data_path=data, out_dir=tmp_path, tracker="wandb")
    out = capsys.readouterr().out
    assert out.count("the tracker has failed") == 1 and "ConnectionError: gone" in out and len(records(run)) > 5
