"""--budget of train_electra.py: a run that ends on time, with its rate at 0.

The clock is that of the main trainer, see trainer/budget/clock.py. Nothing is measured beforehand here: the run begins as if as many
updates fitted as a quick machine makes, so its rate hardly falls at first, and once the first ones are timed, after 4 % of
the budget, the clock sets the end. From there the rate falls in a line to 0, which the clock keeps on time.
"""

import math

import torch

from common.command_clock import seconds_since_start
from trainer.budget.clock import Clock, Course
from trainer.budget.reserves import REPORT_S, evaluation_share, seconds_at_end
from trainer.budget.settings import seconds_of
from trainer.electra.settings import ElectraSettings
from trainer.electra.validation import Validation
from trainer.machine.compiling import PRODUCT_RATE
from trainer.machine.ranks import Ranks
from trainer.updates import rows_of_update

# Of the rate of large matrix products: twice what small networks reach on a CPU. A guess that is too low would let the rate fall
# too soon, one that is too high costs nothing. So it is one number for all widths, unlike `share_of_product_rate` in
# trainer/budget/speed.py, by which plans are compared.
SHARE_OF_PRODUCT_RATE = 0.3
# Behind the last update, for the passages that a run shows: a guess, half of it to find them, and half (NETWORKS_S in
# trainer/electra/closing.py) to read them with both networks.
SHOWING_S = 3.0


def most_updates(settings: ElectraSettings, flops_of_update: float, device: torch.device, ranks: Ranks) -> int:
    """The updates that a budget begins with. It depends on no measurement, so a resume begins with the same."""
    assert settings.budget is not None
    rate = PRODUCT_RATE.get(device.type, PRODUCT_RATE["cpu"])
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    flops = seconds_of(settings.budget) * SHARE_OF_PRODUCT_RATE * rate * threads * ranks.world_size
    return max(2, round(flops / flops_of_update))


def clock_of(settings: ElectraSettings, validation: Validation | None, ranks: Ranks, warmup: int, shows: bool) -> Clock:
    """The clock. warmup: updates of it, behind which the rate of `separate_linear` falls; `original_linear` falls at once.
    shows: the run ends with passages."""
    assert settings.budget is not None
    fall_from = warmup if settings.lr_schedule == "separate_linear" else 0
    evaluated = validation.plan.n_rows if validation is not None else 0
    return Clock(
        seconds_of(settings.budget),
        seconds_since_start(),
        Course(min(fall_from, settings.max_steps - 1), settings.max_steps),
        ranks,
        seconds_at_end=seconds_at_end(settings.report) + (SHOWING_S if shows else 0),
        evaluation=evaluation_share(settings.use_compile != "0") * evaluated / rows_of_update(settings, ranks),
        evaluation_every=settings.eval_interval if validation is not None else 0,
    )


def seconds_to_show(clock: Clock | None, writes_report: bool) -> float:
    """What is left for the passages of a finished run; without a budget there is no end to it."""
    if clock is None:
        return math.inf
    return clock.seconds - clock.spent() - (REPORT_S if writes_report else 0.0)
