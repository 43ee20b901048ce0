"""How the Makefile sets up an environment. Reference: what it hands to a Python that only writes down its arguments."""

import os
import shutil
import subprocess

import pytest

from tests.helpers import ROOT

# Makes an "environment" of itself, and fails where it is asked for an index.
PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *--index-url*) exit 1 ;;
  *version_info*) exec "$REAL" "$@" ;;
esac
"""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def set_up(tmp_path, monkeypatch):
    """What is printed, and the lines of pip, where `make` sets up an environment."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("REAL", "python3")

    def run(*variables, has_gpu=False):
        (tmp_path / "bin").mkdir()
        if has_gpu:
            (tmp_path / "bin" / "nvidia-smi").symlink_to("/bin/true")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environment = tmp_path / "env"
        command = ["make", f"PYTHON={python}", f"VENV={environment}", *variables, str(environment / ".installed")]
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        asked = [line for line in (tmp_path / "log").read_text().splitlines() if "pip install" in line]
        return ended, asked

    return run


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_torch_comes_from_the_index_of_its_cpu_builds(set_up):
    """... and where that cannot be reached, from pip's own, with a line."""
    ended, (first, second) = set_up()
    assert ended.returncode == 0
    assert f"--index-url {CPU_INDEX} torch==2.13.0" in first
    assert second.endswith("-r requirements.txt") and "index-url" not in second
    assert "PyTorch for the CPU" in ended.stdout and "0.4 GB" in ended.stdout
    assert f"PyTorch comes from pip's own index: {CPU_INDEX}" in ended.stdout


@pytest.mark.parametrize("variables, has_index", [([], False), (["TORCH=cpu"], True)])
def test_with_a_gpu_torch_comes_with_the_others_unless_its_cpu_build_is_asked_for(set_up, variables, has_index):
    ended, asked = set_up(*variables, has_gpu=True)
    assert (CPU_INDEX in asked[0], "PyTorch for NVIDIA GPUs" not in ended.stdout) == (has_index, has_index)
    assert asked[-1].endswith("-r requirements.txt")


def test_an_old_python_is_named_before_anything_is_made(set_up, tmp_path, monkeypatch):
    old = tmp_path / "old"
    python = f"{os.path.realpath('/usr/bin/env')} python3"
    old.write_text(f'#!/bin/sh\n{python} -c "import sys; sys.version_info = (3, 10); $2"\n')
    old.chmod(0o755)
    monkeypatch.setenv("REAL", str(old))
    ended, asked = set_up()
    assert ended.returncode != 0
    assert "error: Python 3.11 or newer is needed" in ended.stderr
    assert not asked and not (tmp_path / "env").exists()
