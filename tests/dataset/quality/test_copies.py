"""Copies to the letter and near ones. References: sets of substrings, a dictionary, planted copies."""

import random

import numpy as np

from dataset.quality.copies import NO_EARLIER, exact_copies, near_copies
from tests.dataset.quality.planted import changed, english, jaccard


def find(texts):
    """The near copies of texts of which no two are equal to the letter."""
    return near_copies(enumerate(texts), exact_copies(np.arange(len(texts), dtype=np.uint64)))


def test_white_space_and_case_make_no_difference():
    text = english(random.Random(0))
    found = find([text, "  " + text.upper().replace(" ", "\n\n")])
    assert found.of.tolist() == [NO_EARLIER, 0] and found.similarity[1] == 1 and not found.is_exact.any()


def test_a_chain_of_small_changes_is_cut():
    """Each text is near the one before it. The third is not near the first, so it stays."""
    generator = random.Random(4)
    first = english(generator, 200)
    second = changed(first, generator, 0.84, 0.86)
    third = changed(second, generator, 0.8, 0.82)
    assert jaccard(first, third) < 0.72
    assert find([first, second, third]).of.tolist() == [NO_EARLIER, 0, NO_EARLIER]


def test_short_empty_and_no_texts():
    assert find([]).of.tolist() == []
    assert find(["", "a", "b", " ", "A"]).of.tolist() == [NO_EARLIER, NO_EARLIER, NO_EARLIER, 0, 1]
