"""Loader processes that die, find damaged data or meet a full machine. The reference is an undisturbed run."""

import re

import pytest

from trainer.saving.checkpoint import verified

OUT_WITHIN_S = 20


def only_line(process):
    """What a run wrote to stderr: one line, no traceback."""
    lines = process.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), process.err
    return lines[0]


def test_a_loader_process_is_killed(lab, whole):
    process = lab.start("run", {"kill_worker_at": {"updates": [3]}}, num_workers=1)
    assert process.wait(OUT_WITHIN_S) == 1
    assert "was killed by SIGKILL" in only_line(process)
    update = lab.state("run")["progress"]["update"]
    assert update >= 3 and verified(lab.checkpoints("run")[0])
    assert f"after update {update}; everything is saved" in process.out
    lab.finish(whole)


@pytest.mark.parametrize("workers, batch, update", [(0, 14, 6), (1, 1, 0)])
def test_a_batch_cannot_be_assembled(lab, whole, workers, batch, update):
    """In the trainer's process and in a worker: the updates before it are saved, none is left half done."""
    process = lab.start("run", {"bad_batch": {"at": batch}}, num_workers=workers)
    assert process.wait(OUT_WITHIN_S) == 2
    line = only_line(process)
    wanted = r"a batch cannot be assembled \(\w+Error in \w+.py:\d+: .*\): .* delete the folder .token_store"
    assert re.search(wanted, line), line
    if update:
        assert lab.state("run")["progress"]["update"] == update
    else:
        assert lab.checkpoints("run") == []
        assert "after update 0; no checkpoint was saved yet" in process.out
    lab.finish(whole)


@pytest.mark.parametrize(
    "hooks, updates",
    [({"kill_worker_at": {"updates": [2], "rank": 1}}, range(2, 9)), ({"bad_batch": {"at": 11, "rank": 1}}, [10])],
)
def test_two_ranks_stop_together(lab, hooks, updates):
    """One rank gets no more batches, or none of the second epoch: both save and end after the same update, and go on from there."""
    lab.run_ranks("whole", num_workers=1, accumulation_steps=1)
    processes = lab.start_ranks("run", hooks=hooks, num_workers=1, accumulation_steps=1, save_interval=100)
    assert [process.wait(OUT_WITHIN_S) for process in processes] == [2, 2 if "bad_batch" in hooks else 1]
    assert only_line(processes[1]) and processes[0].err == ""
    update = lab.state("run")["progress"]["update"]
    assert update in updates and f"after update {update}; everything is saved" in processes[0].out
    lab.run_ranks("run", from_resume=1, num_workers=1, accumulation_steps=1)
    assert lab.result("run")["state"] == lab.result("whole")["state"]


def test_small_machines_train_all_the_same(lab, whole):
    """Batches need neither /dev/shm nor an open file each."""
    hooks = {"shared_memory_is_full": {}, "limit": {"name": "RLIMIT_NOFILE", "value": 40}}
    process = lab.start("run", hooks, num_workers=2)
    assert process.wait(30) == 0, process.err
    assert lab.result("run") == whole.result("whole")
