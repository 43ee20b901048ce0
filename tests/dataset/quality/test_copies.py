"""Copies to the letter and near ones. References: sets of substrings, a dictionary, planted copies."""

import random

import numpy as np
import pytest

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


@pytest.mark.parametrize("letters", ["ACGT", "CDEFGAB", "0123456789", "01"])
@pytest.mark.parametrize("length", [200, 5000])
def test_independent_texts_of_few_letters_are_no_copies_and_copies_are_found(letters, length):
    """More texts than are compared in a bucket as they are; in each copy one letter of a hundred is another."""
    generator = random.Random(length)
    texts = ["".join(generator.choices(letters, k=length)) for _ in range(80)]
    copies = ["".join(generator.choice(letters) if i % 100 == 50 else x for i, x in enumerate(text)) for text in texts]
    assert find([*texts, *copies]).of.tolist() == [NO_EARLIER] * 80 + list(range(80))
