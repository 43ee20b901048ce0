"""The times of steps. Reference: how often the device is waited for."""

import torch

from benchmarks import timing
from tests.trainer.machine.simulated_cuda import simulated_cuda


def test_a_gpu_is_not_waited_for_in_each_step(monkeypatch):
    waits = []
    steps = []
    # Then the turn has as many steps as it has at least.
    monkeypatch.setattr(timing, "GPU_TURN_S", 0)
    with simulated_cuda():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(len(steps)))
        timing.step_seconds(lambda: steps.append(None), torch.device("cuda", 0))
    # Before and behind the one that tells how many there will be, and the turn.
    assert waits == [0, 1, 1, 4] and len(steps) == 4


def test_on_a_cpu_each_step_is_timed_alone():
    steps = []
    assert timing.step_seconds(lambda: steps.append(None), torch.device("cpu")) > 0
    assert len(steps) == 1
