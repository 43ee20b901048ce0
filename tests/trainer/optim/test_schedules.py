"""Every schedule over a whole run. References: the schedulers of torch and transformers, and a plain loop for wsd."""

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from trainer.optim.schedules import ENCODER_SCHEDULES, SCHEDULES

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


def ours(schedule):
    return [SCHEDULES[schedule](update / N_UPDATES) for update in range(N_UPDATES + 1)]


def ours_with_warmup(schedule, warmup):
    return [ENCODER_SCHEDULES[schedule](update, N_UPDATES, warmup) for update in range(N_UPDATES + 1)]


def test_cosine_is_the_one_of_torch():
    def cosine(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N_UPDATES, eta_min=0.1)

    assert ours("cosine") == pytest.approx(rates_of(cosine), abs=1e-9)


def test_the_public_trainers_cosine_is_that_of_torch_and_a_tenth():
    """It adds a tenth to a cosine from 1 to 0, so it begins above 1."""

    def cosine_to_zero(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N_UPDATES, eta_min=0.0)

    expected = [0.1 + rate for rate in rates_of(cosine_to_zero)]
    assert ours("minimind") == pytest.approx(expected, abs=1e-9)


def test_linear_and_constant_are_those_of_torch():
    def linear(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=N_UPDATES)

    def constant(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    assert ours("linear") == pytest.approx(rates_of(linear), abs=1e-9)
    assert ours("constant") == rates_of(constant)


def test_wsd_is_a_plain_loop():
    """The rate stays, and in the last fifth of the updates the same piece is taken off at each."""
    decaying = N_UPDATES // 5
    rate = 1.0
    expected = []
    for update in range(N_UPDATES + 1):
        expected.append(rate)
        if update >= N_UPDATES - decaying:
            rate -= 1 / decaying
    assert ours("wsd") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("warmup", [0, 1, 30, 199])
def test_separate_linear_is_the_one_of_transformers(warmup):
    def linear(optimizer):
        return get_linear_schedule_with_warmup(optimizer, warmup, N_UPDATES)

    assert ours_with_warmup("separate_linear", warmup) == pytest.approx(rates_of(linear), abs=1e-9)


def test_original_linear_is_a_decay_of_torch_times_a_warm_up():
    def linear(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=N_UPDATES)

    expected = []
    for update, rate in enumerate(rates_of(linear)):
        expected.append(rate * update / 30 if update < 30 else rate)
    assert ours_with_warmup("original_linear", 30) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("schedule", "warmup", "peak_at", "start"),
    [("one_cycle", 30, 50, 1 / 25), ("adjusted_one_cycle", 30, 30, 1e-5)],
)
def test_cycles_are_those_of_torch(schedule, warmup, peak_at, start):
    """Both begin at `start`, are at 1 at update `peak_at`, and end at 1e-5."""

    def cycle(optimizer):
        # torch counts the updates from 0, and the one at which it peaks is pct_start * total_steps - 1.
        total = N_UPDATES + 1
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=1.0,
            total_steps=total,
            pct_start=(peak_at + 1) / total,
            div_factor=1 / start,
            final_div_factor=start / 1e-5,
            cycle_momentum=False,
        )

    assert ours_with_warmup(schedule, warmup) == pytest.approx(rates_of(cycle), abs=1e-9)
