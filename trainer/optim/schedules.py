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


# ------------------- ELECTRA and GLUE: factors after t of T updates, of which the first w are a warm-up


def original_linear(t: int, T: int, w: float) -> float:
    """A linear decay over the whole run, times a linear warm-up: ELECTRA's original code."""
    # The decay runs during the warm-up too, so the rate never reaches 1.
    warmup = min(1, t / w) if w else 1
    return (1 - t / T) * warmup


def separate_linear(t: int, T: int, w: float) -> float:
    """A linear warm-up, then a linear decay from its end: BERT fine-tuning."""
    if t < w:
        return t / w
    return (T - t) / max(T - w, 1)


def one_cycle(t: int, T: int, w: float) -> float:
    """From 1/25 up to 1 over a quarter of the run, then down to 1e-5; w has no effect."""
    return _two_cosines(t, T, 0.25 * T, 1 / 25)


def adjusted_one_cycle(t: int, T: int, w: float) -> float:
    """From 1e-5 up to 1 over the warm-up, then down to 1e-5."""
    return _two_cosines(t, T, w, 1e-5)


def _two_cosines(t: int, T: int, peak_at: float, start: float) -> float:
    """A cosine from `start` up to 1 at update `peak_at`, then one down to 1e-5 at T."""
    # share: distance of this update from the peak, 0 to 1, towards the start or the end.
    if t < peak_at:
        low = start
        share = 1 - t / max(peak_at, 1)
    else:
        low = 1e-5
        share = (t - peak_at) / max(T - peak_at, 1)
    return 1 + (low - 1) * (1 - math.cos(math.pi * min(share, 1))) / 2


# values of --lr_schedule of train_electra.py and train_glue.py
ENCODER_SCHEDULES = {
    "original_linear": original_linear,
    "separate_linear": separate_linear,
    "one_cycle": one_cycle,
    "adjusted_one_cycle": adjusted_one_cycle,
}
