"""Runs whose ranks have parts of the model, which save folders of parts: killed, damaged, gone on with by other ranks."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.faults.harness import Lab, digest, rising, whole_state
from tests.faults.test_damage import malicious
from trainer.saving.checkpoint import Checkpoints, verified
from trainer.saving.parts import PARTS, RUN, SUMS

# Micro-batches of 2 rows on 2 ranks: 5 updates an epoch, a save after every third.
SETTINGS = {"shard": "full", "epochs": 3}


@pytest.fixture(scope="module")
def sharded(scratch, server, tokenizer, corpus):
    """A run of two ranks that nothing disturbed: its Lab; the run is called "whole"."""
    folder = scratch / "sharded"
    folder.mkdir()
    lab = Lab(folder, server, tokenizer, corpus, **SETTINGS)
    lab.run_ranks("whole")
    return lab


def what_moves_on(state):
    """Digests of weights, moments and progress. (The rates of an optimiser are those of a run until its first update.)"""
    optimizer = state["engine"]["optimizer"]
    moments = [part["state"] for part in optimizer.get("optimizers", [optimizer])]
    assert all(moments)
    return [digest(part) for part in (state["model"], moments, state["progress"])]


# ------------------------------------------------------------------------------------------------ other ranks


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_moments_and_progress_move_on_bit_for_bit(lab, optimizer):
    """Saved by 2 ranks, and saved again by each of these right after the resume: SHA-256 of all of it."""
    lab.settings.update(SETTINGS, optimizer=optimizer, rows_per_update=8, accumulation_steps=None)
    lab.run_ranks("run", hooks={"signal_at": {"updates": [4]}}, expect=143)
    before = what_moves_on(lab.state("run"))
    for world_size, shard in ((1, "full"), (3, "full"), (2, "full"), (4, "2"), (2, "none"), (2, "full")):
        processes = lab.run_ranks("run", world_size, hooks={"save_again": {}}, from_resume=1, shard=shard)
        assert "resumed from" in processes[0].out
        assert what_moves_on(lab.state("run")) == before, (world_size, shard)
        assert lab.checkpoints("run")[0].is_dir() == (world_size > 1 and shard != "none")


def test_one_process_goes_on_with_what_two_ranks_have_saved(lab):
    lab.settings.update(SETTINGS, rows_per_update=8, accumulation_steps=None, epochs=2)
    lab.settings.update(rising(lab.folder), eval_interval=2)
    lab.run_ranks("run", hooks={"signal_at": {"updates": [4]}}, expect=143)
    path = lab.checkpoints("run")[0]
    best = lab.best("run")
    assert best
    weights = lab.state("run")["model"]
    # The half-precision file is as any other run leaves it.
    for name, tensor in torch.load(f"{lab.stem('run')}.pth", weights_only=True).items():
        assert torch.equal(tensor, weights[name].half())
    process = lab.run("run", from_resume=1, shard="none")
    assert f"resumed from {path}" in process.out and not lab.checkpoints("run")[0].is_dir()
    assert lab.best("run") == best


# ------------------------------------------------------------------------------------------------ kill -9


def kill_at_each_call(lab, sharded, rank):
    """Kill a rank at one call of a save after the other, each time from the same checkpoint. What is left has it, or the one that
    was being saved, and a resume goes on from there. Returns the updates of these.

    Of calls that repeat the one before, as the writes of sixty tensors to one file do, the first and the last count.
    """
    # So a save deletes the checkpoint before.
    lab.settings.update(SETTINGS, keep_checkpoints=1)
    lab.run_ranks("before", hooks={"signal_at": {"updates": [1]}}, expect=143)
    begun = (lab.folder / "before", lab.folder / "run")
    shutil.copytree(*begun)
    processes = lab.run_ranks("run", hooks={"kill_in_save": {"at": 0, "rank": rank}}, from_resume=1)
    calls = json.loads(re.search(r"calls in a save: (.*)", processes[rank].out).group(1))
    # From 1, as the hook counts them
    chosen = [at for at, call in enumerate(calls, 1) if not calls[at - 2 : at - 1] == [call] == calls[at : at + 1]]
    assert lab.result("run") == sharded.result("whole")
    found = []
    names = set()
    for at in chosen:
        shutil.rmtree(lab.folder / "run")
        shutil.copytree(*begun)
        processes = lab.start_ranks("run", hooks={"kill_in_save": {"at": at, "rank": rank}}, from_resume=1)
        codes = [process.wait() for process in processes]
        assert codes[rank] == -9 and codes[1 - rank] not in (0, -9), (at, codes)
        assert "calls in a save" not in processes[rank].out, "the save was over"
        # A folder with its own name is whole, whenever that was.
        assert all(map(verified, lab.checkpoints("run")))
        update = whole_state(lab.checkpoints("run")[0])["progress"]["update"]
        found.append(update)
        # A resume goes by what is there; many calls leave the same files behind.
        paths = (path.relative_to(lab.folder) for path in (lab.folder / "run").rglob("*"))
        # The names of temporaries have a random part, or the number of a process.
        left = frozenset(re.sub(r"\.\w+\.tmp", ".tmp", path.as_posix()) for path in paths)
        if left not in names:
            names.add(left)
            processes = lab.run_ranks("run", hooks={"save_again": {}}, from_resume=1)
            assert f"update {update}\n" in processes[0].out, "it went on from another checkpoint"
            assert lab.leftovers("run") == []
    lab.run_ranks("run", from_resume=1)
    assert lab.result("run") == sharded.result("whole")
    print(f"rank {rank}: killed at {len(chosen)} of the {len(calls)} calls of a save, {len(names)} sets of files left")
    return found


@pytest.mark.parametrize(("rank", "at"), [(0, 30), (1, 5)])
def test_kill_9_in_a_sharded_save(lab, sharded, rank, at):
    """The other rank notices and ends; resumed, both are where they would have been."""
    lab.settings.update(SETTINGS)
    lab.run_ranks("run", hooks={"signal_at": {"updates": [1]}}, expect=143)
    processes = lab.start_ranks("run", hooks={"kill_in_save": {"at": at, "rank": rank}}, from_resume=1)
    assert processes[rank].wait() == -9 and processes[1 - rank].wait() not in (0, -9)
    processes = lab.run_ranks("run", from_resume=1)
    assert "update 1\n" in processes[0].out
    assert lab.result("run") == sharded.result("whole")
    assert lab.leftovers("run") == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_at_each_system_call_of_a_sharded_save(lab, sharded, rank):
    found = kill_at_each_call(lab, sharded, rank)
    # The rename is one of them: before it the older checkpoint is the newest, behind it the one that was saved.
    assert found[0] == 1 and found == sorted(found)
    # Whether rank 0 gives the name is up to both: it waits for the parts of the other.
    assert (found[-1] > 1) == (rank == 0)


@pytest.mark.slow
def test_no_update_is_lost_where_the_last_samples_fail(lab):
    """They need a whole model on rank 0. A resume evaluates and samples again, and trains nothing."""
    lab.settings.update(SETTINGS, val_fraction=0.2, sample_prompts="cat")
    lab.run_ranks("whole")
    processes = lab.start_ranks("run", hooks={"fail_in_last_samples": {}})
    codes = [process.wait() for process in processes]
    assert codes[0] != 0 and codes[1] != 0 and "planted failure" in processes[0].err
    assert lab.checkpoints("run")[0].name == lab.checkpoints("whole")[0].name
    lab.run_ranks("run", from_resume=1)
    run, whole = lab.result("run"), lab.result("whole")
    # The optimiser has no rate yet where no update was done.
    assert what_moves_on(lab.state("run")) == what_moves_on(lab.state("whole"))
    assert run["half"] == whole["half"] and run["metrics"] == whole["metrics"]
    assert any("text" in line for line in lab.metrics("run"))


# ------------------------------------------------------------------------------------------------ damage


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def renew_digests(folder):
    names = sorted(set(os.listdir(folder)) - {SUMS})
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines))


DAMAGE = {
    "flipped bit": lambda folder, ran: flipped(folder / "__1_0.distcp"),
    "truncated": lambda folder, ran: os.truncate(folder / "__0_0.distcp", 1000),
    "missing": lambda folder, ran: (folder / "__1_0.distcp").unlink(),
    "extra": lambda folder, ran: (folder / "__9_0.distcp").write_bytes(b"x"),
    "payload among the metadata": lambda folder, ran: (folder / PARTS).write_bytes(malicious(ran, as_zip=True)),
    "payload in the rest": lambda folder, ran: (folder / RUN).write_bytes(malicious(ran, as_zip=False)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_falls_back_and_ends_where_nothing_is_intact(lab, sharded, kind):
    """By one process, or for each second kind by two ranks, which have to agree."""
    shutil.copytree(sharded.folder / "whole", lab.folder / "run")
    lab.settings.update(SETTINGS)
    world_size = 1 + list(DAMAGE).index(kind) % 2
    ran = lab.folder / "ran"
    newest, before = lab.checkpoints("run")
    for path in (newest, before):
        DAMAGE[kind](path, ran)
        if "payload" in kind:
            renew_digests(path)
        if path == newest:
            processes = lab.run_ranks("run", world_size, hooks={"save_again": {}}, from_resume=1)
            assert f"{newest}: " in processes[0].out and "passed over" in processes[0].out
            assert f"resumed from {before}" in processes[0].out
            # What was saved again takes the place of the one that was good.
            for saved in lab.checkpoints("run"):
                if saved not in (newest, before):
                    saved.unlink()
            assert lab.checkpoints("run")[-1] == before
    for path in lab.checkpoints("run"):
        assert path in (newest, before)
    processes = lab.run_ranks("run", world_size, expect=2, from_resume=1)
    assert processes[0].err.count("\n") == 1 and "checkpoints is intact" in processes[0].err
    assert all(process.err == "" for process in processes[1:])
    assert not ran.exists()


def test_a_full_disk_on_any_rank_is_told_and_training_goes_on(lab, sharded):
    """The second save fails on rank 1: rank 0 names the file, the checkpoint before is intact, and the end is the same."""
    lab.settings.update(SETTINGS)
    hooks_of_rank = {1: {"full_disk": {"at_save": 2, "offset": 5_000}}}
    processes = lab.run_ranks("run", hooks_of_rank=hooks_of_rank)
    assert "the save before this one failed" in processes[0].out and "__1_0.distcp" in processes[0].out
    assert "no space left" in processes[0].out.lower() and processes[1].out == ""
    assert lab.leftovers("run") == [] and all(map(verified, lab.checkpoints("run")))
    assert lab.result("run") == sharded.result("whole")


def test_files_of_another_run_in_the_folder_are_no_checkpoints(tmp_path):
    for name in ("update_", "update_x", "update_00000001.tmp", "update_00000002.before"):
        (tmp_path / name).mkdir()
    Path(tmp_path, "update_00000003").write_bytes(b"")
    assert Checkpoints(tmp_path).newest(lambda text: None) is None
