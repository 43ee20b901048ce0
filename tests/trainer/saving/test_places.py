"""A run that could not write its files ends at its start, in one line; one that ended before its first save leaves nothing."""

import os
import shutil
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest

from common.errors import UserError
from tests.helpers import flags, records
from trainer import train_pretrain
from trainer.loop import Trainer
from trainer.pretrain import parts
from trainer.saving.checkpoint import Checkpoints

Usage = namedtuple("Usage", "total used free")
needs_sys = pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that takes nobody's files")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"save_weight": "x" * 300}, "File name too long.*--save_weight"),
        # Its .pth could be written, and the temporary file of its metrics could not.
        ({"save_weight": "x" * 245}, "--save_weight"),
        ({"save_weight": "taken"}, r"taken_16\.pth: not a regular file"),
        pytest.param({"out_dir": "/sys/kernel"}, r"^/sys/kernel/pretrain_16\..*--out_dir", marks=needs_sys),
    ],
    ids=["long", "long with an ending", "a folder", "no file from anybody"],
)
def test_files_that_cannot_be_written_end_a_run_before_its_data_is_opened(tmp_path, data, monkeypatch, changes, said):
    monkeypatch.setattr(parts, "open_corpus", mock.Mock(side_effect=AssertionError("the data is opened already")))
    (tmp_path / "taken_16.pth").mkdir()
    with pytest.raises(UserError, match=said) as error:
        train_pretrain.main(flags(**{"data_path": data, "out_dir": tmp_path, **changes}))
    assert "\n" not in str(error.value)


def test_a_start_that_cannot_clear_up_ends_with_its_cause(tmp_path, data, monkeypatch):
    error = OSError(5, os.strerror(5), "update_1.pt.sha256")
    monkeypatch.setattr(Checkpoints, "remove_leftovers", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=r"update_1\.pt\.sha256"):
        train_pretrain.main(flags(data_path=data, out_dir=tmp_path))


def test_a_disk_without_room_for_a_checkpoint(tmp_path, data, monkeypatch):
    """Found out before the first update, with what is wanted and what is there."""
    monkeypatch.setattr(Trainer, "fit", mock.Mock(side_effect=AssertionError("training has begun")))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(UserError, match=r"a checkpoint takes [\d.]+ MB, and 0.0 MB are free there: free some space"):
        train_pretrain.main(flags(data_path=data, out_dir=tmp_path))


class KilledError(Exception):
    pass


def killed_run(monkeypatch, arguments):
    """A run that ends as if by kill -9, after a few updates that have not been saved."""
    log = Trainer.log

    def killed(run, *rest):
        log(run, *rest)
        if run.progress.update == 2:
            run.reporter.file.close()
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "log", killed)
        with pytest.raises(KilledError):
            train_pretrain.main(arguments)


def folders(place):
    return sorted(path.name for path in place.iterdir() if path.is_dir())


@pytest.mark.parametrize("from_resume", [0, 1])
def test_restarts_before_the_first_save_leave_no_folder(tmp_path, data, monkeypatch, from_resume):
    out = tmp_path / "out"
    arguments = flags(data_path=data, out_dir=out, from_resume=from_resume)
    for _ in range(3):
        killed_run(monkeypatch, arguments)
        assert folders(out) == []
    train_pretrain.main(arguments)
    assert folders(out) == ["pretrain_16_resume"]
    assert len(records(out / "pretrain_16.metrics.jsonl", "settings")) == 1


@pytest.mark.slow
def test_restarts_after_a_finished_run_keep_it_once(tmp_path, data, monkeypatch):
    """The finished run is in one folder, whole, however often its successor was killed."""
    out = tmp_path / "out"
    arguments = flags(data_path=data, out_dir=out)
    train_pretrain.main(arguments)
    weights = (out / "pretrain_16.pth").read_bytes()
    for _ in range(3):
        killed_run(monkeypatch, arguments)
        assert folders(out) == ["pretrain_16_resume_old1"]
    kept = out / "pretrain_16_resume_old1"
    assert (kept / "pretrain_16.pth").read_bytes() == weights
    assert (kept / "pretrain_16.metrics.jsonl").exists()
    assert list(kept.glob("update_*.pt"))
