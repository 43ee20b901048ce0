"""The clock of a run with a budget. Reference: a simulated machine whose speed is known at each moment."""

import pytest

from trainer.budget import clock as module
from trainer.budget.clock import TOLERANCE, Clock, Course
from trainer.machine.ranks import Ranks
from trainer.optim.schedules import wsd

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


def run(machine, budget, planned, seconds_of_update, spent=0.0, evaluation=0.0, **options):
    """Train to the end; returns (seconds that it took in all, the courses, the rate factor of each update).

    seconds_of_update: a function of the seconds since the start.
    """
    began = machine.now - spent
    clock = Clock(budget, spent, planned, Ranks(), evaluation_updates=evaluation, **options)
    every = options.get("evaluation_every", 0)
    courses, factors = [], []
    update = 0
    while update < clock.end:
        factors.append((clock.moved or planned).factor(update))
        machine.now += seconds_of_update(machine.now - began)
        update += 1
        end = clock.end
        clock.after_update(update)
        if clock.end != end:
            courses.append(clock.moved)
        if every and update % every == 0 and update < clock.end:
            with clock.evaluating():
                machine.now += evaluation * seconds_of_update(machine.now - began)
    machine.now += options.get("seconds_at_end", 0.0) + evaluation * seconds_of_update(machine.now - began)
    return machine.now - began, courses, factors


def test_without_a_clock_the_course_is_the_schedule():
    """Reference: wsd."""
    course = Course(fall_from=60, end=100)
    for update in range(100):
        assert course.factor(update) == pytest.approx(wsd(update / 100, 0.4), abs=1e-12)


def test_a_machine_as_planned_is_left_alone(machine):
    """So a resume trains the same updates."""
    seconds, courses, factors = run(machine, 1003.0, Course(350, 1000), lambda _: 1.0, seconds_at_end=3.0)
    assert courses == [] and len(factors) == 1000 and seconds == pytest.approx(1003.0)


def test_a_resume_goes_on_with_the_course_and_the_time(machine):
    before = Clock(1000.0, 20.0, Course(350, 1000), Ranks())
    machine.now += 500
    fresh = before.state_dict()
    before.moved = Course(400, 900, 0.5)
    state = before.state_dict()
    after = Clock(1000.0, 7.0, Course(350, 1000), Ranks())
    after.load_state_dict(state)
    assert after.moved == before.moved and after.spent() == 527.0
    untouched = Clock(1000.0, 0.0, Course(350, 1000), Ranks())
    untouched.load_state_dict(fresh)
    assert untouched.moved is None and untouched.end == 1000


@pytest.mark.parametrize("when", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("slower", [0.2, 0.7, 1.5, 3.0])
def test_the_end_moves_where_the_machine_is_not_as_planned(machine, when, slower):
    """From some moment on: the run ends on time, with a rate that has fallen to zero and never jumped up."""

    def seconds_of_update(passed):
        return slower if passed >= when * 1000 else 1.0

    seconds, courses, factors = run(machine, 1000.0, Course(350, 990), seconds_of_update, seconds_at_end=4.0)
    assert 1000.0 * (1 - 2 * TOLERANCE) <= seconds == pytest.approx(1000.0, rel=0.03)
    assert courses and factors[-1] < 0.05
    assert all(later <= earlier for earlier, later in zip(factors, factors[1:], strict=False))


@pytest.mark.parametrize("budget", [60, 3600, 6 * 3600])
@pytest.mark.parametrize("when", [0.01, 0.1, 0.9])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.9])
def test_a_pause_costs_its_own_time_alone(machine, budget, when, part):
    """Ctrl-Z, or a laptop that sleeps. part: of the time that is left then. By hand: the updates of a second or less that fit
    into the rest."""
    of_update = min(1.0, budget / 600)
    pause = part * (1 - when) * budget
    planned = int(budget / of_update)

    def seconds_of_update(passed):
        starts_now = when * budget <= passed < when * budget + of_update
        return of_update + (pause if starts_now else 0.0)

    seconds, _, factors = run(machine, float(budget), Course(round(0.35 * planned), planned), seconds_of_update)
    assert 0.97 * budget <= seconds <= LATE * budget
    lost = planned - len(factors)
    assert lost == pytest.approx(pause / of_update, abs=max(0.05 * pause / of_update, 0.015 * planned))
    # After a pause until shortly before the end a few updates are left for the fall.
    assert factors[-1] < (0.2 if part == 0.9 else 0.05)


def test_evaluations_and_what_comes_at_the_end_are_counted(machine):
    options = {"seconds_at_end": 20.0, "evaluation": 15.0, "evaluation_every": 100}
    seconds, _, _ = run(machine, 800.0, Course(300, 900), lambda _: 1.0, **options)
    assert seconds == pytest.approx(800.0, rel=0.02)


def test_a_pause_within_an_evaluation_says_nothing_of_the_next_ones(machine):
    """Evaluations of 5 seconds, and a pause of 200 seconds within the second."""
    clock = Clock(1000.0, 0.0, Course(350, 950), Ranks(), evaluation_updates=5.0, evaluation_every=90)
    update = 0
    while update < clock.end:
        machine.now += 1.0
        update += 1
        clock.after_update(update)
        if update % 90 == 0:
            with clock.evaluating():
                machine.now += 5.0 + (200.0 if update == 180 else 0.0)
    assert update == pytest.approx(750, abs=20)


def test_too_little_time_ends_soon(machine):
    """Nothing is left of the budget when the training begins."""
    seconds, _, factors = run(machine, 100.0, Course(100, 300), lambda _: 1.0, spent=120.0)
    assert len(factors) < 30 and factors[-1] <= 0.5


def test_the_rate_has_no_jump_where_the_end_moves_within_the_fall():
    course = Course(20, 60)
    for update in (20, 33, 59):
        for further in (3, 30, 300):
            assert course.with_end(update, update + further).factor(update) == pytest.approx(course.factor(update))
