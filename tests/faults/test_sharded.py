"""Runs whose ranks have parts of the model, each of which saves its own: killed, damaged, gone on with by other ranks."""

import hashlib
import shutil

import pytest
import torch

from tests.faults.harness import Lab, digest, rising
from tests.faults.test_damage import malicious
from trainer.saving.checkpoint import verified

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


def parts_of(checkpoint):
    return sorted(checkpoint.parent.glob(f"{checkpoint.stem}.*.part"))


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
    for world_size, shard in ((1, "full"), (3, "full"), (2, "none"), (2, "full")):
        processes = lab.run_ranks("run", world_size, hooks={"save_again": {}}, from_resume=1, shard=shard)
        assert "resumed from" in processes[0].out
        assert what_moves_on(lab.state("run")) == before, (world_size, shard)
        assert bool(parts_of(lab.checkpoints("run")[0])) == (world_size > 1 and shard != "none")


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
    assert f"resumed from {path}" in process.out and not parts_of(lab.checkpoints("run")[0])
    assert lab.best("run") == best


# ------------------------------------------------------------------------------------------------ kill -9


@pytest.mark.parametrize(("rank", "at"), [(0, 5), pytest.param(1, 5, marks=pytest.mark.slow)])
def test_kill_9_in_a_sharded_save(lab, sharded, rank, at):
    """The other rank notices and ends; resumed, both are where they would have been."""
    # There is no launcher here that would end the other rank.
    lab.settings.update(SETTINGS, dist_timeout=10)
    lab.run_ranks("run", hooks={"signal_at": {"updates": [1]}}, expect=143)
    processes = lab.start_ranks("run", hooks={"kill_in_save": {"at": at, "rank": rank}}, from_resume=1)
    assert processes[rank].wait() == -9 and processes[1 - rank].wait() not in (0, -9)
    processes = lab.run_ranks("run", from_resume=1)
    assert "update 1\n" in processes[0].out
    assert lab.result("run") == sharded.result("whole")
    assert lab.leftovers("run") == []


# ------------------------------------------------------------------------------------------------ damage


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped bit": lambda path: flipped(parts_of(path)[1]),
    "missing": lambda path: parts_of(path)[1].unlink(),
    "of the other": lambda path: shutil.copy(*parts_of(path)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_falls_back_and_ends_where_nothing_is_intact(lab, sharded, kind):
    """By one process, or for each second kind by two ranks, which have to agree."""
    shutil.copytree(sharded.folder / "whole", lab.folder / "run")
    lab.settings.update(SETTINGS)
    world_size = 1 + list(DAMAGE).index(kind) % 2
    newest, before = lab.checkpoints("run")
    DAMAGE[kind](newest)
    processes = lab.run_ranks("run", world_size, hooks={"save_again": {}}, from_resume=1)
    assert f"{newest}: " in processes[0].out and "passed over" in processes[0].out
    assert f"resumed from {before}" in processes[0].out
    shutil.rmtree(lab.folder / "run")
    shutil.copytree(sharded.folder / "whole", lab.folder / "run")
    for path in (newest, before):
        DAMAGE[kind](path)
    processes = lab.run_ranks("run", world_size, expect=2, from_resume=1)
    assert processes[0].err.count("\n") == 1 and "checkpoints is intact" in processes[0].err
    assert all(process.err == "" for process in processes[1:])


@pytest.mark.parametrize("in_part", [False, True])
def test_a_payload_is_never_run(lab, sharded, in_part):
    """With digests that hold."""
    shutil.copytree(sharded.folder / "whole", lab.folder / "run")
    lab.settings.update(SETTINGS)
    ran, path = lab.folder / "ran", lab.checkpoints("run")[0]
    bad = parts_of(path)[0] if in_part else path
    bad.write_bytes(malicious(ran, as_zip=True))
    files = [path, *parts_of(path)]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    path.with_name(f"{path.name}.sha256").write_text("".join(lines))
    process = lab.run("run", expect=2, from_resume=1)
    assert process.err.count("\n") == 1 and str(bad) in process.err and not ran.exists()


@pytest.mark.slow
def test_a_full_disk_on_any_rank_is_told_and_training_goes_on(lab, sharded):
    """The second save fails on rank 1: rank 0 names the file, the checkpoint before is intact, and the end is the same."""
    lab.settings.update(SETTINGS)
    hooks_of_rank = {1: {"full_disk": {"at_save": 2, "offset": 5_000}}}
    processes = lab.run_ranks("run", hooks_of_rank=hooks_of_rank)
    assert "the save before this one failed" in processes[0].out and ".1.part" in processes[0].out
    assert "no space left" in processes[0].out.lower() and processes[1].out == ""
    assert lab.leftovers("run") == [] and all(map(verified, lab.checkpoints("run")))
    assert lab.result("run") == sharded.result("whole")
