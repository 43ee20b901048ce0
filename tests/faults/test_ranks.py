"""Other worker counts, world sizes and launches, lost ranks, compiled models, and ranks that have parts of the model."""

import math
import shutil
import socket
import subprocess

import pytest
import torch

from tests.faults.harness import digest, make_corpus, rank_environments, rising, start_torchrun
from tests.helpers import wait_until
from trainer.saving.checkpoint import load_checkpoint

# Micro-batches of 2 rows on 2 ranks: 5 updates an epoch, a save after every third.
SHARDED = {"shard": "full", "epochs": 3}


def ledgers_agree(one, other, rel_tol=1e-6):
    assert list(one) == list(other)
    for update, (pieces, loss) in one.items():
        assert pieces == other[update][0]
        assert math.isclose(loss, other[update][1], rel_tol=rel_tol)


@pytest.mark.parametrize(
    ("settings", "accumulation_steps"),
    [
        # The micro-batches of 2 rows do not divide an update's.
        ({"rows_per_update": 10, "warmup_iters": 12}, {1: None, 2: None, 3: None}),
        pytest.param({"pack": 0}, {1: 4, 2: 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_updates_are_the_same_on_any_world_size(lab, settings, accumulation_steps):
    """2, 1 and 3 ranks, or 2 again; compared with one rank that is never stopped."""
    lab.settings.update(settings, accumulation_steps=accumulation_steps[1])
    lab.run("whole", hooks={"ledger": {"path": str(lab.folder / "one")}})
    ledger = {"ledger": {"path": str(lab.folder / "ledger")}}
    for world_size, update in ((2, 2), (1, 5)):
        stop = {**ledger, "signal_at": {"updates": [update]}}
        lab.settings["accumulation_steps"] = accumulation_steps[world_size]
        for process in lab.run_ranks("run", world_size, hooks=stop, expect=143, from_resume=1):
            assert "warning" not in process.out
            assert "accumulation_steps is" not in process.out or settings == {"pack": 0}
    last, lab.settings["accumulation_steps"] = max(accumulation_steps.items())
    lab.run_ranks("run", last, hooks=ledger, from_resume=1)
    lab.check_ledger(lab.folder / "ledger", epochs=2)
    ledgers_agree(lab.ledger(lab.folder / "ledger"), lab.ledger(lab.folder / "one"))
    # Rates too: with others the weights would end elsewhere.
    ends = [lab.state(name)["model"] for name in ("run", "whole")]
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-3, atol=1e-5)


def run_apart(lab, of_rank_1, **changes):
    """Two ranks, of which the second one has other flags; their processes, which have ended."""
    first, second = rank_environments(2)
    processes = [lab.start("run", None, first, **changes), lab.start("run", None, second, **{**changes, **of_rank_1})]
    assert [process.wait() for process in processes] == [2, 2]
    assert processes[1].err == "" and processes[0].err.count("\n") == 1
    return processes


def test_ranks_with_other_flags_are_told(lab):
    processes = run_apart(lab, {"batch_size": 7, "num_workers": 1})
    assert f"rank 1 on '{socket.gethostname()}' has --batch_size 7 (rank 0: " in processes[0].err
    assert "num_workers" not in processes[0].err and lab.checkpoints("run") == []


@pytest.mark.slow
def test_ranks_with_other_data_are_told(lab):
    """Another file of the same name, as an outdated copy on another machine. The same data elsewhere is accepted."""
    (lab.folder / "copy").mkdir()
    copy = lab.folder / "copy" / lab.corpus.name
    shutil.copy(lab.corpus, copy)
    environments = rank_environments(2)
    processes = [lab.start("run", None, environments[0]), lab.start("run", None, environments[1], data_path=copy)]
    assert [process.wait() for process in processes] == [0, 0]
    make_corpus(copy, seed=1)
    for flag, what in (("data_path", "data"), ("val_path", "validation data")):
        processes = run_apart(lab, {flag: copy}, val_path=lab.corpus, allow_val_overlap=1)
        assert "rank 1 on " in processes[0].err and f" has {what} " in processes[0].err


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1])
def test_ranks_that_see_other_checkpoints_are_told(lab, seed):
    """As on machines without a shared disk, where one would begin afresh, or with a run of its own, while the other goes on."""
    elsewhere = lab.folder / "elsewhere"
    lab.run("run", epochs=1)
    if seed is not None:
        lab.run("run", epochs=1, seed=seed, out_dir=elsewhere)
    processes = run_apart(lab, {"out_dir": elsewhere}, from_resume=1)
    assert "has checkpoint update_" in processes[0].err and "all ranks need one --out_dir" in processes[0].err


@pytest.mark.slow
def test_a_global_batch_that_cannot_be_kept(lab):
    ledger = {"ledger": {"path": str(lab.folder / "ledger")}}
    assert lab.start("run", {**ledger, "signal_at": {"updates": [3]}}).wait() == 143
    hooks = {**ledger, "signal_at": {"updates": [6]}}
    processes = lab.start_ranks("run", hooks=hooks, batch_size=3, from_resume=1)
    assert [process.wait() for process in processes] == [143, 143]
    assert "now covers 12 rows, before the resume it covered 4" in processes[0].out
    lab.run("run", hooks=ledger, accumulation_steps=1, from_resume=1)
    lab.check_ledger(lab.folder / "ledger", epochs=2)
    steps = [line["step"] for line in lab.metrics("run") if "loss" in line]
    assert steps == sorted(set(steps))


def left_running(lab):
    """Processes that have this lab's folder on their command line."""
    found = subprocess.run(["pgrep", "-f", f"launch.py.*{lab.folder}"], capture_output=True, text=True)
    return found.stdout.split()


@pytest.mark.slow
def test_restarted_by_torchrun(lab):
    lab.run_ranks("whole")
    kills = {"signal_at": {"updates": [3, 7], "name": "SIGKILL", "rank": 1, "once": str(lab.folder / "killed")}}
    launcher = start_torchrun(lab, "run", kills, "--max-restarts", "2", from_resume=1)
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, output
    assert {path.name for path in lab.folder.glob("killed.*")} == {"killed.3", "killed.7"}
    assert lab.result("run") == lab.result("whole")
    assert left_running(lab) == []


@pytest.mark.slow
def test_ranks_end_with_a_killed_launcher_and_the_next_one_goes_on(lab):
    lab.run_ranks("whole")
    launcher = start_torchrun(lab, "run", {"slow_updates": {"seconds": 0.2}}, from_resume=1)
    wait_until(lambda: lab.checkpoints("run"), seconds=240)
    launcher.kill()
    lab.run_ranks("run", from_resume=1)
    # The system takes a moment to remove a loader process whose trainer has just ended.
    wait_until(lambda: not left_running(lab), seconds=5)
    assert lab.result("run") == lab.result("whole")


@pytest.mark.parametrize("kind", ["raise", pytest.param("hang", marks=pytest.mark.slow)])
def test_peer_of_a_rank_that_fails(lab, kind):
    processes = lab.start_ranks("run", hooks={"fail_at": {"updates": [4], "kind": kind, "rank": 1}}, dist_timeout=3)
    assert processes[0].wait(30) == 1
    assert processes[0].err.startswith("error: another rank is gone, or silent for longer than --dist_timeout (")
    assert processes[0].err.count("\n") == 1 and "gloo/" not in processes[0].err
    processes[1].kill()
    processes[1].wait()
    lab.run_ranks("run", from_resume=1)


@pytest.mark.slow
def test_compiled_and_plain_take_turns(lab):
    """Compiled save, plain load, compiled resume: no key differs, and every resume goes on."""
    keys, update = set(), 0
    for i, compiled in enumerate((1, 0, 1)):
        update += 6
        last = i == 2
        hooks = {} if last else {"signal_at": {"updates": [update]}}
        process = lab.start("run", {"quick_compile": {}, **hooks}, use_compile=compiled, from_resume=1)
        assert process.wait() == (0 if last else 143), process.out + process.err
        state = load_checkpoint(lab.checkpoints("run")[0])
        keys.add((*state["model"], *torch.load(f"{lab.stem('run')}.pth", weights_only=True)))
        assert "without torch.compile" not in process.out
    assert len(keys) == 1 and not any("_orig_mod" in key or "module." in key for key in next(iter(keys)))


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
    lab.settings.update(SHARDED, optimizer=optimizer, rows_per_update=8, accumulation_steps=None)
    lab.run_ranks("run", hooks={"signal_at": {"updates": [4]}}, expect=143)
    before = what_moves_on(lab.state("run"))
    for world_size, shard in ((1, "full"), (3, "full"), (2, "none"), (2, "full")):
        processes = lab.run_ranks("run", world_size, hooks={"save_again": {}}, from_resume=1, shard=shard)
        assert "resumed from" in processes[0].out
        assert what_moves_on(lab.state("run")) == before, (world_size, shard)


def test_one_process_goes_on_with_what_two_ranks_have_saved(lab):
    lab.settings.update(SHARDED, rows_per_update=8, accumulation_steps=None, epochs=2)
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
    assert f"resumed from {path}" in lab.run("run", from_resume=1, shard="none").out
    assert lab.best("run") == best


def test_kill_9_in_a_sharded_save(lab):
    # There is no launcher here that would end the other rank.
    lab.settings.update(SHARDED, dist_timeout=10)
    lab.run_ranks("whole")
    # Before the checkpoint of update 3 gets its name
    kill = {"kill_at_call": {"name": "replace", "at": 9}}
    processes = lab.start_ranks("run", hooks_of_rank={0: kill})
    assert processes[0].wait() == -9 and processes[1].wait() == 1
    lab.finish(world_size=2)
