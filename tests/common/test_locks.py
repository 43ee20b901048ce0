"""Locks of files. Reference: flock, made to fail as on a file system without it."""

import errno
import os

import pytest

from common.locks import file_lock

fcntl = pytest.importorskip("fcntl")


def test_a_file_system_without_locks_is_told_and_leaves_no_marker(tmp_path, monkeypatch):
    def without_locks(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    for _ in range(2):
        with pytest.raises(OSError) as told, file_lock(tmp_path / "lock"):
            pytest.fail("it was taken")
        assert told.value.errno == errno.ENOSYS
