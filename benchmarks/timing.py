"""How long a step takes, on a CPU and on a GPU."""

import time
from collections.abc import Callable

import torch

from trainer.machine.measure import seconds, synchronize

# Of the steps on a GPU that are timed together
GPU_TURN_S = 1.0


def step_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of a step. On a GPU the mean of a turn of steps.

    To wait for the GPU in each step would measure how long one takes to come through, with the host's work before it. In
    training the host prepares the next step meanwhile.
    """
    if device.type == "cuda":
        return per_step(step, device, GPU_TURN_S)[0]
    return seconds(step, device)


def per_step(step: Callable[[], object], device: torch.device, turn_s: float) -> tuple[float, float]:
    """(seconds of a step on the device, seconds that the host takes to begin one), over a turn of so many seconds."""
    one = seconds(step, device)
    steps = max(3, int(turn_s / max(one, 1e-6)))
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    begun = time.perf_counter() - start
    synchronize(device)
    return (time.perf_counter() - start) / steps, begun / steps
