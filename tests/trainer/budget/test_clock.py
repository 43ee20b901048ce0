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


def most_that_fit(budget, update, evaluation, every, lost):
    """By brute force: the most updates of a run that knows all times."""
    updates = 0
    while (updates + 1) * update + (1 + updates // every) * evaluation + lost <= budget * (1 - TOLERANCE / 2):
        updates += 1
    return updates


def train(machine, budget, planned, update, evaluation, every, pauses, resume_at=0):
    """Train with pauses, {(what, its number): seconds}; returns (share of the budget when the last one ended and at the end, factors)."""

    def fresh_clock(spent):
        return Clock(
            budget,
            spent,
            Course(planned * 2 // 5, planned),
            Ranks(),
            evaluation_updates=evaluation / update,
            evaluation_every=every,
        )

    began, factors = machine.now, []
    machine.now += pauses.get(("start", 0), 0.0)
    clock, after_pause = fresh_clock(machine.now - began), machine.now
    while len(factors) < clock.end:
        factors.append((clock.moved or clock.planned).factor(len(factors)))
        pause = pauses.get(("update", len(factors)), 0.0)
        machine.now += update + pause
        clock.after_update(len(factors))
        if len(factors) % every == 0 and len(factors) < clock.end:
            with clock.evaluating():
                in_evaluation = pauses.get(("evaluation", len(factors) // every), 0.0)
                machine.now += evaluation + in_evaluation
            pause += in_evaluation
        after_pause = machine.now if pause else after_pause
        if len(factors) == resume_at < clock.end:
            state, clock = clock.state_dict(), fresh_clock(0.0)
            clock.load_state_dict(state)
    return (after_pause - began + evaluation) / budget, (machine.now - began + evaluation) / budget, factors


@pytest.mark.parametrize("budget", [60.0, 86400.0])
@pytest.mark.parametrize(
    ("updates", "share", "evaluations"), [(87, 0.5, 5), (500, 0.02, 5), (1000, 0.02, 10), (2000, 0.3, 2)]
)
@pytest.mark.parametrize("part", [0.01, 0.1, 0.2, 0.48, 0.7, 0.9])
def test_wherever_a_pause_is_the_run_makes_what_fits(machine, budget, updates, share, evaluations, part):
    """part: of the time that is left then. Before the start, in updates, in each evaluation, and after a resume."""
    every, update = -(-updates // evaluations), budget * (1 - share) / updates
    evaluation = budget * share / evaluations
    planned = most_that_fit(budget, update, evaluation, every, 0.0)
    in_updates = [("update", number) for number in (1, 2, 9, planned // 2, planned * 9 // 10)]
    for what, number in [("start", 0), *in_updates, *[("evaluation", n) for n in range(1, evaluations)]]:
        done = number / planned * (every if what == "evaluation" else 1)
        lost = part * (1 - done) * budget
        possible = most_that_fit(budget, update, evaluation, every, lost)
        for resume_at in (0, planned // 3):
            pauses = {(what, number): lost}
            forced, took, factors = train(machine, budget, planned, update, evaluation, every, pauses, resume_at)
            case = (what, number, resume_at)
            assert took <= max(1 + TOLERANCE, forced + 0.01) + 6 * update / budget, case
            assert len(factors) >= possible - max(3, 0.02 * planned), case
            assert factors[-1] < 0.34 and factors == sorted(factors, reverse=True), case


@pytest.mark.parametrize("when", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("slower", [10, 30, 100])
@pytest.mark.parametrize("lasts", [0.05, 1.0])
def test_slow_updates_in_a_row_are_the_pace(machine, when, slower, lasts):
    """For a share of the budget, or for good. Two updates show it, and one more is the decay."""

    def seconds_of_update(passed):
        return float(slower) if when <= passed / 3000 < when + lasts else 1.0

    seconds, _, factors = run(machine, 3000.0, Course(1200, 2980), seconds_of_update)
    assert seconds <= 3000 * LATE + (3 * slower if when + lasts > 1 else 0)
    assert lasts == 1 or len(factors) >= 0.9 * 3000 * (1 - lasts)
    assert factors[-1] < 0.34 and factors == sorted(factors, reverse=True)
