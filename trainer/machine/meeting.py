"""Ranks of one machine that wait for each other many times in an update.

A barrier of Gloo is a message to a thread that must be woken. Where every core computes, that takes milliseconds, and the
update of a small model as a whole takes a hundred. Here each rank counts its waits in memory that all of them see, and
looks at the counts of the others.
"""

import os
import platform
import time
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from common.errors import ProcessLostError
from common.processes import is_gone
from trainer.machine.ranks import Ranks
from trainer.machine.shared_memory import shared_bytes

# Each count has a line of the cache for itself.
BYTES_OF_A_COUNT = 64
# First a rank looks again and again, about a tenth of a millisecond. Then it leaves the core to whoever wants it in between:
# on a machine with other work that may be the rank which is waited for.
LOOKS = 1000
NAP_S = 5e-5
# Between two looks whether the process that is waited for is still there
CHECK_S = 0.5
# A processor of this kind shows others its writes in the order in which they were made: who sees the count sees what was
# written before it.
ORDERED = ("x86_64", "AMD64")


class LostRankError(ProcessLostError):
    """The process of another rank is gone, or does nothing any more."""


class Meeting(Protocol):
    """A place where the ranks wait for each other."""

    def wait(self) -> None:
        """Return when all ranks have called it as often as this one. What they wrote before can be read."""


class CountedMeeting:
    """Counts in shared memory, each with the number of its process beside it. Errors: LostRankError."""

    def __init__(self, memory: torch.Tensor, ranks: Ranks, timeout_s: float) -> None:
        """memory: uint8 [count_bytes(world size)], zeros, shared by all ranks."""
        rows = memory.numpy().view(np.int64).reshape(ranks.world_size, -1)
        self._counts = rows[:, 0]
        self._pids = rows[:, 1]
        self._pids[ranks.rank] = os.getpid()
        self._own = ranks.rank
        self._others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
        self._waits = 0
        self._timeout_s = timeout_s

    def wait(self) -> None:
        self._waits += 1
        self._counts[self._own] = self._waits
        for other in self._others:
            self._wait_for(other)

    def _wait_for(self, other: int) -> None:
        for _ in range(LOOKS):
            if self._counts[other] >= self._waits:
                return
        begin = time.monotonic()
        next_check = begin + CHECK_S
        while self._counts[other] < self._waits:
            time.sleep(NAP_S)
            now = time.monotonic()
            if now >= next_check:
                next_check = now + CHECK_S
                # It may have come and gone since.
                if self._is_gone(other) and self._counts[other] < self._waits:
                    raise LostRankError(
                        f"the process of rank {other} is gone; --from_resume 1 goes on from the last save"
                    )
            if now > begin + self._timeout_s:
                raise LostRankError(f"rank {other} did not come within {self._timeout_s:g} s (--dist_timeout)")

    def _is_gone(self, rank: int) -> bool:
        pid = int(self._pids[rank])
        # 0: it has not said its number yet.
        return pid != 0 and is_gone(pid)


class GlooMeeting:
    """For processors of other kinds."""

    def wait(self) -> None:
        dist.barrier()


def count_bytes(world_size: int) -> int:
    """Of the memory of a CountedMeeting."""
    return BYTES_OF_A_COUNT * world_size


def make_meeting(ranks: Ranks) -> Meeting:
    """For ranks that share memory. A collective: all ranks must call it."""
    memory = None
    if platform.machine() in ORDERED:
        memory = shared_bytes(count_bytes(ranks.world_size), ranks)
    if memory is None:
        return GlooMeeting()
    group = dist.group.WORLD
    assert group is not None
    # That of --dist_timeout, which the group was made with. torch has no public name for it.
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return CountedMeeting(memory, ranks, timeout.total_seconds())
