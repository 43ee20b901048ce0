"""The lock of a run's files. Reference: a second handle of the same lock, as another process has it."""

import json
import socket
import threading
import time

import pytest
from filelock import FileLock

from common.errors import UserError
from trainer.saving import run_folder
from trainer.saving.run_folder import release_locks, take_lock


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """(the stem of a run's files, their lock, which another process has, what tells who that is)."""
    monkeypatch.setattr(run_folder, "WAIT_S", 0.1)
    lock = FileLock(tmp_path / ".run.lock", thread_local=False)
    lock.acquire()
    yield tmp_path / "run", lock, tmp_path / ".run.running"
    lock.release()
    release_locks()


def write_owner(path, host):
    path.write_text(json.dumps({"pid": 7, "host": host, "started": "2026-01-01 00:00:00"}))


def test_the_lock_of_another_machine_is_waited_for(taken, capsys):
    """It is lost: the server frees its lock after a while. A line says why nothing happens."""
    stem, lock, running = taken
    write_owner(running, "node1")
    timer = threading.Timer(0.4, lock.release)
    timer.start()
    take_lock(stem)
    timer.join()
    assert json.loads(running.read_text())["host"] == socket.gethostname()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{stem}: process 7 on 'node1'") and "its machine was lost" in line


@pytest.mark.parametrize("host", [socket.gethostname(), None])
def test_a_process_of_this_machine_is_not_waited_for(taken, capsys, host):
    """None: nobody says who it is."""
    stem, _, running = taken
    if host is not None:
        write_owner(running, host)
    begin = time.monotonic()
    with pytest.raises(UserError, match="is writing these files"):
        take_lock(stem)
    assert time.monotonic() - begin < 30 and capsys.readouterr().out == ""
