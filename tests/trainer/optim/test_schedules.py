"""Every schedule over a whole run. References: the schedulers of torch and transformers, and plain loops."""

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import get_linear_schedule_with_warmup

from encoders.schedules import ENCODER_SCHEDULES
from trainer.optim.schedules import SCHEDULES

N_UPDATES = 200


def rates_of(make_scheduler):
    """The rates that a scheduler gives to the updates 0 ... N_UPDATES, of a base rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(optimizer)
    rates = []
    for update in range(N_UPDATES + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if update < N_UPDATES:
            scheduler.step()
    return rates


def cosine(lowest):
    return rates_of(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, N_UPDATES, eta_min=lowest))


def linear():
    return rates_of(lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=N_UPDATES))


def wsd():
    """The rate stays, and in the last fifth of the updates the same piece is taken off at each."""
    decaying = N_UPDATES // 5
    rates = [1.0]
    for update in range(N_UPDATES):
        rates.append(rates[-1] - (1 / decaying if update >= N_UPDATES - decaying else 0.0))
    return rates


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("cosine", lambda: cosine(0.1)),
        # The public trainer adds a tenth to a cosine from 1 to 0, so it begins above 1.
        ("minimind", lambda: [0.1 + rate for rate in cosine(0.0)]),
        ("linear", linear),
        ("constant", lambda: [1.0] * (N_UPDATES + 1)),
        ("wsd", wsd),
    ],
)
def test_schedules_of_pretraining(schedule, expected):
    found = [SCHEDULES[schedule](update / N_UPDATES) for update in range(N_UPDATES + 1)]
    assert found == pytest.approx(expected(), abs=1e-9)


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
