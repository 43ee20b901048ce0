"""Checkpoints as files, in one process; tests/faults has the runs that are killed. References: plain torch.save and sha256sum."""

import itertools
import os
import shutil
import subprocess
from unittest import mock

import pytest
import torch

from trainer.saving import checkpoint
from trainer.saving.checkpoint import Checkpoints, load_checkpoint, verified


def state(update):
    return {"update": update, "weights": torch.full((50, 50), float(update))}


def save(checkpoints, update):
    checkpoints.save(state(update), update, write_weights=print)
    checkpoints.wait()


def names(checkpoints):
    return [path.name for path in checkpoints.paths()]


def test_digest_is_what_sha256sum_checks(tmp_path):
    save(Checkpoints(tmp_path), 1)
    assert verified(tmp_path / "update_00000001.pt")
    assert torch.equal(load_checkpoint(tmp_path / "update_00000001.pt")["weights"], state(1)["weights"])
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "update_00000001.pt.sha256"], cwd=tmp_path, check=True, capture_output=True)


def test_the_newest_are_kept_and_one_that_reads_back_differently_is_none_of_them(tmp_path, monkeypatch):
    """Nothing is pruned before the newer one is verified."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for update in (1, 2, 3, 4):
        save(checkpoints, update)
    assert names(checkpoints) == ["update_00000004.pt", "update_00000003.pt"] and len(os.listdir(tmp_path)) == 4
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "file_digest", lambda path: "0" * 64)
        checkpoints.save(state(5), 5, write_weights=print)
        with pytest.raises(OSError, match="update_00000005.pt"):
            checkpoints.wait()
    assert names(checkpoints)[-2:] == ["update_00000004.pt", "update_00000003.pt"]
    save(checkpoints, 6)
    assert names(checkpoints) == ["update_00000006.pt", "update_00000004.pt"]


def test_a_kill_while_an_update_is_saved_again_leaves_an_intact_checkpoint(tmp_path, monkeypatch):
    """At each of the renames, before and after it; a kill is an error here behind which nothing is done."""
    replace, renames = os.replace, []

    def killed_at(number, after):
        def stop(source, target):
            renames.append(target)
            if len(renames) == number and not after:
                raise KeyboardInterrupt
            replace(source, target)
            if len(renames) == number:
                raise KeyboardInterrupt

        return stop

    for number, after in itertools.product((1, 2, 3), (False, True)):
        checkpoints = Checkpoints(tmp_path / f"{number}_{after}", keep=1)
        save(checkpoints, 1)
        renames.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed_at(number, after))
            checkpoints.save({**state(1), "evaluated": True}, 1, write_weights=print)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.wait()
        path = Checkpoints(checkpoints.folder).newest()
        assert path is not None and ("evaluated" in load_checkpoint(path)) == ((number, after) >= (2, True))
        save(checkpoints, 1)
        assert len((checkpoints.folder / "update_00000001.pt.sha256").read_bytes().splitlines()) == 1


def test_an_error_in_the_background_reaches_the_trainer_once(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state(1), 1, mock.Mock(side_effect=OSError(28, "No space left on device", "weights.pth")))
    with pytest.raises(OSError, match="weights.pth"):
        checkpoints.wait()
    checkpoints.wait()
    assert names(checkpoints) == ["update_00000001.pt"]  # the checkpoint does not suffer from it


def test_temporaries_of_a_run_whose_name_begins_alike_are_left_alone(tmp_path):
    """--save_weight a_512.b may be writing its own while --save_weight a begins."""
    own = ["a_512.pth.77.tmp", "a_512.metrics.jsonl.0000077.tmp", "a_512.discriminator.tmp"]
    own += [".a_512.running.77.tmp", ".a_512.0123456789abcdef.tmp"]
    others = ["a_512.b_512.pth.77.tmp", "a_512.b_512.metrics.jsonl.77.tmp", "a_512_moe.pth.77.tmp"]
    others += [".a_512.b_512.running.77.tmp", ".a_512.b_512.0123456789abcdef.tmp"]
    for name in own + others:
        (tmp_path / name).touch()
    Checkpoints(tmp_path / "a_512_resume").remove_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_what_somebody_else_has_put_beside_checkpoints_stays(tmp_path):
    """Through saves, a start, and a run that takes the place of another one."""
    folder = tmp_path / "run_resume"
    folder.mkdir()
    odd = ["update_best.pt", "update_00000120_keep.pt", "update_120.pt", "update_0000000120.pt", "update_x.pt.sha256"]
    foreign = {name: name.encode() for name in (".DS_Store", "notes.txt", "update_notes.tmp", *odd)}
    for name, content in foreign.items():
        (folder / name).write_bytes(content)
    checkpoints = Checkpoints(folder, keep=1)
    for update in (1, 2):
        save(checkpoints, update)
    (folder / "update_00000003.pt.77.tmp").touch()
    assert names(checkpoints) == ["update_00000002.pt"] and checkpoints.newest().name == "update_00000002.pt"
    checkpoints.remove_leftovers()
    own = {"update_00000002.pt", "update_00000002.pt.sha256"}
    assert set(os.listdir(folder)) == own | foreign.keys()

    metrics = tmp_path / "run.metrics.jsonl"
    metrics.write_text("of the first run")
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints.set_aside([metrics], [], [])
    old = tmp_path / "run_resume_old1"
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", old.name]
    assert set(os.listdir(old)) == own | foreign.keys() | {metrics.name}
    assert {name: (old / name).read_bytes() for name in foreign} == foreign


def test_weights_of_an_earlier_run_stay_until_those_of_the_fresh_one_replace_them(tmp_path):
    """It may begin with them, and be killed before it has saved any: then a second fresh run finds them too."""
    weights, network = tmp_path / "run.pth", tmp_path / "generator"
    network.mkdir()
    for path in (weights, network / "model.safetensors"):
        path.write_text("of the first run")
    checkpoints = Checkpoints(tmp_path / "run_resume")
    for _ in range(2):
        checkpoints.set_aside([], [weights, network], [])
        assert weights.exists() and os.listdir(network) == ["model.safetensors"]
        (tmp_path / "run_resume").mkdir(exist_ok=True)
    old = tmp_path / "run_resume_old1"
    assert sorted(os.listdir(tmp_path)) == ["generator", "run.pth", "run_resume", old.name]
    for path in (weights, network / "model.safetensors"):
        replacement = tmp_path / "new"
        replacement.write_text("of the fresh run")
        os.replace(replacement, path)
    assert (old / "run.pth").read_text() == (old / "generator" / "model.safetensors").read_text() == "of the first run"


def test_an_old_run_that_somebody_has_renamed_back_loses_nothing(tmp_path):
    metrics, folder = tmp_path / "run.metrics.jsonl", tmp_path / "run_resume"
    old = tmp_path / "run_resume_old1"
    checkpoints = Checkpoints(folder)
    for content in ("first", "second"):
        save(checkpoints, 1)
        metrics.write_text(content)
        checkpoints.set_aside([metrics], [], [])
        os.rename(old, folder)
    assert (folder / metrics.name).read_text() == "second"
    assert (folder / f"{metrics.name}.before").read_text() == "first"
