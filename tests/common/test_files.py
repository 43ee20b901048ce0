"""Files that appear complete or not at all."""

import errno
import os
from unittest import mock

import pytest

from common.files import atomic_file


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

    with (
        mock.patch.object(os, "fsync", fsync),
        mock.patch.object(os, "replace", replace),
        atomic_file(path) as file,
    ):
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert calls == ["content", "rename", "rename", "rename", "folder"]


def test_what_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), atomic_file(path) as file:
        file.write(b"half")
        raise KeyError
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]
