"""Entities in a sentence's tags, and how many of them a model finds: precision, recall and F1 of whole entities.

Tags are those of CoNLL's tasks: O, or a letter and a kind, as B-PER. All usual schemes are read, as the tasks' own script
`conlleval` reads them. An entity begins at B or S (U), or where I or E (L) follows no entity of its kind. It ends before
the next one, before another kind, before O, and behind E (L) or S (U).
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"
TAG = re.compile(r"[BIESLU]-.+", re.DOTALL)
# Letters of the tags that go on with an entity, and of those that an entity ends with.
GOES_ON = "IEL"
ENDS = "ESLU"


class Entity(NamedTuple):
    kind: str
    # Of its words: [begin, end).
    begin: int
    end: int


def are_entity_tags(labels: Iterable[str]) -> bool:
    """Whether all labels are O, or a letter and a kind."""
    return all(label == OUTSIDE or TAG.fullmatch(label) for label in labels)


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of a sentence."""
    found = set()
    begin: int | None = None
    open_kind = ""
    letter_before = OUTSIDE
    # The O behind the sentence closes an entity that reaches its end.
    for i, tag in enumerate([*tags, OUTSIDE]):
        letter, _, kind = tag.partition("-")
        goes_on = begin is not None and letter in GOES_ON and kind == open_kind and letter_before not in ENDS
        if begin is not None and not goes_on:
            found.add(Entity(open_kind, begin, i))
            begin = None
        if begin is None and letter != OUTSIDE:
            begin = i
            open_kind = kind
        letter_before = letter
    return found


def entity_scores(right: Iterable[Sequence[str]], found: Iterable[Sequence[str]]) -> dict[str, float]:
    """entity_precision, entity_recall and entity_f1 over sentences. An entity counts where kind, begin and end are right.
    NaN where there is neither an entity nor one that was found."""
    n_right = 0
    n_found = 0
    n_both = 0
    for right_tags, found_tags in zip(right, found, strict=True):
        wanted = entities(right_tags)
        given = entities(found_tags)
        n_right += len(wanted)
        n_found += len(given)
        n_both += len(wanted & given)
    if not n_right + n_found:
        return dict.fromkeys(("entity_precision", "entity_recall", "entity_f1"), math.nan)
    return {
        "entity_precision": n_both / n_found if n_found else 0.0,
        "entity_recall": n_both / n_right if n_right else 0.0,
        "entity_f1": 2 * n_both / (n_right + n_found),
    }
