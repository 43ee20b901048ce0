"""Older versions of transformers, installed aside, and what they make of folders: in a process of its own each."""

import json
import os
import subprocess
import sys

import pytest

# Each with what it wants beside itself; torch, numpy and the rest are those of this process.
PINNED = {
    "4.48.3": ("transformers==4.48.3", "tokenizers==0.21.4", "huggingface_hub==0.36.0"),
    "4.57.3": ("transformers==4.57.3", "tokenizers==0.22.1", "huggingface_hub==0.36.0"),
}


def install(version, folder):
    """Put that version into a folder for PYTHONPATH; the test is skipped where no package index answers."""
    pinned = PINNED[version]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *pinned]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("pip has not finished within 300 seconds")
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(pinned)}: no network?")


def run_with(folder, script, cwd=None, request=""):
    """The standard output of a script in a process that finds the packages of `folder` first, and nothing of ours."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=request,
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def read_with(folder, version, script, asked):
    """{folder: answer} of a script that reads [(folder, kind, text)] from its input, and answers in JSON with its version."""
    request = json.dumps([(str(path), kind, text) for path, kind, text in asked])
    answers = json.loads(run_with(folder, script, request=request))
    assert answers.pop("version") == version
    return answers
