"""Learning-rate schedules: pure functions of how far a run has come."""

import math


def get_lr(current_step, total_steps, lr):
    """MiniMind's cosine: from 1.1·lr at step 0 down to 0.1·lr at `total_steps`."""
    return lr / 10 + 0.5 * lr * (1 + math.cos(math.pi * current_step / total_steps))


SCHEDULES = {  # share of the run done (0 to 1) -> factor of the learning rate
    "minimind": lambda progress: get_lr(progress, 1.0, 1.0),
    "cosine": lambda progress: 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),  # 1 to 0.1
    "wsd": lambda progress: min(1.0, (1 - progress) / 0.2),  # warm-up by its own flag, stable, linear decay at the end
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def one_cycle(t, T, peak_at, start):
    """A cosine from `start` up to 1 at update `peak_at`, then one down to 1e-5 at T."""
    low, share = (start, 1 - t / max(peak_at, 1)) if t < peak_at else (1e-5, (t - peak_at) / max(T - peak_at, 1))
    return 1 + (low - 1) * (1 - math.cos(math.pi * min(share, 1))) / 2


ENCODER_SCHEDULES = {  # (updates done t, all updates T, those of the warm-up w) -> factor of the learning rate
    "original_linear": lambda t, T, w: (1 - t / T) * (min(1, t / w) if w else 1),
    "separate_linear": lambda t, T, w: t / w if t < w else (T - t) / max(T - w, 1),
    "one_cycle": lambda t, T, w: one_cycle(t, T, 0.25 * T, 1 / 25),
    "adjusted_one_cycle": lambda t, T, w: one_cycle(t, T, w, 1e-5),
}


def learning_rate(progress, warmup_progress, lr, schedule="minimind"):
    """The rate of an update that starts at `progress` (0 to 1 of all rows of the run).

    warmup_progress: share of the warm-up done at the end of this update; from 1 on it has no effect.
    Progress is counted in rows rather than micro-batches, so that the same global batch gets the same rate however it
    is cut into micro-batches and ranks.
    """
    return lr * SCHEDULES[schedule](progress) * min(1.0, warmup_progress)
