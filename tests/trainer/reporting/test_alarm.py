"""Runs that go wrong are told of, once, and healthy ones are not. References: ln(vocabulary), and losses made for each case."""

import itertools
import math

import numpy as np
import pytest

from tests.helpers import records, train
from trainer.pretrain.overview import entropy_of
from trainer.reporting.alarm import Alarm
from trainer.reporting.html_report import write_report

FALLING = [8.7 * 0.98**n for n in range(120)]


def told(losses, validation=()):
    """The lines about a log line each 10 updates, the first 3 within the warm-up, and about evaluations."""
    lines = []
    alarm = Alarm(math.log(6400), 7.0, lines.append, {})
    for n, loss in enumerate(losses):
        alarm.after_log(10 * n, loss, n >= 3)
    for loss in validation:
        alarm.after_evaluation(loss)
    return lines


@pytest.mark.parametrize(
    ("run", "line"),
    [
        ([[8.8, 9.4, 40.0, 142_733.0, 9e9]], "a loss of 142733.00 is worse than guessing (8.76): the rate is too high"),
        ([[*FALLING[:30], 9.3, 9.4]], "a loss of 9.30 is worse than guessing"),
        ([[8.8, 8.0, *[7.02, 6.98, 7.01, 6.97] * 10]], "the loss stands at 7"),
        ([[8.8, *itertools.repeat(7.6, 40)]], "the loss stands at 7.60"),
        ((FALLING, (3, 2, 2.01, 2.02, 2.04, 2.06)), "the validation loss rises from 2.000 to 2.040 in 3 evaluations"),
    ],
)
def test_a_loss_of_no_use_is_told_once(run, line):
    (found,) = told(*run)
    assert found.startswith(line)


@pytest.mark.parametrize(
    "run",
    [
        (FALLING, (3.0, 2.5, 2.51, 2.52, 2.5)),
        (FALLING, (2.0, 2.001, 2.002, 2.003)),
        # Weights whose own scale gives a high loss at first, and a plateau that is left
        ([15.0, 14.0, 12.0, 11.0, 10.0, 9.4, *FALLING],),
        ([8.8, *itertools.repeat(7.05, 15), *FALLING[30:]],),
    ],
)
def test_a_healthy_run_is_left_alone(run):
    assert told(*run) == []


def test_a_diverging_run_says_so_and_ends_as_ever(data, tmp_path, capsys):
    """With all ids of the head, and with a sample. Reference: the same runs at a usual rate."""
    options = {"data_path": data, "max_updates": 30, "warmup_iters": 4, "val_fraction": 0.1}
    for head in (0, 512):
        for rate, times in ((50.0, 1), (1e-3, 0)):
            run = train(out_dir=tmp_path / f"{head}-{rate}", **options, learning_rate=rate, sampled_softmax=head)
            assert capsys.readouterr().out.count(f"is worse than guessing ({math.log(6400):.2f})") == times
            assert len(records(run, "alarm")) == times
            page = tmp_path / "page.html"
            write_report([run.reporter.file.name], page)
            assert page.read_text().count("Note: a loss of") == times


def test_the_entropy_of_single_tokens():
    assert entropy_of(np.array([[0, 0, 3], [3, -100, -100]])) == pytest.approx(math.log(2))
