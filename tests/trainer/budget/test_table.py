"""A plan as text. Reference: the plan's own numbers."""

import dataclasses

import pytest

from tests.trainer.budget.test_plan import ALL, SimulatedMachine, demands
from trainer.budget.laws import MOST_PASSES
from trainer.budget.plan import best_plan
from trainer.budget.table import plan_table, quantity

PLAN = best_plan(ALL, demands(seconds=600.0), SimulatedMachine())


def table_of(plan, others=None, error=0.03):
    """{name: text} of the lines."""
    lines = plan_table(
        plan, others or {}, "0.01", error=error, bytes_per_token=3.0, total_seconds=600.0, until=None, T=512
    )
    width = max(line.index("  ", 3) for line in lines if line.startswith("  expected validation loss"))
    return {line[2 : width + 2].strip(): line[width + 2 :].strip() for line in lines}


@pytest.mark.parametrize("passes", [0.4, MOST_PASSES, MOST_PASSES + 1, 21.3])
def test_a_loss_is_promised_for_as_many_passes_as_were_measured(passes):
    plan = dataclasses.replace(PLAN, passes=passes)
    twice = dataclasses.replace(PLAN, passes=2 * passes)
    told = table_of(plan, {"twice as much": twice})
    if passes <= MOST_PASSES:
        assert told["expected validation loss"].startswith(f"{plan.loss:.3f} (")
    else:
        assert (
            told["expected validation loss"]
            == f"not known for {passes:.0f} passes over one text: up to 8 were measured"
        )
        assert f"{plan.loss:.3f}" not in str(told) and "note" not in told
    assert (": loss" in told["twice as much would give"]) == (2 * passes <= MOST_PASSES)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (12.0, "12"),
        (999.6, "1 K"),
        (1234.0, "1.23 K"),
        (999_400.0, "999 K"),
        (999_936.0, "1 M"),
        (7.284e6, "7.28 M"),
        (999.7e6, "1 G"),
        (2.5e12, "2.5 T"),
    ],
)
def test_a_quantity_has_three_digits_and_no_exponent(value, told):
    """Also where rounding takes it to the next unit. References: by hand."""
    assert quantity(value) == told


def test_of_other_runs_nothing_is_promised():
    assert table_of(PLAN, error=None)["expected validation loss"] == "not known for such a run"
