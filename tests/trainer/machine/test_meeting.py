"""Ranks that wait for each other in shared memory. Reference: what each has written before its wait."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
import torch

from common.processes import is_gone
from trainer.machine import meeting
from trainer.machine.meeting import CountedMeeting, GlooMeeting, LostRankError, count_bytes, make_meeting
from trainer.machine.ranks import Ranks

WORLD_SIZE = 3
ROUNDS = 300


def counted(rank, memory, timeout_s=60.0):
    return CountedMeeting(memory, Ranks(rank, rank, WORLD_SIZE), timeout_s)


def test_nobody_goes_on_before_all_have_come():
    """In each round every rank writes a number and reads those of all behind the first wait; the second one lets it write
    again."""
    memory = torch.zeros(count_bytes(WORLD_SIZE), dtype=torch.uint8)
    written = [0] * WORLD_SIZE
    wrong = []

    def run(rank):
        place = counted(rank, memory)
        for number in range(1, ROUNDS + 1):
            written[rank] = number
            place.wait()
            if written != [number] * WORLD_SIZE:
                wrong.append((rank, number, list(written)))
            place.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD_SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and written == [ROUNDS] * WORLD_SIZE


def test_a_rank_that_does_not_come_is_an_error():
    memory = torch.zeros(count_bytes(WORLD_SIZE), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="rank 1 did not come within 0.05 s"):
        counted(0, memory, timeout_s=0.05).wait()


def test_counts_lie_in_lines_of_their_own():
    memory = torch.zeros(count_bytes(WORLD_SIZE), dtype=torch.uint8)
    for rank in range(WORLD_SIZE):
        with contextlib.suppress(RuntimeError):
            counted(rank, memory, timeout_s=0.0).wait()
    counts = memory.view(torch.int64).view(WORLD_SIZE, 8)
    assert counts[:, 0].tolist() == [1, 1, 1] and counts[:, 1].tolist() == [os.getpid()] * WORLD_SIZE
    assert not counts[:, 2:].any()


def test_a_rank_whose_process_is_gone_is_an_error(monkeypatch):
    """At once, long before the time is over; one that has ended and was not asked for its exit code is gone too."""
    monkeypatch.setattr(meeting, "CHECK_S", 0.01)
    memory = torch.zeros(count_bytes(WORLD_SIZE), dtype=torch.uint8)
    process = subprocess.Popen([sys.executable, "-c", ""])
    place = counted(0, memory)
    memory.view(torch.int64).view(WORLD_SIZE, 8)[1, 1] = process.pid
    with pytest.raises(LostRankError, match="rank 1"):
        place.wait()
    assert process.returncode is None
    process.wait()
    assert is_gone(process.pid) and not is_gone(os.getpid())
    # A rank that has not said its number yet is not gone.
    memory.view(torch.int64).view(WORLD_SIZE, 8)[1, 1] = 0
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        counted(0, memory, timeout_s=0.1).wait()


def test_other_processors_send_messages(monkeypatch):
    """They may show their writes to each other in another order."""
    monkeypatch.setattr(meeting.platform, "machine", lambda: "aarch64")
    assert isinstance(make_meeting(Ranks(0, 0, 2, on_one_machine=True)), GlooMeeting)
