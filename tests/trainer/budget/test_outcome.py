"""What is told of a plan. Reference: where the law of the loss was measured."""

import dataclasses
from types import SimpleNamespace

import pytest

from tests.trainer.budget.test_table import PLAN
from trainer.budget import laws
from trainer.budget.outcome import loss_error

MEASURED = dataclasses.replace(PLAN, parameters=2_000_000, tokens=1e7)


def error_of(plan, text_scale=1.0, vocab_size=laws.MEASURED_VOCABULARY, from_weight="none", use_moe=False):
    costs = SimpleNamespace(data=SimpleNamespace(text_scale=text_scale, vocab_size=vocab_size))
    return loss_error(plan, costs, SimpleNamespace(from_weight=from_weight, use_moe=use_moe))


def test_the_small_range_is_for_what_was_measured():
    assert error_of(MEASURED) == laws.LOSS_ERROR


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": dataclasses.replace(MEASURED, parameters=26_000_000)},
        {"plan": dataclasses.replace(MEASURED, parameters=100_000)},
        {"plan": dataclasses.replace(MEASURED, tokens=1e9)},
        {"plan": dataclasses.replace(MEASURED, tokens=1e5)},
        {"text_scale": 0.7},
        {"vocab_size": 32_000},
    ],
)
def test_beyond_it_the_range_is_a_wide_one(changes):
    assert error_of(**{"plan": MEASURED, **changes}) == laws.LOSS_ERROR_ELSEWHERE


@pytest.mark.parametrize("changes", [{"from_weight": "pretrain"}, {"use_moe": True}])
def test_where_no_law_is_known_there_is_no_range(changes):
    assert error_of(MEASURED, **changes) is None
