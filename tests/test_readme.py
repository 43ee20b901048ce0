"""The README's Python, and what its first screen has to tell."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT, tiny_model
from trainer.saving.weights import save_weights

READMES = ("README.md", "README_zh.md")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# The Chinese page has the same code, which takes seconds to run.
@pytest.mark.parametrize("name", [READMES[0], pytest.param(READMES[1], marks=pytest.mark.slow)])
def test_the_snippet_runs_from_another_folder(name, tmp_path):
    """With the repository's full path in it, as its comment says, and weights of a tiny model."""
    (snippet,) = re.findall(r"```python\n(.*?)```", text_of(name), re.DOTALL)
    model = tiny_model(vocab_size=6400)
    save_weights(model.state_dict(), model.config.to_dict(), tmp_path / "pretrain_512")
    snippet = snippet.replace('repository = "."', f"repository = {str(ROOT)!r}")
    snippet = snippet.replace('f"{repository}/out/pretrain_512.pth"', repr(str(tmp_path / "pretrain_512.pth")))
    ended = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("<|im_start|>") >= 1
    assert ended.stdout.startswith("<|im_start|>Return the")


@pytest.mark.parametrize("name", READMES)
def test_the_first_screen_tells_what_it_runs_on_and_what_it_takes(name):
    first_screen = text_of(name).split("\n## ")[0]
    requirements = dict(re.findall(r"^([\w-]+)==([\d.]+)", text_of("requirements.txt"), re.MULTILINE))
    for package in ("torch", "transformers"):
        assert f"{package} {requirements[package]}" in first_screen
    for word in ("Linux", "Windows", "macOS", "CUDA", "GB", "3090", "pretrain_hq.jsonl"):
        assert word in first_screen


def test_both_readmes_have_the_same_commands_and_tables():
    english, chinese = map(text_of, READMES)
    for pattern in (r"^(?:python|torchrun|make|pip) [^#\n]*", r"^## ", r"^\|"):
        found = [[line.strip() for line in re.findall(pattern, text, re.MULTILINE)] for text in (english, chinese)]
        assert found[0] == found[1], pattern
