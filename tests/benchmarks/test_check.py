"""benchmarks/check.py, on a CPU: its sections, their limits, its table, its comparisons; and its checks on a GPU (`pytest -m gpu`)."""

import json
import platform
import shlex
import signal
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from benchmarks import check, checks, measures, other_side
from tests.helpers import ROOT, command_line, complaint, flags, is_running, wait_until
from trainer import train_pretrain
from trainer.machine.command_line import run_cli
from trainer.machine.devices import deterministic

CPU = torch.device("cpu")
CHECKS = checks.NUMBERS | checks.TRAINER | checks.WAITING | checks.BAD_NUMBERS


def main(folder, *words):
    """(exit code, what is in --out)."""
    out = folder / "check.jsonl"
    code = check.main(["--device", "cpu", "--out", str(out), *words])
    return code, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A function that puts a program of Python in the place of each section; its first argument is the path of --out."""

    real = subprocess.Popen

    def instead(text):
        popen = partial(real, [sys.executable, "-c", text, str(tmp_path / "check.jsonl")])
        monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(**options))

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield instead
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_every_check_of_the_report_holds_on_a_cpu(tmp_path, monkeypatch):
    code, found = main(tmp_path, "machine", "losses", "resume")
    assert code == 0, found
    assert [result["what"] for result in found[:3]] == ["system", "processor", "versions"]
    said = {result["what"]: result["value"] for result in found if "ok" in result}
    assert said["losses"].startswith("in torch.") and said["resume"].endswith("the same weights to the last bit")
    monkeypatch.setitem(measures.SIZES, "26m", measures.SIZES["tiny"])
    figures = {result["what"]: result["value"] for result in measures.plain_code(CPU)}
    assert figures["tokens, without graphs"] > 0 < figures["share of the product rate, without graphs"] < 100


def test_a_check_that_fails_leaves_the_others_alone_and_is_named_at_the_end(monkeypatch, tmp_path, capsys):
    fails = mock.Mock(side_effect=RuntimeError("no such kernel"))
    section = check.Section(partial(check.one_by_one, {"first": fails, "second": lambda device: "fine"}))
    monkeypatch.setitem(check.SECTIONS, "numbers", section)
    monkeypatch.setattr(check, "run_section", lambda name, args, left_s: check.SECTIONS[name].results(CPU))
    code, (first, second) = main(tmp_path, "numbers")
    found = [code, first["ok"], first["value"], second["ok"], second["value"]]
    assert found == [1, False, "RuntimeError: no such kernel", True, "fine"]
    said = capsys.readouterr().out
    assert "| numbers | second | ok: fine, 0 s |" in said and "\nfailed: first (numbers); more in " in said


def test_a_section_that_hangs_or_crashes_is_a_row_and_keeps_what_it_has_found(tmp_path, monkeypatch, program):
    hang = check.SECTIONS["numbers"]._replace(on_cpu_s=3, limit_s=3)
    monkeypatch.setitem(check.SECTIONS, "numbers", hang)
    found = 'import os, sys, time; print(\'{"what": "a step"}\', file=open(sys.argv[1], "a"), flush=1);'
    for end, said in (("time.sleep(60)", "stopped after 3 s"), ("os.kill(os.getpid(), 9)", "exit code -9: ")):
        program(found + end)
        code, (first, failure, seconds) = main(tmp_path, "numbers")
        assert (code, first, seconds["what"]) == (1, {"what": "a step"}, "seconds of the section")
        assert failure["ok"] is False and failure["value"] == said


def test_the_table_has_no_names_or_places(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "annas-mac.local")
    monkeypatch.setenv("USER", "anna")
    said = "error: /home/anna/my texts/a.jsonl:3: bad|line, says anna@annas-mac.local to 10.0.0.7"
    assert check.without_names(said) == "error: *** bad/line, says ***@***.*** to ***"
    assert check.without_names("1,200 1/s, within 1e-3") == "1,200 1/s, within 1e-3"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups of processes")
def test_a_signal_that_ends_the_command_ends_its_section(tmp_path, program):
    """The section would go on for minutes; a program that it has started, too. Then somebody ends the command."""
    program(
        "import os, signal, subprocess, sys, time; child = subprocess.Popen(['sleep', '600']);"
        "print(os.getpid(), child.pid, file=open(sys.argv[1], 'a'), flush=True);"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    )
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run_cli(lambda: main(tmp_path, "machine")[0])
    pids = [int(pid) for pid in (tmp_path / "check.jsonl").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def test_other_bits_after_a_resume_are_found(monkeypatch):
    """Runs that resume, and leave what was never the same."""
    monkeypatch.setattr(checks, "start", mock.Mock())
    monkeypatch.setattr(checks, "kill_after_first_save", lambda *_: "update_3.pt")
    monkeypatch.setattr(checks, "output_of", lambda process: "cpu, resumed from update_3.pt")
    monkeypatch.setattr(checks, "weights_in", lambda folder: folder.name)
    with pytest.raises(AssertionError, match="killed behind update_3.pt: the weights differ"):
        checks.resumes_bitwise("", CPU)


@pytest.mark.slow
def test_what_differs_between_two_sides_is_found_from_its_first_update_on(data, monkeypatch, tmp_path):
    other = []

    def run_logged(python, command, log_path):
        return train_pretrain.main([*command[1:], *(other if log_path.parent.name == "before" else ())]), ""

    assert other_side.difference([1.0, 2.0, 4.0], [1.0, 2.5, 3.0]) == "by 2.5e-01, from 2 of 3"
    monkeypatch.setattr(other_side, "run_logged", run_logged)
    words = ["--flags", shlex.join(flags(data_path=data, max_updates=4))]
    code, (result, _) = main(tmp_path, *words)
    assert (code, result["value"]) == (0, "losses equal; weights equal")
    other = ["--learning_rate", "1e-3"]
    code, (result, _) = main(tmp_path, *words)
    # The first update has two micro-batches, with the initial weights.
    assert code == 1 and ", from 3 of 8; weights differ, of a sample by " in result["value"]


@pytest.mark.slow
def test_the_files_of_a_commit_a_failing_run_and_mistakes(data, tmp_path, capsys):
    script, out = ROOT / "benchmarks" / "check.py", ["--out", str(tmp_path / "check.jsonl")]
    words = ["--against", "HEAD", *out, "--flags"]
    done = command_line([*words, shlex.join(flags(data_path=data, max_updates=3))], script=script)
    assert done.returncode == 0 and "ok: losses equal; weights equal" in done.stdout, done.stderr
    done = command_line([*words, "--no_such_flag 1"], script=script)
    assert done.returncode == 1 and "exit code 2: error: unrecognized arguments: --no_such_flag" in done.stdout
    mistakes = {"--against 0123456789": "git finds no commit 0123456789", "nonsense": "expected one of report, gpu, "}
    if not torch.cuda.is_available():
        mistakes["speed"] = "--device cuda: not on this machine; use --device cpu"
    for mistake, message in mistakes.items():
        assert message in complaint(capsys, check.main, [*mistake.split(), *out])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name):
    with deterministic():
        CHECKS[name](torch.device("cuda", 0))
