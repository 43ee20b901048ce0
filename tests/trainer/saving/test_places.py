"""Runs that cannot write, or have not saved yet, and the lock of a run. Reference: a second handle of it, as another process has."""

import json
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from filelock import FileLock

from common.errors import UserError
from tests.helpers import ROOT, before_update, flags, records, train, write_corpus
from trainer import train_pretrain
from trainer.loop import Trainer
from trainer.pretrain import parts
from trainer.saving import run_folder
from trainer.saving.checkpoint import Checkpoints
from trainer.saving.run_folder import release_locks, take_lock

needs_sys = pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that takes nobody's files")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"save_weight": "x" * 300}, "File name too long.*--save_weight"),
        # Its .pth could be written, and the temporary file of its metrics could not.
        ({"save_weight": "x" * 245}, "--save_weight"),
        # A plan takes half a minute.
        ({"out_dir": ROOT / "README.md" / "out", "budget_tokens": 3000}, "README.md/out: Not a directory"),
        ({"save_weight": "taken"}, r"taken_16\.pth: not a regular file"),
        pytest.param({"out_dir": "/sys/kernel"}, r"^/sys/kernel/pretrain_16\..*--out_dir", marks=needs_sys),
    ],
    ids=["long", "long with an ending", "below a file", "a folder", "no file from anybody"],
)
def test_unwritable_files_end_a_run_before_its_data_is_opened(tmp_path, data, monkeypatch, capfd, changes, said):
    monkeypatch.setattr(parts, "open_corpus", mock.Mock(side_effect=AssertionError("the data is opened already")))
    (tmp_path / "taken_16.pth").mkdir()
    with pytest.raises(UserError, match=said) as error:
        train_pretrain.main(flags(**{"data_path": data, "out_dir": tmp_path, **changes}))
    assert "\n" not in str(error.value) and "planning:" not in capfd.readouterr().out


def test_a_start_that_cannot_clear_up_ends_with_its_cause(tmp_path, data, monkeypatch):
    error = OSError(5, os.strerror(5), "update_1.pt.sha256")
    monkeypatch.setattr(Checkpoints, "remove_leftovers", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=r"update_1\.pt\.sha256"):
        train_pretrain.main(flags(data_path=data, out_dir=tmp_path))


def test_a_disk_without_room_for_a_checkpoint(tmp_path, data, monkeypatch):
    """Found out before the first update, with what is wanted and what is there."""
    monkeypatch.setattr(Trainer, "fit", mock.Mock(side_effect=AssertionError("training has begun")))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=10**9, free=5000))
    with pytest.raises(UserError, match=r"a checkpoint takes [\d.]+ MB, and 0.0 MB are free there: free some space"):
        train_pretrain.main(flags(data_path=data, out_dir=tmp_path))


def killed_run(arguments):
    """A run that ends as if by kill -9, after a few updates that have not been saved."""
    with before_update(3, mock.Mock(side_effect=ArithmeticError)), pytest.raises(ArithmeticError):
        train_pretrain.main(arguments)


def folders(place):
    return sorted(path.name for path in place.iterdir() if path.is_dir())


@pytest.mark.parametrize("from_resume", [0, 1])
def test_restarts_before_the_first_save_leave_no_folder(tmp_path, data, from_resume):
    """And after a finished run they keep that one whole, in one folder."""
    out = tmp_path / "out"
    arguments = flags(data_path=data, out_dir=out, from_resume=from_resume)
    for _ in range(3):
        killed_run(arguments)
        assert folders(out) == []
    train_pretrain.main(arguments)
    assert folders(out) == ["pretrain_16_resume"]
    assert len(records(out / "pretrain_16.metrics.jsonl", "settings")) == 1
    weights = (out / "pretrain_16.pth").read_bytes()
    for _ in range(3):
        killed_run(flags(data_path=data, out_dir=out))
        assert folders(out) == ["pretrain_16_resume_old1"]
    kept = out / "pretrain_16_resume_old1"
    assert (kept / "pretrain_16.pth").read_bytes() == weights
    assert (kept / "pretrain_16.metrics.jsonl").exists()
    assert list(kept.glob("update_*.pt"))


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
    """[(source, target, open files in the way)] of every rename: Windows neither renames nor replaces what is open, or holds such."""
    seen = []

    def watched(rename):
        def checked(source, target, **options):
            places = [Path(source).absolute(), Path(target).absolute()]
            in_the_way = [path for path in open_files() if any(map(path.is_relative_to, places))]
            seen.append((source, target, in_the_way))
            rename(source, target, **options)

        return checked

    monkeypatch.setattr(os, "replace", watched(os.replace))
    monkeypatch.setattr(os, "rename", watched(os.rename))
    return seen


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_pretraining_renames_nothing_that_is_open(tmp_path, renames):
    data = write_corpus(tmp_path / "data.jsonl", 40)
    options = {"data_path": data, "out_dir": tmp_path, "save_interval": 4, "num_workers": 1}
    train(**options)
    train(**options)
    train(**options, from_resume=1, epochs=2)
    for source, target, in_the_way in renames:
        assert not in_the_way, f"{source} -> {target}"
    names = [str(target) for _, target, _ in renames]
    for part in ("update_", ".pth", ".json", "_old1", "metrics.jsonl", "settings.yaml", ".token_store"):
        assert any(part in name for name in names), (part, names)
