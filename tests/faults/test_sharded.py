"""Runs whose ranks have parts of the model: killed in a save, gone on with by other ranks. Their checkpoints are those of any run."""

import pytest
import torch

from tests.faults.harness import digest, rising

# Micro-batches of 2 rows on 2 ranks: 5 updates an epoch, a save after every third.
SETTINGS = {"shard": "full", "epochs": 3}


def what_moves_on(state):
    """Digests of weights, moments and progress. (The rates of an optimiser are those of a run until its first update.)"""
    optimizer = state["engine"]["optimizer"]
    moments = [part["state"] for part in optimizer.get("optimizers", [optimizer])]
    assert all(moments)
    return [digest(part) for part in (state["model"], moments, state["progress"])]


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


def test_one_process_goes_on_with_what_two_ranks_have_saved(lab):
    lab.settings.update(SETTINGS, rows_per_update=8, accumulation_steps=None, epochs=2)
    lab.settings.update(rising(lab.folder), eval_interval=2)
    # Behind the lowest validation loss, which is that of update 5
    lab.run_ranks("run", hooks={"signal_at": {"updates": [7]}}, expect=143)
    path = lab.checkpoints("run")[0]
    best = lab.best("run")
    assert best
    weights = lab.state("run")["model"]
    # The half-precision file is as any other run leaves it.
    for name, tensor in torch.load(f"{lab.stem('run')}.pth", weights_only=True).items():
        assert torch.equal(tensor, weights[name].half())
    process = lab.run("run", from_resume=1, shard="none")
    assert f"resumed from {path}" in process.out
    assert lab.best("run") == best


def test_kill_9_in_a_sharded_save(lab):
    """The other rank notices and ends; resumed, both are where they would have been."""
    # There is no launcher here that would end the other rank.
    lab.settings.update(SETTINGS, dist_timeout=10)
    lab.run_ranks("whole")
    # Before the checkpoint of update 3 gets its name
    kill = {"kill_at_call": {"name": "replace", "at": 3}}
    processes = lab.start_ranks("run", hooks_of_rank={0: kill})
    assert processes[0].wait() == -9 and processes[1].wait() == 1
    processes = lab.run_ranks("run", from_resume=1)
    assert lab.result("run") == lab.result("whole") and lab.leftovers("run") == []
