"""How long a command has been running, as --budget counts it."""

from pathlib import Path

import pytest

from common import processes

pytestmark = pytest.mark.skipif(not hasattr(processes.time, "CLOCK_BOOTTIME"), reason="the system does not tell")


@pytest.fixture
def set_age(monkeypatch):
    """set_age(whole, since_import): how old the process is, and since when it has been running this code."""
    monkeypatch.setattr(processes, "_called", None)
    behind_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(behind_name[19]) / processes.os.sysconf("SC_CLK_TCK")

    def set_age(whole, since_import):
        monkeypatch.setattr(processes.time, "clock_gettime", lambda clock: started + whole)
        monkeypatch.setattr(processes, "_IMPORTED", processes.time.monotonic() - since_import)

    return set_age


@pytest.mark.parametrize("whole, counted", [(7.0, 7.0), (3600.0, 2.0)])
def test_the_start_of_python_counts_but_nothing_before_it(set_age, whole, counted):
    """An entry point of a container that downloads for an hour, and ends with `exec python`, keeps its process."""
    set_age(whole=whole, since_import=2.0)
    assert processes.seconds_since_start() == pytest.approx(counted, abs=1.0)


def test_a_command_that_is_called_as_a_function_counts_from_its_call(set_age):
    """A notebook may have run for hours before it calls a trainer with a budget."""
    set_age(whole=3600.0, since_import=3599.0)
    assert processes.seconds_since_start() == pytest.approx(3600.0)
    processes.count_from_here()
    assert 0 <= processes.seconds_since_start() < 60
