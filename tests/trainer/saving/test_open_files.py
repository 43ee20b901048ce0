"""Windows renames neither a file that is open or mapped nor a folder that holds one, and puts nothing in the place of one.
Reference: what Linux says this process has open, at every rename of runs that save, resume and begin anew."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers import train, write_corpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def open_files() -> list[Path]:
    """The files that this process has open or mapped."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(Path(os.readlink(descriptor)))
        except FileNotFoundError:
            # the listing's descriptor
            continue
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6:
            found.append(Path(words[5]))
    # Windows has no open folders, such as those that are made durable here.
    return [path for path in found if not path.is_dir()]


@pytest.fixture
def renames(monkeypatch):
    """[(source, target, open files that are in the way)] of every rename."""
    seen = []

    def watched(rename):
        def checked(source, target, **options):
            places = [Path(source).absolute(), Path(target).absolute()]
            in_the_way = []
            for path in open_files():
                if any(path.is_relative_to(place) for place in places):
                    in_the_way.append(path)
            seen.append((source, target, in_the_way))
            rename(source, target, **options)

        return checked

    monkeypatch.setattr(os, "replace", watched(os.replace))
    monkeypatch.setattr(os, "rename", watched(os.rename))
    return seen


def check(renames, wanted):
    """wanted: parts of the names of what must have been renamed."""
    for source, target, in_the_way in renames:
        assert not in_the_way, f"{source} -> {target}"
    names = [str(target) for _, target, _ in renames]
    for part in wanted:
        assert any(part in name for name in names), (part, names)


@pytest.mark.slow
def test_pretraining_renames_nothing_that_is_open(tmp_path, renames):
    data = write_corpus(tmp_path / "data.jsonl", 40)
    options = {"data_path": data, "out_dir": tmp_path, "save_interval": 4, "num_workers": 1}
    train(**options)
    train(**options)
    train(**options, from_resume=1, epochs=2)
    check(renames, ["update_", ".pth", ".json", "_old1", "metrics.jsonl", "settings.yaml", ".token_store"])
