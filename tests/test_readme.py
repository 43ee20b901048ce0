"""The pages that a newcomer reads: the Python lines run, the versions are those that are installed, both READMEs say the same."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT, write_weights

READMES = ("README.md", "README_zh.md")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_snippet_runs_from_another_folder(tmp_path):
    """With the repository's full path in it, as its comment says, and weights of a tiny model."""
    (snippet,) = re.findall(r"```python\n(.*?)```", text_of("docs/pretraining.md"), re.DOTALL)
    weight = write_weights(tmp_path / "pretrain_512", vocab_size=6400)
    snippet = snippet.replace('repository = "."', f"repository = {str(ROOT)!r}")
    snippet = snippet.replace('f"{repository}/out/pretrain_512.pth"', repr(weight))
    command = [sys.executable, "-c", snippet]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("<|im_start|>Return the")


def test_the_readmes_name_the_versions_that_are_installed():
    requirements = dict(re.findall(r"^([\w-]+)==([\d.]+)", text_of("requirements.txt"), re.MULTILINE))
    for name in READMES:
        for package in ("torch", "transformers"):
            assert f"{package} {requirements[package]}" in text_of(name)


def test_both_readmes_have_the_same_commands_and_tables():
    english, chinese = map(text_of, READMES)
    for pattern in (r"^(?:python|torchrun|make|pip|hf) [^#\n]*", r"^## ", r"^\|"):
        found = [[line.strip() for line in re.findall(pattern, text, re.MULTILINE)] for text in (english, chinese)]
        assert found[0] == found[1], pattern


def test_what_the_pages_name_exists():
    """Links and their headings (GitHub's anchors: lower case, blanks as hyphens, without other signs), and files of ours."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "dataset" / "README.md"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        folders = "model|dataset|trainer|scripts|launch|tests|docs"
        for file in re.findall(rf"`((?:{folders})/[\w/]+\.(?:py|sh|md|yaml|sbatch))`", text):
            assert (ROOT / file).is_file(), f"{page.name}: {file}"
        for link, anchor in re.findall(r"\]\(([^):#\s]*)(?:#([^)\s]*))?\)", text):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
                assert anchor in anchors, f"{page.name}: {link}#{anchor}"
