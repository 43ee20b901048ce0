"""The clock of a run with a budget. Reference: a simulated machine whose speed is known at each moment."""

import random
from unittest import mock

import pytest

from trainer.budget import clock as module
from trainer.budget.clock import TOLERANCE, Clock, DecaySchedule
from trainer.forecast import Expectation
from trainer.machine.ranks import Ranks
from trainer.optim.schedules import wsd
from trainer.pretrain.settings import PretrainSettings

# A run may be late by half of the tolerance, and by the updates between two checks.
LATE = 1 + TOLERANCE


class Machine:
    """A clock that a simulated run moves."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(module, "time", machine)
    return machine


def run(machine, budget, planned, seconds_of_update, evaluation=0.0, every=0, pauses=None, resume_at=0, **options):
    """Train to the end; returns (seconds in all, the rate factor of each update, seconds until the last pause was over).
    evaluation: its time, in updates. pauses: {(what, its number): seconds}."""

    def fresh_clock(spent):
        seconds = evaluation * seconds_of_update(0.0)
        return Clock(budget, spent, planned, Ranks(), evaluation_seconds=seconds, evaluation_every=every, **options)

    def work(updates, *event):
        nonlocal after_pause
        machine.now += updates * seconds_of_update(machine.now - began)
        if event in (pauses or ()):
            machine.now += pauses[event]
            after_pause = machine.now

    began = after_pause = machine.now
    work(0, "start", 0)
    clock, factors = fresh_clock(machine.now - began), []
    while len(factors) < clock.end:
        factors.append((clock.moved or planned).factor(len(factors)))
        # The rate rises only to what is planned with so many updates left.
        updates_left = (clock.end - len(factors) + 1) / (planned.end - planned.decay_start)
        assert factors[-1] <= max([*factors[-2:-1], min(updates_left, 1.0)]) + 1e-9
        work(1, "update", len(factors))
        clock.after_update(len(factors))
        if every and len(factors) % every == 0 and len(factors) < clock.end:
            with clock.evaluating():
                work(evaluation, "evaluation", len(factors) // every)
        if len(factors) == resume_at < clock.end:
            state, clock = clock.state_dict(), fresh_clock(0.0)
            clock.load_state_dict(state)
    work(evaluation)
    return machine.now - began + options.get("seconds_at_end", 0.0), factors, after_pause - began


def test_a_decay_that_does_not_move_is_that_of_wsd():
    schedule = DecaySchedule(decay_start=60, end=100)
    for update in range(100):
        assert schedule.factor(update) == pytest.approx(wsd(update / 100, 0.4), abs=1e-12)


def test_a_machine_as_planned_is_left_alone(machine):
    """So a resume trains the same updates."""
    schedule = DecaySchedule(350, 1000)
    seconds, factors, _ = run(machine, 1003.0, schedule, lambda _: 1.0, seconds_at_end=3.0)
    assert factors == [schedule.factor(update) for update in range(1000)] and seconds == pytest.approx(1003.0)


def test_a_resume_goes_on_with_the_schedule_and_the_time(machine):
    before = Clock(1000.0, 20.0, DecaySchedule(350, 1000), Ranks())
    machine.now += 500
    fresh = before.state_dict()
    before.moved = DecaySchedule(400, 900, 0.5)
    state = before.state_dict()
    assert state == {"seconds_spent": 520.0, "fall_from": 400, "end": 900, "fall_rate": 0.5}, "as checkpoints have it"
    after = Clock(1000.0, 7.0, DecaySchedule(350, 1000), Ranks())
    after.load_state_dict(state)
    assert after.moved == before.moved and after.spent() == 527.0
    untouched = Clock(1000.0, 0.0, DecaySchedule(350, 1000), Ranks())
    untouched.load_state_dict(fresh)
    assert untouched.moved is None and untouched.end == 1000


@pytest.mark.parametrize("when", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("slower", [0.2, 0.7, 1.5, 3.0])
def test_the_end_moves_where_the_machine_is_not_as_planned(machine, when, slower):
    """From some moment on: the run ends on time, with a rate that has fallen to zero."""
    plan, pace = DecaySchedule(350, 990), (1.0, slower)
    seconds, factors, _ = run(machine, 1000.0, plan, lambda passed: pace[passed >= when * 1000], seconds_at_end=4.0)
    assert 1000.0 * (1 - 2 * TOLERANCE) <= seconds == pytest.approx(1000.0, rel=0.03)
    assert len(factors) != 990 and factors[-1] < 0.05


@pytest.mark.parametrize("lost", [{"pauses": {("start", 0): 120.0}}, {"evaluation": 150.0}])
def test_too_little_time_ends_soon(machine, capsys, lost):
    """Before the start, or because an evaluation takes longer than the budget: no pace is told, since none was measured."""
    _, factors, _ = run(machine, 100.0, DecaySchedule(100, 300), lambda _: 1.0, **lost)
    assert len(factors) < 30 and factors[-1] <= 0.5
    assert capsys.readouterr().out.startswith("there is no time for more, so the run ends after ")


def most_that_fit(budget, update, evaluation, every, lost):
    """By brute force: the most updates of a run that knows all times."""
    updates = 0
    while (updates + 1) * update + (1 + updates // every) * evaluation + lost <= budget * (1 - TOLERANCE / 2):
        updates += 1
    return updates


@pytest.mark.parametrize("budget", [60.0, 86400.0])
@pytest.mark.parametrize(
    "updates, share, evaluations", [(87, 0.5, 5), (500, 0.02, 5), (1000, 0.02, 10), (2000, 0.3, 2)]
)
@pytest.mark.parametrize("part", [0.01, 0.1, 0.2, 0.48, 0.7, 0.9])
def test_wherever_a_pause_is_the_run_makes_what_fits(machine, budget, updates, share, evaluations, part):
    """part: of the time that is left then. Before the start, in updates, in each evaluation and the first two, and after a resume."""
    every, update = -(-updates // evaluations), budget * (1 - share) / updates
    evaluation = budget * share / evaluations
    planned = most_that_fit(budget, update, evaluation, every, 0.0)
    in_updates = [("update", number) for number in (1, 2, 9, planned // 2, planned * 9 // 10)]
    moments = [("start", 0), *in_updates, *[("evaluation", number) for number in range(1, evaluations)]]
    # Two equal ones of less than five times an evaluation are taken for slow evaluations.
    firsts = (0.7, 0.5) if share < 0.1 else (0.7,)
    in_two = [{("evaluation", 1): first, ("evaluation", 2): 1 - first} for first in firsts]
    for shares in [*({moment: 1.0} for moment in moments), *(in_two if evaluations > 2 else [])]:
        what, number = max(shares)
        done = number / planned * (every if what == "evaluation" else 1)
        lost = part * (1 - done) * budget
        possible = most_that_fit(budget, update, evaluation, every, lost)
        for resume_at in (0, planned // 3):
            pauses = {moment: share * lost for moment, share in shares.items()}
            schedule, case = DecaySchedule(planned * 2 // 5, planned), (pauses, resume_at)
            took, factors, forced = run(machine, budget, schedule, lambda _: update, evaluation / update, every, *case)
            assert took <= max(LATE * budget, forced + evaluation + 0.01 * budget) + 6 * update, case
            assert len(factors) >= possible - max(3, 0.02 * planned), case
            assert factors[-1] < 0.34, case


@pytest.mark.parametrize("when", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("slower", [10, 30, 100])
@pytest.mark.parametrize("lasts", [0.05, 1.0])
def test_slow_updates_in_a_row_are_the_pace(machine, when, slower, lasts):
    """For a share of the budget, or for good. Two updates show it, and one more is the decay."""
    plan, pace = DecaySchedule(1200, 2980), (1.0, float(slower))
    seconds, factors, _ = run(machine, 3000.0, plan, lambda passed: pace[when <= passed / 3000 < when + lasts])
    assert seconds <= 3000 * LATE + (3 * slower if when + lasts > 1 else 0)
    assert lasts == 1 or len(factors) >= 0.9 * 3000 * (1 - lasts)
    assert factors[-1] < 0.34


def test_a_slow_beginning_leaves_no_low_rate(machine, capsys):
    """Ten times slower for a third of the time. The end moves near and back, and a line says each."""

    def forecast(updates):
        return Expectation(0.0, updates, 0.1) if updates > 300 else None

    pace = lambda passed: 10.0 if passed < 900 else 0.1  # noqa: E731
    _, factors, _ = run(machine, 1000.0, DecaySchedule(350, 1000), pace, forecast=forecast)
    assert max(factors[-900:]) == 1.0
    n, printed = len(factors), capsys.readouterr().out
    of_end = f"{n:.3f} ({0.9 * n:.2f} to {1.1 * n:.2f})"
    assert f"so the run ends after {n:,} updates (1,000 were planned); the end is expected at {of_end}" in printed
    assert "so the run ends after 99 updates (1,000 were planned)\n" in printed


@pytest.mark.parametrize("load", [0, 2, 8])
@pytest.mark.parametrize("budget", [30.0, 60.0, 90.0, 180.0])
@pytest.mark.parametrize("planned", [0.3, 1.0, 3.0])
def test_a_short_plan_on_a_busy_machine_makes_what_its_time_allows(machine, budget, load, planned):
    """Its first updates are slow, and that makes evaluations no slower. Reference: the same updates, one after the other."""

    def pace(passed):
        waits = load * random.Random(f"{passed:.2f}").expovariate(2)
        return 0.02 * (1 + waits) * (4 if passed < 3 else 1)

    evaluation, passed, possible = 2.0, 0.0, 0
    while passed + pace(passed) <= budget - evaluation:
        passed, possible = passed + pace(passed), possible + 1
    end = int(possible * planned)
    clock = Clock(budget, 0.0, DecaySchedule(int(0.35 * end), end), Ranks(), evaluation_seconds=evaluation)
    began, done = machine.now, 0
    while done < clock.end:
        machine.now += pace(machine.now - began)
        done += 1
        clock.after_update(done)
    late = machine.now - began + evaluation - budget
    assert done >= 0.9 * possible and abs(late) <= max(2.0, 0.02 * budget)


def test_an_end_that_moves_within_the_decay_never_lowers_the_rate():
    """Reference: the rate before, or that of the plan with as many updates left."""
    schedule = DecaySchedule(20, 60)
    for update in (20, 33, 59):
        for further in (3, 30, 300):
            factor = schedule.factor(update)
            moved = schedule.with_end(update, update + further, factor)
            assert moved.factor(update) == pytest.approx(max(factor, min(further / 40, 1.0)))


@pytest.mark.parametrize(("slowness", "reserved"), [(1.0, 4.0), (3.0, 12.0), (50.0, 18.0)])
def test_a_moment_of_load_does_not_take_the_whole_budget(monkeypatch, slowness, reserved):
    monkeypatch.setattr(module, "slowness", lambda: slowness)
    settings = PretrainSettings(budget="60s", max_updates=100, decay_share=0.65, eval_interval=0)
    plan = mock.Mock(n_rows=1000, row_targets=lambda first, last: 9e5)
    corpus = mock.Mock(plan=lambda epoch: plan, mixture=None)
    parts = mock.Mock(settings=settings, corpus=corpus, validation=None, prompts=[])
    parts.batching.rows, parts.model.config.num_hidden_layers, parts.batching.updates_in = 8, 2, lambda interval: 0
    assert module.clock_of(parts, mock.Mock()).seconds_at_end == reserved
