"""The alarm by itself: what it says of a course of AUCs, and when. References: courses by hand, as docs/experiments.md has them."""

from types import SimpleNamespace

import pytest

from trainer.electra.auc_alarm import PATIENCE, AucAlarm

# Updates of the runs that are watched.
END = 10_000


def alarm(**changes):
    usual = {
        "max_steps": END, "learning_rate": 5e-4, "position_init": "normal", "optimizer": "adamw", "muon_lr": 0.02,
        "init_std": 0.02, "max_seq_len": 128, "model_path": None, "warmup_steps": 0, "lr_schedule": "original_linear", "budget": None,
        "discriminator_config": None,
    }  # fmt: skip
    return AucAlarm(SimpleNamespace(**{**usual, **changes}))


def test_an_auc_near_a_half_is_told_once_with_what_has_helped():
    watched = alarm(learning_rate=2e-3)
    assert watched.line(500, END, 0.51, 6.1) is None
    line = watched.line(PATIENCE, END, 0.52, 6.1)
    assert line.startswith("warning: after 1,500 updates the discriminator's AUC is 0.52")
    for helped in (
        "--learning_rate 7e-4",
        "--position_init sinusoidal",
        "--optimizer muon",
        "--init_std",
        "--max_seq_len 32",
    ):
        assert helped in line
    assert watched.line(PATIENCE + 500, END, 0.53, 6.1) is None
    # What a run has already is not advised.
    tried = alarm(position_init="sinusoidal", optimizer="muon", muon_lr=0.006, init_std=0.1, max_seq_len=32)
    line = tried.line(PATIENCE, END, 0.52, 6.1)
    assert line.endswith("What has helped: more updates (docs/electra.md)")
    # Weights that come from a folder are not drawn, and those of files not as the flags say.
    for given in ({"model_path": "out"}, {"discriminator_config": "discriminator.json"}):
        line = alarm(**given).line(PATIENCE, END, 0.52, 6.1)
        assert "--init_std" not in line and "--position_init" not in line and "--max_seq_len" in line


@pytest.mark.parametrize("best", [0.57, 0.58, 0.58499])
def test_an_auc_that_was_a_little_better_once_is_on_the_plateau_all_the_same(best):
    """From 0.58 to 0.545 is no fall, and 0.545 no success: it is told when a run that never was better would be."""
    watched = alarm()
    assert watched.line(500, END, best, 6.1) is None
    for update in range(600, PATIENCE, 100):
        assert watched.line(update, END, 0.545, 6.1) is None
    assert "the discriminator's AUC is 0.55: it tells nothing yet" in watched.line(PATIENCE, END, 0.545, 6.1)
    assert watched.line(PATIENCE + 500, END, 0.545, 6.1) is None
    # A fall behind it has a line of its own.
    assert watched.line(PATIENCE + 1000, END, 0.5, 6.1).startswith("warning: the discriminator's AUC fell from 0.5")


def test_a_short_run_is_told_after_its_half():
    watched = alarm(max_steps=600)
    assert watched.line(200, 600, 0.5, 6.1) is None
    assert "after 300 updates" in watched.line(300, 600, 0.5, 6.1)


def test_a_run_that_warms_up_is_given_its_patience_behind_that():
    """The published warm-up of 10,000 updates, the usual one, and that of a schedule with its own."""
    cases = [
        ({"warmup_steps": 10_000, "max_steps": 1_000_000}, 11_500),
        ({"warmup_steps": None, "max_steps": 1_000_000}, 11_500),
        ({"warmup_steps": None, "max_steps": 2_000}, 200 + 900),
        ({"warmup_steps": 100, "max_steps": 2_000, "lr_schedule": "one_cycle"}, 500 + 750),
        ({"warmup_steps": 5_000, "max_steps": 2_000}, 5_000),
    ]
    for settings, last in cases:
        watched = alarm(**settings)
        assert watched.line(last - 1, settings["max_steps"], 0.5, 6.1) is None, settings
        assert f"after {last:,} updates" in watched.line(last, settings["max_steps"], 0.5, 6.1), settings


def test_what_is_kept_of_the_alarm_goes_on_as_if_nothing_had_happened():
    """Reference: an alarm that watches all evaluations, stopped after each of them in turn."""
    course = [
        (500, END, 0.52, 6.2),
        (1000, END, 0.7, 6.0),
        (1500, END, 0.65, 5.9),
        (2000, END, 0.65, 5.9),
        (2500, END, 0.5, 5.9),
    ]
    course.append((3000, END, 0.5, 5.9))
    whole = alarm(learning_rate=2e-3)
    said = [whole.line(*evaluation) for evaluation in course]
    assert [line is not None for line in said] == [False, False, True, False, True, False]
    for stop in range(len(course)):
        before = alarm(learning_rate=2e-3)
        lines = [before.line(*evaluation) for evaluation in course[:stop]]
        after = alarm(learning_rate=2e-3)
        after.take_kept(before.kept())
        assert lines + [after.line(*evaluation) for evaluation in course[stop:]] == said


def test_a_run_that_learns_is_not_disturbed():
    watched = alarm()
    for update, auc in ((500, 0.52), (1000, 0.56), (1500, 0.6), (2000, 0.7), (2500, 0.69), (3000, 0.8)):
        assert watched.line(update, END, auc, 6.0) is None


def test_an_auc_that_falls_is_told_once_with_its_reason():
    """As a rate of 2e-3 did: 0.55 and then 0.505; and as a generator that learns does: 0.87 and then 0.8."""
    lost = alarm(learning_rate=2e-3)
    assert lost.line(900, END, 0.62, 6.0) is None
    line = lost.line(1200, END, 0.5, 6.02)
    assert (
        line.startswith("warning: the discriminator's AUC fell from 0.62 to 0.50") and "--learning_rate 0.001" in line
    )
    assert lost.line(1500, END, 0.5, 6.02) is None
    learned = alarm()
    assert learned.line(3000, END, 0.87, 5.9) is None
    line = learned.line(5000, END, 0.8, 4.7)
    assert line.startswith(
        "note: the discriminator's AUC fell from 0.87 to 0.80 while the generator's loss fell from 5.90 to 4.70"
    )


def test_a_collapse_behind_a_benign_fall_is_told_too():
    """A generator that has learned explains 0.80, but not 0.50."""
    watched = alarm()
    assert watched.line(3000, END, 0.87, 5.9) is None
    assert watched.line(5000, END, 0.8, 4.7).startswith("note: ")
    assert watched.line(5500, END, 0.79, 4.6) is None
    line = watched.line(6000, END, 0.5, 4.6)
    assert line.startswith("warning: the discriminator's AUC fell from 0.87 to 0.50. It tells nothing any more: ")
    assert watched.line(6500, END, 0.5, 4.6) is None


@pytest.mark.parametrize(
    "settings, flag",
    [
        ({"learning_rate": 5e-4}, "--learning_rate 0.00025 or lower"),
        ({"learning_rate": 7e-4}, "--learning_rate 0.00035 or lower"),
        ({"optimizer": "muon", "muon_lr": 0.006}, "--muon_lr 0.003 or lower"),
    ],
)
def test_the_advice_is_half_of_the_rate_that_the_layers_have(settings, flag):
    watched = alarm(**settings)
    watched.line(900, END, 0.7, 6.0)
    assert watched.line(1200, END, 0.6, 6.0).endswith(f"start again, with {flag}")
