"""notebooks/pretrain.ipynb in a kernel of Jupyter, as its users run it, and what its first cell installs on which image."""

import importlib.metadata
import subprocess
import sys
import zipfile

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers import ROOT
from trainer.reporting.records import RunRecords

NOTEBOOK = ROOT / "notebooks" / "pretrain.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.slow
def test_every_cell_runs_in_a_fresh_folder(tmp_path, monkeypatch):
    """It clones the project, here a repository of the working tree. Each training has one picture and one line, which change."""
    git = ["git", f"--git-dir={tmp_path / 'git'}", f"--work-tree={ROOT}", "-c", "user.name=a", "-c", "user.email=a"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True, cwd=ROOT)
    for variable in (f"PROJECT={tmp_path / 'git'}", f"DATA={ROOT}/docs/*.md", "BUDGET=40s", "CUDA_VISIBLE_DEVICES="):
        monkeypatch.setenv(*variable.split("=", 1))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(notebook))
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    _, pretraining, writing, chat, export = code_cells(notebook)
    for cell, name in ((pretraining, "pretrain"), (chat, "full_sft")):
        (weights,) = tmp_path.glob(f"out/{name}_*[0-9].pth")
        losses = RunRecords.read(weights.with_suffix(".metrics.jsonl")).columns["loss"][1]
        assert losses[-1] < losses[0] and len(losses) > 2
        shown = [output.data for output in cell.outputs if output.output_type == "display_data"]
        (line,) = [data["text/plain"] for data in shown if "image/png" not in data]
        assert len(shown) == 2 and line.startswith("Epoch:") and f"loss:{losses[-1]:.3f}" in line
        assert "Epoch:" not in printed(cell) and "run: " in printed(cell)
    assert len(printed(writing).partition("Return the")[2]) > 20 and printed(chat).splitlines()[-1].strip()
    assert "model.zip" in export.outputs[-1].data["text/html"]
    names = zipfile.ZipFile(tmp_path / "model.zip").namelist()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(names)


@pytest.mark.parametrize(
    ("image", "installed"),
    [
        # Colab, ModelScope, an older one, this one
        ({"torch": "2.11.0+cu128", "transformers": "5.15.0", "rensa": None}, ["rensa==0.5.0", "torch==2.11.0+cu128"]),
        ({"torch": "2.10.0", "transformers": "4.57.6"}, ["transformers==5.23.0", "torch==2.10.0"]),
        ({"torch": "2.9.1"}, ["torch==2.13.0"]),
        ({}, None),
    ],
)
def test_the_first_cell_leaves_what_an_image_has(image, installed, monkeypatch):
    """image: {package: version}, None: it is missing; others are as here."""
    version, commands = importlib.metadata.version, []

    def version_of(package):
        if image.get(package, "") is None:
            raise importlib.metadata.PackageNotFoundError
        return image.get(package) or version(package)

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(NOTEBOOK.parent)
    exec(code_cells(nbformat.read(NOTEBOOK, as_version=4))[0].source, {})  # noqa: S102 - our own
    assert sys.path[0] == str(ROOT)
    assert commands == ([[sys.executable, "-m", "pip", "install", "--quiet", *installed]] if installed else [])
