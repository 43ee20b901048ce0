"""What --from_resume 1 does with what it finds, and what a fresh run or a second one does with what is there."""

import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests.faults.harness import digest
from trainer.saving.checkpoint import digest_line, verified
from trainer.saving.weights import save_with_digest


@pytest.fixture(scope="module")
def stopped(new_lab):
    """The folder of a run that was stopped after update 5, to be copied."""
    lab = new_lab()
    assert lab.start("run", {"signal_at": {"updates": [5]}}).wait() == 143
    return lab.folder / "run"


def test_more_epochs_are_announced(lab, whole):
    """A finished run goes on; the learning rate follows the new schedule, and each update is there once."""
    shutil.copytree(whole.folder / "whole", lab.folder / "run")
    # as written before there was dropout, or this flag
    state = lab.state("run")
    del state["identity"]["architecture"]["dropout"], state["settings"]["grad_clip"]
    path = lab.checkpoints("run")[0]
    save_with_digest(state, path, Path(f"{path}.sha256"), lambda digest: digest_line(path, digest))
    process = lab.run("run", from_resume=1, epochs=3)
    assert "--epochs is 3, was 2 before the resume" in process.out and "--grad_clip" not in process.out
    steps = [line["step"] for line in lab.metrics("run") if "loss" in line]
    assert steps == list(range(3 * 19)) and lab.state("run")["progress"]["update"] == 30


def test_a_fresh_run_sets_the_old_one_aside(lab, whole, stopped):
    """Nothing is deleted; copied back with its metrics and weights, it resumes."""
    shutil.copytree(stopped, lab.folder / "run")
    weights = Path(f"{lab.stem('run')}.pth").read_bytes()
    kept = {path.name: digest(list(path.read_bytes())) for path in lab.checkpoints("run")}
    lines = lab.stem("run").with_suffix(".metrics.jsonl").read_text()
    for number in (1, 2):
        process = lab.run("run", seed=number)
        old = lab.stem("run").parent / f"pretrain_32_resume_old{number}"
        assert str(old) in process.out
    old = lab.stem("run").parent / "pretrain_32_resume_old1"
    assert {path.name: digest(list(path.read_bytes())) for path in old.glob("update_*.pt")} == kept
    assert all(map(verified, old.glob("update_*.pt")))
    assert (old / "pretrain_32.metrics.jsonl").read_text() == lines
    assert (old / "pretrain_32.pth").read_bytes() == weights

    # Copied into the place of another run, it resumes.
    stem = lab.stem("again")
    shutil.copytree(old, f"{stem}_resume")
    for path in Path(f"{stem}_resume").glob("pretrain_32.*"):
        path.rename(stem.with_name(path.name))
    lab.run("again", from_resume=1)
    assert lab.result("again") == whole.result("whole")


def test_a_resume_without_checkpoints_keeps_what_is_there(lab, whole):
    lab.run("run")
    stem = lab.stem("run")
    metrics, weights = (Path(f"{stem}.{kind}").read_bytes() for kind in ("metrics.jsonl", "pth"))
    shutil.rmtree(f"{stem}_resume")
    assert "starting afresh" in lab.run("run", seed=9, from_resume=1).out
    old = Path(f"{stem}_resume_old1")
    assert [(old / f"{stem.name}.{kind}").read_bytes() for kind in ("metrics.jsonl", "pth")] == [metrics, weights]
    assert Path(f"{stem}.metrics.jsonl").read_text().count('"settings"') == 1


@pytest.mark.parametrize(
    "call, at",
    [("link", 1), ("replace", 5), ("unlink", 7)]
    + [pytest.param(*place, marks=pytest.mark.slow) for place in (("link", 3), ("unlink", 8))],
)
def test_a_fresh_run_killed_while_it_sets_the_old_one_aside(lab, whole, stopped, call, at):
    """Before the move and behind it: the next start goes on with the old run, or has all of it in one folder."""
    shutil.copytree(stopped, lab.folder / "run")
    stem, folder = lab.stem("run"), Path(f"{lab.stem('run')}_resume")
    before = {path.name: path.read_bytes() for path in (*stem.parent.glob(f"{stem.name}.*"), *folder.iterdir())}
    assert lab.start("run", {"kill_at_call": {"name": call, "at": at}}).wait() == -9
    has_moved = call == "unlink"
    assert folder.exists() is not has_moved
    lab.finish(whole)
    kept = {path.name: path.read_bytes() for path in stem.parent.glob("*_old*/*")}
    assert kept == (before if has_moved else {})
    assert [path.name for path in stem.parent.glob("*_old*")] == ["pretrain_32_resume_old1"] * has_moved


@pytest.mark.slow
def test_a_second_run_is_refused_and_the_first_goes_on(lab, whole):
    first = lab.start("run", {"slow_updates": {"seconds": 0.3}})
    assert first.until(lambda: lab.log_lines("run") > 0)
    second = lab.run("run", expect=2, save_interval=5)
    assert f"process {first.pid} on '{socket.gethostname()}'" in second.err and second.err.count("\n") == 1
    assert first.wait(60) == 0
    assert lab.result("run") == whole.result("whole")
    assert sorted(path.name for path in (lab.folder / "run").glob(".*")) == [".pretrain_32.lock"]


@pytest.mark.slow
def test_wandb_continues_the_same_run(lab):
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(lab.folder), "WANDB_SILENT": "true"}
    first = lab.start("run", {"signal_at": {"updates": [4]}}, environment, use_wandb=1)
    assert first.wait(300) == 128 + signal.SIGTERM, first.err
    wandb_id = lab.state("run")["progress"]["tracker_ids"]["wandb"]
    lab.run("run", environment=environment, use_wandb=1, from_resume=1)
    assert lab.state("run")["progress"]["tracker_ids"] == {"wandb": wandb_id}
    folders = {path.name for path in lab.folder.glob("wandb/offline-run-*")}
    assert len(folders) == 2 and all(name.endswith(wandb_id) for name in folders)
