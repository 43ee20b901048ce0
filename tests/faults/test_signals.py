"""Stop signals at every kind of moment. The reference is a run that nobody disturbed."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.faults.harness import rank_environments, seeded_random, start_torchrun
from tests.helpers import wait_until
from trainer.saving.checkpoint import verified

OUT_WITHIN_S = 10


def stop(process, name, whole_group=False):
    """Send a stop signal; the seconds until the process is out, with the right code (0 if it had just trained to its end)."""
    start = time.monotonic()
    if whole_group:
        os.killpg(process.pid, getattr(signal, name))
    else:
        process.kill(getattr(signal, name))
    code = process.wait()
    assert code == 128 + getattr(signal, name) or code == 0 and "weights: " in process.out, process.out + process.err
    seconds = time.monotonic() - start
    assert seconds < OUT_WITHIN_S
    return seconds


def logged(lab, name):
    """Updates begun so far, as the metrics file tells (--log_interval 1, two micro-batches an update)."""
    return lab.log_lines(name) // 2


def check_saved(lab, name, process):
    """A checkpoint at the update at which the run says it stopped; nothing before it is lost."""
    update = lab.state(name)["progress"]["update"]
    assert f"after update {update}; everything is saved" in process.out
    assert update >= logged(lab, name)
    assert all(map(verified, lab.checkpoints(name))) and lab.leftovers(name) == []
    return update


def test_stop_signals_at_any_moment(lab, whole):
    generator = seeded_random("signals")
    options = {"hooks": {"slow_updates": {"seconds": 0.03}}, "num_workers": 2}
    for _ in range(4):
        begun = logged(lab, "run")
        process = lab.start("run", from_resume=1, **options)
        wanted = begun + generator.randint(0, 2)
        if process.until(lambda wanted=wanted: logged(lab, "run") > wanted):
            stop(process, generator.choice(("SIGTERM", "SIGINT", "SIGHUP")), whole_group=generator.random() < 0.5)
            if process.wait() != 0:
                check_saved(lab, "run", process)
        else:
            assert process.wait() == 0
    lab.finish(whole)


@pytest.mark.slow
def test_a_stop_signal_during_an_evaluation(lab):
    """It is broken off, and done by the next run: the metrics lack no line and have none twice."""
    options = {"val_fraction": 0.5, "eval_interval": 8}
    lab.run("whole", **options)
    assert sum("val_loss" in line for line in lab.metrics("whole")) == 3
    process = lab.start("run", {"slow_evaluation": {"seconds": 0.5}}, **options)
    assert process.until(lambda: "evaluating" in process.out)
    stop(process, "SIGTERM")
    check_saved(lab, "run", process)
    lab.run("run", from_resume=1, **options)
    assert lab.result("run")["metrics"] == lab.result("whole")["metrics"]
    assert lab.result("run")["half"] == lab.result("whole")["half"]
    lab.run("run", from_resume=1, **options)
    assert lab.result("run")["metrics"] == lab.result("whole")["metrics"]


def test_a_second_signal_exits_at_once(lab, whole):
    """Inside a save that takes long: out within a second, and the resume goes on from the checkpoint before."""
    process = lab.start("run", {"slow_save": {"seconds": 20}, "slow_updates": {"seconds": 0.02}})
    assert process.until(lambda: lab.is_saving("run"))
    process.kill(signal.SIGTERM)
    time.sleep(1.2)
    assert process.running()
    assert stop(process, "SIGINT") < 1
    lab.finish(whole)


def test_a_stop_signal_to_one_of_two_ranks(lab):
    """Both stop at the same update, and neither leaves before the save is done; the saved state of both goes on exactly."""
    # first one that waits for the other, which torchrun has lost
    environment = {**rank_environments(2)[1], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    store = dist.TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    alone = lab.start("run", None, environment)
    wait_until(lambda: store.num_keys() > 0)
    stop(alone, "SIGTERM")
    lab.run_ranks("whole")
    hooks = {"slow_save": {"seconds": 0.3}}
    processes = lab.start_ranks("run", 2, hooks, {1: {"signal_at": {"updates": [4], "rank": 1}}})
    assert processes[1].wait() == 143
    assert lab.checkpoints("run")[0].name == "update_00000004.pt"
    assert processes[0].wait() == 143
    assert check_saved(lab, "run", processes[0]) == 4
    lab.finish(world_size=2)


@pytest.mark.slow
def test_a_stop_signal_to_torchrun(lab):
    """As a scheduler does: both ranks save before torchrun is out."""
    lab.run_ranks("whole")
    launcher = start_torchrun(lab, "run", {"slow_updates": {"seconds": 0.2}, "slow_save": {"seconds": 1}})
    wait_until(lambda: logged(lab, "run") >= 3, seconds=240)
    start = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode != 0 and time.monotonic() - start < OUT_WITHIN_S
    assert f"after update {lab.state('run')['progress']['update']}; everything is saved" in output
    lab.finish(world_size=2)


def test_a_sigusr1_saves_and_goes_on(lab, whole):
    """Also in the last moments of the process, in which nobody listens to it any more."""
    hooks = {"signal_at": {"updates": [5], "name": "SIGUSR1"}, "signal_at_end": {"name": "SIGUSR1"}}
    lab.run("run", hooks=hooks, keep_checkpoints=50)
    saved = [int(path.stem.removeprefix("update_")) for path in lab.checkpoints("run")]
    assert sorted(saved) == [3, 5, 6, 9, 13, 16, 19, 20]
    assert lab.result("run") == whole.result("whole")
