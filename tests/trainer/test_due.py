"""What is due after an update. Reference: the micro-batches of a run, looked at one by one."""

import pytest

from trainer.due import Intervals
from trainer.job import Evaluation, Progress

N_UPDATES = 40


def intervals(accumulation_steps=1, log_interval=1, save_interval=0, save_at=frozenset(), **evaluation):
    return Intervals(
        evaluation=Evaluation(**evaluation),
        log_interval=log_interval,
        save_interval=save_interval,
        save_at=save_at,
        accumulation_steps=accumulation_steps,
    )


def updates_at_which(is_due, accumulation_steps):
    """The numbers, from 1, of the updates of a run after which is_due(progress, steps, finished)."""
    due = []
    for update in range(1, N_UPDATES + 1):
        steps = range((update - 1) * accumulation_steps, update * accumulation_steps)
        progress = Progress(update=update, step=steps[-1])
        if is_due(progress, steps, update == N_UPDATES):
            due.append(update)
    return due


def updates_that_hold(interval, accumulation_steps):
    """Those within which a micro-batch has a number, from 1, that `interval` divides."""
    steps = range(1, N_UPDATES * accumulation_steps + 1)
    return {(step - 1) // accumulation_steps + 1 for step in steps if interval and step % interval == 0}


@pytest.mark.parametrize("accumulation_steps", [1, 2, 3, 8])
@pytest.mark.parametrize("interval", [0, 1, 2, 5, 7, 100])
def test_an_interval_of_micro_batches_ends_within_an_update(interval, accumulation_steps):
    """The last update is always saved and evaluated."""
    expected = sorted(updates_that_hold(interval, accumulation_steps) | {N_UPDATES})
    saves = intervals(accumulation_steps, save_interval=interval)
    assert updates_at_which(saves.save_is_due, accumulation_steps) == expected
    evaluations = intervals(accumulation_steps, evaluate=print, eval_interval=interval)
    assert updates_at_which(evaluations.evaluation_is_due, accumulation_steps) == expected


def test_an_interval_of_updates_ends_with_every_nth_one():
    saves = intervals(accumulation_steps=3, save_interval=7, counts_updates=True)
    assert updates_at_which(saves.save_is_due, 3) == [7, 14, 21, 28, 35, N_UPDATES]


def test_samples_alone_come_at_the_end_or_at_times_of_their_own():
    at_the_end = intervals(samples=print, eval_interval=5)
    assert updates_at_which(at_the_end.evaluation_is_due, 1) == [N_UPDATES]
    assert updates_at_which(intervals(eval_interval=5).evaluation_is_due, 1) == []
    often = intervals(samples=print, sample_interval=15)
    assert updates_at_which(lambda progress, _, finished: often.samples_are_due(progress, finished), 1) == [15, 30, 40]


def test_a_log_line_comes_after_the_first_of_each_interval_and_after_the_last():
    """Counted in updates, it comes after the last micro-batch of one."""
    by_micro_batches = intervals(accumulation_steps=2, log_interval=4)
    assert [step for step in range(11) if by_micro_batches.log_is_due(step, 11)] == [0, 4, 8, 10]
    by_updates = intervals(accumulation_steps=2, log_interval=3, counts_updates=True)
    assert [step for step in range(11) if by_updates.log_is_due(step, 11)] == [1, 7, 10]
