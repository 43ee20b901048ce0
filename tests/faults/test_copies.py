"""A command that divides itself into processes. References: the run in one process, and the undisturbed run (bitwise)."""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.test_ranks import ledgers_agree
from tests.helpers import is_running, wait_until

# Four rows in a micro-batch, so that each of two processes has two of them. 60 documents leave a ragged last update.
ROWS = {"batch_size": 4, "accumulation_steps": 2}
TWO = {**ROWS, "cpu_processes": 2}


def copies_of(process):
    """The ranks that a command has started and that are still there."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def test_a_resume_may_have_another_number_of_processes(lab):
    """2, then 1, then 2 processes: no warning, every update as in one process that is never stopped, losses to 1e-6."""
    lab.run("whole", hooks={"ledger": {"path": str(lab.folder / "one")}}, **ROWS)
    ledger = {"ledger": {"path": str(lab.folder / "ledger")}}
    for processes, update in ((2, 3), (1, 7)):
        stopped = lab.start("run", {**ledger, "signal_at": {"updates": [update]}}, **ROWS, cpu_processes=processes, from_resume=1)  # fmt: skip
        assert stopped.wait() == 143, stopped.err
        assert "warning" not in stopped.out
    last = lab.run("run", hooks=ledger, from_resume=1, **TWO)
    assert "2 processes of 1 thread share each micro-batch:" in last.out and not last.err
    lab.check_ledger(lab.folder / "ledger", epochs=2)
    ledgers_agree(lab.ledger(lab.folder / "ledger"), lab.ledger(lab.folder / "one"))


@pytest.mark.slow
def test_killed_and_resumed_with_two_processes_ends_bitwise_alike(lab):
    lab.run("whole", **TWO)
    for rank in (0, 1):
        hooks = {"signal_at": {"updates": [4 + 3 * rank], "name": "SIGKILL", "rank": rank}}
        assert lab.start("run", hooks, from_resume=1, save_interval=2, **TWO).wait() == 1
    lab.finish(**TWO)


def test_a_killed_copy_ends_the_command_with_one_line(lab):
    process = lab.start("run", {"slow_updates": {"seconds": 0.1}}, **TWO)
    assert process.until(lambda: lab.log_lines("run") > 1)
    first, copy = copies_of(process)
    os.kill(copy, signal.SIGKILL)
    assert process.wait(20) == 1
    (line,) = process.err.splitlines()
    assert line.startswith(f"error: process 2 of 2 (pid {copy}) was killed by signal 9")
    assert not is_running(first)


def test_copies_end_with_a_killed_command(lab):
    process = lab.start("run", {"slow_updates": {"seconds": 0.1}}, num_workers=1, **TWO)
    assert process.until(lambda: lab.log_lines("run") > 1)
    copies = copies_of(process)
    assert len(copies) == 2
    process.kill()
    assert process.wait() == -9
    wait_until(lambda: not any(map(is_running, copies)), seconds=5)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_signal_saves_and_ends_all(lab, name):
    """To the command alone, and (Ctrl-C) to all of its processes at once."""
    process = lab.start("run", {"slow_updates": {"seconds": 0.05}}, epochs=100, **TWO)
    assert process.until(lambda: lab.log_lines("run") > 2)
    copies = copies_of(process)
    for pid in (process.pid, *copies) if name == "SIGINT" else [process.pid]:
        os.kill(pid, getattr(signal, name))
    assert process.wait(20) == 128 + getattr(signal, name), process.err
    assert lab.checkpoints("run") and not process.err
    assert not any(map(is_running, copies))


@pytest.mark.parametrize(
    "hooks, changes, said",
    [
        ({}, {"from_weight": "nowhere.pth"}, "error: --from_weight nowhere.pth"),
        ({"bad_batch": {"at": 5, "rank": 1}}, {}, "error: a batch cannot be assembled"),
    ],
)
def test_an_error_is_told_once(lab, hooks, changes, said):
    """In all processes, and in the copy only."""
    process = lab.start("run", hooks, **changes, **TWO)
    assert process.wait(20) == 2
    (line,) = process.err.splitlines()
    assert line.startswith(said)
