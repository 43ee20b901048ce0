"""Learning-rate schedules: pure functions of a run's progress."""

import math


def get_lr(current_step: float, total_steps: float, lr: float) -> float:
    """MiniMind's cosine: from 1.1·lr at step 0 down to 0.1·lr at `total_steps`."""
    return lr / 10 + 0.5 * lr * (1 + math.cos(math.pi * current_step / total_steps))


# ------------------------------------------------------- factors of the rate by the share of the run done, 0 to 1


def minimind(progress: float) -> float:
    """1.1 to 0.1, as in MiniMind's trainer."""
    return get_lr(progress, 1.0, 1.0)


def cosine(progress: float) -> float:
    """1 to 0.1."""
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


# share of the run over which `wsd` decays the rate
WSD_DECAY_SHARE = 0.2


def wsd(progress: float, decay_share: float = WSD_DECAY_SHARE) -> float:
    """Stable, then a linear decay to 0 over the last `decay_share` of the run; the warm-up has its own flag."""
    return min(1.0, (1 - progress) / decay_share)


def linear(progress: float) -> float:
    """1 to 0."""
    return 1 - progress


def constant(progress: float) -> float:
    """1 throughout."""
    return 1.0


# values of --lr_schedule of train_pretrain.py
SCHEDULES = {"minimind": minimind, "cosine": cosine, "wsd": wsd, "linear": linear, "constant": constant}
