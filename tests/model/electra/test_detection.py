"""model/electra/detection.py: which words are doubted. References: the rule in its words, counts by hand, JSON."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.electra.detection import (
    THRESHOLD,
    Counts,
    Draws,
    Passage,
    Word,
    draws_of,
    measured_threshold,
    passage_of_record,
    tell_detector,
    tell_draws,
    total,
    usual_threshold,
)

PROBABILITY = st.floats(0, 1)
WORDS = st.builds(Word, st.text(), st.text(), PROBABILITY, st.none() | st.text())
PASSAGES = st.builds(Passage, st.lists(WORDS), st.text(), PROBABILITY, st.just(True))


@pytest.mark.parametrize(
    "probabilities, wanted",
    [([0.11, 0.12, 0.13], 0.24), ([0.01, 0.02, 0.9], 0.5), ([0.02, 0.04], 0.2), ([0.9, 0.9], 0.5), ([], 0.2)],
)
def test_unmeasured_a_word_is_doubted_from_twice_the_mean_on_within_bounds(probabilities, wanted):
    assert usual_threshold(probabilities) == pytest.approx(wanted)


@given(PASSAGES)
def test_counts_are_those_of_the_words(passage):
    counted = [0, 0, 0, 0]
    for word in passage.words:
        doubted = word.probability >= passage.threshold
        counted[0] += word.original is not None
        counted[1] += word.original is not None and doubted
        counted[2] += word.original is None
        counted[3] += word.original is None and doubted
    assert passage.counts == Counts(*counted)
    assert total([passage, passage]) == Counts(*(2 * count for count in counted))


@given(PASSAGES)
def test_a_passage_comes_back_from_its_record(passage):
    """Also where a text has lone surrogates, which JSON spells."""
    assert passage_of_record(json.loads(json.dumps(passage.as_record()))) == passage


WORD = {"before": "", "word": "a", "probability": 0.5, "doubted": True, "original": "b", "replaced": True}
RECORD = {"threshold": 0.5, "corrupted": True, "after": "", "words": [WORD]}


def test_a_record_of_something_else_is_none():
    assert passage_of_record(RECORD) == Passage([Word("", "a", 0.5, "b")], "", 0.5, True)
    wrong = [None, [], {}, {**RECORD, "threshold": 2}, {**RECORD, "threshold": True}, {**RECORD, "threshold": math.nan}]
    wrong += [
        {**RECORD, "after": 1},
        {**RECORD, "corrupted": "yes"},
        {**RECORD, "words": {}},
        {**RECORD, "words": ["a"]},
    ]
    for change in ({"before": None}, {"word": 1}, {"probability": "0.5"}, {"probability": -1}, {"original": ["b"]}):
        wrong.append({**RECORD, "words": [{**WORD, **change}]})
    for record in wrong:
        assert passage_of_record(record) is None, record


def test_a_config_tells_what_was_measured_and_nothing_of_an_earlier_run():
    config = SimpleNamespace()
    assert measured_threshold(config) is None
    tell_detector(config, 32, 0.25)
    assert measured_threshold(config) == 0.25 and config.trained_length == 32
    tell_detector(config, 128, None)
    assert measured_threshold(config) is None and config.trained_length == 128
    for value in ("0.5", -0.1, 1.5, math.nan, True, [0.5]):
        assert measured_threshold(SimpleNamespace(**{THRESHOLD: value})) is None


def test_a_generators_config_tells_what_its_run_did_otherwise_than_usual():
    config = SimpleNamespace()
    tell_draws(config, Draws())
    assert not vars(config) and draws_of(config) == Draws()
    draws = Draws("bert", "fp32_gumbel", 0.7, True)
    tell_draws(config, draws)
    assert draws_of(SimpleNamespace(**json.loads(json.dumps(vars(config))))) == draws
    tell_draws(config, Draws(temperature=2.0))
    assert vars(config) == {"replaced_by": {"temperature": 2.0}}
    tell_draws(config, Draws())
    assert not vars(config)
    for fields in (3, None, {"mask_style": ["bert"], "sampling": 1, "temperature": 0, "disallow_correct": 1, "x": 2}):
        assert draws_of(SimpleNamespace(replaced_by=fields)) == Draws()
    for temperature in (math.nan, math.inf, -1, True, "1"):
        assert draws_of(SimpleNamespace(replaced_by={"temperature": temperature})) == Draws()
