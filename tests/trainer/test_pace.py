"""The clock of a run with a budget. Reference: a simulated machine whose speed is known at each moment."""

import math

import pytest

from trainer import pace
from trainer.optim.schedules import wsd
from trainer.pace import NO_PROPOSAL, Course, Pace, as_numbers, course_of, moved


class Machine:
    """A clock that a simulated run moves."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(pace, "time", machine)
    return machine


def run(
    machine, budget, planned, seconds_of_update, spent=0.0, seconds_at_end=0.0, evaluation=0.0, every=0, most=math.inf
):
    """Train to the end; returns (seconds that it took in all, the courses, the rate factor of each update)."""
    keeper = Pace(budget, spent, planned, seconds_at_end, evaluation, every, most_updates=most)
    began = machine.now - spent
    course = None
    courses = []
    factors = []
    update = 0
    while update < (course or planned).end:
        proposal = keeper.proposal(update, course)
        factors.append((course or planned).factor(update))
        machine.now += seconds_of_update(machine.now - began)
        update += 1
        if proposal is not None:
            course = proposal
            courses.append(course)
        if every and update % every == 0 and update < (course or planned).end:
            with keeper.paused():
                machine.now += evaluation * seconds_of_update(machine.now - began)
    machine.now += seconds_at_end + evaluation * seconds_of_update(machine.now - began)
    return machine.now - began, courses, factors


def test_without_a_clock_the_course_is_the_schedule():
    """Reference: wsd."""
    course = Course(fall_from=60, end=100)
    for update in range(100):
        assert course.factor(update) == pytest.approx(wsd(update / 100, 0.4), abs=1e-12)


@pytest.mark.parametrize(("seconds_of_update", "end"), [(1.0, 300), (0.5, 300), (4.0, 250)])
def test_time_that_is_left_over_makes_a_run_no_longer_than_it_may_be(machine, seconds_of_update, end):
    """A slow machine still ends on time. Reference: the seconds of the updates that fit."""
    planned = Course(105, 300)
    seconds, _, factors = run(machine, 1000.0, planned, lambda _: seconds_of_update, most=300)
    assert len(factors) == pytest.approx(end, rel=0.02)
    assert seconds == pytest.approx(end * seconds_of_update, rel=0.02)


def test_a_fast_machine_trains_up_to_what_a_run_may_have(machine):
    planned = Course(350, 1000)
    _, courses, factors = run(machine, 1000.0, planned, lambda _: 0.25, most=1500)
    assert len(factors) == pytest.approx(1500, abs=1)
    assert courses[0].end - courses[0].fall_from == 650


def test_a_machine_as_planned_is_left_alone(machine):
    """So a resume trains the same updates."""
    planned = Course(350, 1000)
    seconds, courses, factors = run(machine, 1003.0, planned, lambda _: 1.0, seconds_at_end=3.0)
    assert courses == [] and len(factors) == 1000 and seconds == pytest.approx(1003.0)


def proposals_of(machine, spent, update, planned, n_updates):
    """What a clock proposes in a process that begins after `update` updates of a second, `spent` seconds of 1,000 having passed."""
    keeper = Pace(1000.0, spent, planned)
    found = []
    for now in range(update + 1, update + n_updates + 1):
        machine.now += 1.0
        proposal = keeper.proposal(now, found[-1] if found else None)
        if proposal is not None:
            found.append(proposal)
    return found


def test_a_resume_is_held_to_the_tolerance_of_the_run(machine):
    """A start that took one hundredth of the budget moves nothing, where the first look of a new run is more exact."""
    planned = Course(350, 1000)
    assert proposals_of(machine, 510.0, 500, planned, 400) == []
    assert len(proposals_of(machine, 10.0, 0, planned, 400)) == 1


def test_a_resume_near_the_end_looks_in_time(machine):
    """With 20 seconds left for 40 updates of a second."""
    (course,) = proposals_of(machine, 980.0, 960, Course(350, 1000), 12)
    assert course.end == pytest.approx(980, abs=1)


@pytest.mark.parametrize("speed", [0.2, 0.5, 0.9, 1.1, 2.0, 5.0])
def test_a_plan_that_was_wrong_is_mended_at_the_first_look(machine, speed):
    seconds, courses, factors = run(machine, 600.0, Course(210, 600), lambda _: speed, seconds_at_end=5.0)
    assert seconds == pytest.approx(600.0, rel=0.02)
    assert len(courses) == 1 and factors[-1] < 0.02
    # The rate is constant, and then falls to the end without a jump.
    assert all(abs(a - b) < 0.02 for a, b in zip(factors, factors[1:], strict=False))


@pytest.mark.parametrize("when", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_a_disturbance_shortens_the_run(machine, when, slower):
    """Another program takes a core from some moment on: the run ends on time, with a rate that has fallen to zero."""

    def seconds_of_update(passed):
        return slower if passed > when * 1000 else 1.0

    seconds, courses, factors = run(machine, 1000.0, Course(350, 990), seconds_of_update, seconds_at_end=4.0)
    assert seconds == pytest.approx(1000.0, rel=0.03)
    assert courses and factors[-1] < 0.05
    assert all(later <= earlier for earlier, later in zip(factors, factors[1:], strict=False))


@pytest.mark.parametrize("when", [100, 400, 700])
@pytest.mark.parametrize("stall", [30.0, 150.0, 250.0])
def test_a_machine_that_stands_still_for_a_while(machine, when, stall):
    """Ctrl-Z, or a disk that hangs: what is lost is its time alone, and the rest goes on at the speed of before."""

    def seconds_of_update(passed):
        return stall if when <= passed < when + 1 else 1.0

    seconds, courses, factors = run(machine, 1000.0, Course(350, 990), seconds_of_update, seconds_at_end=4.0)
    assert seconds == pytest.approx(1000.0, rel=0.02)
    assert len(courses) <= 2 and factors[-1] < 0.02
    assert len(factors) == pytest.approx(996 - stall, abs=20)
    # The rate falls to the new end, without a jump.
    assert all(abs(a - b) < 0.02 for a, b in zip(factors, factors[1:], strict=False))


def test_a_disturbance_that_ends_is_made_good(machine):
    def seconds_of_update(passed):
        return 3.0 if 200 < passed < 300 else 1.0

    seconds, _, factors = run(machine, 1000.0, Course(350, 990), seconds_of_update)
    assert seconds == pytest.approx(1000.0, rel=0.03)
    assert factors[-1] < 0.05


def test_only_the_constant_phase_changes_before_the_fall(machine):
    """The fall has as many updates as planned."""
    _, courses, _ = run(machine, 500.0, Course(350, 1000), lambda passed: 0.5 if passed < 50 else 0.6)
    before = [course for course in courses if course.fall_rate == 1.0]
    assert before and all(course.end - course.fall_from == 650 for course in before)


def test_evaluations_and_what_comes_at_the_end_are_counted(machine):
    seconds, _, _ = run(
        machine, 800.0, Course(300, 900), lambda _: 1.0, seconds_at_end=20.0, evaluation=15.0, every=100
    )
    assert seconds == pytest.approx(800.0, rel=0.02)


def test_time_before_the_first_update_is_part_of_the_budget(machine):
    seconds, _, _ = run(machine, 300.0, Course(100, 300), lambda _: 1.0, spent=90.0)
    assert seconds == pytest.approx(300.0, rel=0.02)


def test_too_little_time_ends_soon(machine):
    """Nothing is left of the budget when the training begins."""
    seconds, _, factors = run(machine, 100.0, Course(100, 300), lambda _: 1.0, spent=120.0)
    assert len(factors) < 30 and factors[-1] <= 0.5


def test_the_end_is_never_behind_the_update_that_is_under_way():
    for update in range(1, 50):
        for possible in (-5, 0, 1, 2, 10):
            course = moved(Course(20, 60), update, possible)
            assert course.fall_from < course.end and course.end >= update + pace.NEAREST_END


def test_the_rate_has_no_jump_where_the_end_moves_within_the_fall():
    course = Course(20, 60)
    for update in (20, 33, 59):
        for possible in (3, 30, 300):
            assert moved(course, update, possible).factor(update) == pytest.approx(course.factor(update))


def test_a_course_goes_to_the_other_ranks_as_numbers():
    course = Course(12, 345, 0.5)
    assert course_of(as_numbers(course)) == course
    assert course_of(NO_PROPOSAL) is None and tuple(as_numbers(None)) == NO_PROPOSAL
