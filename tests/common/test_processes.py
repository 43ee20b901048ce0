"""How long a command has been running, as --budget counts it."""

import pytest

from common import processes


@pytest.mark.skipif(not hasattr(processes.time, "CLOCK_BOOTTIME"), reason="the system does not tell")
def test_the_time_of_a_command_in_an_older_process(monkeypatch):
    """A notebook may have run for hours before it calls a trainer with a budget."""
    monkeypatch.setattr(processes, "_called", None)
    monkeypatch.setattr(processes.time, "clock_gettime", lambda clock: 1e9)
    assert processes.seconds_since_start() > 1e6
    processes.count_from_here()
    assert 0 <= processes.seconds_since_start() < 60
