"""The command behind `make gpu`, on a CPU: its sections, its time limits, and that its checks can fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_bits, gpu_checks
from benchmarks.arguments import gpu_parser
from tests.helpers import ROOT
from tests.scripts.playground.pages import wait_until

CPU = torch.device("cpu")


def test_bad_numbers_on_a_cpu():
    assert "skipped" in gpu_checks.a_bad_loss_changes_nothing(CPU)


def test_an_expert_without_tokens_on_a_cpu():
    assert "0" in gpu_checks.an_expert_without_tokens_gets_a_zero_gradient(CPU)


def test_gradients_that_are_wrong_are_found(monkeypatch):
    """A loss that is 2 % too large."""
    monkeypatch.setattr(gpu_checks, "reference_of", lambda kind: (1.0, torch.zeros(0)))
    monkeypatch.setattr(gpu_checks, "gradient_of", lambda training: (1.02, torch.zeros(0)))
    with pytest.raises(AssertionError, match="off by"):
        gpu_checks.agrees_with_float64("minimind2", "bfloat16", False, CPU)


def test_a_run_that_ends_before_it_is_killed_or_saves_nothing_is_a_failure(tmp_path, monkeypatch):
    (tmp_path / "run_resume").mkdir()
    with pytest.raises(AssertionError, match="nothing was saved"):
        gpu_checks.killed_after_its_first_save([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)
    (tmp_path / "run_resume" / "update_00000005.pt").write_bytes(b"")
    asleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert gpu_checks.killed_after_its_first_save(asleep, tmp_path) == "update_00000005.pt"
    ended = gpu_checks.start([sys.executable, "-c", "pass"])
    ended.wait()
    monkeypatch.setattr(gpu_checks, "start", lambda command: ended)
    with pytest.raises(AssertionError, match="had ended"):
        gpu_checks.killed_after_its_first_save([], tmp_path)


def test_other_bits_are_found(monkeypatch, tmp_path):
    """Runs that resume, and leave what was never the same."""
    monkeypatch.setattr(gpu_checks, "killed_after_its_first_save", lambda *_: "update_3.pt")
    monkeypatch.setattr(gpu_checks, "end_of", lambda process: "cpu, resumed from update_3.pt")
    monkeypatch.setattr(gpu_checks, "weights_in", lambda folder: folder.name)
    with pytest.raises(AssertionError, match="killed behind update_3.pt: the weights differ"):
        gpu_checks.killed_and_resumed(lambda out_dir: [sys.executable, "-c", "pass"], tmp_path, CPU)


def test_a_wait_is_found():
    with pytest.raises(AssertionError, match="wait"), gpu_checks.waits_are_errors(CPU):
        torch.ones(3).sum().item()
    with gpu_checks.waits_are_errors(CPU):
        torch.ones(3).sum()


def test_a_check_that_fails_leaves_the_others_alone(monkeypatch):
    def fails(device):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu.CHECKS, 5, {"first": fails, "second": lambda device: "fine"})
    first, second = gpu.results_of(5, CPU, small=True)
    assert not first["ok"] and first["value"] == "RuntimeError: no such kernel"
    assert second["ok"] and second["value"] == "fine"


def test_what_nobody_promises_is_neither_passed_nor_failed(monkeypatch, tmp_path, capsys):
    def differs(device):
        raise gpu_checks.NotPromised("other bits")

    monkeypatch.setitem(gpu.CHECKS, 2, {"resume": differs, "other resume": lambda device: "the same bits"})
    found = list(gpu.results_of(2, CPU, small=True))
    assert [result["ok"] for result in found] == [None, True]
    monkeypatch.setattr(gpu, "ask", lambda number, args, record, *rest: [record.add(number, one) for one in found])
    code, results, said = main(tmp_path, capsys, "--sections", "2")
    assert code == 0
    assert [result["ok"] for result in results] == [None, True]
    assert "| 2 | resume | not promised: other bits |" in said and "| 2 | other resume | ok: the same bits |" in said
    assert said.splitlines()[-1] == "neither right nor wrong, since nobody promises it here: resume (section 2)"


def arguments(*flags):
    return gpu_parser().parse_args(["--device", "cpu", "--seconds", "small", *flags])


def record_in(folder):
    return gpu.Record(open(folder / "out", "w", encoding="utf-8"))


def main(folder, capsys, *flags):
    """(exit code, what is in --out, what was printed)."""
    out = folder / "gpu.jsonl"
    code = gpu.main(arguments("--out", str(out), *flags))
    return code, [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out


def run(*flags):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--seconds", "small", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_command_measures_and_writes_a_table(tmp_path):
    out = tmp_path / "gpu.jsonl"
    ended = run("--sections", "0", "--out", str(out))
    assert ended.returncode == 0, ended.stderr
    assert "| 0 | torch |" in ended.stdout and "| 0 | best product |" in ended.stdout
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert {result["section"] for result in results} == {0} and results[-1]["what"] == "seconds of the section"


def test_a_section_that_hangs_is_stopped_and_keeps_what_it_has_found(tmp_path, monkeypatch, capsys):
    """It is stopped within a line."""
    program = (
        'import sys, time; print(\'{"what": "a step", "value": 1}\');'
        'sys.stdout.write(\'{"what": "half a li\'); sys.stdout.flush(); time.sleep(60)'
    )
    monkeypatch.setattr(gpu, "section_command", lambda number, args: [sys.executable, "-c", program])
    record = record_in(tmp_path)
    gpu.ask(0, arguments(), record, 1)
    first, end, seconds = record.results
    assert first == {"section": 0, "what": "a step", "value": 1}
    assert end["ok"] is False and end["value"] == "stopped after 1 s"
    assert seconds["what"] == "seconds of the section"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups of processes")
def test_what_a_section_has_started_ends_with_it():
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert int(process.stdout.readline()) > 0
        gpu.end_with_its_own(process)
        # The pipe ends when nobody is left who could write to it.
        assert process.stdout.read() == ""
    # One that has ended already
    gpu.end_with_its_own(process)


@pytest.fixture(autouse=True)
def handlers():
    """The command sets those of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups of processes")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_ends_the_command_ends_its_section(tmp_path, monkeypatch, capsys, name):
    """The section tells its number and would go on for minutes; a program that it has started, too."""
    signum = getattr(signal, name)
    program = (
        "import json, os, subprocess, sys, time; child = subprocess.Popen(['sleep', '600']);"
        "print(json.dumps({'what': 'numbers', 'value': f'{os.getpid()} {child.pid}'}), flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(gpu, "section_command", lambda number, args: [sys.executable, "-c", program])
    out_path = tmp_path / "gpu.jsonl"

    def found_text(result):
        # The section runs: now somebody ends the command.
        os.kill(os.getpid(), signum)
        return str(result)

    monkeypatch.setattr(gpu, "found_text", found_text)
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments("--sections", "0", "--out", str(out_path)))
    assert ended.value.code == 128 + signum
    (result,) = [json.loads(line) for line in out_path.read_text().splitlines()]
    for pid in map(int, result["value"].split()):
        wait_until(lambda pid=pid: not is_running(pid))


