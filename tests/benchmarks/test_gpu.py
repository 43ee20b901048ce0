"""The command behind `make gpu`, on a CPU: its sections and its time limits; and its checks on a GPU (`pytest -m gpu`)."""

import json
import signal
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from benchmarks import gpu, gpu_bits, gpu_checks
from tests.helpers import is_running, wait_until
from trainer.machine.command_line import run_cli
from trainer.machine.devices import deterministic

CPU = torch.device("cpu")
CHECKS = gpu_checks.NUMBERS | gpu_checks.TRAINER | gpu_checks.WAITING | gpu_checks.BAD_NUMBERS


def main(folder, *flags):
    """(exit code, what is in --out)."""
    out = folder / "gpu.jsonl"
    code = gpu.main(["--device", "cpu", "--out", str(out), *flags])
    return code, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A function that puts a program of Python in the place of each section; its first argument is the path of --out."""

    def instead(text):
        popen = partial(subprocess.Popen, [sys.executable, "-c", text, str(tmp_path / "gpu.jsonl")])
        monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(**options))

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield instead
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_check_that_fails_leaves_the_others_alone_and_is_named_at_the_end(monkeypatch, tmp_path, program, capsys):
    fails = mock.Mock(side_effect=RuntimeError("no such kernel"))
    section = partial(gpu.one_by_one, {"first": fails, "second": lambda device: "fine"})
    monkeypatch.setattr(gpu, "SECTIONS", [("a section", section)] * 6)
    monkeypatch.setattr(gpu, "run_section", lambda number, args, limit: main(tmp_path, "--section", str(number)))
    code, (first, second) = main(tmp_path, "--sections", "5")
    assert code == 1
    assert (first["ok"], first["value"]) == (False, "RuntimeError: no such kernel")
    assert (second["ok"], second["value"]) == (True, "fine")
    said = capsys.readouterr().out
    assert "| 5 a section | second | ok: fine |" in said and said.endswith("failed: first (section 5)\n")


def test_a_section_that_hangs_is_stopped_and_keeps_what_it_has_found(tmp_path, monkeypatch, program):
    monkeypatch.setattr(gpu, "CPU_LIMIT_S", 1)
    program("import sys, time; print('{\"what\": \"a step\"}', file=open(sys.argv[1], 'a'), flush=1); time.sleep(60)")
    code, (first, end, seconds) = main(tmp_path, "--sections", "0")
    assert code == 1 and first == {"what": "a step"}
    assert end["ok"] is False and end["value"] == "stopped after 1 s"
    assert seconds["what"] == "seconds of the section"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no groups of processes")
def test_a_signal_that_ends_the_command_ends_its_section(tmp_path, monkeypatch, program):
    """The section would go on for minutes; a program that it has started, too. Then somebody ends the command."""
    program(
        "import os, signal, subprocess, sys, time; child = subprocess.Popen(['sleep', '600']);"
        "print(os.getpid(), child.pid, file=open(sys.argv[1], 'a'), flush=True);"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    )
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run_cli(lambda: main(tmp_path, "--sections", "0")[0])
    pids = [int(pid) for pid in (tmp_path / "gpu.jsonl").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def test_the_first_tensor_that_differs_is_named_and_a_process_that_fails_too(monkeypatch, capsys):
    """Two equal runs; two of which one has a weight with another last bit after its first update; two that fail alike."""
    planted = "model.norm.weight after update 1"
    monkeypatch.setattr(gpu_bits, "SHAPE", (1, 8))
    monkeypatch.setattr(gpu_bits, "SMALL", {**gpu_checks.SMALL, "hidden_size": 16, "vocab_size": 64})

    def notes(case, device, changes):
        found = []
        for name, tensor in gpu_bits.tensors_of(case, CPU):
            if changes and name == planted:
                tensor.data[0] = tensor.data[0].nextafter(torch.tensor(9.0))
            found.append((name, gpu_bits.digest_of(tensor)))
        return found

    equal, other = (notes("plain", "cpu", changes) for changes in (False, True))
    failed = [*equal[:3], (gpu_bits.FAILURE, "no such kernel")]
    for sides, code, said in (
        ([equal, notes("plain", "cpu", False)], 0, "same   plain: "),
        ([equal, other], 1, f"differ between processes, first {planted}"),
        ([failed, failed], 1, "FAILED plain: error: no such kernel"),
    ):
        monkeypatch.setattr(gpu_bits, "side", lambda case, device, sides=sides: sides.pop())
        assert gpu_bits.main(["--device", "cpu", "--cases", "plain"]) == code
        assert said in capsys.readouterr().out


def test_other_bits_are_found(monkeypatch):
    """Runs that resume, and leave what was never the same."""
    monkeypatch.setattr(gpu_checks, "start", mock.Mock())
    monkeypatch.setattr(gpu_checks, "kill_after_first_save", lambda *_: "update_3.pt")
    monkeypatch.setattr(gpu_checks, "output_of", lambda process: "cpu, resumed from update_3.pt")
    monkeypatch.setattr(gpu_checks, "weights_in", lambda folder: folder.name)
    with pytest.raises(AssertionError, match="killed behind update_3.pt: the weights differ"):
        gpu_checks.resumes_bitwise("", CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name):
    with deterministic():
        CHECKS[name](torch.device("cuda", 0))
