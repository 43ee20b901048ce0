"""Runs whose folder is a mounted bucket (bucket.py). Reference: a run in a plain folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.encoders.electra.test_command import flags
from tests.encoders.electra.test_examples import write_lines, write_vocab
from tests.faults.harness import rising
from tests.helpers import complaint, wait_until
from trainer import train_electra
from trainer.saving.checkpoint import verified

pytestmark = pytest.mark.slow


class Mount:
    """A bucket at `{folder}/mount`, served by a process."""

    def __init__(self, folder):
        self.path, self.store, self.log = folder / "mount", folder / "store", folder / "bucket.log"
        for path in (self.path, self.store):
            path.mkdir()

    def start(self, *refused):
        program = Path(__file__).with_name("bucket.py")
        with open(self.log, "w") as log:
            command = [sys.executable, str(program), str(self.store), str(self.path), *refused]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: self.path.is_mount() or self.process.poll() is not None)
        if self.process.poll() is not None:
            said = self.log.read_text()
            assert "fuse: " in said or "fusermount3: " in said, said
            pytest.skip(f"this machine mounts nothing: {said[:200]}")

    def end(self):
        self.process.kill()
        self.process.wait()
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def mount(tmp_path):
    pytest.importorskip("mfusepy", reason="mfusepy or libfuse is not installed", exc_type=(ImportError, OSError))
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("no /dev/fuse")
    mount = Mount(tmp_path)
    mount.start()
    yield mount
    mount.end()


def in_bucket(lab, mount, name):
    """Let the run `name` of a lab write into the bucket."""
    (mount.path / name).mkdir()
    (lab.folder / name).symlink_to(mount.path / name)


def test_kill_9_a_lost_machine_and_a_fresh_run(mount, lab):
    lab.settings.update(rising(lab.folder), eval_interval=7)
    lab.run("whole")
    in_bucket(lab, mount, "run")
    for call in (3, 9, 14, 15, 16):
        # kill -9 when it renames: in the start, and in saves
        lab.run("run", hooks={"kill_at_call": {"name": "replace", "at": call}}, from_resume=1, expect=-9)
    process = lab.start("run", hooks={"slow_save": {}}, from_resume=1)
    assert process.until(lambda: lab.is_saving("run"))
    mount.end()
    process.kill()
    process.wait()
    mount.start()
    said = lab.run("run", from_resume=1).out
    assert "resumed from" in said and "no file locks" in said and "each save writes it anew" in said
    assert lab.result("run") == lab.result("whole") and lab.best("run") and not lab.leftovers("run")
    # A fresh run keeps the earlier one whole.
    newest = lab.checkpoints("run")[0].name
    lab.run("run")
    old = max(lab.stem("run").parent.glob("*_resume_old*"))
    assert verified(old / newest)
    assert (old / f"{lab.stem('run').name}.metrics.jsonl").read_text().count('"loss"') > 10
    assert lab.result("run") == lab.result("whole")


def test_what_a_bucket_cannot_hold_is_told_at_the_start(mount, lab, tmp_path, capsys):
    data = mount.path / "data.jsonl"
    data.write_bytes(lab.corpus.read_bytes())
    cache = {"XDG_CACHE_HOME": str(lab.folder / "cache")}
    said = lab.run("beside", data_path=data, cache_dir=None, environment=cache, max_updates=1).out
    assert f"{mount.path}/.token_store cannot be written to, renamed in or locked: using {lab.folder}/cache" in said
    failed = lab.run("named", data_path=data, cache_dir=mount.path / "tokens", expect=2)
    assert failed.err.startswith(
        f"error: {mount.path}/tokens cannot be written to, renamed in or locked; --cache_dir names"
    )
    electra = {"vocab_path": write_vocab(tmp_path / "vocab.txt"), "data_path": write_lines(tmp_path / "lines.jsonl")[0]}
    told = complaint(capsys, train_electra.main, flags(**electra, out_dir=mount.path))
    assert (
        told.startswith(f"error: {mount.path}/electra_small/") and "Operation not supported: fix that, or name" in told
    )
    for refused in ("rename", "move_inside"):
        mount.end()
        mount.start(refused)
        in_bucket(lab, mount, refused)
        failed = lab.run(refused, expect=2)
        said = "Operation not supported: fix that, or name another --out_dir"
        assert failed.err.count("\n") == 1 and said in failed.err and not lab.leftovers(refused)
