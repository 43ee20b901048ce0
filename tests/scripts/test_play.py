"""scripts/play.py: its flags, the names of its models, and a start by path that Ctrl-C ends."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from common.errors import UserError
from scripts import export_hf, play
from scripts.arguments import play_parser
from tests.helpers import ROOT


def opened(*arguments):
    return play.open_server(play_parser().parse_args(["--device", "cpu", "--port", "0", *map(str, arguments)]))


def test_a_weight_and_a_folder_stand_side_by_side(weight, tmp_path):
    export_hf.export(weight, tmp_path / "pretrain_hf")
    server = opened("--weight", weight, tmp_path / "pretrain_hf", "--out_dir", tmp_path)
    try:
        assert [model.name for model in server.models] == ["pretrain_32", "pretrain_hf"]
        assert server.address == f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.end()


def test_without_a_weight_only_runs_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(play, "DEFAULT_WEIGHT", tmp_path / "pretrain_512.pth")
    server = opened("--out_dir", tmp_path)
    assert server.models == [] and "only runs are shown" in capsys.readouterr().out
    server.end()


def test_two_of_the_same_name_are_told_apart():
    assert play.distinct_names(["out/a.pth", "out/b_hf/"]) == ["a", "b_hf"]
    assert play.distinct_names(["x/a.pth", "y/a.pth"]) == ["x/a.pth", "y/a.pth"]
    assert play.distinct_names(["a.pth", "a.pth"]) == ["a.pth (1)", "a.pth (2)"]
    assert play.distinct_names(["a\u202e\udcff.pth"]) == ["a<U+202E>\\udcff"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weight", "a", "b", "c"], "3 are too many"),
        (["--weight", "nowhere.pth"], "no such file"),
        (["--weight", "a", "--tokenizer_path", "b", "c"], "one for each"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--host", "203.0.113.7"], "--host 203.0.113.7"),
        (["--host", "a" * 70 + ".b"], "--host"),
    ],
)
def test_one_line_for_what_the_user_can_mend(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr(play, "DEFAULT_WEIGHT", tmp_path / "none.pth")
    with pytest.raises(UserError, match=message):
        opened("--out_dir", tmp_path, *arguments)


@pytest.mark.parametrize("port", ["-1", "65536", "x", "1.5"])
def test_a_port_out_of_range_ends_in_one_line(port, capsys):
    with pytest.raises(SystemExit) as stop:
        play_parser().parse_args(["--port", port])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_it_runs_by_path_until_ctrl_c(weight, tmp_path):
    words = [sys.executable, str(ROOT / "scripts" / "play.py"), "--weight", weight, "--device", "cpu", "--port", "0"]
    words += ["--tokenizer_path", str(ROOT / "model")]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("open http://127.0.0.1:") and "Ctrl-C ends" in line, process.stderr.read()
        with urllib.request.urlopen(line.split()[1] + "api/models", timeout=60) as answer:
            assert json.load(answer)["models"][0]["name"] == "pretrain_32"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
