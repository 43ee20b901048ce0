"""Two runs that would write the same files."""

import os
import signal
import socket

import pytest

from tests.faults.harness import start_torchrun
from tests.faults.test_ranks import left_running
from tests.helpers import wait_until


@pytest.mark.slow
def test_a_second_run_is_refused_and_the_first_goes_on(lab, whole):
    first = lab.start("run", {"slow_updates": {"seconds": 0.3}})
    assert first.until(lambda: lab.log_lines("run") > 0)
    second = lab.start("run", save_interval=5)
    assert second.wait(30) == 2
    assert f"process {first.pid} on '{socket.gethostname()}'" in second.err and second.err.count("\n") == 1
    assert first.wait(60) == 0
    assert lab.result("run") == whole.result("whole")
    assert sorted(path.name for path in (lab.folder / "run").glob(".*")) == [".pretrain_32.lock"]


@pytest.mark.slow
def test_ranks_end_with_a_killed_launcher_and_the_next_one_goes_on(lab):
    lab.run_ranks("whole")
    launcher = start_torchrun(lab, "run", {"slow_updates": {"seconds": 0.2}}, from_resume=1)
    wait_until(lambda: lab.checkpoints("run"), seconds=240)
    os.kill(launcher.pid, signal.SIGKILL)
    lab.run_ranks("run", from_resume=1)
    # The system takes a moment to remove a loader process whose trainer has just ended.
    wait_until(lambda: not left_running(lab), seconds=5)
    assert lab.result("run") == lab.result("whole")
