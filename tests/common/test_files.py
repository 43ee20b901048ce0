"""Files that appear complete or not at all."""

import contextlib
import errno
import os
import time
from unittest import mock

import pytest

from common.files import atomic_file, atomic_folder, restore, try_to_write


def test_a_power_cut_leaves_the_old_file_or_the_whole_new_one(tmp_path):
    """The content is on the disk before the name is taken, the name before the work goes on."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    calls = []

    def fsync(descriptor):
        calls.append("folder" if os.path.samestat(os.fstat(descriptor), os.stat(tmp_path)) else "content")
        if calls[-1] == "folder":
            raise OSError(errno.EINVAL, "Invalid argument, as from a network drive")

    def replace(source, target):
        calls.append("rename")
        if calls.count("rename") < 3:
            error = PermissionError(errno.EACCES, "Access is denied, as while Windows scans the file")
            error.winerror = 5
            raise error
        os.rename(source, target)

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(os, "replace", replace), atomic_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert calls == ["content", "rename", "rename", "rename", "folder"]


@pytest.mark.parametrize("kind", ["file", "folder", "probe"])
def test_the_error_of_a_full_disk_names_the_path(tmp_path, kind):
    path = tmp_path / "out"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as error, mock.patch("os.fsync", side_effect=full):
        if kind == "probe":
            try_to_write(path)
        with atomic_file(path) if kind == "file" else atomic_folder(path, tmp_path / "new"):
            raise full
    assert error.value.filename == str(path) and not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_when_the_file_is_written_again(tmp_path):
    """If it is an hour old: another process may be writing a younger one. What others name alike stays."""
    others = ["a[1].123.tmp", "a1.0123abcd.tmp", "a[1].b.0123abcd.tmp", "a[1].0123abcf.tmp", "a[1]"]
    for name in ("a[1].0123abcd.tmp", *others):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, 2 * (time.time() - (0 if name == others[3] else 3700),))
    with atomic_file(tmp_path / "a[1]") as file:
        file.write(b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("killed_at", [1, 2, None])
def test_a_folder_that_is_replaced_stays_whole(tmp_path, killed_at):
    """A kill before either rename leaves the old one, perhaps under another name until the next start."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"old")
    rename, calls = os.replace, []

    def killing_rename(source, target):
        calls.append(source)
        # After a kill nothing is renamed any more.
        if killed_at and len(calls) >= killed_at:
            raise KeyboardInterrupt
        rename(source, target)

    atomic = atomic_folder(tmp_path / "folder", tmp_path / "new")
    with mock.patch.object(os, "replace", killing_rename), contextlib.suppress(KeyboardInterrupt), atomic as unfinished:
        unfinished.mkdir()
        (unfinished / "file").write_bytes(b"new")
    restore(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "file").read_bytes() == (b"old" if killed_at else b"new")