def is_running(pid):
    """Not one that has ended and that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_no_section_goes_on_beyond_nine_minutes():
    assert [gpu.limit_of(number, 0, "cuda") for number in (0, 3)] == [90, 120]
    assert gpu.limit_of(3, gpu.LAST_START_S, "cuda") == gpu.END_S - gpu.LAST_START_S == 35
    assert gpu.limit_of(3, gpu.LAST_START_S + 1, "cuda") == 0
    assert gpu.END_S < 9 * 60


@pytest.mark.slow
def test_a_section_on_a_cpu(tmp_path):
    record = record_in(tmp_path)
    gpu.ask(7, arguments(), record, 590)
    assert len(record.results) > 1 and record.names(False) == []


# ------------------------------------------------------------------------------------------- gpu_bits.py


def test_the_first_tensor_that_differs_is_named(monkeypatch):
    """Notes of two processes, as their JSON is read."""
    same = [("batch: targets", "1", False), ("gradient of a", "2", False)]
    sides = [[*same, ("gradient of b", "3", False)], [*same, ("gradient of b", "4", False)]]
    monkeypatch.setattr(gpu_bits, "side", lambda case, device: sides.pop())
    assert gpu_bits.compare("plain", "cpu") == ("between processes 1 of 3 differ, first gradient of b", False)
    sides = [same, same]
    assert gpu_bits.compare("plain", "cpu") == ("2 tensors, the same to the last bit", True)
    # The other process failed at its end.
    sides = [[*same, ("error", "no such kernel", True)], same]
    assert gpu_bits.compare("plain", "cpu") == ("error: no such kernel | 2 and 3 notes", False)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "trainer --use_compile 0 --log_interval 50"])
def test_equal_runs_have_equal_bits_on_a_cpu(case):
    compare = gpu_bits.compare_trainers if case.startswith("trainer") else gpu_bits.compare
    said, ok = compare(case, "cpu")
    assert ok, said
