"""The steps of the Dockerfile that need neither root nor Docker, in a fresh folder. Reference: how Docker describes its instructions."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT, flags

RULES = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
# Bytes of an image below 1 GB that are not Python packages: of its base, and of the compiler
BASE, COMPILER = 131_000_000, 105_000_000


def is_sent(path):
    """Whether a file goes to `docker build`: the last rule that matches it, or a folder above it, decides."""
    sent = True
    for rule in RULES:
        pattern = re.escape(rule.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{pattern}(/.*)?", path):
            sent = rule.startswith("!")
    return sent


def test_code_is_sent_and_nothing_else():
    for path in ("trainer/tour.py", "model/tokenizer.json", "dataset/store/build.py", "out/.gitkeep"):
        assert is_sent(path), path
    others = ".git/HEAD my.jsonl out/chat.pth dataset/.token_store/a dataset/my.jsonl.zst model/__pycache__/a.pyc"
    for path in others.split():
        assert not is_sent(path), path


def copy(sources, folder):
    for source in map(ROOT.joinpath, sources):
        for path in [source] if source.is_file() else source.rglob("*"):
            name = str(path.relative_to(ROOT))
            if path.is_file() and is_sent(name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / name)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image has Python 3.11")
@pytest.mark.skipif(not (shutil.which("make") and shutil.which("strip")), reason="make or strip is missing")
def test_the_steps_install_less_than_a_gigabyte_and_the_image_trains(tmp_path, data):
    environment, folder = dict(os.environ), tmp_path
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()))
    for instruction, rest in (line.split(" ", 1) for line in text.splitlines() if line):
        rest = rest.replace("/opt/venv", str(tmp_path / "venv"))
        if instruction in ("ARG", "ENV"):
            for word in shlex.split(rest):
                name, _, value = word.partition("=")
                environment[name] = value.replace("$PATH", environment["PATH"])
        elif instruction == "WORKDIR":
            folder = tmp_path / rest[1:]
            folder.mkdir()
        elif instruction == "COPY" and not rest.startswith("--from"):
            *sources, _ = [word for word in rest.split() if word[:2] != "--"]
            copy(sources, folder)
        elif instruction == "RUN" and not re.match("apt-get|useradd", rest):
            subprocess.run(["sh", "-ec", rest], cwd=folder, env=environment, check=True)
        elif instruction == "ENTRYPOINT":
            start = json.loads(rest)
    size = sum(path.lstat().st_size for path in (tmp_path / "venv").rglob("*"))
    assert size < 1e9 - BASE - COMPILER, f"{size / 1e6:.0f} MB"
    words = flags(data_path=data, max_updates=2, report=1, out_dir=None)
    python = shutil.which(start[0], path=environment["PATH"])
    assert python == str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, *start[1:], *words], cwd=folder, env=environment, check=True)
    assert (folder / "out" / "pretrain_16.report.html").is_file()
