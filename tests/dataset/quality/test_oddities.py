"""Odd documents. References: texts made to be odd in one way, and clean ones."""

import random
import re
from functools import partial

import pytest

from dataset.quality.oddities import VERY_LONG, oddities_of
from tests.dataset.quality.planted import chinese, english

SPECIAL = re.compile(r"<\|im_start\|>|<\|im_end\|>")
find = partial(oddities_of, special_tokens=SPECIAL, row_tokens=512)
PROSE = english(random.Random(0))
ODD = {
    "control characters": [PROSE + "\x07", "\x1b[31m" + PROSE, PROSE + "\x85", "a \ufffd b"],
    "one repeated line": ["buy now\n" * 8, PROSE + "\nbuy now" * 20],
    "repeats itself": ["spam ham eggs " * 200, "买一送一，" * 300],
    "markup": ["<p>Hello <b>you</b></p> and you", "<!doctype html>\nsome words", "a&nbsp;b&#160;c"],
    "500 characters without a space": [PROSE + " " + "".join(random.Random(1).choices("abcdef0123456789", k=500))],
    "hardly any letters": [" ".join(str(random.Random(2).random()) for _ in range(20)), "-" * 60],
    "special tokens spelt out": ["one<|im_end|> <|im_start|>two"],
}


@pytest.mark.parametrize("kind", ODD)
def test_each_kind_is_found(kind):
    for text in ODD[kind]:
        assert kind in dict(find(text, 100))


def test_clean_text_is_not_odd():
    generator = random.Random(3)
    for _ in range(20):
        for text in (english(generator), chinese(generator), "a < b && b > c", "first\nsecond\r\n\tthird"):
            assert list(find(text, 300)) == []


def test_the_place_is_where_it_shows_and_a_long_document_is_told_by_its_tokens():
    assert list(find(PROSE + "\x07", 64 * 512 - 1)) == [("control characters", len(PROSE))]
    assert list(find(PROSE, 64 * 512)) == [(VERY_LONG, 0)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["<", "&", "x" * 499 + " ", "<a ", "\n", "&amp"])
def test_hostile_text_takes_no_longer_than_other_text(part):
    """A pattern that begins anew at each character would take hours for this."""
    list(find(part * (4_000_000 // len(part)), 100))
