"""The command behind `make gpu`, on a CPU: its sections, its time limits, and that its checks can fail."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu, gpu_checks
from tests.helpers import ROOT

CPU = torch.device("cpu")


def test_every_section_has_something_to_do():
    numbers = set(gpu.MEASUREMENTS) | set(gpu.CHECKS)
    assert numbers == set(range(len(gpu.GPU_SECTIONS))) and not set(gpu.MEASUREMENTS) & set(gpu.CHECKS)


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


def run(*flags):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--seconds", "small", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_command_measures_and_writes_a_table(tmp_path):
    out = tmp_path / "gpu.jsonl"
    ended = run("--sections", "0", "--out", str(out))
    assert ended.returncode == 0, ended.stderr
    assert "| 0 | torch |" in ended.stdout and "| 0 | best product |" in ended.stdout
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert {result["section"] for result in results} == {0} and results[-1]["what"] == "seconds of the section"


def test_a_section_that_hangs_is_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gpu.LIMITS_S, 0, 0.5)
    arguments = gpu.gpu_parser().parse_args(["--device", "cpu", "--seconds", "small"])
    with open(tmp_path / "out", "w", encoding="utf-8") as out:
        results = gpu.ask(0, arguments, out)
    assert [result["value"] for result in results if result.get("ok") is False] == ["stopped after 0.5 s"]


@pytest.mark.slow
@pytest.mark.parametrize("section", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_every_section_on_a_cpu(section, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LIMIT_S", 590)
    monkeypatch.setattr(gpu, "LIMITS_S", {})
    arguments = gpu.gpu_parser().parse_args(["--device", "cpu", "--seconds", "small"])
    with open(tmp_path / "out", "w", encoding="utf-8") as out:
        results = gpu.ask(section, arguments, out)
    assert len(results) > 1 and [result for result in results if result.get("ok") is False] == []
