"""Where stores lie and who makes them. Reference: what is printed while another process holds the lock."""

import contextlib

import pytest
from filelock import Timeout

from dataset.store import token_store


class HeldAtFirst:
    """A lock that another process gives back while this one waits."""

    def __init__(self, path):
        self.path = path

    def acquire(self, timeout=-1):
        if timeout >= 0:
            raise Timeout(str(self.path))
        return contextlib.nullcontext()


@pytest.mark.parametrize("tell", [True, False])
def test_who_waits_says_so_where_he_is_asked_to(tmp_path, capsys, monkeypatch, tell):
    """A rank that waits for rank 0 of its own run has nothing to tell: rank 0 shows what it is doing."""
    monkeypatch.setattr(token_store, "file_lock", HeldAtFirst)
    with token_store.lock(tmp_path / "corpus", tell):
        pass
    assert ("waiting for another process" in capsys.readouterr().out) == tell


@pytest.mark.parametrize(
    "name", ["work", "work-0123", "0123456789abcdef", "work-0123456789abcdef0", "work-0123456789abcdef.old"]
)
def test_the_folder_of_another_program_stays(tmp_path, name):
    """--cache_dir may name a folder that other programs use too, such as the home."""
    notes = tmp_path / f".tmp-{name}" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("not ours")
    with token_store.lock(tmp_path / "corpus-0123456789abcdef"):
        assert notes.read_text() == "not ours"
    assert not (tmp_path / f".{name}.lock").exists()
