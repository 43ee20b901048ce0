"""How long a command has been running, as --budget counts it, and a pool of processes."""

from tests.helpers import run_program


def test_the_imports_of_a_command_count():
    """Reference: a sleep in the place of them."""
    code = "import common.start, time; time.sleep(0.3); import common.processes as p; print(p.seconds_since_start())"
    assert float(run_program(code).stdout) >= 0.3


# A signal that the start of a process holds back
INTERRUPTED = """
import multiprocessing, os, signal
from common.processes import Workers
signal.signal(signal.SIGINT, signal.default_int_handler)
start = multiprocessing.Process.start
def interrupted(process):
    start(process)
    os.kill(os.getpid(), signal.SIGINT)
multiprocessing.Process.start = interrupted
Workers(1, print, int)
"""


def test_a_ctrl_c_during_the_start_of_a_process_ends_both():
    """Else the exit would wait for a process that nobody ends."""
    assert "KeyboardInterrupt" in run_program(INTERRUPTED).stderr
