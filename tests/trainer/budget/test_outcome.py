"""What is told of a plan. Reference: where the law of the loss was measured."""

import dataclasses
from types import SimpleNamespace

import pytest

from tests.trainer.budget.test_table import PLAN
from trainer.budget import laws
from trainer.budget.outcome import loss_error, sources_read_too_often

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


def test_a_source_that_is_read_too_often_is_named_with_the_share_that_it_may_have():
    """Reference: with that share it is read as often as was measured."""
    parts = (laws.Part(0.75, 9e6, "large.jsonl"), laws.Part(0.25, 2e5, "small.jsonl"))
    (line,) = sources_read_too_often(parts, tokens=1e7)
    assert "small.jsonl is read 12 times, and the other text 0.83 times" in line
    assert "at most 16.0% of all shares (now 25.0%;" in line
    mended = (laws.Part(0.84, 9e6, "large.jsonl"), laws.Part(0.16, 2e5, "small.jsonl"))
    assert sources_read_too_often(mended, tokens=1e7) == []


def test_a_text_without_shares_is_no_source_that_is_read_too_often():
    assert sources_read_too_often((), tokens=1e7) == []
    assert sources_read_too_often((laws.Part(1.0, 1e5, "only.jsonl"),), tokens=1e7) == []
