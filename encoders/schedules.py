"""Learning-rate schedules of ELECTRA and GLUE: factors of the rate after t of T updates, of which the first w are a warm-up."""

import math


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
    # distance of this update from the peak, 0 to 1, towards the start or the end.
    if t < peak_at:
        low = start
        distance = 1 - t / max(peak_at, 1)
    else:
        low = 1e-5
        distance = (t - peak_at) / max(T - peak_at, 1)
    return 1 + (low - 1) * (1 - math.cos(math.pi * min(distance, 1))) / 2


# values of --lr_schedule of train_electra.py and train_glue.py
ENCODER_SCHEDULES = {f.__name__: f for f in (original_linear, separate_linear, one_cycle, adjusted_one_cycle)}
