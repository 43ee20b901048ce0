"""Every schedule over a whole run. References: the schedulers of torch and transformers, and plain loops."""

import pytest
from torch.optim import lr_scheduler
from transformers import get_linear_schedule_with_warmup

from encoders.schedules import ENCODER_SCHEDULES
from tests.trainer.optim.test_schedules import N_UPDATES, linear, rates_of


def cycle(peak_at, start):
    """It begins at `start`, is at 1 at update `peak_at`, and ends at 1e-5."""
    # torch counts the updates from 0, and the one at which it peaks is pct_start * total_steps - 1.
    total = N_UPDATES + 1
    shape = {"pct_start": (peak_at + 1) / total, "div_factor": 1 / start, "final_div_factor": start / 1e-5}
    shape |= {"total_steps": total, "cycle_momentum": False}
    return rates_of(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, **shape))


def separate(warmup):
    return rates_of(lambda optimizer: get_linear_schedule_with_warmup(optimizer, warmup, N_UPDATES))


@pytest.mark.parametrize(
    "schedule, warmup, expected",
    [
        ("separate_linear", 0, lambda: separate(0)),
        ("separate_linear", 30, lambda: separate(30)),
        ("original_linear", 30, lambda: [rate * min(update / 30, 1) for update, rate in enumerate(linear())]),
        ("one_cycle", 30, lambda: cycle(50, 1 / 25)),
        ("adjusted_one_cycle", 30, lambda: cycle(30, 1e-5)),
    ],
)
def test_schedules_of_encoders(schedule, warmup, expected):
    found = [ENCODER_SCHEDULES[schedule](update, N_UPDATES, warmup) for update in range(N_UPDATES + 1)]
    assert found == pytest.approx(expected(), abs=1e-9)
