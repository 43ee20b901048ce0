"""Kill -9 and stops at chosen and random moments; the reference is a run that nobody disturbed."""

import time
from functools import partial

import pytest

from tests.chats import write_chats
from tests.faults.harness import rising, seeded_random
from trainer.saving.checkpoint import load_checkpoint, verified

INTERVAL = 3  # updates between saves: --save_interval 6 micro-batches, two of them an update


def check_readable(lab, name):
    """Every checkpoint with its final name is whole; returns the newest one's update, 0 without any."""
    paths = lab.checkpoints(name)
    for path in paths:
        assert verified(path)
        load_checkpoint(path)
    return load_checkpoint(paths[0])["progress"]["update"] if paths else 0


def check_killed(lab, name):
    """After a kill: nothing unreadable, and lost work bounded: a save is complete at the latest when the next one begins."""
    assert lab.log_lines(name) // 2 - check_readable(lab, name) <= 2 * INTERVAL


@pytest.mark.parametrize("num_workers", [0, 2])
def test_kill_9_at_random_points(lab, whole, num_workers):
    """Four times, by turns within a save and anywhere. The lock is free at once, also where loader processes are at work."""
    generator = seeded_random(f"kills {num_workers}")
    inside = 0
    for number in range(4):
        begun = lab.log_lines("run")
        in_save = number % 2 == 0
        hooks = {"slow_save": {"seconds": 0.5}} if in_save else {}
        hooks["slow_updates"] = {"seconds": 0.02}
        process = lab.start("run", hooks, from_resume=1, num_workers=num_workers)
        is_there = partial(lab.is_saving, "run") if in_save else lambda begun=begun: lab.log_lines("run") > begun
        process.until(is_there)
        time.sleep(generator.uniform(0, 0.1))
        process.kill()
        assert process.wait() in (0, -9), process.err
        inside += lab.is_saving("run")
        check_killed(lab, "run")
    lab.finish(whole)
    assert inside > 0


@pytest.mark.parametrize("call, at", [("replace", 7), ("replace", 9), ("replace", 10), ("fsync", 3)])
def test_kill_9_before_each_system_call_of_a_save(lab, whole, call, at):
    """The first five are of the start; then config, weights, digest, checkpoint; then the next save's."""
    assert lab.start("run", {"kill_at_call": {"name": call, "at": at}}).wait() == -9
    check_killed(lab, "run")
    lab.finish(whole)


@pytest.mark.parametrize(
    "use_moe, pack, dtype, world_size",
    [
        (True, 1, "bfloat16", 1),
        pytest.param(False, 1, "bfloat16", 2, marks=pytest.mark.slow),
        pytest.param(True, 0, "float32", 2, marks=pytest.mark.slow),
    ],
)
def test_kill_9_and_exact_resume(new_lab, use_moe, pack, dtype, world_size):
    """Killed once and stopped twice, at moments that are no saves: the same bits and lines, of the lowest validation loss too."""
    lab = new_lab(use_moe=use_moe, pack=pack, dtype=dtype)
    lab.settings.update(rising(lab.folder), eval_interval=7, num_key_value_heads=2, dropout=0.1)
    bfloat16 = {"any_cpu_has_bfloat16": {}}
    lab.run_ranks("whole", world_size, hooks=bfloat16)
    end = lab.state("whole")["progress"]["update"]
    assert lab.best("whole")
    for update, name in ((2, "SIGTERM"), (end // 2, "SIGKILL"), (end - 2, "SIGTERM")):
        hooks = {**bfloat16, "signal_at": {"updates": [update], "name": name}}
        if world_size == 1:
            assert lab.start("run", hooks, from_resume=1).wait() == (143 if name == "SIGTERM" else -9)
        else:
            for process in lab.start_ranks("run", world_size, hooks, from_resume=1):
                assert process.wait() not in (0, 2)
    lab.finish(world_size=world_size, hooks=bfloat16)


@pytest.mark.parametrize(("update", "name"), [(1, "SIGTERM"), (10, "SIGKILL"), (20, "SIGTERM")])
def test_awkward_stops(lab, whole, update, name):
    """Step 1, epoch end, the last one (20 updates, 10 an epoch)."""
    assert whole.state("whole")["progress"]["update"] == 20
    process = lab.start("run", {"signal_at": {"updates": [update], "name": name}})
    assert process.wait() == (143 if name == "SIGTERM" else -9)
    if name == "SIGTERM":
        assert check_readable(lab, "run") == update
        lab.finish(whole)
    else:
        metrics = lab.stem("run").with_suffix(".metrics.jsonl")
        metrics.write_bytes(metrics.read_bytes() + b'{"step": 3, "upd')  # a line that was cut off
        lab.finish(whole, num_workers=2)


def test_awkward_stops_a_finished_run_trains_nothing(lab):
    """It ends its records, though: a kill behind the last save has left out their last line. The .json names the weights before too."""
    shares = {"data_path": f"{lab.corpus}:1"}
    lab.run("run", **shares)
    metrics = lab.stem("run").with_suffix(".metrics.jsonl")
    paths = [path for path in metrics.parent.rglob("*") if path.is_file() and path.suffix != ".json"]
    before = {path: path.read_bytes() for path in paths}
    metrics.write_bytes(before[metrics][: before[metrics].rindex(b'{"step"')])
    again = lab.run("run", from_resume=1, hooks={"fail_at": {"updates": list(range(1, 99)), "kind": "raise"}}, **shares)
    assert "nothing to do" in again.out
    assert before == {path: path.read_bytes() for path in paths}


def test_killed_between_save_and_prune(lab, whole):
    """--keep_checkpoints 1, three times."""
    for _ in range(3):
        assert lab.start("run", {"kill_in_prune": {}}, keep_checkpoints=1, from_resume=1).wait() == -9
        assert check_readable(lab, "run") > 0
    lab.finish(whole, keep_checkpoints=1)


def test_a_fine_tuning_that_is_killed_ends_as_one_that_is_not(lab):
    """The tokenizer has a token for each byte, so rows are long."""
    lab.trainer, lab.prefix = "train_sft", "full_sft"
    lab.corpus = write_chats(lab.folder / "chats.jsonl", 60, most_words=3)
    lab.settings.update(from_weight="none", max_seq_len=96, learning_rate=1e-3)
    lab.run("whole")
    assert lab.start("run", {"signal_at": {"updates": [7], "name": "SIGKILL"}}).wait() == -9
    lab.finish()
