"""Entities of a sentence's tags. Reference: the rules of conlleval, as a table of what begins and ends where; by hand."""

import itertools
import math
import random

import pytest

from trainer.glue.entities import are_entity_tags, entities, entity_scores


def begins(before, tag):
    """Whether an entity begins at a tag: the rules one by one, as the tasks' own script states them."""
    (letter, kind), (letter_before, kind_before) = parts(tag), parts(before)
    if letter == "O":
        return False
    return letter in "BSU" or letter_before in "OESLU" or kind != kind_before


def ends(tag, behind):
    """Whether one ends with a tag."""
    (letter, kind), (letter_behind, kind_behind) = parts(tag), parts(behind)
    if letter == "O":
        return False
    return letter in "ESLU" or letter_behind in "OBSU" or kind != kind_behind


def parts(tag):
    letter, _, kind = tag.partition("-")
    return letter, kind


def by_rules(tags):
    tags = ["O", *tags, "O"]
    first = [i for i in range(1, len(tags) - 1) if begins(tags[i - 1], tags[i])]
    last = [i for i in range(1, len(tags) - 1) if ends(tags[i], tags[i + 1])]
    return {(parts(tags[a])[1], a - 1, b) for a, b in zip(first, last, strict=True)}


@pytest.mark.parametrize("letters", ["BI", "I", "BIES", "BILU"])
def test_entities_are_those_of_the_rules_for_every_sequence(letters):
    labels = ["O", *(f"{letter}-{kind}" for letter in letters for kind in ("X", "Y-Z"))]
    n = 4 if len(labels) < 6 else 3
    for tags in itertools.product(labels, repeat=n):
        assert {tuple(entity) for entity in entities(tags)} == by_rules(tags), tags


def test_scores_by_hand():
    """Four entities; three are found, of which two are right: kind, begin and end count."""
    right = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "O", "B-LOC"], ["O"]]
    found = [["B-PER", "I-PER", "O", "B-ORG"], ["B-ORG", "O", "O"], ["O"]]
    wanted = {"entity_precision": 2 / 3, "entity_recall": 2 / 4, "entity_f1": 4 / 7}
    assert entity_scores(right, found) == pytest.approx(wanted)
    assert all(math.isnan(value) for value in entity_scores([["O"]], [["O"]]).values())
    assert entity_scores([["B-X"]], [["O"]]) == dict.fromkeys(wanted, 0.0)
    # The same span in another sentence is another entity.
    assert entity_scores([["B-X"], ["O"]], [["O"], ["B-X"]])["entity_f1"] == 0


def test_f1_is_that_of_sets():
    """Reference: the harmonic mean of precision and recall, counted over sets of (sentence, kind, begin, end)."""
    generator = random.Random(0)
    labels = ["O", "B-X", "I-X", "B-Y", "I-Y"]
    right, found = ([generator.choices(labels, k=12) for _ in range(30)] for _ in range(2))
    sets = [{(i, *e) for i, tags in enumerate(side) for e in by_rules(tags)} for side in (right, found)]
    both = len(sets[0] & sets[1])
    precision, recall = both / len(sets[1]), both / len(sets[0])
    scores = entity_scores(right, found)
    assert scores["entity_f1"] == pytest.approx(2 * precision * recall / (precision + recall)) and both


def test_which_labels_are_entity_tags():
    assert are_entity_tags(["O", "B-PER", "I-PER", "S-a-b"])
    assert not are_entity_tags(["NN", "VB"]) and not are_entity_tags(["O", "B-"]) and not are_entity_tags(["PER"])
